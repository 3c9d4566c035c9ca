"""A worker's view of the others; its decisions to begin, rejoin and leave, without I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from edgegossip.contract.metrics import payload_num_bytes
from edgegossip.contract.protocol import Event, Message, Rank, Seconds, WorkerJoined, WorkerLost
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.net.runtime import Life
from edgegossip.net.transport import Incarnation

_OVERHEAD = 1024
"""Memory of a message in addition to its payload, in bytes."""
_GRACE: Seconds = 3.0
"""Seconds until a departed worker counts as lost."""
_RETURN_DELAY: Seconds = 3.0
"""Delay of a worker's second return without a missing message; see `Peers._return_when_due`."""
_MAX_DOUBLINGS = 4
"""Limits the delay to 45 s, less than the default patience of algorithms."""
_MAX_LIVES = 2
"""Maximum lives of a process, which begins a new life when it rejoins, at most once."""
_MAX_FORMER_LIVES = 16
"""Lives of a worker whose counts are kept; a restart without a checkpoint adds one."""
PLACEHOLDER = Message("net/placeholder", 0)
"""Takes the number of a message that a newer one replaces; see `Algorithm.replaces`."""


@dataclass(slots=True, kw_only=True)
class SentLog:
    """Messages to one worker that are not in its checkpoint, for resending.

    Args:
        max_bytes: Memory limit, in bytes; the oldest messages are dropped first.
    """

    max_bytes: int
    entries: deque[tuple[int, Message]] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, number: int, message: Message) -> None:
        self.entries.append((number, message))
        self.num_bytes += payload_num_bytes(message.payload) + _OVERHEAD
        # The oldest go first: the receiver needs an unbroken sequence up to the newest one.
        while self.num_bytes > self.max_bytes:
            self._drop()

    def replace(self, number: int, message: Message) -> None:
        """Put `message` in the place of `number`, if it is still there."""
        for index in reversed(range(len(self.entries))):  # what is replaced is not old
            if self.entries[index][0] == number:
                self.num_bytes -= payload_num_bytes(self.entries[index][1].payload)
                self.num_bytes += payload_num_bytes(message.payload)
                self.entries[index] = number, message
                return

    def forget(self, number: int) -> None:
        """Drop the messages up to `number`, which are in the receiver's checkpoint."""
        while self.entries and self.entries[0][0] <= number:
            self._drop()

    def has(self, number: int) -> bool:
        """Whether the log still has message `number`, the last one added."""
        return bool(self.entries) and self.entries[-1][0] == number

    def _drop(self) -> None:
        _, message = self.entries.popleft()
        self.num_bytes -= payload_num_bytes(message.payload) + _OVERHEAD


@dataclass(slots=True, kw_only=True)
class Peer:
    """State kept for one other worker.

    Attributes:
        log: Messages that can be resent.
        incarnation: Incarnation of its process; 0 before the first.
        is_reachable: Whether the transport can reach the worker.
        is_refused: Whether this process is ignored; its statements then confirm nothing.
        status: Newest status of that process.
        began_at: Time at which it began, by its status but on this worker's clock.
        life: Life for which messages are numbered.
        former: Number of the last message to each of its other lives, and from it.
        num_lives: Number of its lives in the current process.
        sent: Number of the last message to that life.
        received: Number of the last message from it.
        kept: Number of the last message from it in this worker's checkpoint.
        known_life: Last life that the algorithm knows about; 0 for none.
        is_lost: Whether the algorithm knows of the loss, or will learn of it when it starts.
        heard_at: Time at which the last algorithm message arrived.
        num_gaps: Number of consecutive statuses that reported more messages than have arrived.
        has_lost_some: Whether a message has arrived without its predecessor.
        num_returns: Number of its returns without a missing message, and of its lies, since
            its last message.
        return_at: Time of its next such return; infinity if none is scheduled.
        may_never_come: Whether the run is open.
    """

    log: SentLog
    incarnation: Incarnation = 0
    is_reachable: bool = False
    is_refused: bool = False
    status: WorkerStatus | None = None
    began_at: Seconds = 0.0
    life: Life = 0
    former: dict[Life, tuple[int, int]] = field(default_factory=dict)
    num_lives: int = 0
    sent: int = 0
    received: int = 0
    kept: int = 0
    known_life: Life = 0
    is_lost: bool = False
    heard_at: Seconds = 0.0
    num_gaps: int = 0
    has_lost_some: bool = False
    num_returns: int = 0
    return_at: Seconds = math.inf
    may_never_come: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the worker is reachable and has sent a status."""
        return self.is_reachable and self.status is not None

    @property
    def has_left(self) -> bool:
        """Whether the worker has left the run before its end, or has never been there."""
        is_gone = self.status is not None and self.status.phase == Phase.GONE
        return is_gone or (self.may_never_come and self.life == 0)

    def turn_to(self, life: Life) -> None:
        """Number messages for this life, if it is another one.

        A worker whose newest checkpoint is from a former life returns to that life, and the
        numbering goes on where it was. Otherwise what it sends again would count twice, and it
        would drop new messages as repeated. What was kept for that life is gone.
        """
        if life == self.life:
            return
        if self.life:
            self.former[self.life] = self.sent, self.received
        if len(self.former) > _MAX_FORMER_LIVES:
            del self.former[next(iter(self.former))]
        self.life = life
        self.num_lives += 1
        self.count_anew()
        self.sent, self.received = self.former.pop(life, (0, 0))

    def heard(self, number: int, now: Seconds) -> None:
        """Record the arrival of message `number`."""
        self.received, self.heard_at = number, now
        self.forget_returns()

    def forget_returns(self) -> None:
        """Do not delay the next return because of earlier ones."""
        self.num_returns, self.return_at = 0, math.inf

    def refuse(self) -> None:
        """Ignore this process from now on."""
        self.status, self.is_refused = None, True

    def count_anew(self) -> None:
        """Restart the numbering of messages with an empty log."""
        self.sent = self.received = self.kept = self.num_gaps = 0
        self.has_lost_some = False
        self.forget_returns()
        self.log = SentLog(max_bytes=self.log.max_bytes)


class Peers:
    """All other workers of a run.

    Args:
        rank: Rank of this worker.
        num_workers: Number of all workers.
        life: Life of this worker.
        max_log_bytes: Limit, in bytes, on messages kept for each worker for resending; 0 keeps
            none.
        ended: Workers that have already finished; the others do not wait for them.
        takes_repeats: As in the algorithm's `Traits`.
        is_open: As in `HostSettings`.

    Attributes:
        silence: Seconds for which this worker asks the others to bear its silence.
    """

    def __init__(
        self,
        rank: Rank,
        num_workers: int,
        life: Life,
        max_log_bytes: int = 0,
        ended: Collection[Rank] = (),
        takes_repeats: bool = False,
        is_open: bool = False,
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.life = life
        self.is_resumed = False
        self.has_begun = False
        self.silence: Seconds = 0.0
        self._ended = frozenset(ended)
        self._takes_repeats = takes_repeats
        self.is_open = is_open
        # Workers that have left, and the time on this worker's clock when they count as lost.
        self._leaving: dict[Rank, Seconds] = {}
        others = (other for other in range(num_workers) if other != rank)
        self._peers = {
            other: Peer(log=SentLog(max_bytes=max_log_bytes), may_never_come=is_open)
            for other in others
        }

    def __getitem__(self, rank: Rank) -> Peer:
        return self._peers[rank]

    def __iter__(self) -> Iterator[tuple[Rank, Peer]]:
        return iter(self._peers.items())

    @property
    def active(self) -> list[Rank]:
        """Workers that the algorithm considers present."""
        return [rank for rank, peer in self if not peer.is_lost]

    @property
    def asked_silence(self) -> Seconds:
        """The longest silence that a present worker with work left asks for, in seconds."""
        statuses = (self[rank].status for rank in self.active)
        return max((x.silence for x in statuses if x and x.phase == Phase.RUNNING), default=0.0)

    @property
    def trusted(self) -> tuple[Rank, ...]:
        """Workers that the algorithm considers present, and that are not ignored."""
        return tuple(rank for rank in self.active if not self[rank].is_refused)

    @property
    def lost(self) -> list[Rank]:
        """Unfinished workers that the algorithm considers lost, and that do not return soon."""
        gone = [r for r, peer in self if peer.is_lost and self._return_at(peer) == math.inf]
        return [rank for rank in gone if rank not in self._ended]

    # Reports of the transport and of the others.

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Record a newly reachable process of `rank`; its status follows."""
        peer = self[rank]
        if incarnation != peer.incarnation:
            # What the former process said, and what it was ignored for, is not this one's. The
            # numbering stays: whether this one goes on with that life, its status will say.
            peer.incarnation, peer.status, peer.num_lives = incarnation, None, 0
            peer.is_refused = False
            peer.forget_returns()
        peer.is_reachable = True
        self._leaving.pop(rank, None)

    def disappeared(self, rank: Rank, incarnation: Incarnation, clock: Seconds) -> list[Event]:
        """Record the loss of a process of `rank` at time `clock` of this worker."""
        peer = self[rank]
        if incarnation != peer.incarnation:
            return []  # from an earlier process; its successor was faster
        peer.is_reachable = False
        if peer.status is not None and peer.status.phase == Phase.LEAVING:
            # This worker is probably about to be stopped too, and must not continue alone.
            self._leaving[rank] = clock + _GRACE
            return []
        return self.lose(rank)

    @property
    def due_at(self) -> Seconds:
        """Time of the next loss or return of a worker (`overdue`); infinity without any."""
        returns = [self._return_at(peer) for _, peer in self]
        return min([*self._leaving.values(), *returns], default=math.inf)

    def overdue(self, clock: Seconds) -> list[Event]:
        """Events for departed workers that now count as lost, and lost ones that return."""
        late = [rank for rank, at in self._leaving.items() if clock >= at]
        for rank in late:
            del self._leaving[rank]
        events = [event for rank in late for event in self.lose(rank)]
        for rank, peer in self:
            if clock >= self._return_at(peer):
                events += self._return_when_due(rank, clock)
        return events

    def lied(self, rank: Rank) -> list[Event]:
        """Count `rank` as lost; it will wait for an answer to what was rejected.

        If it is lost already, the event still comes, so that its unused data is dropped.
        """
        self[rank].num_returns += 1
        self.lose(rank)
        return [WorkerLost(rank, has_lied=True)] if self.has_begun else []

    def lose(self, rank: Rank) -> list[Event]:
        """Count `rank` as lost until a message or a status brings it back."""
        peer = self[rank]
        if peer.is_lost or not self.has_begun:
            return []
        # A loss settles all that was lost in transit before: nobody waits for it any more.
        peer.is_lost, peer.has_lost_some = True, False
        self.count_on()
        return [WorkerLost(rank)]

    def told(self, rank: Rank, status: WorkerStatus, clock: Seconds) -> list[Event]:
        """Record a status of `rank`, received at time `clock` of this worker."""
        peer = self[rank]
        if status.life != peer.life and peer.num_lives >= _MAX_LIVES:
            return []  # repeated welcomes would cost the others work each time
        # One that overtakes models takes another path, and a later status may be faster.
        before = peer.status
        if before and before.life == status.life and status.elapsed < before.elapsed:
            return []
        peer.status, peer.began_at = status, clock - status.elapsed
        # First the life, because a new one restarts the numbers that the next lines compare.
        peer.turn_to(status.life)
        # Its checkpoint may still be about an earlier life of this worker, with other numbers.
        if status.begun_with == self.life:
            peer.log.forget(status.kept)
        if status.phase == Phase.GONE:
            return self.lose(rank)
        # It handles other events than before this worker's checkpoint, when it was in step.
        if self.has_begun and self._has_begun_without(status):
            self.count_on()
        is_counting = status.phase >= Phase.RUNNING and status.begun_with == self.life
        # A single gap proves nothing: the status may have overtaken messages that are resent.
        is_gap = is_counting and status.left > peer.received
        peer.num_gaps = peer.num_gaps + 1 if is_gap else 0
        if not self._takes_part(peer):
            return []
        if is_gap and peer.is_lost:
            return self._return_when_due(rank, clock)
        return self.find(rank)

    def _takes_part(self, peer: Peer) -> bool:
        """Whether both have begun, and the worker can be reached."""
        status = peer.status
        is_there = status is not None and status.phase in (Phase.RUNNING, Phase.FINISHED)
        return self.has_begun and is_there and peer.is_reachable

    def _return_at(self, peer: Peer) -> Seconds:
        """Time of a scheduled return; infinity while the worker does not take part.

        The schedule remains, so a link that is down at that time does not prolong the delay.
        """
        is_due = peer.return_at < math.inf and self._takes_part(peer)
        return peer.return_at if is_due else math.inf

    def _return_when_due(self, rank: Rank, clock: Seconds) -> list[Event]:
        """Bring back a lost worker without the messages that it says it has sent.

        A worker whose message was rejected may wait for the answer, and send only statuses.
        Each time that these bring it back, the others wait for its message until they lose it
        once more. Each return is therefore delayed for longer than the one before, until a
        message arrives. A liar can avoid the delay by reporting fewer messages.
        """
        peer = self[rank]
        if peer.return_at == math.inf:
            doublings = min(peer.num_returns, _MAX_DOUBLINGS)
            peer.return_at = clock + _RETURN_DELAY * (2**doublings - 1)
        if clock < peer.return_at:
            return []
        peer.num_returns += 1
        return self.find(rank)

    def find(self, rank: Rank) -> list[Event]:
        """Events for the algorithm if it does not know yet that `rank` is present."""
        peer = self[rank]
        if not peer.is_lost and peer.known_life == peer.life:
            return []
        # The algorithm must hear of a loss before each return, even if this worker missed it
        # because the other one restarted too fast.
        # In an open run, one that appears for the first time has an empty state, too.
        is_known = peer.known_life != 0 or self.is_open
        has_restarted = is_known and peer.known_life != peer.life
        lost: list[Event] = [] if peer.is_lost else [WorkerLost(rank)]
        if peer.is_lost:  # nobody waits for messages that it sent in the meantime
            peer.has_lost_some, peer.num_gaps = False, 0
        peer.is_lost, peer.known_life, peer.return_at = False, peer.life, math.inf
        self.count_on()
        return [*lost, WorkerJoined(rank, has_restarted)]

    def count_on(self) -> None:
        """Continue numbering after the last message that each receiver has; receivers drop
        lower numbers as duplicates.

        A resumed worker repeats its actions since the checkpoint and sends the same messages
        with the same numbers. Its actions may differ once a worker is lost or found, or has
        lost this one, because the resumed worker then receives different messages. They may
        always differ if the algorithm depends on the order of arrival, and once a placeholder
        has taken the place of what it had received. A placeholder that comes while this worker
        still meets the others takes effect at once, ahead of the events that are pending until
        it begins. Their messages then get new numbers, so some may arrive twice; algorithms in
        rounds drop or overwrite such a copy.
        """
        if self.is_resumed:  # only then has it used numbers that it does not remember
            for _, peer in self:
                if peer.status is not None:
                    peer.sent = max(peer.sent, peer.status.received[self.rank])

    @property
    def lacking(self) -> list[Rank]:
        """Workers from which a message was permanently lost in transit.

        Messages arrive in the order in which they were sent. A status that may overtake some
        counts none as left. The first status of a resumed worker comes before its resent
        messages.
        """
        return [rank for rank in self.active if self._lacks(self[rank])]

    def _lacks(self, peer: Peer) -> bool:
        if peer.has_lost_some or peer.num_gaps < 2 or peer.status is None:
            return peer.has_lost_some
        return peer.status.left > peer.received  # otherwise it was resent

    # Beginning.

    @property
    def missing(self) -> list[Rank]:
        """Workers that have not ended but are unreachable or have not sent a status."""
        known = self._here().keys() | self._ended
        return [rank for rank, _ in self if rank not in known]

    @property
    def are_all_here(self) -> bool:
        """Whether no worker is missing."""
        return not self.missing

    @property
    def began_at(self) -> Seconds | None:
        """Start of the other workers' run, on this worker's clock; None if it has not begun.

        This is the median of their claims, or the later of two claims, so that a single liar
        cannot make the run appear old.
        """
        here = self._here()
        begun = [rank for rank, status in here.items() if status.phase >= Phase.RUNNING]
        is_known = self._do_agree(begun)
        return median_high(self[rank].began_at for rank in begun) if is_known else None

    @property
    def must_rejoin(self) -> bool:
        """Whether other workers began without this life or cannot resend missing messages."""
        here = self._here()
        begun = [rank for rank, status in here.items() if self._has_begun_without(status)]
        resumed = [rank for rank, status in here.items() if status.is_resumed]
        gaps = [rank for rank in here if self._is_gap(rank)]
        return (
            self._do_agree(begun)
            or (not self.is_resumed and self._do_agree(resumed))
            or self._do_agree(gaps)
        )

    def _do_agree(self, ranks: Collection[Rank]) -> bool:
        """Whether at least two workers (or the only reachable one) make a claim; a single
        worker may lie.
        """
        num_reachable = sum(peer.is_reachable and not peer.is_refused for _, peer in self)
        return len(ranks) >= min(2, max(1, num_reachable))

    def _has_begun_without(self, status: WorkerStatus) -> bool:
        return status.phase >= Phase.RUNNING and status.begun_with != self.life

    def _is_gap(self, rank: Rank) -> bool:
        """Whether this worker has resumed and `rank` cannot resend all missing messages."""
        peer, status = self[rank], self[rank].status
        if status is None or not self.is_resumed:
            return False
        # A later message may have arrived already, before this worker begins.
        is_gap = peer.has_lost_some or status.oldest > peer.received + 1
        return peer.known_life == status.life and is_gap

    def live_anew(self, life: Life) -> None:
        """Begin as a new worker, whose algorithm knows no other worker."""
        self.life, self.is_resumed = life, False
        for _, peer in self:
            peer.count_anew()
            peer.former.clear()
            peer.known_life, peer.is_lost = 0, False

    def begin(self, *, has_rejoined: bool = False) -> list[Event]:
        """Begin with the present workers; return the events that come before `Started`."""
        self.has_begun = True
        here = self._here()
        events: list[Event] = []
        for rank, peer in self:
            # A loss or a return that the algorithm knows from the checkpoint is not reported
            # again.
            if rank not in here or not self._goes_along(rank, here[rank], has_rejoined):
                events += [] if peer.is_lost else [WorkerLost(rank)]
                peer.is_lost = True
            else:
                events += [WorkerJoined(rank)] if peer.is_lost else []
                peer.is_lost, peer.known_life = False, peer.life
        if events or self._takes_repeats or any(map(self._has_begun_without, here.values())):
            self.count_on()
        return events

    def _goes_along(self, rank: Rank, status: WorkerStatus, has_rejoined: bool) -> bool:
        """Whether `rank` is in step with this worker or can help it; if not, it joins later.

        Two workers that rejoin at the same time would wait for each other's help. A worker
        whose claim to have begun earlier is unconfirmed will not send the first messages
        of a run.
        """
        if has_rejoined:
            return status.phase != Phase.WAITING
        if self.is_resumed:
            return self[rank].life == self[rank].known_life and not self._is_gap(rank)
        return not self._has_begun_without(status)

    def _here(self) -> dict[Rank, WorkerStatus]:
        return {
            rank: peer.status
            for rank, peer in self
            if peer.is_reachable and peer.status is not None
            if peer.status.phase < Phase.LEAVING
        }

    # Counting, and leaving.

    def status_for(
        self, rank: Rank, phase: Phase, elapsed: Seconds, num_waiting: int = 0
    ) -> WorkerStatus:
        """This worker's status for `rank`, to which `num_waiting` messages still wait."""
        peer, everyone = self[rank], self._peers.values()
        sent = [each.sent for each in everyone]
        received = [each.received for each in everyone]
        for counts in (sent, received):  # everyone's position in them is its rank
            counts.insert(self.rank, 0)
        return WorkerStatus(
            phase=phase,
            life=self.life,
            begun_with=peer.known_life if self.has_begun and not peer.is_lost else 0,
            elapsed=elapsed,
            silence=self.silence,
            is_resumed=self.is_resumed,
            oldest=peer.log.entries[0][0] if peer.log.entries else peer.sent + 1,
            kept=peer.kept,
            # If the status overtakes those that wait, it also overtakes what has left before
            # them and is still on its way in a direct stream.
            left=0 if num_waiting else peer.sent,
            sent=tuple(sent),
            received=tuple(received),
        )

    @property
    def unfinished(self) -> list[Rank]:
        """Workers that are present or return soon, and have work left by their statuses."""
        here = [
            (rank, peer.status)
            for rank, peer in self
            if not peer.is_lost or self._return_at(peer) < math.inf
        ]
        return [r for r, status in here if status is None or status.phase != Phase.FINISHED]

    @property
    def is_nothing_under_way(self) -> bool:
        """Whether all messages have arrived, according to the workers' latest statuses."""
        # Which worker it is for makes no difference to the counts.
        own = self.status_for(self.active[0], Phase.FINISHED, 0.0) if self.active else None
        statuses = {self.rank: own} | {rank: self[rank].status for rank in self.active}
        return all(
            a.sent[j] == b.received[i]
            for i, a in statuses.items()
            for j, b in statuses.items()
            if i != j and a is not None and b is not None
        )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed worker; its counts include all messages received so far."""
        return {
            "life": self.life,
            "peers": {
                rank: [
                    peer.known_life,
                    peer.life,
                    peer.sent,
                    peer.received,
                    peer.is_lost,
                    peer.has_lost_some,
                    list(peer.log.entries),
                    [[life, *counts] for life, counts in peer.former.items()],
                ]
                for rank, peer in self
            },
        }

    def note_kept(self) -> None:
        """Record that a stored checkpoint has all messages received so far."""
        for _, peer in self:
            peer.kept = peer.received

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.life, self.is_resumed = state["life"], True
        for rank, kept in state["peers"].items():
            known_life, life, sent, received, is_lost, has_lost_some, log, former = kept
            peer = self[rank]
            peer.turn_to(life)
            peer.former = {each: (sent_to, got) for each, sent_to, got in former}
            peer.known_life, peer.is_lost = known_life, is_lost
            peer.has_lost_some = has_lost_some
            # After `turn_to`, which sets them to 0. What had arrived is in this checkpoint.
            peer.sent, peer.received, peer.kept = sent, received, received
            for number, message in log:
                peer.log.add(number, message)
