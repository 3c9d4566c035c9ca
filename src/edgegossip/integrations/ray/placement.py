"""Placement of each piece of work, depending on the speed of the seats."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from edgegossip.contract.protocol import Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.integrations.ray.learners_desk import Reply
from edgegossip.integrations.ray.twin import Twin

_PARCEL_SECONDS = 0.005
"""Seconds of work up to which small pieces are sent together; a round trip takes about 2 ms."""

_AHEAD_SECONDS = 0.5
"""A seat with less work in progress than this gets more, so that it never waits."""

_NEWEST = 0.3
"""Weight of the newest measurement of a speed."""

_WORTH_MOVING = 0.8
"""A learner moves if another seat would finish its work within this share of the time."""


Arrived: TypeAlias = tuple[TrainingResult, Sequence[tuple[str, type[Warning]]]]
"""A result and its warnings."""


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work: training whose result is awaited.

    Attributes:
        number: Serial number, in the order of requests.
        num_losses: Number of seats that were lost while they had this job.
    """

    twin: Twin
    request: Train
    progress: float
    cost: float
    number: int
    arrives: Future[Arrived] = field(default_factory=Future)
    num_losses: int = 0


@dataclass(eq=False)
class Seat:
    """One core of the cluster and its learners.

    Attributes:
        name: Name for messages.
        seconds_per_cost: Seconds per unit of cost at this seat; None if not known yet.
        making_seconds: Seconds for making a learner at this seat.
        line: Jobs that wait for its learners.
        num_under_way: Number of jobs sent but not finished.
        cost_under_way: Cost of these jobs.
        forgotten: Learners that have moved away and that the seat must still forget.
        is_lost: Whether the seat and its learners are lost.
    """

    name: str
    seconds_per_cost: float | None = None
    making_seconds: float | None = None
    line: deque[Job] = field(default_factory=deque)
    cost_in_line: float = 0.0
    num_under_way: int = 0
    cost_under_way: float = 0.0
    forgotten: deque[int] = field(default_factory=deque)
    is_lost: bool = False

    def seconds(self, cost: float) -> float:
        """Seconds that work of this cost takes; infinite if not known yet."""
        return math.inf if self.seconds_per_cost is None else self.seconds_per_cost * cost


class Placement:
    """Hands out work to seats, each of which has a thread.

    Work goes to the seat that has its learner. A new learner goes to the first free seat, so
    fast seats get more learners. A seat without work takes over a learner whose work would
    otherwise be done later. Results do not depend on any of this.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Seat, threading.Condition] = {}
        self._numbers = itertools.count()
        self._seats: list[Seat] = []
        self._homeless: deque[Job] = deque()
        self._seconds_per_cost: float | None = None
        self._error: Exception | None = None
        self._is_closed = False

    def seconds(self, twin: Twin) -> float:
        """Seconds that the twin's next work may take; infinite if nothing is known yet."""
        rate = twin.seconds_per_cost
        rate = self._seconds_per_cost if rate is None else rate
        return math.inf if rate is None else rate * twin.last_cost

    def put(self, twin: Twin, request: Train, progress: float) -> Future[Arrived]:
        """Add a job."""
        with self._lock:
            job = Job(twin, request, progress, twin.last_cost, next(self._numbers))
            if self._error is not None:
                job.arrives.set_exception(self._error)
            else:
                self._enqueue(job)
            return job.arrives

    def open(self, seat: Seat) -> None:
        """Add a seat."""
        with self._lock:
            self._seats.append(seat)

    def take(self, seat: Seat) -> list[Job]:
        """Take the seat's next jobs; wait for one if the seat has none in progress.

        If the seat has jobs in progress, the list is empty when these suffice for now or no
        other job waits. At the end, the list is always empty.
        """
        with self._lock:
            while not self._is_closed:
                is_busy = seat.num_under_way > 0
                if is_busy and seat.seconds(seat.cost_under_way) > _AHEAD_SECONDS:
                    return []
                jobs = self._parcel(seat)
                if jobs or is_busy:
                    return jobs
                self._wait(seat)
            return []

    def finish(self, seat: Seat, jobs: Sequence[Job], replies: Sequence[Reply]) -> None:
        """Record the time that a seat took for jobs and for making learners."""
        cost = sum(job.cost for job in jobs)
        seconds = sum(reply.seconds for reply in replies)
        with self._lock:
            seat.num_under_way -= len(jobs)
            seat.cost_under_way = max(0.0, seat.cost_under_way - cost)
            if cost > 0:
                seat.seconds_per_cost = _followed(seat.seconds_per_cost, seconds / cost)
                self._seconds_per_cost = _followed(self._seconds_per_cost, seconds / cost)
            for reply in replies:
                if reply.making_seconds is not None:
                    seat.making_seconds = _followed(seat.making_seconds, reply.making_seconds)
            if seat.line:  # now it is known whether to take over some of it
                self._wake(seat)

    def lose(self, seat: Seat, under_way: Sequence[Job]) -> None:
        """Release the jobs of a lost seat to other seats."""
        with self._lock:
            seat.is_lost = True
            if seat in self._seats:
                self._seats.remove(seat)
            jobs = [*under_way, *seat.line]
            seat.line.clear()
            for job in jobs:
                job.twin.move(None)
            merged = sorted([*jobs, *self._homeless], key=lambda job: job.number)
            self._homeless = deque(merged)
            self._wake_all()

    def fail(self, error: Exception) -> None:
        """Fail all work that has not begun, now and later."""
        with self._lock:
            self._error = error
            for line in (self._homeless, *(seat.line for seat in self._seats)):
                while line:
                    line.popleft().arrives.set_exception(error)

    def close(self) -> None:
        """Wake all threads that wait for work, for the last time."""
        with self._lock:
            self._is_closed = True
            self._wake_all()

    @property
    def seats(self) -> list[Seat]:
        """The seats that have not been lost."""
        with self._lock:
            return [*self._seats]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # Within the lock.

    def _enqueue(self, job: Job) -> None:
        home = job.twin.seat
        if home is None or home.is_lost:
            self._homeless.append(job)
        else:
            home.line.append(job)
            home.cost_in_line += job.cost
        self._wake(home)

    def _wait(self, seat: Seat) -> None:
        changed = self._idle[seat] = threading.Condition(self._lock)
        changed.wait()
        self._idle.pop(seat, None)

    def _wake(self, home: Seat | None) -> None:
        """Wake a seat for new work: the one that has its learner, or else any."""
        changed = self._idle.pop(home, None) if home is not None else None
        if changed is None and self._idle:
            changed = self._idle.pop(next(iter(self._idle)))
        if changed is not None:
            changed.notify()

    def _wake_all(self) -> None:
        while self._idle:
            self._wake(None)

    def _parcel(self, seat: Seat) -> list[Job]:
        jobs: list[Job] = []
        seconds = 0.0
        while seconds < _PARCEL_SECONDS:
            job = self._oldest(seat) or (None if jobs else self._taken_over(seat))
            if job is None:
                break
            jobs.append(job)
            seat.num_under_way += 1
            seat.cost_under_way += job.cost
            seconds += seat.seconds(job.cost)
        return jobs

    def _oldest(self, seat: Seat) -> Job | None:
        """Take the oldest job whose learner is at this seat or has no seat."""
        if seat.line and not (
            self._homeless and self._homeless[0].number < seat.line[0].number
        ):
            job = seat.line.popleft()
            seat.cost_in_line -= job.cost
            return job
        return self._homeless.popleft() if self._homeless else None

    def _taken_over(self, seat: Seat) -> Job | None:
        """Take the job that would wait longest elsewhere, if this seat would finish it
        sooner.
        """
        others = [each for each in self._seats if each.line and each is not seat]
        if not others or seat.num_under_way or seat.seconds_per_cost is None:
            return None
        busiest = max(others, key=_seconds_of_all)
        job = busiest.line[-1]
        here = (seat.making_seconds or 0.0) + seat.seconds(job.cost)
        if here > _WORTH_MOVING * _seconds_of_all(busiest):
            return None
        busiest.line.pop()
        busiest.cost_in_line -= job.cost
        return job


def _seconds_of_all(seat: Seat) -> float:
    """Seconds until a seat has done all its waiting work."""
    return seat.seconds(seat.cost_in_line + seat.cost_under_way)


def _followed(value: float | None, measured: float) -> float:
    return measured if value is None else value + _NEWEST * (measured - value)
