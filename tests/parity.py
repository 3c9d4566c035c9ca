"""One trace, three drivers: what the simulator did, done again by hosts on a network."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.algorithms import NUM_WORKERS
from tests.host_wrappers import Inside
from tests.worlds import (
    NUM_PARAMS,
    UNEVEN,
    ManySamples,
    StageTrainer,
    UnitTrainer,
    claims_units,
    loss_of,
    make_world,
    stages_in,
)

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Predict,
    Predicted,
    Rank,
    Received,
    Seconds,
    SetTimer,
    TimerFired,
    Trained,
    WorkerState,
)
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import Forecaster, HostServices, HostSettings
from edgegossip.net.transport import Transport

SIZE = 4
SETTINGS = HostSettings(run=b"test run", meet_seconds=20.0, quiet_seconds=0.01)
Moment = tuple[Seconds, Event]


@dataclass
class Steady(Forecaster):
    """Forecasts the same each time."""

    throughput: float

    def trained(self, start: Seconds, end: Seconds, cost: float) -> None:
        pass

    def forecast(self, now: Seconds) -> Predicted:
        return Predicted(self.throughput)


@dataclass
class Recorder(Inside):
    """An algorithm that keeps what each worker was told, and when."""

    trace: dict[Rank, list[Moment]] = field(default_factory=lambda: defaultdict(list))

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        self.trace[state.rank].append((now, event))
        return self.inner.handle(state, event, now)


@dataclass
class Replay(Inside):
    """An algorithm that is told what happens in the order, and at the times, of a trace.

    What comes too early is held back. Timers and forecasts are the trace's own: they depend
    on the clock, which is not what is compared.
    """

    trace: Mapping[Rank, list[Moment]]

    def __post_init__(self) -> None:
        self.left = {rank: deque(moments) for rank, moments in self.trace.items()}
        self.held: dict[Rank, list[Event]] = defaultdict(list)

    def joined(self, older: Message, newer: Message) -> None:
        """Nothing: each message of the trace comes on its own."""

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        self.held[state.rank].append(event)
        effects: list[Effect] = []
        while (moment := self._next(state.rank)) is not None:
            then, happened = moment
            effects += self.inner.handle(state, happened, then)
        return [each for each in effects if not isinstance(each, SetTimer | Predict)]

    def _next(self, rank: Rank) -> Moment | None:
        left, held = self.left[rank], self.held[rank]
        if not left:
            return None
        then, recorded = left[0]
        if isinstance(recorded, TimerFired | Predicted):
            return left.popleft()
        for event in held:
            if _key(event) == _key(recorded):
                left.popleft()
                held.remove(event)
                if isinstance(event, Trained) and isinstance(recorded, Trained):
                    event = replace(event, seconds=recorded.seconds)
                return then, event
        return None


def _key(event: Event) -> tuple[object, ...]:
    if isinstance(event, Received):
        return (Received, event.sender, event.message.kind, event.message.round)
    return (type(event),)


def simulate(algorithm: Algorithm[Any]) -> tuple[Recorder, list[WorkerState]]:
    """The simulator's events on uneven platforms, and the final states."""
    recorder = Recorder(algorithm)
    simulator = make_world(recorder, size=SIZE, platforms=UNEVEN)
    simulator.run()
    return recorder, simulator.states


def run_hosts(
    algorithm: Algorithm[Any], make_transport: Callable[[Rank], Transport]
) -> list[Host[Any]]:
    """Run a host for each worker, each in a thread, to the end."""
    stages = stages_in(algorithm)

    def make_trainer(rank: Rank) -> ManySamples:
        if stages is not None:
            return StageTrainer(stages, rank, 0.1, SIZE)
        kind = UnitTrainer if claims_units(algorithm) else ManySamples
        return kind(rank, 0.1, SIZE)

    hosts = [
        Host(
            algorithm,
            rank,
            NUM_WORKERS,
            torch.zeros(NUM_PARAMS),
            make_trainer(rank),
            make_transport(rank),
            settings=SETTINGS,
            services=HostServices(evaluate=loss_of),
        )
        for rank in range(NUM_WORKERS)
    ]
    run_all(hosts)
    return hosts


def run_all(hosts: list[Host[Any]], seconds: float = 30.0) -> list[str]:
    """Run hosts in threads; say how each ended.

    Raises:
        AssertionError: If one has not come to its end in time.
        Exception: What the first of them raised.
    """
    reasons: dict[int, str | BaseException] = {}

    def run(index: int) -> None:
        try:
            reasons[index] = hosts[index].run()
        except BaseException as error:
            reasons[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(hosts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    found = [reasons.get(index) for index in range(len(hosts))]
    for reason in found:
        if isinstance(reason, BaseException):
            raise reason
    assert None not in found, f"a host did not come to its end: {found}"
    return [str(reason) for reason in found]
