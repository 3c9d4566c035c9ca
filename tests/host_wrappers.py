"""Algorithms around another one: their base, one that misleads, one that notes commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.algorithms.wrappers.standby.standby import StandbyState
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Role,
    Seconds,
    Send,
    WorkerLost,
    WorkerState,
)


@dataclass
class Inside(Algorithm[WorkerState]):
    """Does what the algorithm inside does."""

    inner: Algorithm[Any]

    def init(self, rank: Rank, params: torch.Tensor) -> WorkerState:
        state: WorkerState = self.inner.init(rank, params)
        return state

    def renew(self, state: WorkerState, params: torch.Tensor) -> WorkerState:
        renewed: WorkerState = self.inner.renew(state, params)
        return renewed

    def role(self, rank: Rank) -> Role:
        return self.inner.role(rank)

    def schema(self, params: torch.Tensor) -> Any:  # noqa: ANN401
        return self.inner.schema(params)

    @property
    def traits(self) -> Any:  # noqa: ANN401
        return self.inner.traits

    def joined(self, older: Message, newer: Message) -> Message | None:
        return self.inner.joined(older, newer)

    def replaces(self, newer: Message, older: Message) -> bool:
        return self.inner.replaces(newer, older)

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        return self.inner.handle(state, event, now)


class Furthest(Inside):
    """Tells those who come back that the run is at its end."""

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        end = int(self.traits.num_rounds or 0)
        effects = self.inner.handle(state, event, now)
        return [
            replace(each, message=replace(each.message, round=end))
            if isinstance(each, Send) and each.message.kind == "catch-up"
            else each
            for each in effects
        ]


@dataclass
class Ledger(Inside):
    """Writes down all commits: by worker and number how many steps went into it.

    One that goes on from a checkpoint may send another commit under the same number. Besides:
    how many commits of each worker were answered, how often a server has missed it, and how
    often it began, each time with what it then remembered.
    """

    steps: dict[Rank, dict[int, set[int]]] = field(default_factory=dict)
    num_answered: dict[Rank, int] = field(default_factory=dict)
    num_absences: Counter[Rank] = field(default_factory=Counter)
    num_lives: Counter[Rank] = field(default_factory=Counter)
    states: dict[Rank, WorkerState] = field(default_factory=dict)
    began: dict[int, Seconds] = field(default_factory=dict)
    lost: list[tuple[int, Rank, int]] = field(default_factory=list)
    clock: Callable[[], Seconds] = lambda: 0.0

    def look(self, state: WorkerState) -> None:
        """Note when each elected server begins, and what it lacks."""
        if not isinstance(state, StandbyState) or not state.is_evaluated:
            return
        term = state.election.term
        if state.server is None or term in self.began:
            return
        self.began[term] = self.clock()
        for rank, num_merged in state.server.num_commits.items():
            self.lost.append((term, rank, self.num_answered.get(rank, 0) - num_merged))

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        server = getattr(state, "server", None)
        steps_before = server.num_steps.get(state.rank, 0) if server else 0
        if self.states.get(state.rank) is not state:
            self.states[state.rank] = state
            self.num_lives[state.rank] += 1
        effects = super().handle(state, event, now)
        self.look(state)
        if isinstance(event, WorkerLost) and (server or isinstance(state, ServerState)):
            self.num_absences[event.rank] += 1
        if server and (more := server.num_steps.get(state.rank, 0) - steps_before):
            # Its own commit, which was merged at once.
            number = server.num_commits[state.rank]
            self.steps.setdefault(state.rank, {}).setdefault(number, set()).add(more)
        # In a region, a worker has another rank.
        worker = getattr(state, "worker", getattr(state, "local", state))
        if isinstance(worker, CommitterState):
            rank, commits = state.rank, self.steps.setdefault(state.rank, {})
            if worker.commit is not None:
                numbers = {name: int(each) for name, each in worker.commit.numbers.items()}
                commits.setdefault(numbers["number"], set()).add(numbers["num_steps"])
            self.num_answered[rank] = max(self.num_answered.get(rank, 0), worker.num_commits)
        return effects
