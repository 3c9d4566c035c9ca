"""The traffic to and from one other worker over zenoh, and beside it."""

from __future__ import annotations

import itertools
import math
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import zenoh

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import Credentials
from edgegossip.net.pacing import UNLIMITED, Pace, UploadLimit
from edgegossip.net.runtime import TokenBucket
from edgegossip.net.streams import Stream, Streams
from edgegossip.net.transport import Incarnation, Listener, Progress
from edgegossip.net.zenoh.direct import DirectStreams
from edgegossip.net.zenoh.links import Links, process_of
from edgegossip.net.zenoh.order import FIRST, Arrival, Order, following, is_since
from edgegossip.net.zenoh.pieces import HEADER, Assembler, split
from edgegossip.net.zenoh.session import CHUNK_BYTES
from edgegossip.net.zenoh.twins import Claim, Claims

_MAX_ALIVE = 64
_MAX_HELD = 64
"""Pieces kept of a process that does not speak for its rank yet; by then it only introduces
itself.
"""
_REPEAT: Seconds = 2.0
"""Seconds after which a worker asks again for a new turn that has not begun."""
_SIGNS = (1.0, 64)
"""Sustained rate, per second, and burst of signs of life."""

_SHORT = 4096
"""Bytes of the largest frames that leave in one piece, and may overtake others."""

# The last message to a worker that leaves.
_FAREWELL = b""
_FAST = 500_000
"""Bytes per second that a path must have carried before a direct stream takes it."""
_MARK = struct.Struct("<Q")
# Asks for a new turn; names a piece after the missing ones, or the last one before them.
_GAP = struct.Struct("<cI")
_GAPS = b"g"


class ZenohPeer:
    """The traffic to and from one other worker.

    The youngest process speaks for the rank, because the token of a killed one may remain until
    its lease ends. It has to wait for `settle` seconds, in which an older process that still
    lives claims the rank (see `Twins`). If that process ends, it speaks at once.

    Frames are lost when a stream ends, or one of two zenoh links to the same process. The
    sender notices this, or is told by the receiver, which counts pieces (`Order`). It then
    begins a new *turn*, and the listener sends the frames again.

    Args:
        rank: The other worker.
        listener: Receives the events.
        max_bytes: Maximum size of a frame, in bytes.
        links: Links of the session; they tell which traffic leaves this machine.
        settle: Seconds for which an older process may claim the rank.
        upload: Limit on what leaves for all workers together.
        paces: The paces of all workers; this one's is added.
    """

    publisher: zenoh.Publisher
    acknowledger: zenoh.Publisher
    direct: DirectStreams | None = None

    def __init__(
        self,
        rank: Rank,
        listener: Listener,
        max_bytes: int,
        links: Links,
        settle: Seconds,
        upload: UploadLimit = UNLIMITED,
        paces: list[Pace] | None = None,
    ) -> None:
        self.incarnation: Incarnation | None = None
        # Traffic beyond this machine. One thread at a time adds to each counter.
        self.bytes_sent = self.bytes_received = 0
        self._links = links
        self._settle = settle
        self._session_id: str | None = None
        # Processes by their first sign of life, and those that may speak for the rank.
        self._alive: list[Incarnation] = []
        self._may_speak: set[Incarnation] = set()
        self._claims = Claims()
        # Turns begun, the last one with a piece, and the number of its first and last piece.
        self._num_turns = self._turn = 0
        self._first = self._number = 0
        self._putting = threading.Lock()
        self._order = Order(None)
        self._ask_at = 0.0
        self._held: defaultdict[Incarnation, list[tuple[bytes, int]]] = defaultdict(list)
        self._signs = TokenBucket(*_SIGNS)
        self._rank = rank
        self._max_bytes = max_bytes
        self._listener = listener
        self._serials = itertools.count()
        self._pace = Pace(time.monotonic, CHUNK_BYTES, [] if paces is None else paces)
        self._upload = upload
        self._assembler = Assembler(max_bytes, lambda reason: listener.refused(rank, reason))
        self._sending = threading.Lock()
        self._is_sending_long = False
        # Held during calls of the listener, so that it gets one report at a time.
        self._telling = threading.Lock()
        self._is_closing = False
        self._left: Incarnation | None = None
        self._has_answered = threading.Event()
        self._answer: threading.Thread | None = None

    def send(self, frame: Sequence[Buffer]) -> None:
        """Send a frame, unless no process speaks for the rank."""
        is_short = sum(map(len, frame)) <= _SHORT
        # With the lock, because whoever has been told of a turn sends in this turn.
        with self._telling:
            turn = self._num_turns
        if is_short and self._is_sending_long:
            # From another thread: it neither waits for the end of the long one, nor follows it
            # in a stream.
            self._send_in_pieces(frame, turn, is_short)
            return
        with self._sending:
            self._is_sending_long = not is_short
            try:
                if not self._send_directly(frame, turn):
                    self._send_in_pieces(frame, turn, is_short)
            finally:
                self._is_sending_long = False

    def begin(self, frame: Sequence[Buffer]) -> Progress:
        """Send what a direct stream takes of a frame at once."""
        with self._telling:  # see `send`
            turn = self._num_turns
        if self.direct is None or not self._sending.acquire(blocking=False):
            return Progress.NONE
        try:
            if not self._goes_on(turn):
                return Progress.NONE
            progress = self.direct.begin(frame)
            # As in `send`: short frames overtake what is left of it.
            self._is_sending_long = progress == Progress.SOME
        finally:
            self._sending.release()
        if progress != Progress.NONE and self._links.leave_machine(self._session_id):
            self.bytes_sent += sum(map(len, frame))
        return progress

    def send_rest(self) -> None:
        """Send the rest of a frame that `begin` has begun to send."""
        with self._sending:
            try:
                if self.direct is not None:
                    self.direct.send_rest()
            finally:
                self._is_sending_long = False

    def _send_directly(self, frame: Sequence[Buffer], turn: int) -> bool:
        """Send a frame over a direct stream; return whether there is one."""
        if self.direct is None or not self._goes_on(turn):
            return False
        # A slow path is left to `Pace`: a stream would fill its buffers for seconds.
        is_fast = (self._pace.rate or 0.0) >= _FAST and math.isinf(self._upload.rate)
        if not self.direct.send(
            frame, lambda piece: self._put_in_order(piece, turn), may_open=is_fast
        ):
            return False
        if self._links.leave_machine(self._session_id):
            self.bytes_sent += sum(map(len, frame))
        return True

    def _send_in_pieces(self, frame: Sequence[Buffer], turn: int, is_short: bool) -> None:
        def leave(num_bytes: int) -> int:
            delay = self._upload.delay(num_bytes)
            if not is_short:
                self._pace.wait(num_bytes, delay, lambda: self._goes_on(turn))
            return self._pace.sent(num_bytes)

        pieces = split(next(self._serials), frame, lambda: self._pace.piece_bytes, leave)
        for piece in pieces:
            # The end of a frame is useless to a process that missed its beginning.
            if not self._put_in_order(piece, turn):
                return
            if self._links.leave_machine(self._session_id):
                self.bytes_sent += len(piece)

    def _goes_on(self, turn: int) -> bool:
        return self.incarnation is not None and self._num_turns == turn

    def _put_in_order(self, piece: bytes, turn: int) -> bool:
        """Send a piece unless its turn is over; return whether it was sent."""
        with self._putting:
            if not self._goes_on(turn):
                return False
            if self._turn != turn:
                self._first = self._put_next(FIRST)
                self._turn = turn
            self._put_next(piece)
        return True

    def _put_next(self, piece: bytes) -> int:
        self._number = following(self._number)
        self.put(piece, self._number)
        return self._number

    def _begin_turn(self) -> None:
        """Begin a new turn, because frames may be lost."""
        if self._is_closing or self.incarnation is None:
            return
        self._listener.interrupted(self._rank, self.incarnation)
        self._num_turns += 1
        self._pace.reset()
        if self.direct is not None:
            self.direct.leave_stream()

    def link_ended(self, process: Incarnation) -> None:
        """Take note of the end of one of several zenoh links to `process`."""
        with self._telling:
            if process == self.incarnation:
                self._begin_turn()

    def take(self, piece: bytes, session_id: str | None, number: int = 0) -> None:
        """Receive a piece of a frame.

        Args:
            piece: The piece.
            session_id: Session that has sent it.
            number: Its place in the order of pieces; 0 for none.
        """
        if piece == _FAREWELL:
            self._has_answered.set()
            return
        if len(piece) == _MARK.size:
            self._pace.acknowledged(*_MARK.unpack(piece))
            return
        process = process_of(session_id)
        if len(piece) == _GAP.size and piece[:1] == _GAPS:
            self._hear_gap(piece, process)
            return
        if self.direct is not None and self.direct.take_offer(piece, process):
            return
        if len(piece) >= HEADER.size and (mark := HEADER.unpack_from(piece)[-1]):
            self._acknowledge(_MARK.pack(mark))
        with self._telling:
            if self._links.leave_machine(session_id):
                self.bytes_received += len(piece)
            # A process that has appeared, but does not speak for the rank yet: its pieces wait
            # until it does, because the listener must hear of a process before its frames.
            if process is not None and process != self.incarnation and process in self._alive:
                if len(self._held[process]) < _MAX_HELD:
                    self._held[process].append((piece, number))
                return
            self._session_id = session_id
            self._add(piece, process, number)

    def _add(self, piece: bytes, process: Incarnation | None, number: int) -> None:
        if number and process is not None and not self._is_in_order(piece, process, number):
            return
        if number and piece == FIRST:
            self._ask_at = 0.0
            self._assembler.reset()
            if self.direct is not None:
                self.direct.renew()
            return
        if self.direct is not None and self.direct.take_switch(piece):
            return
        frame = self._assembler.add(piece)
        if frame is not None:
            self._listener.received(self._rank, frame)

    def _is_in_order(self, piece: bytes, process: Incarnation, number: int) -> bool:
        """Whether all pieces before this one have arrived; if not, ask for a new turn."""
        if process != self._order.process:
            if self.incarnation not in (None, process):
                return False  # it speaks no more, or not yet
            self._order = Order(process)
        arrival = self._order.take(number, is_first=piece == FIRST)
        if arrival == Arrival.AFTER_A_GAP:
            self._ask_for_a_turn(number)
        return arrival == Arrival.IN_ORDER

    def _ask_for_a_turn(self, number: int) -> None:
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _REPEAT
            self._acknowledge(_GAP.pack(_GAPS, number))

    def _hear_gap(self, piece: bytes, process: Incarnation | None) -> None:
        _, number = _GAP.unpack(piece)
        with self._telling:
            if process is None or process != self.incarnation or not self._may_sign():
                return
            # Unless another turn has begun meanwhile.
            if self._turn == self._num_turns and is_since(number, self._first):
                self._begin_turn()

    def stream_received(self, stream: Stream, frame: memoryview) -> bool:
        """See `direct.Owner`."""
        with self._telling:
            if self.direct is None or stream is not self.direct.incoming:
                return False
            if self._links.leave_machine(self._session_id):
                self.bytes_received += len(frame)
            handle = self._listener.read(self._rank, frame)
        handle()
        return True

    def stream_refused(self, reason: str) -> None:
        """See `direct.Owner`."""
        self._listener.refused(self._rank, reason)

    def outgoing_ended(self, stream: Stream) -> None:
        """See `direct.Owner`."""
        with self._telling:
            if self.direct is not None and self.direct.drop(stream):
                self._begin_turn()

    def incoming_ended(self, stream: Stream) -> None:
        """See `direct.Owner`."""
        with self._telling:
            is_current = self.direct is not None and stream is self.direct.incoming
            if is_current and self._order.last is not None:
                self._order.break_off()
                self._ask_for_a_turn(self._order.last)

    def appear(self, incarnation: Incarnation) -> None:
        """Receive a sign of life."""
        with self._telling:
            if incarnation in self._alive or self._is_closing or not self._may_sign():
                return
            # A process that never undeclares its tokens must not make this list grow for ever.
            self._alive = [*self._alive[1 - _MAX_ALIVE :], incarnation]
            # Another process speaks. It may be dead, or have the older right, which its claim
            # will show; this one waits for that.
            if self.incarnation is not None:
                timer = threading.Timer(self._settle, self._give_way, [incarnation])
                timer.daemon = True
                timer.start()
                return
            self._may_speak.add(incarnation)
            self._choose()

    def heard(self, claim: Claim) -> None:
        """Receive a process's claim that it was there before another one."""
        with self._telling:
            if self._may_sign():
                self._claims.add(claim)
                self._choose()

    def disappear(self, incarnation: Incarnation) -> None:
        """Receive the withdrawal of a sign of life."""
        with self._telling:
            # While this worker leaves, even an unknown withdrawal gets an answer, or the other
            # one would wait in vain.
            if incarnation not in self._alive and not self._is_closing:
                return
            if incarnation in self._alive:
                self._alive.remove(incarnation)
            self._held.pop(incarnation, None)
            # Nobody else can claim the rank now, so the remaining ones need not wait.
            if not self._may_speak.intersection(self._alive):
                self._may_speak.update(self._alive)
            self._choose()
            leaves_too = self._is_closing and incarnation == self._left
        # A worker that leaves in order waits for this answer. It is sent from another thread,
        # because a reading thread of zenoh must not wait until another worker reads.
        answer = threading.Thread(target=self.put, args=(_FAREWELL,))
        answer.start()
        self._answer = answer  # set once the thread runs, because `close` may join it at once
        if leaves_too:
            # It may be gone before it notices our departure and answers. Its own farewell is as
            # good: all its messages have arrived before it, and it waits for our answer.
            self._has_answered.set()

    def leave(self, deadline: Seconds) -> bool:
        """Send nothing after the current frame; return whether the peer is present."""
        # Not for ever: a congested link may block the sending thread until the lease ends.
        has_silence = self._sending.acquire(timeout=until(deadline))
        with self._telling:
            self._is_closing = True
            self._has_answered.clear()
            self._left, self.incarnation = self.incarnation, None
            self._pace.reset()
        if has_silence:
            if self.direct is not None:
                self.direct.finish()
            self._sending.release()
        return self._left is not None

    def await_reading(self, deadline: Seconds) -> None:
        """Wait until the peer has read all frames of its stream."""
        if self.direct is not None:
            self.direct.await_reading(until(deadline))

    def expel(self, credentials: Credentials) -> None:
        """End the peer's streams at once if `credentials` revoke its certificate."""
        if self.direct is not None:
            self.direct.expel(credentials)

    def close_streams(self) -> None:
        """End the peer's streams."""
        if self.direct is not None:
            self.direct.close()

    def lose(self) -> None:
        """Report the peer's disappearance to the listener, now that this worker has left."""
        with self._telling:
            self._alive = []
            self._held.clear()
            if self._left is not None:
                self._listener.disappeared(self._rank, self._left)

    def return_to_life(self, streams: Streams) -> None:
        """Resume sending when the peer appears."""
        with self._telling:
            self.direct = DirectStreams(
                self._rank, streams, self._links.host, self, self._max_bytes
            )
            self._assembler.reset()
            self._is_closing = False

    def await_farewell(self, deadline: Seconds) -> None:
        """Wait until the peer confirms that it has read all frames."""
        self._has_answered.wait(until(deadline))
        if self._answer is not None:
            self._answer.join(until(deadline))

    def put(self, piece: bytes, number: int = 0) -> None:
        """Send a piece over zenoh, with its place in the order of pieces."""
        with suppress(zenoh.ZError):  # the session has been closed
            # The source tells the receiver which process the piece is of.
            source = zenoh.SourceInfo(self.publisher.id, number)
            self.publisher.put(piece, source_info=source)

    def _acknowledge(self, answer: bytes) -> None:
        # Dropped if the link is congested, because a reading thread of zenoh must not wait. The
        # next one says it, too.
        with suppress(zenoh.ZError):
            source = zenoh.SourceInfo(self.acknowledger.id, 0)
            self.acknowledger.put(answer, source_info=source)

    def _may_sign(self) -> bool:
        """Whether another sign of life is accepted now."""
        if self._signs.take(time.monotonic()):
            return True
        self._listener.refused(self._rank, "more signs of life than any honest worker gives")
        return False

    def _give_way(self, incarnation: Incarnation) -> None:
        with self._telling:
            if incarnation in self._alive:
                self._may_speak.add(incarnation)
                self._choose()

    def _choose(self) -> None:
        """Turn to the process that speaks for the rank."""
        if self._is_closing:
            return
        self._may_speak.intersection_update(self._alive)
        ready = [each for each in self._alive if each in self._may_speak]
        # If all are beaten (claims of liars), the youngest speaks, as without claims.
        unclaimed = [each for each in ready if not self._claims.is_beaten(each, self._alive)]
        chosen = next(reversed(unclaimed or ready), None)
        if chosen != self.incarnation:
            self._turn_to(chosen)

    def _turn_to(self, incarnation: Incarnation | None) -> None:
        # The end of a frame of one process must never complete the beginning of another's.
        before, self.incarnation = self.incarnation, incarnation
        self._num_turns += 1
        self._assembler.reset()
        self._pace.reset()
        if before is not None:
            self._order.break_off()
            self._listener.disappeared(self._rank, before)
        if incarnation is not None:
            self._listener.appeared(self._rank, incarnation)
        # After the reports, so that no frame of another process or link comes before them.
        if self.direct is not None:
            self.direct.turn(incarnation)
        if incarnation is not None:
            for piece, number in self._held.pop(incarnation, []):
                self._add(piece, incarnation, number)


def until(deadline: Seconds) -> Seconds:
    return max(0.0, deadline - time.monotonic())
