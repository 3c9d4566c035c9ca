"""The runtime of a host: its clock, its inbox, and background threads.

The host uses time and threads only through a `Runtime`. Tests use a virtual runtime, with which
a run of minutes takes milliseconds and one seed gives one trace.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from edgegossip.contract.protocol import Rank, Seconds

_Lane: TypeAlias = Rank | None
_NOTHING = object()
RATE = 2000.0
"""Sustained rate of messages per second from one sender."""
BURST = 100_000
"""Burst of messages from one sender. It exceeds the number of resent messages: a checkpoint
holds 64 MiB, with at least 1 KiB per message.
"""
REFUSED_COST = 100
"""Cost of a rejected frame, in messages; honest workers cause none."""
STATUS_COST = 20
"""Cost of a worker's status, in messages; at most 20 statuses are sent per second."""


class Sink(Protocol):
    """Any queue from which a host takes items."""

    def put(self, item: Any, /) -> None:  # noqa: ANN401
        """Add `item`; thread-safe."""

    def add(self, item: Any, /) -> None:  # noqa: ANN401
        """Add `item`, for a thread that calls `help` next; thread-safe."""

    def help(self) -> None:
        """Let this thread handle an item, if it may; see `FairQueue.help`."""


class FairQueue:
    """A queue that serves senders in turn, with one thread that takes items and some that help.

    Items of one sender (their `sender` or `rank`) stay in order. Items without a sender also
    stay in order and have their own turn.

    While the thread that takes items waits in `get`, another one may handle the next item in
    its place (`help`), so that no change of thread lies between an item and its effects. One
    thread at a time handles items.

    >>> from edgegossip.contract.protocol import WorkerJoined, WorkerLost
    >>> waiting = FairQueue()
    >>> for item in (WorkerLost(1), WorkerJoined(1), WorkerLost(2), "own"):
    ...     waiting.put(item)
    >>> [waiting.get() for _ in range(4)]  # doctest: +ELLIPSIS
    [WorkerLost(rank=1, ...), WorkerLost(rank=2, ...), 'own', WorkerJoined(rank=1, ...)]
    """

    def __init__(self) -> None:
        # A signal handler may also put an item in during a `get`.
        self._arrived: deque[Any] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lanes: defaultdict[_Lane, deque[Any]] = defaultdict(deque)
        self._turns: deque[_Lane] = deque()
        self._handle: Callable[[Any], bool] | None = None
        # Held by the thread that handles items, once others may help.
        self._handling = threading.Lock()
        self._is_shared = False

    def put(self, item: Any, /) -> None:  # noqa: ANN401
        """Add `item`; thread-safe."""
        self._arrived.append(item)
        self._bell.put(None)

    def add(self, item: Any, /) -> None:  # noqa: ANN401
        """Add `item` without waking the thread that takes items; call `help` next."""
        self._arrived.append(item)

    def get(self, timeout: Seconds | None = None) -> Any:  # noqa: ANN401
        """Take the next item, waiting at most `timeout` seconds; None if there is none.

        None may also come earlier, if a helper asks for it. Only one thread may call this.
        """
        while not self._bell.empty():
            self._bell.get()
        if (item := self._next()) is _NOTHING:
            is_helped = self._handle is not None
            if is_helped:
                self._handling.release()
            try:
                with suppress(queue.Empty):
                    self._bell.get(timeout=timeout)
            finally:
                if is_helped:
                    self._handling.acquire()
            item = self._next()
        return None if item is _NOTHING else item

    def let_help(self, handle: Callable[[Any], bool] | None) -> None:
        """Let other threads handle items with `handle` from now on; none of them if it is None.

        Only the thread that handles items may call this, and `get` must be called by the thread
        that has called it first.

        Args:
            handle: Handles an item, and returns whether `get` must return. It may not raise.
        """
        if handle is not None and not self._is_shared:
            self._is_shared = self._handling.acquire()
        self._handle = handle

    def help(self) -> None:
        """Handle the next item in this thread if nobody handles one; else see that `get` does.

        This may take as long as an item takes, so a thread that others wait for calls `put`.
        """
        if self._handle is not None and self._handling.acquire(blocking=False):
            try:
                must_return = self._handle_next()
            finally:
                self._handling.release()
            # Whoever added an item meanwhile has found this thread at work, and rings.
            if not must_return:
                return
        self._bell.put(None)

    def empty(self) -> bool:
        """Whether no item waits."""
        return not self._arrived and not self._turns

    def qsize(self) -> int:
        """Number of waiting items; thread-safe."""
        return len(self._arrived) + sum(map(len, [*self._lanes.values()]))

    def _handle_next(self) -> bool:
        """Handle the next item, if others may; return whether `get` must return."""
        if (handle := self._handle) is None:
            return True
        item = self._next()
        must_return = item is None or (item is not _NOTHING and handle(item))
        return must_return or bool(self._turns)

    def _next(self) -> Any:  # noqa: ANN401
        # All that has arrived is sorted first; else a flood would still stand before the
        # others.
        while self._arrived:
            self._sort(self._arrived.popleft())
        if not self._turns:
            return _NOTHING
        lane = self._turns.popleft()
        item = self._lanes[lane].popleft()
        # One item per turn, then to the end of the line.
        if self._lanes[lane]:
            self._turns.append(lane)
        return item

    def _sort(self, item: Any) -> None:  # noqa: ANN401
        lane = getattr(item, "sender", getattr(item, "rank", None))
        if not self._lanes[lane]:
            self._turns.append(lane)
        self._lanes[lane].append(item)


class TokenBucket:
    """A token bucket: `rate` tokens per second, and `burst` at once after a pause; thread-safe.

    If an item costs more than one token, the rest is charged afterwards.

    >>> bucket = TokenBucket(rate=1.0, burst=2)
    >>> [bucket.take(now) for now in (0.0, 0.0, 0.5, 1.0, 9.0, 9.0, 9.0)]
    [True, True, False, True, True, True, False]
    >>> bucket.charge(2)
    >>> [bucket.take(now) for now in (11.0, 12.0)]
    [False, True]
    >>> bucket.charge(2)
    >>> bucket.refill(now=12.0)
    >>> [bucket.take(12.0) for _ in range(3)]
    [True, True, False]
    """

    def __init__(self, rate: float = RATE, burst: int = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._left = float(burst)
        self._at: Seconds | None = None
        self._refilled_at: Seconds | None = None
        self._lock = threading.Lock()

    def take(self, now: Seconds) -> bool:
        """Take a token; return whether the bucket had one."""
        with self._lock:
            # Threads may read the clock in one order and come here in the other.
            since = 0.0 if self._at is None else max(0.0, now - self._at)
            self._left = min(self._burst, self._left + self._rate * since)
            self._at = now
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def refill(self, now: Seconds) -> None:
        """Fill the bucket, at most once in the time that it would take to fill by itself.

        Otherwise a sender that restarts repeatedly could send without limit.
        """
        with self._lock:
            seconds = self._burst / self._rate
            if self._refilled_at is None or now - self._refilled_at >= seconds:
                self._left, self._refilled_at = float(self._burst), now

    def charge(self, number: int) -> None:
        """Charge more for an item that has already passed; the debt is limited to a burst."""
        with self._lock:
            # A debt without limit would silence an honest worker long after one bad moment.
            self._left = max(-self._burst, self._left - number)


T = TypeVar("T")
Life: TypeAlias = int
"""A life of a rank, drawn at each start with an empty state; a resumed worker keeps its own."""
HostCoroutine: TypeAlias = Generator[Seconds, Any, T]
"""Yields the time, by `Runtime.clock`, until which there is nothing to do, and receives the
next item of the inbox, or None at that time.
"""
_LONGEST_WAIT: Seconds = 3600.0
"""Longest wait in one system call, which does not support infinity."""


class Background(Protocol):
    """Runs jobs in sequence, in the background."""

    def submit(self, job: Callable[[], T], done: Callable[[T], object] | None = None) -> None:
        """Run `job` after earlier ones, then call `done` with its result; neither may raise."""

    def close(self, seconds: Seconds) -> None:
        """Accept no more jobs, and wait at most `seconds` for submitted ones."""


class Runtime(Protocol):
    """Clock, inbox and threads of a host."""

    def clock(self) -> Seconds:
        """Time in seconds; it never decreases."""

    def inbox(self) -> FairQueue:
        """Make an empty inbox."""

    def background(self, name: str) -> Background:
        """Make a `Background`; `name` is for display."""

    def new_life(self) -> Life:
        """Draw a unique life in 1..2**63 - 1."""


class RunClock:
    """Seconds since a run began, read from a machine's clock.

    Args:
        read: Returns the machine's time; it never decreases.

    Attributes:
        began_at: The machine's time at which the run began; until then, at which this was made.

    >>> clock = RunClock(lambda: 107.0)
    >>> clock.began_at = 100.0
    >>> clock.now
    7.0
    """

    def __init__(self, read: Callable[[], Seconds]) -> None:
        self.read = read
        self.began_at = read()

    @property
    def now(self) -> Seconds:
        """Seconds since the run began."""
        return self.read() - self.began_at


def drive(coroutine: HostCoroutine[T], inbox: FairQueue, clock: Callable[[], Seconds]) -> T:
    """Run `coroutine`, and wait when it asks to; return its result."""
    item = None
    # Closed even after an error, so that the host leaves the run in order.
    with closing(coroutine):
        while True:
            try:
                until = coroutine.send(item)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            item = inbox.get(timeout=min(max(0.0, until - clock()), _LONGEST_WAIT))


class BackgroundThread:
    """A `Background` with a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[T], object] | None = None) -> None:
        """See `Background`."""

        def run() -> None:
            result = job()
            if done is not None:
                done(result)

        self._jobs.put(run)

    def close(self, seconds: Seconds) -> None:
        """See `Background`."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class RealRuntime:
    """The `Runtime` of a process: the machine's clock, and threads.

    >>> 0 < RealRuntime().new_life() < 2**63
    True
    """

    def clock(self) -> Seconds:
        """See `Runtime`."""
        return time.monotonic()

    def inbox(self) -> FairQueue:
        """See `Runtime`."""
        return FairQueue()

    def background(self, name: str) -> Background:
        """See `Runtime`."""
        return BackgroundThread(name)

    def new_life(self) -> Life:
        """See `Runtime`."""
        # From the system's generator: two workers with one seed must draw different numbers.
        return 1 + secrets.randbelow(2**63 - 1)
