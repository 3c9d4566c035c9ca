"""Real hosts in virtual time: the processes that run them, in one thread.

`Host`, `Peers`, `Sending`, `Receiving`, `Admission` and `Work` are the package's own. Virtual
are the clock, the threads beside a host, and the network. One seed gives one trace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.virtual_time import T

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.host import Host
from edgegossip.net.runtime import FairQueue, Life
from edgegossip.net.transport import Incarnation

if TYPE_CHECKING:
    from tests.virtual_network import VirtualNetwork

TICK: Seconds = 1e-6
"""A process that waits until a moment wakes this much later, as a real one does."""
MAX_STEPS_AT_ONCE = 2000
"""A host that takes more at one moment is in a busy loop."""


class VirtualInbox(FairQueue):
    """Tells its process that there is something."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify

    def put(self, item: Any, /) -> None:  # noqa: ANN401
        super().put(item)
        self._notify()

    def help(self) -> None:
        if self._handle_next():
            self._notify()


class VirtualBackground:
    """Jobs of one process, one after the other, each for as long as it sleeps."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any], object] | None]] = deque()
        self._is_busy = False

    def submit(self, job: Callable[[], T], done: Callable[[T], object] | None = None) -> None:
        self._jobs.append((job, done))
        if not self._is_busy:
            self._is_busy = True
            self._begin()

    def close(self, seconds: Seconds) -> None:
        """Submitted work continues for a while; nobody waits."""

    def _begin(self) -> None:
        job, done = self._jobs.popleft()
        result, seconds = self._process.time.timed(job)

        def end() -> None:
            if done is not None:
                done(result)
            self._is_busy = bool(self._jobs)
            if self._is_busy:
                self._begin()

        self._process.after(seconds, end)


class Process:
    """One incarnation of a worker: runs a host, and may be paused or killed.

    Args:
        network: Where it is.
        rank: Its worker.
        skew: What its clock shows at time 0.
    """

    def __init__(self, network: VirtualNetwork, rank: Rank, skew: Seconds) -> None:
        self.network = network
        self.time = network.time
        self.rank = rank
        self.incarnation: Incarnation = network.draw.getrandbits(62)
        self.reason: str | BaseException | None = None
        self.is_alive = True
        self.is_paused = False
        self.on_end: Callable[[], None] = lambda: None
        self.started_at = self.time.now
        self.ended_at = math.inf
        self._skew = skew
        self._deferred: list[Callable[[], None]] = []
        self._inbox = VirtualInbox(self._notify)
        self._is_notified = False
        self._wake_at = self._alarm_at = math.inf  # the alarm rings at or before the moment
        self._num_steps = 0
        self._stepped_at = -1.0

    # Its runtime.

    def clock(self) -> Seconds:
        return self.time.now + self.time.ahead + self._skew

    def inbox(self) -> VirtualInbox:
        return self._inbox

    def background(self, name: str) -> VirtualBackground:
        return VirtualBackground(self)

    def new_life(self) -> Life:
        return 1 + self.network.draw.getrandbits(62)

    # Its course.

    def run(self, host: Host[Any]) -> None:
        self.host = host
        self._coroutine = host.coroutine()
        self.network.num_running += 1
        self._send(None)

    def after(self, seconds: Seconds, action: Callable[[], None]) -> None:
        """Do something of this process, unless it is dead by then; later if it is paused."""

        self.time.at(self.time.now + seconds, partial(self.act, action))

    def act(self, action: Callable[[], None]) -> None:
        """Do it now, unless it is dead; later if it is paused."""
        if self.is_alive and self.is_paused:
            self._deferred.append(action)
        elif self.is_alive:
            action()

    def pause(self) -> None:
        self.is_paused = True

    def wake(self) -> None:
        self.is_paused = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.act(action)

    def die(self) -> None:
        self.network.num_running -= self.is_running
        self.is_alive = False

    @property
    def is_running(self) -> bool:
        """It is alive, and has not come to its end."""
        return self.is_alive and self.reason is None

    def _notify(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            self.after(0.0, self._wake)

    def _wake(self) -> None:
        self._is_notified = False
        if self.reason is None:
            self._send(self._inbox.get(timeout=0))

    def _set_alarm(self) -> None:
        """Wake at `_wake_at`, unless an alarm that rings before will see to it."""
        if self._wake_at < self._alarm_at:
            self._alarm_at = at = self._wake_at
            self.time.at(at, partial(self.act, partial(self._ring, at)))

    def _ring(self, at: Seconds) -> None:
        if at != self._alarm_at:
            return  # an earlier one has taken its place
        self._alarm_at = math.inf
        if self.time.now < self._wake_at:
            self._set_alarm()
        elif not self._is_notified:
            self._wake()

    def _send(self, item: Any) -> None:  # noqa: ANN401
        self._count_step()
        try:
            until = self._coroutine.send(item)
        except StopIteration as end:
            self._end(end.value)
        except BaseException as error:
            self._end(error)
        else:
            self._wake_at = max(self.time.now, until - self._skew) + TICK
            self._set_alarm()
            if not self._inbox.empty():
                self._notify()

    def _end(self, reason: str | BaseException) -> None:
        self.network.num_running -= self.is_running
        self.reason, self.ended_at = reason, self.time.now
        self.on_end()

    def _count_step(self) -> None:
        self._num_steps = self._num_steps + 1 if self._stepped_at == self.time.now else 1
        self._stepped_at = self.time.now
        assert self._num_steps < MAX_STEPS_AT_ONCE, f"worker {self.rank} is in a busy loop"
