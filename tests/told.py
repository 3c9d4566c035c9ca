"""Everything that one process of a worker is told: does its host keep its promises?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tests.host_wrappers import Inside
from tests.oracles import RoundModels, ViolationError, innermost
from tests.update_rules import Rules

from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.rounds import RoundState
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.sending import Sending
from edgegossip.net.host.status import Phase
from edgegossip.net.runtime import Life

STOPPED: Seconds = 2.5
"""One that was stopped may be back, so it counts as present at least so long."""
LATE: Seconds = 0.5
"""A timer fires at most so late."""
MOST_WAITING = 3
"""Messages to one worker that may wait when a synchronous one begins a round."""


@dataclass
class Memory:
    """Knowledge of an algorithm, which a resumed one has from its checkpoint.

    Attributes:
        lost: Workers that it counts as lost.
        lives: By worker, the life that it knows.
        timers: By name, when each is to fire.
    """

    lost: set[Rank] = field(default_factory=set)
    lives: dict[Rank, Life] = field(default_factory=dict)
    timers: dict[str, Seconds] = field(default_factory=dict)

    def copy(self) -> Memory:
        return Memory({*self.lost}, {**self.lives}, {**self.timers})


@dataclass
class Told(Inside):
    """Notes what one process is told of the others, and of its own start.

    Attributes:
        begun: The lives with which workers have begun, of all processes.
        report: Takes what is wrong.
        since_end: Seconds since the end of a worker's process; below 0 if it has none.
        has_rejoined: As in `Started`; None before it.
        is_alone: Whether it began with at most one other worker in reach.
        has_news: Whether it was told of a loss or a return.
        taken: Messages that the host has taken, and not handed over yet.
        dropped: Messages that it has taken before it rejoined.
        given_up: Workers that it was told to have lost while their links were up and they ran.
        began_at: When it was first told anything; None before.
        early: Messages that were taken before it began.
        final: Its own final model in the checkpoint that it started from, if any.
        is_of_peers: As in `World`.
    """

    rounds: RoundModels
    furthest: Callable[[], int]
    begun: set[tuple[Rank, Life]]
    report: Callable[[ViolationError], None]
    since_end: Callable[[Rank], Seconds]
    memory: Memory = field(default_factory=Memory)
    is_resumed: bool = False
    has_rejoined: bool | None = None
    is_alone: bool = False
    has_news: bool = False
    taken: list[Received] = field(default_factory=list)
    dropped: list[Message] = field(default_factory=list)
    given_up: set[Rank] = field(default_factory=set)
    began_at: Seconds | None = None
    early: list[Received] = field(default_factory=list)
    final: torch.Tensor | None = None
    is_of_peers: bool = False
    peers: Peers = field(init=False)
    sending: Sending = field(init=False)
    rules: Rules = field(init=False)
    last_round: int | None = field(init=False)
    is_synchronous: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rules, traits = Rules(self.inner), self.traits
        self.last_round, self.is_synchronous = traits.num_rounds, traits.is_synchronous

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        before = state.round
        if self.began_at is None:
            self.began_at, self.early = now, [*self.taken]
        if self.is_resumed and not self.peers.is_resumed:  # it rejoins with a new state
            self.is_resumed, self.memory = False, Memory()
        try:
            self._hear(event, before, now)
        except ViolationError as violation:
            self.report(violation)
        if is_of_absent(state, event):
            self.rounds.has_trouble(before, self.furthest())
        self.rules.before(state, event)
        effects = self.inner.handle(state, event, now)
        try:
            self.rules.require(state, event)
        except ViolationError as violation:
            self.report(violation)
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.memory.timers[effect.name] = effect.at
        if state.round > before:
            self.rounds.note(state, before, self.furthest())
        return effects

    def _hear(self, event: Event, round: int, now: Seconds) -> None:
        match event:
            case Started():
                self._start(event)
            case WorkerLost():
                # Who is not there when it begins counts as lost, even if just stopped.
                self._lose(event, is_beginning=now == self.began_at)
            case WorkerJoined():
                self._join(event)
            case TimerFired(name):
                self.memory.timers.pop(name, None)
            case Trained() if self.is_synchronous and now != self.began_at:
                self._require_room()
            case Received():
                self.taken[:] = [each for each in self.taken if each is not event]
                self._receive(event)
        if isinstance(event, WorkerLost | WorkerJoined):
            self.has_news = True
            self.rounds.has_trouble(round, self.furthest())

    def _start(self, event: Started) -> None:
        rank, life = self.peers.rank, self.peers.life
        self.has_rejoined = event.has_rejoined
        # The only one that can be reached is believed.
        self.is_alone = sum(peer.is_reachable for _, peer in self.peers) < 2
        present = [rank for rank, _ in self.peers if rank not in self.memory.lost]
        self.memory.lives = {rank: self.peers[rank].life for rank in present}
        self._require_beginning(event)
        if event.has_rejoined:
            # What came before was for the state that it has dropped.
            self.dropped += [each.message for each in self.taken]
            self.taken.clear()
            if not self.begun and not self.is_alone:
                raise ViolationError(f"worker {rank} rejoins a run that nobody has begun")
        if (rank, life) in self.begun:
            raise ViolationError(f"worker {rank} begins anew with a life that it had before")
        self.begun.add((rank, life))

    def _require_beginning(self, event: Started) -> None:
        """A late worker rejoins; or those who began without it, whom it cannot yet believe,
        count as lost.
        """
        if event.has_rejoined:
            return
        rank, life = self.peers.rank, self.peers.life
        statuses = {r: p.status for r, p in self.peers if p.is_known and p.status is not None}
        begun = {
            r
            for r, status in statuses.items()
            if Phase.RUNNING <= status.phase < Phase.LEAVING and status.begun_with != life
        }
        if len(begun) > 1 or (begun and len(statuses) == 1 and self.is_alone):
            raise ViolationError(
                f"worker {rank} begins as if nobody had, but workers {sorted(begun)} have"
            )
        if present := begun - self.memory.lost:
            raise ViolationError(
                f"worker {rank} begins with workers {sorted(present)}, which began without it"
            )

    def _lose(self, event: WorkerLost, *, is_beginning: bool) -> None:
        if event.rank in self.memory.lost and not event.has_lied:
            raise ViolationError(f"worker {self.peers.rank} loses worker {event.rank} twice")
        self.memory.lost.add(event.rank)
        status = self.peers[event.rank].status
        phase = None if status is None else status.phase
        if (
            self.is_of_peers
            and not is_beginning
            and phase == Phase.LEAVING
            and 0.0 <= self.since_end(event.rank) < STOPPED
        ):
            raise ViolationError(
                f"worker {self.peers.rank} loses worker {event.rank}, which was just stopped"
            )
        if phase == Phase.RUNNING and self.peers[event.rank].is_reachable:
            self.given_up.add(event.rank)

    def _join(self, event: WorkerJoined) -> None:
        memory, rank, life = self.memory, event.rank, self.peers[event.rank].life
        if rank not in memory.lost:
            raise ViolationError(
                f"worker {self.peers.rank} is told that worker {rank} is back, not of its loss"
            )
        has_restarted = memory.lives.get(rank, 0 if self.peers.is_open else life) != life
        if event.has_restarted != has_restarted:
            raise ViolationError(
                f"worker {self.peers.rank} is told that worker {rank} "
                f"{'has' if event.has_restarted else 'has not'} restarted"
            )
        memory.lost.discard(rank)
        memory.lives[rank] = life

    def _receive(self, event: Received) -> None:
        """Nobody hears from one that it counts as lost, but has found it before."""
        rank, last = self.peers.rank, self.last_round
        if last is not None and event.message.round > last:
            raise ViolationError(
                f"worker {rank} is handed a message of round {event.message.round} of {last}"
            )
        is_early = any(event is each for each in self.early)
        is_there = self.peers[event.sender].is_reachable and not is_early
        if self.is_of_peers and is_there and event.sender in self.memory.lost:
            raise ViolationError(
                f"worker {rank} is handed a message of worker {event.sender}, which is lost"
            )

    def _require_room(self) -> None:
        """No synchronous worker begins a round while too many messages wait for another."""
        for rank, peer in self.peers:
            number = self.sending.outbox.num_numbered(rank)
            if peer.is_known and number > MOST_WAITING:
                raise ViolationError(
                    f"worker {self.peers.rank} goes on while {number} messages wait for worker "
                    f"{rank}"
                )

    def require_timers(self, now: Seconds) -> None:
        """Fail if a timer should have fired by now."""
        for name, at in self.memory.timers.items():
            if at + LATE < now < math.inf:
                raise ViolationError(
                    f"timer {name!r} of worker {self.peers.rank} was due at {at:.2f} s, "
                    f"not fired at {now:.2f} s"
                )


def is_of_absent(state: WorkerState, event: Event) -> bool:
    """Whether a message is not waited for, and yet mixed if it is in time."""
    inner = innermost(state)
    return (
        isinstance(event, Received)
        and isinstance(inner, RoundState)
        and inner.first_exchange.get(event.sender, 0) > event.message.round
    )
