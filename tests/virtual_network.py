"""The network between virtual processes.

It behaves as a `ZenohTransport` does: links are TCP, so a short cut delays what is sent, and a
longer one closes the link and loses it; a process that is killed is missed at once, one that
hangs after the lease; two ends of a new link need not see it at once, and frames may come
before that.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.virtual_process import Process
from tests.virtual_time import VirtualTime

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import Credentials
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener, Progress


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How frames travel on every link.

    Args:
        latency: Least and most seconds that a frame takes, drawn for each link.
        bandwidth: Bytes per second of a link.
        late: Chance that a frame takes up to a second more; those behind it wait.
        lost: Chance that a frame is lost.
        twice: Chance that it comes twice.
    """

    latency: tuple[Seconds, Seconds] = (0.001, 0.02)
    bandwidth: float = 1e6
    late: float = 0.0
    lost: float = 0.0
    twice: float = 0.0


@dataclass
class _Link:
    """One direction between two processes that see each other."""

    sender: VirtualTransport
    receiver: VirtualTransport
    latency: Seconds
    is_seen: bool = False
    num_breaks: int = 0
    turn: int = 0  # the last break that the sender has been told of
    last_arrival: Seconds = 0.0
    stalled: list[bytes] = field(default_factory=list)

    @property
    def is_broken(self) -> bool:
        return self.turn != self.num_breaks


class VirtualNetwork:
    """Joins virtual processes.

    Args:
        time: The clock.
        draw: All that is random.
        wire: How frames travel.
        lease: Silence after which a link is closed.
    """

    def __init__(
        self, time: VirtualTime, draw: random.Random, wire: Wire, lease: Seconds = 1.5
    ) -> None:
        self.time = time
        self.draw = draw
        self.num_running = 0  # processes
        self.lease = lease
        self._wire = wire
        self._open: dict[Rank, VirtualTransport] = {}
        self._links: dict[tuple[Rank, Rank], _Link] = {}
        self._cuts: dict[tuple[Rank, Rank], int] = defaultdict(int)

    def transport(self, process: Process) -> VirtualTransport:
        return VirtualTransport(self, process)

    # What happens to links and processes.

    def cut(self, a: Rank, b: Rank, seconds: Seconds, *, one_way: bool = False) -> None:
        """Nothing gets from `a` to `b`, nor back unless `one_way`, for so long.

        With infinite `seconds`, until `heal`.
        """
        for way in _ways(a, b, one_way):
            self._cuts[way] += 1
        self.time.at(
            self.time.now + self._patience(),
            lambda: self._close_if(lambda: self.is_cut(a, b), a, b),
        )
        if seconds < math.inf:
            heal = partial(self.heal, a, b, one_way=one_way)
            self.time.at(self.time.now + seconds, heal)

    def heal(self, a: Rank, b: Rank, *, one_way: bool = False) -> None:
        """End a cut."""
        for way in _ways(a, b, one_way):
            self._cuts[way] -= 1
        self._resume(a, b)

    def is_cut(self, a: Rank, b: Rank) -> bool:
        """Whether nothing gets from one to the other in at least one direction."""
        return bool(self._cuts[a, b] or self._cuts[b, a])

    def interrupt(self, a: Rank, b: Rank) -> None:
        """One of two links between `a` and `b` ends: what is in it is lost, and both are told.

        Until one is, what it sends is lost, too; see `net/zenoh/order.py`.
        """
        for way in _ways(a, b, False):
            link = self._links.get(way)
            if link is not None and link.is_seen:
                link.num_breaks += 1
                link.stalled.clear()
                begin = partial(self._begin_turn, link, link.num_breaks)
                link.sender.process.after(self.draw.uniform(0.0, 0.5), begin)

    def _begin_turn(self, link: _Link, turn: int) -> None:
        rank, process = link.receiver.rank, link.receiver.process
        if self._links.get((link.sender.rank, rank)) is link and turn == link.num_breaks:
            link.turn = turn
            link.sender.listener.interrupted(rank, process.incarnation)

    def pause(self, rank: Rank, seconds: Seconds) -> None:
        """A process stands still, as with SIGSTOP; longer than the lease, its links close."""
        process = self._open[rank].process if rank in self._open else None
        if process is None or process.is_paused:
            return
        process.pause()
        for other in [*self._open]:
            close = partial(self._close_if, lambda: process.is_paused, rank, other)
            self.time.at(self.time.now + self._patience(), close)

        def wake() -> None:
            if process.is_alive:
                process.wake()
                for other in [*self._open]:
                    self._resume(rank, other)

        self.time.at(self.time.now + seconds, wake)

    def kill(self, rank: Rank, *, machine: bool = False) -> None:
        """A process ends at once; of a machine that is lost, nothing is heard any more."""
        transport = self._open.pop(rank, None)
        if transport is None:
            return
        transport.process.die()
        for other in [*self._open]:
            after = self._patience() if machine else self.draw.uniform(0.0, 0.01)
            self._gone(transport, other, after)

    def join(self, transport: VirtualTransport) -> None:
        if transport.rank in self._open:
            self.kill(transport.rank)
        self._open[transport.rank] = transport
        for other in self._open:
            if other != transport.rank:
                self._connect(transport.rank, other)

    def leave(self, transport: VirtualTransport) -> None:
        if self._open.get(transport.rank) is transport:
            del self._open[transport.rank]
            for other in [*self._open]:
                self._gone(transport, other, 0.02)  # after what was sent before

    # Links.

    def link(self, sender: Rank, receiver: Rank) -> _Link | None:
        """The present link, if there is one."""
        return self._links.get((sender, receiver))

    def send(
        self, sender: VirtualTransport, receiver: Rank, frame: bytes, *, at_once: bool = False
    ) -> None:
        """Put a frame on the wire; sleeps for as long as that takes, unless `at_once`."""
        if not at_once:
            self.time.sleep(len(frame) / self._wire.bandwidth)
        link = self.link(sender.rank, receiver)
        if link is None or link.sender is not sender or not link.is_seen:
            return  # a worker that has not appeared gets nothing
        if link.is_broken:
            return
        if self._cuts[sender.rank, receiver] or link.receiver.process.is_paused:
            link.stalled.append(frame)
        else:
            self._travel(link, frame, self.time.clock())

    def _travel(self, link: _Link, frame: bytes, left_at: Seconds) -> None:
        draw, wire, to = self.draw, self._wire, link.receiver
        if wire.lost and draw.random() < wire.lost:
            return
        delay = link.latency + (
            draw.random() if wire.late and draw.random() < wire.late else 0.0
        )
        at = max(left_at + delay, link.last_arrival)  # in the order sent
        link.last_arrival = at
        way, turn = (link.sender.rank, to.rank), link.turn

        def arrive() -> None:
            is_on_link = link.turn == turn and not link.is_broken
            if is_on_link and self._links.get(way) is link:
                data = memoryview(bytearray(frame))
                to.process.act(lambda: to.listener.read(way[0], data)())

        for _ in range(2 if wire.twice and draw.random() < wire.twice else 1):
            self.time.at(at, arrive)

    def _connect(self, a: Rank, b: Rank) -> None:
        """Try to open a link, until it is there or one of the two is gone."""
        one, two = self._open.get(a), self._open.get(b)
        if one is None or two is None:
            return
        link = self._links.get((a, b))
        if link is not None and (link.sender, link.receiver) == (one, two):
            return  # else it was with a process that is gone, and not missed yet
        if self.is_cut(a, b) or one.process.is_paused or two.process.is_paused:
            self.time.at(
                self.time.now + self.draw.uniform(0.1, 1.0), lambda: self._reconnect(one, two)
            )
            return
        for here, there in ((one, two), (two, one)):
            latency = self.draw.uniform(*self._wire.latency)
            self._links[here.rank, there.rank] = _Link(here, there, latency)
        for here, there in ((one, two), (two, one)):
            self._see(here, there, self.draw.uniform(0.0, 0.3))

    def _reconnect(self, one: VirtualTransport, two: VirtualTransport) -> None:
        if self._open.get(one.rank) is one and self._open.get(two.rank) is two:
            self._connect(one.rank, two.rank)

    def _see(self, here: VirtualTransport, there: VirtualTransport, after: Seconds) -> None:
        link = self._links[here.rank, there.rank]

        def see() -> None:
            if self._links.get((here.rank, there.rank)) is link:
                link.is_seen = True
                here.turn_to(there.rank, there.process.incarnation)

        here.process.after(after, see)

    def _close_if(self, is_still: Callable[[], bool], a: Rank, b: Rank) -> None:
        if is_still() and a in self._open and b in self._open and (a, b) in self._links:
            one, two = self._open[a], self._open[b]
            self._drop(a, b)
            for here, there in ((one, two), (two, one)):
                here.process.after(0.0, partial(here.turn_to, there.rank, None))
            self._reconnect(one, two)

    def _gone(self, gone: VirtualTransport, other: Rank, after: Seconds) -> None:
        here, link = self._open[other], self._links.get((other, gone.rank))

        def miss() -> None:
            if self._links.get((other, gone.rank)) is link:
                self._drop(other, gone.rank)
            if here.alive.get(gone.rank) == gone.process.incarnation:
                here.turn_to(gone.rank, None)
            new = self._open.get(gone.rank)
            if new is not None and self._open.get(other) is here:
                self._connect(gone.rank, other)

        here.process.after(after, miss)

    def _drop(self, a: Rank, b: Rank) -> None:
        self._links.pop((a, b), None)
        self._links.pop((b, a), None)

    def _resume(self, a: Rank, b: Rank) -> None:
        """Data that TCP had kept arrive in order where the link was not closed meanwhile."""
        for way in ((a, b), (b, a)):
            link = self._links.get(way)
            to = self._open.get(way[1])
            if link is None or to is None or self._cuts[way] or to.process.is_paused:
                continue
            stalled, link.stalled = link.stalled, []
            for frame in stalled:
                self._travel(link, frame, self.time.now)

    def _patience(self) -> Seconds:
        return self.draw.uniform(self.lease, 2 * self.lease)


def _ways(a: Rank, b: Rank, one_way: bool) -> list[tuple[Rank, Rank]]:
    return [(a, b)] if one_way else [(a, b), (b, a)]


class VirtualTransport:
    """One process's end of a `VirtualNetwork`; a `Transport`."""

    listener: Listener
    credentials: Callable[[], Credentials] | None = None

    def __init__(self, network: VirtualNetwork, process: Process) -> None:
        self.rank = process.rank
        self.process = process
        self.alive: dict[Rank, Incarnation] = {}
        self._network = network
        self._rests: dict[Rank, tuple[_Link, int, Sequence[Buffer]]] = {}

    @property
    def calls(self) -> tuple[str, ...]:
        return ()

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        self.listener = listener
        self._network.join(self)

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        self._network.send(self, receiver, b"".join(frame))

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        link, chance = self._network.link(self.rank, receiver), self._network.draw.random()
        if link is None or chance < 0.3:
            return Progress.NONE
        if chance < 0.7:
            self._network.send(self, receiver, b"".join(frame), at_once=True)
            return Progress.ALL
        self._rests[receiver] = link, link.turn, frame
        return Progress.SOME

    def send_rest(self, receiver: Rank) -> None:
        """Send it, unless its link or turn is over, and with it what has left before."""
        link, turn, frame = self._rests.pop(receiver)
        if self._network.link(self.rank, receiver) is link and link.turn == turn:
            self.send(receiver, frame)

    def close(self) -> None:
        """Say farewell once all that was submitted has left, or ten seconds are over."""
        self._network.time.at(self._network.time.now + 0.1, lambda: self._network.leave(self))

    def turn_to(self, rank: Rank, incarnation: Incarnation | None) -> None:
        """Tell the listener who speaks for `rank` now, if anybody."""
        before = self.alive.pop(rank, None)
        if before is not None:
            self.listener.disappeared(rank, before)
        if incarnation is not None:
            self.alive[rank] = incarnation
            self.listener.appeared(rank, incarnation)
