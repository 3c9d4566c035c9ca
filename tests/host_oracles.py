"""Invariants of real hosts, at any time and at their end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tests.deliveries import Deliveries, Way
from tests.host_worlds import SIZE
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
from tests.told import Memory, Told
from tests.worlds import stages_in

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import Event, Rank, Seconds, WorkerLost
from edgegossip.contract.snapshot import dismantle
from edgegossip.net.guard.admission import Refused
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.net.runtime import Life
from edgegossip.runs.final_average import FinalState

if TYPE_CHECKING:
    from tests.host_runs import Run
    from tests.virtual_process import Process

EACH: Seconds = 0.5
"""Between two looks at all hosts."""
UNSEEN: Seconds = 5.0
"""A worker that cannot be reached counts as lost after at most so long."""
LEAVING: Seconds = 15.0
"""Workers leave so soon after their end, unless one that lies keeps them."""
UNFOUND: Seconds = 5.0
"""Two that reach each other, and run, know of each other after at most so long."""
UNHEARD: Seconds = 12.0
"""The same if one lacks messages of the other, which delays its second return, or hears none
until the other's long training ends.
"""
UNSENT: Seconds = 8.0
"""Something of what waits for a link that is up arrives within this time."""
LATER: Seconds = 30.0
"""The same where messages are lost, take long, or are lies, and in other worlds than peers'."""


@dataclass(frozen=True)
class Kept:
    """Facts at the moment when a checkpoint was written.

    Attributes:
        received: The last number handed over on each way.
        memory: What the algorithm had been told.
    """

    received: dict[Way, int]
    memory: Memory


@dataclass
class Oracles:
    """Watches a run; keeps the first thing that is wrong.

    Attributes:
        told: What each process was told, in the order of their starts.
    """

    run: Run
    violation: ViolationError | None = None
    told: list[tuple[Process, Told]] = field(default_factory=list)
    begun: set[tuple[Rank, Life]] = field(default_factory=set)
    resumed: set[int] = field(default_factory=set)
    kept: dict[Rank, Kept] = field(default_factory=dict)
    since: dict[tuple[object, ...], Seconds] = field(default_factory=dict)
    arrived: dict[tuple[int, int], int] = field(default_factory=dict)
    rounds: RoundModels = field(default_factory=RoundModels)

    def __post_init__(self) -> None:
        self.deliveries = Deliveries(lambda: self.run.time.now, self.report)
        self.run.time.at(EACH, self._look)

    def report(self, violation: ViolationError) -> None:
        self.violation = self.violation or violation

    def around(self, process: Process, algorithm: Algorithm[Any]) -> Algorithm[Any]:
        """The algorithm of one process, watched."""
        # That a run has begun nobody has to believe because one that lies says so.
        is_liar = process.rank == self.run.world.liar
        begun, report = (set(), _ignore) if is_liar else (self.begun, self.report)
        told = Told(algorithm, self.rounds, self._furthest, begun, report, self._since_end)
        told.is_of_peers = self.run.world.is_of_peers
        self.told.append((process, told))
        return told

    def watch(self, process: Process, host: Any, checkpoint: object) -> None:  # noqa: ANN401
        """Follow the host of a process before it runs, from a checkpoint or None."""
        _, told = self.told[-1]
        told.peers, told.sending = host.peers, host.sending
        process.on_end = partial(self._require_staying, process)
        self._watch_refusing(host)
        self._watch_leaving(host)
        kept = None if checkpoint is None else self.kept[process.rank]
        received = None if kept is None else kept.received
        self.deliveries.watch(host, process.incarnation, told.taken, received)
        if kept is not None:
            self.resumed.add(process.rank)
            told.is_resumed, told.memory = True, kept.memory.copy()
            if isinstance(host.state, FinalState):
                told.final = host.state.models.get(process.rank)
            try:
                require_same_checkpoint(host, checkpoint)
            except ViolationError as violation:
                self.report(violation)

    def saved(self, rank: Rank) -> None:
        """Note that a checkpoint of this worker is on its disk."""
        process, told = next(each for each in reversed(self.told) if each[0].rank == rank)
        received = dict(self.deliveries.last[process.incarnation])
        self.kept[rank] = Kept(received, told.memory.copy())

    def conclude(self) -> None:
        """Raise what was wrong on the way or is at the end."""
        if self.violation is not None:
            raise self.violation
        require_handed_over(self)
        require_nothing_lost(self)
        require_nothing_again(self)
        require_leaving(self)
        require_nobody_given_up(self)
        require_weights(self)
        require_models(self)

    # While it goes on.

    def _furthest(self) -> int:
        running = (p for p in self.run.processes.values() if p.is_running)
        # Those that have ended count, too: who comes after them does not continue their run.
        rounds: list[int] = [process.host.state.round for process in running]
        return max([*rounds, *(number for number, _ in self.rounds.models)])

    def _since_end(self, rank: Rank) -> Seconds:
        process = self.run.processes.get(rank)
        return -math.inf if process is None else self.run.time.now - process.ended_at

    def _look(self) -> None:
        running = [*self._running()]
        # The time for which a process stands still counts for nothing.
        awake = {process.incarnation for process in running}
        self.since = {key: at for key, at in self.since.items() if key[0] in awake}
        try:
            for process in running:
                self._require_clock(process)
                self._require_views(process)
                self._require_arrivals(process)
                self._require_log(process)
                self._told_by(process).require_timers(process.host.now)
        except ViolationError as violation:
            self.report(violation)
        self.run.time.at(self.run.time.now + EACH, self._look)

    def _running(self) -> Iterator[Process]:
        for rank, process in self.run.processes.items():
            is_awake = process.is_running and not process.is_paused
            if rank != self.run.world.liar and is_awake and process.host.peers.has_begun:
                yield process

    def _require_clock(self, process: Process) -> None:
        """A run is no older than its first process, unless a liar was alone to say so."""
        if self.run.world.lie and any(told.is_alone for _, told in self.told):
            return
        age = self.run.time.now - min(at for at, _ in self.run.starts)
        if process.host.now > age + 1e-3:
            raise ViolationError(
                f"worker {process.rank} has run {process.host.now:.2f} s after {age:.2f} s"
            )

    def _require_views(self, process: Process) -> None:
        """Losses and returns are noticed in time."""
        reachable, now = self.run.transports[process.rank].alive, self.run.time.now
        world = self.run.world
        is_hard = world.loses or world.is_thin or world.liar is not None
        is_hard |= not world.is_of_peers
        for other, peer in process.host.peers:
            there = self.run.processes.get(other)
            is_both = (
                there is not None
                and self._reach_each_other(process, there)
                and {there.host.sending.phase, process.host.sending.phase} == {Phase.RUNNING}
            )
            is_silent = peer.is_lost and (
                peer.num_returns > 0 or other in self._told_by(process).given_up
            )
            is_unseen = other not in reachable and not peer.is_lost
            for what, limit, holds in (
                ("counts as present, although it cannot reach it, worker", UNSEEN, is_unseen),
                (
                    "counts as lost, although it can reach it, worker",
                    LATER if is_hard else UNHEARD if is_silent else UNFOUND,
                    is_both and peer.is_lost,
                ),
            ):
                key = (process.incarnation, there.incarnation if there else other, what)
                if not holds:
                    self.since.pop(key, None)
                elif now - self.since.setdefault(key, now) > limit:
                    raise ViolationError(f"worker {process.rank} {what} {other}, for {limit} s")

    def _reach_each_other(self, here: Process, there: Process) -> bool:
        """Whether `there` takes part, too, and their link is up at both ends."""
        return (
            there.rank in self.run.transports[here.rank].alive
            and here.rank in self.run.transports[there.rank].alive
            and there.is_running
            and not there.is_paused
            and self.run.busy_until[there.rank] + EACH < self.run.time.now
            and there.host.peers.has_begun
            and there.rank != self.run.world.liar
        )

    def _require_arrivals(self, process: Process) -> None:
        """While a link is up, messages arrive, also those that waited for it."""
        world, now = self.run.world, self.run.time.now
        # What a link loses after its message was forgotten does not come again.
        is_forgotten = world.forgets and len(world.hits) < len(world.disturbances)
        if world.liar is not None or world.wire.lost or is_forgotten:
            return
        for other, peer in process.host.peers:
            there = self.run.processes.get(other)
            if there is None:
                continue
            key = (process.incarnation, there.incarnation)
            # Messages that were sent while it was down may be lost.
            last = self.arrived.get(key, 0)
            if peer.sent <= last:
                self.since.pop(key, None)
                continue
            num_left = _num_under_way(process, there)
            if not self._reach_each_other(process, there):
                self.arrived[key], num_left = peer.sent, 0
            elif peer.sent - num_left > last:
                self.arrived[key] = peer.sent - num_left
                self.since.pop(key, None)
            if num_left <= 0:
                self.since.pop(key, None)
            elif now - self.since.setdefault(key, now) > UNSENT:
                raise ViolationError(
                    f"worker {other} has got none of {num_left} messages of worker "
                    f"{process.rank} for {UNSENT} s"
                )

    def _watch_refusing(self, host: Any) -> None:  # noqa: ANN401
        """Nobody waits for the message that was a lie."""
        refuse = host.receiving._refuse

        def refuses(refused: Refused) -> list[Event]:
            events: list[Event] = refuse(refused)
            liar = refused.rank if refused.is_lie and host.peers.has_begun else None
            if liar is not None and WorkerLost(liar, has_lied=True) not in events:
                what = f"worker {host.rank} is not told that worker {liar} has lied"
                self.report(ViolationError(what))
            return events

        host.receiving._refuse = refuses

    def _watch_leaving(self, host: Any) -> None:  # noqa: ANN401
        """The others go on at once without one that says that it leaves for good."""
        tell = host.peers.told

        def told(rank: Rank, status: WorkerStatus, clock: Seconds) -> list[Event]:
            events: list[Event] = tell(rank, status, clock)
            peer = host.peers[rank]
            is_gone = peer.status is status and status.phase == Phase.GONE
            if is_gone and host.peers.has_begun and not peer.is_lost:
                what = f"worker {host.rank} goes on with worker {rank}, which has left"
                self.report(ViolationError(what))
            return events

        host.peers.told = told

    def _require_staying(self, process: Process) -> None:
        """Nobody leaves while one that it can reach goes on, or before the other's messages."""
        run, host = self.run, process.host
        # Those who take ten times as long as this one has trained are waited for no longer.
        is_late = host.now > 10 * host._ending._finished_at
        has_finished = process.reason == "finished" and not is_late
        if not has_finished or not run.world.is_of_peers or run.world.liar is not None:
            return
        # Messages that take longer count as lost.
        has_settled = host.now - host._ending._changed_at > host._settings.settle_seconds
        reachable = run.transports[process.rank].alive
        for other in host.peers.active:
            there = run.processes.get(other)
            is_there = there is not None and reachable.get(other) == there.incarnation
            if there is None or not is_there or not there.is_running:
                continue
            if there.host.peers.has_begun and there.host.sending.phase == Phase.RUNNING:
                self.report(
                    ViolationError(f"worker {process.rank} leaves before worker {other}")
                )
            status = host.peers[other].status
            # It need not know of messages that were sent at the last moment.
            is_told = (
                status is not None and status.sent[process.rank] > host.peers[other].received
            )
            if is_told and not has_settled and not run.world.loses:
                num_left = _num_under_way(there, process)
                what = f"while {num_left} messages of worker {other} are under way to it"
                self.report(ViolationError(f"worker {process.rank} leaves {what}"))

    def _told_by(self, process: Process) -> Told:
        return next(told for each, told in reversed(self.told) if each is process)

    def _require_log(self, process: Process) -> None:
        """Messages that a receiver's disk lacks are kept for it, and nothing else."""
        rank, peers = process.rank, process.host.peers
        on_disk = self.kept[rank].received if rank in self.kept else {}
        for other, peer in peers:
            log, has = peer.log, on_disk.get((other, peer.life, rank, peers.life), 0)
            if peer.kept > has:
                raise ViolationError(
                    f"worker {rank} says that its checkpoint has message {peer.kept} of worker "
                    f"{other}, but it has those up to {has}"
                )
            if not log.num_bytes <= log.max_bytes:
                raise ViolationError(
                    f"worker {rank} keeps {log.num_bytes} bytes for worker {other}"
                )
            status = peer.status
            # A status may be about an earlier life of this worker.
            is_current = status is not None and status.begun_with == peers.life
            kept = status.kept if status is not None and is_current else 0
            first = log.entries[0][0] if log.entries else peer.sent + 1
            # One that has resumed sends again what the other has had for long.
            if first <= kept and not peers.is_resumed:
                raise ViolationError(
                    f"worker {rank} keeps message {first} for worker {other}, whose checkpoint "
                    f"has all up to {kept}"
                )
            there = self.run.processes.get(other)
            if there is None or there.host.peers.life != peer.life or peers.is_resumed:
                continue
            # What was kept for a former life was dropped when the next one began.
            if self._has_returned(there):
                continue
            on_its_disk = self.kept[other].received if other in self.kept else {}
            has = on_its_disk.get((rank, peers.life, other, peer.life), 0)
            if first > has + 1 and not self.run.world.forgets:
                raise ViolationError(
                    f"worker {rank} keeps messages from {first} on for worker {other}, whose "
                    f"checkpoint has those up to {has}"
                )

    def _has_returned(self, process: Process) -> bool:
        """Whether a process is in a life that its worker has left before."""
        lives = [each.host.peers.life for each, _ in self.told if each.rank == process.rank]
        return {*lives[lives.index(lives[-1]) :]} != {lives[-1]}


def _num_under_way(sender: Process, receiver: Process) -> int:
    """Number of messages that were sent, and have not arrived."""
    there, here = sender.host.peers, receiver.host.peers
    way_there, way_here = there[receiver.rank], here[sender.rank]
    if way_there.life != here.life or way_here.life != there.life:
        return 0
    num_left: int = way_there.sent - way_here.received
    return num_left


def _ignore(_: ViolationError) -> None:
    """Take a violation of one that lies."""


# At the end.


def require_handed_over(oracles: Oracles) -> None:
    """Where no frame is lost and nobody lies, no message is passed over.

    Where some are forgotten, a resumed worker that lacks those of several others begins anew.
    """
    world = oracles.run.world
    if world.loses or world.liar is not None:
        return
    if world.forgets:
        require_new_life(oracles)
        return
    for gap in oracles.deliveries.gaps:
        sender, _, receiver, _ = gap.way
        raise ViolationError(
            f"worker {receiver} was handed message {gap.before} of worker {sender} "
            f"after {gap.after}, at {gap.at:.2f} s"
        )


def require_new_life(oracles: Oracles) -> None:
    """No worker goes on from a checkpoint after which it lacks messages of several others."""
    for process, told in oracles.told:
        if not told.is_resumed:
            continue
        rank, life = process.rank, process.host.peers.life
        lacking = {
            gap.way[0]
            for gap in oracles.deliveries.gaps
            if gap.way[2:] == (rank, life)
            and gap.process == process.incarnation
            and gap.is_first
        }
        if len(lacking) > 1:
            raise ViolationError(
                f"worker {rank} goes on, and lacks messages of workers {sorted(lacking)}"
            )


def require_nothing_lost(oracles: Oracles) -> None:
    """A host hands over what it has taken; while nobody is missed, all that is sent."""
    for process, told in oracles.told:
        if process.reason == "finished" and told.taken:
            message = told.taken[0].message
            raise ViolationError(
                f"worker {process.rank} has taken {message.kind} of round {message.round} of "
                f"worker {told.taken[0].sender}, and not handed it over"
            )
    world = oracles.run.world
    is_calm = is_undisturbed(oracles) and not world.loses and world.liar is None
    if not is_calm or any(each.reason != "finished" for each, _ in oracles.told):
        return
    for (sender, _, receiver, _), number, message in oracles.deliveries.lost():
        raise ViolationError(
            f"message {number} of worker {sender} to worker {receiver} is lost though nothing "
            f"has happened: {message.kind} of round {message.round}"
        )


def require_nothing_again(oracles: Oracles) -> None:
    """Where links go on, only what was lost is sent again."""
    world = oracles.run.world
    is_quiet = not (world.hits or any(world.start_at) or world.loses or world.wire.twice)
    if is_quiet and world.liar is None and (again := oracles.deliveries.again):
        way, number = again[0]
        raise ViolationError(
            f"worker {way[2]} gets message {number} of worker {way[0]} again, which had arrived"
        )


def require_leaving(oracles: Oracles) -> None:
    """Soon after the last one's end, all leave."""
    run = oracles.run
    here = [each for each in run.processes.values() if each.reason == "finished"]
    if run.world.liar is not None or not here:
        return
    disturbances = [each for each in run.world.disturbances if each.seconds < math.inf]
    # Those who give up a lost server or stage have been at work until then.
    at_work = [p.ended_at for p, _ in oracles.told if isinstance(p.reason, ServerLostError)]
    last = max(
        *(run.watcher.finished_at.get(each.rank, 0.0) for each in here),
        *(each.at + each.seconds for each in disturbances),
        *at_work,
        0.0,
    )
    for process in here:
        if process.ended_at > last + LEAVING:
            raise ViolationError(
                f"worker {process.rank} leaves at {process.ended_at:.1f} s, though all had "
                f"finished at {last:.1f} s"
            )


def require_nobody_given_up(oracles: Oracles) -> None:
    """Where nothing happens to anybody, no slow worker is taken for a lost one."""
    world = oracles.run.world
    has_trouble = world.hits or any(world.start_at) or world.loses
    if has_trouble or world.liar is not None:
        return
    for process, told in oracles.told:
        if told.given_up:
            raise ViolationError(
                f"worker {process.rank} has given up workers {sorted(told.given_up)} though "
                "nothing has happened to them"
            )


def require_same_checkpoint(host: Any, checkpoint: Any) -> None:  # noqa: ANN401
    """A host that goes on from a checkpoint would write the same one."""
    found: list[Any] = []

    def keep(again: Any) -> bool:  # noqa: ANN401
        found.append(again)
        return False

    saves, host._save = host._save, keep
    due = host._checkpoint_at
    host._keep()
    host._save, host._checkpoint_at = saves, due
    for name, expected in checkpoint.items():
        (plain, tensors), (kept, vectors) = dismantle(found[0][name]), dismantle(expected)
        is_same = name == "now" or (plain == kept and tensors.keys() == vectors.keys())
        if not is_same or not all(torch.equal(x, vectors[key]) for key, x in tensors.items()):
            raise ViolationError(f"worker {host.rank} resumes with another {name}")


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
        lost += sum(weight_of(told.dropped) for _, told in oracles.told)
        require_sum("weights", held + lost, begun / run.world.num_workers)
    elif isinstance(algorithm, PushSum) and is_undisturbed(oracles):
        states = [innermost(process.host.state) for process, _ in oracles.told]
        held = sum(s.weight + sum(m.weight for m in s.arrived) for s in states)
        require_sum("weights", held, run.world.num_workers)


def is_undisturbed(oracles: Oracles) -> bool:
    """Whether all have begun together, once, and nobody was told of a loss."""
    have_begun_once = len(oracles.told) == oracles.run.world.num_workers
    return have_begun_once and all(
        told.has_rejoined is False and not told.has_news for _, told in oracles.told
    )


def require_models(oracles: Oracles) -> None:
    """Models are in the box; equal where that is promised; and as without any trouble."""
    run, algorithm = oracles.run, oracles.run.world.algorithm
    if not run.world.offset or run.world.rise:
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
        oracles.rounds.require(algorithm)
    if is_steady(algorithm) and is_undisturbed(oracles) and run.world.liar is None:
        require_reference(models, reference(algorithm, run.world.num_workers, SIZE, 0.1))
