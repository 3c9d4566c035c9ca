"""The two levels of HALoS: workers and a local server, and local servers and a global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD, MomentumServerState
from edgegossip.algorithms.server.outer_server import PacedCommitterState
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import SERVER, CommitterState
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Seconds,
    Send,
    WorkerJoined,
)
from edgegossip.contract.schema import MessageSpec


@dataclass(slots=True, kw_only=True)
class LocalServerState(MomentumServerState):
    """State of a local server towards its workers.

    Attributes:
        progress: Sum of the server's changes that are not in `RegionState` yet, [num_params].
        num_new: Number of commits that made them.
    """

    progress: Tensor
    num_new: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalLevel(AsyncLocalSGD):
    """The workers of a region and their server."""

    def make_server(self, **fields: Any) -> LocalServerState:  # noqa: ANN401
        zero = torch.zeros_like(fields["params"])
        return LocalServerState(
            **fields, model=fields["params"], velocity=zero, buffer=zero, progress=zero
        )

    def absorb(self, state: MomentumServerState, commits: list[Message]) -> None:
        assert isinstance(state, LocalServerState)
        before = state.model
        super().absorb(state, commits)
        # Only what commits have changed: what came from the global server is known there.
        state.progress = state.progress + (state.model - before)
        state.num_new += len(commits)


@dataclass(slots=True, kw_only=True)
class RegionState(PacedCommitterState):
    """State of a local server towards the global one, whose worker it is.

    Attributes:
        is_closing: Whether the workers have finished, so that the next commit is the last.
    """

    is_closing: bool = False


@dataclass(frozen=True, kw_only=True)
class GlobalLevel(AsyncLocalSGD):
    """The local servers and the global one. Commits of workers are a region's steps."""

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        specs = super().schema(params)
        numbers = {**specs["commit"].numbers, "is_last": range(2)}
        return {**specs, "commit": replace(specs["commit"], numbers=numbers)}

    def make_worker(self, **fields: Any) -> RegionState:  # noqa: ANN401
        return RegionState(**fields)

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        assert isinstance(state, RegionState)
        return {**super().commit_numbers(state), "is_last": int(state.is_closing)}

    def go_on(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Commit if due; a region trains by itself."""
        assert isinstance(state, RegionState)
        if state.is_pulling or state.commit is not None:
            return []
        if state.round >= self.num_rounds:
            return [Finish()]
        return self._commit(state, now) if state.is_closing or self.is_due(state) else []

    def handle_as_worker(
        self, state: CommitterState, event: Event, now: Seconds
    ) -> list[Effect]:
        assert isinstance(state, RegionState)
        if isinstance(event, WorkerJoined) and event.rank == SERVER and state.is_closing:
            # The server may have forgotten that this region has finished: it commits once more.
            state.round = min(state.round, self.num_rounds - 1)
        return super().handle_as_worker(state, event, now)

    def _take_commit(self, state: ServerState, sender: Rank, message: Message) -> None:
        super()._take_commit(state, sender, message)
        if message.numbers["number"] <= state.num_commits[sender]:
            self._note_end(state, sender, message)  # a repetition, which a new server may need

    def answer(self, state: ServerState, rank: Rank) -> Send:
        if rank in state.waiting and state.is_counted(rank):
            self._note_end(state, rank, state.waiting[rank])
        return super().answer(state, rank)

    def _note_end(self, state: ServerState, rank: Rank, commit: Message) -> None:
        """Wait no longer for a region whose last commit the model has."""
        if commit.numbers["is_last"]:
            state.rounds[rank] = self.num_rounds
