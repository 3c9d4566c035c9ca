"""Invariants of real hosts, at any time and at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.deliveries import Deliveries, Way
from tests.host_worlds import SIZE
from tests.host_wrappers import Inside
from tests.oracles import (
    Box,
    RoundModels,
    ViolationError,
    has_one_model,
    innermost,
    is_steady,
    reference,
    require_reference,
    require_sum,
    weight_of,
)
from tests.worlds import stages_in

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Rank,
    Seconds,
    Started,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.net.host.status import Phase

if TYPE_CHECKING:
    from tests.host_runs import Run
    from tests.virtual_process import Process

EACH: Seconds = 0.5
"""Between two looks at all hosts."""
UNSEEN: Seconds = 5.0
"""A worker that cannot be reached counts as lost after at most so long."""
UNFOUND: Seconds = 30.0
"""Two that reach each other, and run, know of each other after at most so long."""


@dataclass
class Told(Inside):
    """Notes what one process is told of the others, and of its own start."""

    rounds: RoundModels
    furthest: Callable[[], int]
    has_rejoined: bool | None = None  # None before its start
    has_news: bool = False

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        before = state.round
        if isinstance(event, Started):
            self.has_rejoined = event.has_rejoined
        elif isinstance(event, WorkerLost | WorkerJoined):
            self.has_news = True
            self.rounds.has_trouble(self.furthest())
        effects = self.inner.handle(state, event, now)
        if state.round > before:
            self.rounds.note(state, before, self.furthest())
        return effects


@dataclass
class Oracles:
    """Watches a run; keeps the first thing that is wrong.

    Attributes:
        told: What each process was told, in the order of their starts.
    """

    run: Run
    violation: ViolationError | None = None
    told: list[tuple[Process, Told]] = field(default_factory=list)
    resumed: set[int] = field(default_factory=set)
    kept: dict[Rank, dict[Way, int]] = field(default_factory=dict)
    since: dict[tuple[object, ...], Seconds] = field(default_factory=dict)
    rounds: RoundModels = field(default_factory=RoundModels)

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(lambda: self.run.time.now, self.report)
        self.run.time.at(EACH, self._look)

    def report(self, violation: ViolationError) -> None:
        self.violation = self.violation or violation

    def around(self, process: Process, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        """The algorithm of one process, watched."""
        told = Told(algorithm, self.rounds, self._furthest)
        self.told.append((process, told))
        return told

    def watch(self, process: Process, host: Any, *, resumes: bool) -> None:  # noqa: ANN401
        """Follow the host of a process before it runs."""
        kept = self.kept.get(process.rank) if resumes else None
        self.deliveries.watch(host, process.incarnation, kept)
        if resumes:
            self.resumed.add(process.rank)

    def saved(self, rank: Rank) -> None:
        """Note that a checkpoint of this worker is on its disk."""
        process = self.run.processes[rank]
        self.kept[rank] = dict(self.deliveries.last[process.incarnation])

    def conclude(self) -> None:
        """Raise what was wrong on the way or is at the end."""
        if self.violation is not None:
            raise self.violation
        require_handed_over(self)
        require_weights(self)
        require_models(self)

    # While it goes on.

    def _furthest(self) -> int:
        running = (p for p in self.run.processes.values() if p.is_running)
        # Those that have ended count, too: who comes after them does not continue their run.
        rounds: list[int] = [process.host.state.round for process in running]
        return max([*rounds, *(number for number, _ in self.rounds.models)])

    def _look(self) -> None:
        try:
            for process in self._running():
                self._require_clock(process)
                self._require_views(process)
                self._require_bounds(process)
        except ViolationError as violation:
            self.report(violation)
        self.run.time.at(self.run.time.now + EACH, self._look)

    def _running(self) -> Iterator[Process]:
        for rank, process in self.run.processes.items():
            is_awake = process.is_running and not process.is_paused
            if rank != self.run.world.liar and is_awake and process.host.peers.has_begun:
                yield process

    def _require_clock(self, process: Process) -> None:
        """A run is no older than its first process."""
        age = self.run.time.now - min(at for at, _ in self.run.starts)
        if process.host.now > age + 1e-3:
            raise ViolationError(
                f"worker {process.rank} has run {process.host.now:.2f} s after {age:.2f} s"
            )

    def _require_views(self, process: Process) -> None:
        """Losses and returns are noticed in time."""
        reachable, now = self.run.transports[process.rank].alive, self.run.time.now
        for other, peer in process.host.peers:
            there = self.run.processes.get(other)
            is_both = (
                there is not None
                and other in reachable
                and process.rank in self.run.transports[other].alive
                and there.is_running
                and not there.is_paused
                and there.host.peers.has_begun
                and other != self.run.world.liar
                and {there.host.sending.phase, process.host.sending.phase} == {Phase.RUNNING}
            )
            is_unseen = other not in reachable and not peer.is_lost
            for what, limit, holds in (
                ("counts as present, although it cannot reach it, worker", UNSEEN, is_unseen),
                (
                    "counts as lost, although it can reach it, worker",
                    UNFOUND,
                    is_both and peer.is_lost,
                ),
            ):
                key = (process.incarnation, there.incarnation if there else other, what)
                if not holds:
                    self.since.pop(key, None)
                elif now - self.since.setdefault(key, now) > limit:
                    raise ViolationError(f"worker {process.rank} {what} {other}, for {limit} s")

    def _require_bounds(self, process: Process) -> None:
        """Fail if the log of messages is too large, or has what a checkpoint holds."""
        for other, peer in process.host.peers:
            log = peer.log
            if not log.num_bytes <= log.max_bytes:
                raise ViolationError(
                    f"worker {process.rank} keeps {log.num_bytes} bytes for worker {other}"
                )
            status, peers = peer.status, process.host.peers
            # A status may be about an earlier life of this worker.
            is_current = status is not None and status.begun_with == peers.life
            kept = status.kept if status is not None and is_current else 0
            # One that has resumed sends again what the other has had for long.
            if log.entries and log.entries[0][0] <= kept and not peers.is_resumed:
                raise ViolationError(
                    f"worker {process.rank} keeps message {log.entries[0][0]} for worker "
                    f"{other}, whose checkpoint has all up to {kept}"
                )


# At the end.


def require_handed_over(oracles: Oracles) -> None:
    """Where no frame is lost and nobody lies, no message is passed over."""
    world = oracles.run.world
    if world.loses or world.liar is not None:
        return
    for gap in oracles.deliveries.passed_over():
        sender, _, receiver, _ = gap.way
        raise ViolationError(
            f"worker {receiver} was handed message {gap.before} of worker {sender} "
            f"after {gap.after}, at {gap.at:.2f} s"
        )


def require_weights(oracles: Oracles) -> None:
    """Weights are conserved: what is lost was sent, or was held by one that is gone."""
    run = oracles.run
    if run.world.liar is not None or oracles.resumed or stages_in(run.world.algorithm):
        return
    algorithm = innermost(run.world.algorithm)
    if isinstance(algorithm, GoSGD):
        begun = sum(told.has_rejoined is False for _, told in oracles.told)
        states = [
            innermost(process.host.state)
            for process, told in oracles.told
            if told.has_rejoined is not None
        ]
        held = sum(s.weight + weight_of(m for _, m in s.queue) for s in states)
        lost = weight_of(m for *_, m in oracles.deliveries.lost())
        lost += weight_of(oracles.deliveries.unsent)
        require_sum("weights", held + lost, begun / run.world.num_workers)
    elif isinstance(algorithm, PushSum) and is_undisturbed(oracles):
        states = [innermost(process.host.state) for process, _ in oracles.told]
        held = sum(s.weight + sum(m.weight for m in s.arrived) for s in states)
        require_sum("weights", held, run.world.num_workers)


def is_undisturbed(oracles: Oracles) -> bool:
    """Whether all have begun together, and nobody was told of a loss."""
    return all(told.has_rejoined is False and not told.has_news for _, told in oracles.told)


def require_models(oracles: Oracles) -> None:
    """Models are in the box; equal where that is promised; and as without any trouble."""
    run, algorithm = oracles.run, oracles.run.world.algorithm
    if not run.world.offset:
        return
    models = {
        rank: process.host.state.estimate
        for rank, process in run.processes.items()
        if process.is_alive and process.reason == "finished" and rank != run.world.liar
    }
    box = Box(algorithm, run.world.offset)
    for rank, model in models.items():
        box.require(rank, model)
    if has_one_model(algorithm) and not run.world.loses and run.world.liar is None:
        oracles.rounds.require()
    if is_steady(algorithm) and is_undisturbed(oracles) and run.world.liar is None:
        require_reference(models, reference(algorithm, run.world.num_workers, SIZE, 0.1))
