"""A simulator whose workers do as a test says, and what came out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import num_bytes
from edgegossip.contract.protocol import (
    WORKER,
    Effect,
    Event,
    Finish,
    Message,
    Note,
    Rank,
    Role,
    Seconds,
    Started,
    Steps,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.sim.fault import Fault, Faults
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

Answer: TypeAlias = Callable[[Rank, Event, Seconds], list[Effect]]
Happened: TypeAlias = tuple[Seconds, Rank, Event]


@dataclass(frozen=True)
class Scripted(Algorithm[WorkerState]):
    """Answers as it is told, and notes what it is asked."""

    answer: Answer
    seen: list[Happened]

    def init(self, rank: Rank, params: Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def role(self, rank: Rank) -> Role:
        return WORKER

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        self.seen.append((now, state.rank, event))
        if isinstance(event, Trained):
            state.params = event.params
        return self.answer(state.rank, event, now)


@dataclass
class Counting(Trainer):
    """Adds one for each step, and costs a sample a step."""

    rank: Rank
    incarnation: int

    @property
    def num_samples(self) -> int:
        return 10 + self.rank

    def cost(self, request: Train) -> float:
        return request.work.num_steps if isinstance(request.work, Steps) else 1

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        steps = int(self.cost(request))
        params = request.params + steps + 100 * self.incarnation
        return TrainingResult(params, steps, steps, loss=0.5)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Watcher:
    """Keeps what the observer is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[Rank, Seconds, Seconds]] = []
        self.uplinks: list[tuple[Rank, Rank, tuple[Seconds, Seconds]]] = []
        self.arrivals: list[tuple[Seconds, Rank, Rank, int]] = []
        self.losses: list[tuple[Seconds, Rank, Rank, str]] = []
        self.changes: list[tuple[Seconds, Rank, str]] = []
        self.notes: list[tuple[Seconds, Rank, Note]] = []

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.spans.append((rank, start, now))

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.uplinks.append((rank, receiver, uplink))

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        self.arrivals.append((now, rank, sender, staleness))

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self.losses.append((now, rank, sender, reason))

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self.changes.append((now, rank, what))

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        self.notes.append((now, rank, note))


@dataclass
class World:
    """A simulator with everything that came out of it."""

    simulator: Simulator[WorkerState]
    seen: list[Happened]
    watcher: Watcher

    def run(self, until: Seconds = math.inf) -> World:
        self.simulator.run(until)
        return self

    def times(self, kind: type, rank: Rank | None = None) -> list[Seconds]:
        return [
            now for now, r, event in self.seen if isinstance(event, kind) and rank in (None, r)
        ]

    def told(self, kind: type) -> list[tuple[Seconds, Rank, Rank]]:
        return [(now, r, event.rank) for now, r, event in self.seen if type(event) is kind]  # type: ignore[union-attr]


def world(
    answer: Answer,
    num_workers: int = 2,
    *script: Fault,
    platforms: tuple[Platform, ...] | None = None,
    detection_time: Seconds = 1.0,
    **settings: Any,  # noqa: ANN401
) -> World:
    seen: list[Happened] = []
    watcher = Watcher()
    simulator = Simulator(
        Scripted(answer, seen),
        platforms or (Platform(throughput=10.0),) * num_workers,
        torch.zeros(3),
        Counting,
        faults=Faults(script=script, detection_time=detection_time),
        observer=watcher,
        **settings,
    )
    return World(simulator, seen, watcher)


def on_start(effects: dict[Rank, list[Effect]]) -> Answer:
    """Do this at the start and finish; nothing later."""

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return [*effects.get(rank, []), Finish()] if isinstance(event, Started) else []

    return answer


def message(round: int = 0, num_floats: int = 10) -> Message:
    return Message("note", round, {"x": torch.zeros(num_floats)})


SIZE = num_bytes(message())
SECOND = Links(default=Link(latency=0.25, bandwidth=float(SIZE)))
"""Links on which a `message` takes a second, and a quarter more to arrive."""
