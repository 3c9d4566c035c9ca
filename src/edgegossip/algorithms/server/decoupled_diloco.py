"""Decoupled DiLoCo: workers never stand still, and the server merges what comes in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.server.outer_server import (
    OuterServer,
    OuterServerState,
    PacedCommitterState,
    progress_of,
    with_statistics,
)
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import MAX_COUNT, CommitterState
from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, SetTimer, Trained
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.schema import MessageSpec


@dataclass(slots=True, kw_only=True)
class LearnerState(PacedCommitterState):
    """State of a worker.

    Attributes:
        num_samples: Number of samples since the last commit.
    """

    num_samples: int = 0


@dataclass(slots=True, kw_only=True)
class SyncerState(OuterServerState):
    """State of the server.

    Attributes:
        velocity: :math:`m`, [num_params].
        closes_at: End of the grace window; None while there is no quorum.
    """

    velocity: Tensor
    closes_at: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(OuterServer):
    r"""Merge the commits of a quorum and of those who come soon after, while all train on.

    The server waits until :math:`K` workers have committed, and then for the others during a
    *grace window* of at most :math:`\gamma` times the duration of the fastest worker's block.
    From the changes :math:`U_i` of those that have come, each made from :math:`s_i` samples in
    :math:`h_i` steps,

    .. math::
        w_i = s_i \cdot s_i / h_i, \qquad
        \Delta = \frac{\sum_i w_i U_i}{\sum_i w_i}, \qquad
        m \leftarrow \mu m + \Delta, \qquad
        W \leftarrow W + \alpha (\Delta + \mu m)

    A worker trains on while its commit is in flight. If :math:`y` are its parameters at the
    commit and :math:`z` those at the answer, it continues from :math:`W + (z - y)`, so no step
    is lost. A commit that misses a merge takes part in the next one. The server waits for no
    lost worker: where fewer than :math:`K` are there, it waits for all of them.

    Restarts are as in `AsyncLocalSGD`: no commit is lost, but the momentum is. With
    `waits_for_answer`, a quorum of all workers and equal speeds, this is `DiLoCo` without
    compression on a complete graph; without momentum, `FixedADACOMM`.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        quorum: :math:`K`, in [1, M]; None is half of the workers, rounded up.
        grace: :math:`\gamma`, at least 0; with 0, a quorum is merged at once.
        outer_momentum: :math:`\mu`, in [0, 1).
        waits_for_answer: Whether a worker pauses while its commit is in flight.

    Raises:
        ValueError: If a number is out of range.

    References:
        Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026,
        arXiv:2604.21428; the abstract and a summary of the formulas were at hand. Departures:
        the model is not cut into fragments that take turns (`Shards` divides it among
        servers); changes count from the model that a worker started from, not from the
        server's newest; a worker merges its answer where the paper overwrites, and gets the
        model when its own commit is merged; blocks differ by speed, where the paper's workers
        commit at the same time whatever they have; the grace window is a share of a block.
    """

    quorum: int | None = None
    grace: float = 0.5
    outer_momentum: float = 0.7
    waits_for_answer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "quorum")
        check_ranges(self, grace="at least 0", outer_momentum="in [0, 1)")
        check_ranges(self, quorum="at least 1 or None")
        if self.num_needed > self.num_workers:
            raise ValueError(
                f"quorum must be in [1, num_workers] or None, got {self.quorum} of "
                f"{self.num_workers}; it is the number of commits to wait for"
            )

    @property
    def num_needed(self) -> int:
        """Number of commits to wait for, :math:`K`."""
        return -(-self.num_workers // 2) if self.quorum is None else self.quorum

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `OuterServer`; commits also state their samples."""
        specs = super().schema(params)
        numbers = {**specs["commit"].numbers, "num_samples": range(MAX_COUNT + 1)}
        return {**specs, "commit": replace(specs["commit"], numbers=numbers)}

    # The worker.

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        return LearnerState(
            rank=rank,
            params=params,
            answer=self.no_answer(params),
            local_steps=self.local_steps,
        )

    def trains_on(self, state: CommitterState) -> bool:
        return not self.waits_for_answer

    def learn(self, state: CommitterState, event: Trained) -> None:
        super().learn(state, event)
        assert isinstance(state, LearnerState)
        state.num_samples += event.num_samples

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        assert isinstance(state, LearnerState)
        return {**super().commit_numbers(state), "num_samples": state.num_samples}

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, LearnerState)
        state.num_samples = 0
        return super().committed(state, now)

    def go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        assert isinstance(state, LearnerState)
        state.num_samples = 0  # there is no progress to commit
        return super().go_back(state, event, now)

    # The server.

    def make_server(self, **fields: Any) -> SyncerState:  # noqa: ANN401
        return SyncerState(**fields, velocity=torch.zeros_like(fields["params"]))

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SyncerState)
        if any(j not in state.waiting for j in self.training(state)):
            if len(state.waiting) < self.num_needed:
                return []
            if state.closes_at is None:
                state.closes_at = now + self._window(state)
                if state.closes_at > now:
                    return [SetTimer("window", state.closes_at)]
            if now < state.closes_at:
                return []
        state.closes_at = None
        return super().serve(state, now)

    def _window(self, state: SyncerState) -> Seconds:
        """Length of the grace window, in seconds."""
        speeds = [commit.numbers["pace"] for commit in state.waiting.values()]
        # All blocks last as long as that of the fastest worker. Until its speed is known,
        # nothing says how long that is.
        fastest = max([*speeds, self.settings(state, state.rank)["fastest"]])
        return self.grace * self.local_steps / fastest if fastest else 0.0

    def absorb(self, state: SyncerState, commits: list[Message]) -> None:
        weights = [_weight(commit) for commit in commits]
        # Commits without samples, as of skipped training, count alike among themselves.
        weights = weights if any(weights) else [1.0] * len(commits)
        mean = measured = nothing = torch.zeros_like(state.params)
        for commit, weight in zip(commits, weights, strict=True):
            share = weight / sum(weights)
            mean = mean.add(progress_of(commit), alpha=share)
            # Running statistics have no momentum: they move to the mean of those measured.
            measured = measured + with_statistics(commit, nothing, state.params, share)
        mu = self.outer_momentum
        state.velocity = mean.add(state.velocity, alpha=mu)
        step = mean.add(state.velocity, alpha=mu)
        state.params = state.params.add(step, alpha=self.outer_lr).add(measured)


def _weight(commit: Message) -> float:
    num_samples, num_steps = commit.numbers["num_samples"], commit.numbers["num_steps"]
    return num_samples * num_samples / num_steps if num_steps else 0.0
