"""The compute pool on Ray: learners are on the cores of a cluster; the event loop is local."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from edgegossip.contract.errors import NetworkError, TrainingError
from edgegossip.contract.protocol import Train
from edgegossip.contract.ranges import check_range
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.integrations.ray.learners_desk import Order, Reply
from edgegossip.integrations.ray.placement import Arrived, Job, Placement, Seat
from edgegossip.integrations.ray.twin import Twin, twins
from edgegossip.integrations.ray_session import (
    ClusterNode,
    LostError,
    RaySession,
    RemoteDesk,
    require_versions,
)
from edgegossip.runs.describe import versions
from edgegossip.sim.pool import ComputePool, MakeTrainer, Pending, train_alone

_log = logging.getLogger(__name__)
_NODES_SECONDS = 3.0
_SLOW_START_SECONDS = 60.0
_MOST_LOSSES = 5


class RayPool:
    """Trains on every core of a Ray cluster, with the results of a `ComputePool`, bit for bit.

    Each learner is in one actor. Its state comes back with each result, so that the learner can
    be made again elsewhere; lost work is repeated. Work that takes less time than a round trip
    to an actor, about 2 ms, is done here or sent in batches. From Python::

        run(experiment, out="out", open_pool=lambda: RayPool("HEAD:6379"))

    - This machine must belong to the cluster (no ``ray://``). Nodes that join later are used.
    - All machines need the same versions of Python and packages, which is checked, and the same
      kind of processor, which is not.
    - The data is stored once on each machine, in Ray's object store. A data set that reads
      files (`from_torch`) needs them on each machine.
    - The event loop's process has all learners; each actor has only its own.
    - Trainers' output is dropped; their warnings are passed on. GPUs are not used.
    - Work that kills five actors ends the run, which can be resumed.
    - Ray notices within half a minute that a machine has lost power, and the run ends about
      a minute after the head is lost. After SIGKILL, Ray's processes end within two minutes.

    Code and data are pickled. Anyone who can reach the ports of a cluster, including one that
    is started here, can run any code on its machines and on this one. On one machine Ray asks
    for the token in ``~/.ray/auth_token``, unless RAY_AUTH_MODE is "disabled". Its usage
    reports are off unless RAY_USAGE_STATS_ENABLED is set.

    Args:
        address: Running cluster to which this machine belongs, "HOST:PORT" or "auto"; None
            starts Ray on this machine alone, until the pool is closed.
        num_actors: Maximum number of cores to use; None for all cores.
        min_seconds: Work that takes less time than this is done here.
        open_session: Connects to Ray.

    Raises:
        UsageError: If ray is not installed.
        NetworkError: If there is no cluster at `address`.
        ValueError: If `num_actors` is out of range.
    """

    def __init__(
        self,
        address: str | None = None,
        num_actors: int | None = None,
        *,
        min_seconds: float = 0.0005,
        open_session: Callable[[str | None, int | None], RaySession] = RaySession,
    ) -> None:
        check_range("num_actors", num_actors, "at least 1 or None")
        self._num_actors = num_actors
        self._min_seconds = min_seconds
        self._placement = Placement()
        self._here = ComputePool(0)
        self._lock = threading.Lock()
        self._desks: set[RemoteDesk] = set()
        self._threads: list[threading.Thread] = []
        self._used: set[tuple[str, int]] = set()
        self._num_seats = 0
        self._is_closing = threading.Event()
        self._session = open_session(address, num_actors)
        self._run(self._watch)

    @property
    def seats(self) -> list[Seat]:
        """The cores in use and their speeds."""
        return self._placement.seats

    def trainers(self, make_trainer: MakeTrainer) -> MakeTrainer:
        """Turn the trainers of `make_trainer` into trainers that run on the cluster."""
        return twins(make_trainer, self._session.put(make_trainer))

    def train(
        self, trainer: Trainer, request: Train, progress: float
    ) -> Pending[TrainingResult]:
        """Start training; see `Trainer.train`.

        Args:
            trainer: Trainer made by `trainers`; any other trainer trains here.
            request: As in `Trainer.train`.
            progress: As in `Trainer.train`.
        """
        if not isinstance(trainer, Twin):
            return self._here.train(trainer, request, progress)
        if self._placement.seconds(trainer) < self._min_seconds:
            return self._here.submit(_train_here, trainer, request, progress)
        return _Arriving(self._placement.put(trainer, request, progress))

    def close(self) -> None:
        """Drop all work, and stop all actors and Ray itself if it was started here."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._placement.close()
        try:
            with self._lock:
                desks, threads = [*self._desks], [*self._threads]
            for desk in desks:
                desk.close()
            for thread in threads:
                thread.join(timeout=10)
        finally:
            self._session.close()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Threads: one that watches the nodes, and one for each core.

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._failing, args=(work,), daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _failing(self, work: Callable[[], None]) -> None:
        """Fail the run if this thread fails, instead of waiting forever."""
        try:
            work()
        except LostError as error:
            self._fail(NetworkError(f"the Ray cluster is gone ({error}); --resume continues"))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._is_closing.is_set():
            self._placement.fail(error)

    def _watch(self) -> None:
        """Use each core of each node, including nodes that join later or return."""
        start, has_warned = time.monotonic(), False
        while not self._is_closing.is_set():
            for node in self._session.nodes():
                for core in range(node.num_cores):
                    self._use(node, core)
            if not has_warned and time.monotonic() - start > _SLOW_START_SECONDS:
                has_warned = True
                if not self.seats:
                    _log.warning("no core of the Ray cluster is free yet; waiting for one")
            self._is_closing.wait(_NODES_SECONDS)

    def _use(self, node: ClusterNode, core: int) -> None:
        with self._lock:
            is_enough = self._num_actors is not None and self._num_seats >= self._num_actors
            if is_enough or (node.name, core) in self._used:
                return
            self._used.add((node.name, core))
            self._num_seats += 1
        self._run(partial(self._serve, node, core))

    def _serve(self, node: ClusterNode, core: int) -> None:
        """Keep an actor on this core as long as the node is present; replace a lost actor."""
        num_failures = 0
        while not self._is_closing.is_set():
            desk = self._session.open_desk(node)
            with self._lock:
                self._desks.add(desk)
            try:
                if self._is_closing.is_set():  # and may not have seen this desk
                    return
                require_versions(node.host, desk.versions(), versions())
                num_failures = 0
                _Service(self._placement, Seat(f"core {core} of {node.host}"), desk).serve()
            except LostError as error:
                num_failures += 1
                is_there = node.name in {each.name for each in self._session.nodes()}
                if num_failures == _MOST_LOSSES or not is_there:
                    self._leave(node, error)
                    return
            finally:
                with self._lock:
                    self._desks.discard(desk)
                desk.close()

    def _leave(self, node: ClusterNode, error: LostError) -> None:
        """Give up this core, on which no actor can be started."""
        if self._is_closing.is_set():
            return
        _log.warning("a core of %s is no longer used: %s", node.host, error)
        nodes = self._session.nodes()
        cores = {(each.name, number) for each in nodes for number in range(each.num_cores)}
        with self._lock:
            self._num_seats -= 1
            is_last = self._num_seats == 0 and self._used.issuperset(cores)
        if is_last:
            raise TrainingError(
                "no core of the Ray cluster is left to train on; start machines, and "
                f"--resume. The last error: {error}"
            )


@dataclass(slots=True)
class _Arriving:
    """A result in transit, with the warnings raised where it is made."""

    arrives: Future[Arrived]

    def result(self) -> TrainingResult:
        result, warned = self.arrives.result()
        for message, category in warned:
            warnings.warn(message, category, stacklevel=2)
        return result


@dataclass(slots=True)
class _Parcel:
    """Jobs that were sent together."""

    jobs: Sequence[Job]
    wait: Callable[[], Sequence[Reply]] | None = None


@dataclass(slots=True)
class _Service:
    """The work of one thread: send jobs to an actor and receive the replies."""

    placement: Placement
    seat: Seat
    desk: RemoteDesk

    def serve(self) -> None:
        """Serve until the end, or until the actor is lost."""
        sent: deque[_Parcel] = deque()
        self.placement.open(self.seat)
        try:
            while True:
                while jobs := self.placement.take(self.seat):
                    sent.append(_Parcel(jobs))
                    sent[-1].wait = self._send(jobs)
                if not sent:
                    return
                assert sent[0].wait is not None
                replies = sent[0].wait()
                self._settle(sent.popleft().jobs, replies)
        except LostError as error:
            self._lose([job for parcel in sent for job in parcel.jobs], error)
        except Exception as error:
            for parcel in sent:
                for job in parcel.jobs:
                    job.arrives.set_exception(error)
            raise

    def _send(self, jobs: Sequence[Job]) -> Callable[[], Sequence[Reply]]:
        forgotten = [self.seat.forgotten.popleft() for _ in range(len(self.seat.forgotten))]
        return self.desk.work(forgotten, [self._order(job) for job in jobs])

    def _order(self, job: Job) -> Order:
        twin = job.twin
        order = Order(twin.serial, job.request, job.progress)
        if twin.seat is not self.seat:
            order.origin = twin.origin
            order.state = None if twin.is_new else twin.state_dict()
            twin.move(self.seat)
        return order

    def _settle(self, jobs: Sequence[Job], replies: Sequence[Reply]) -> None:
        self.placement.finish(self.seat, jobs, replies)
        for job, reply in zip(jobs, replies, strict=True):
            try:
                arrived = _arrived(job, reply)
            except Exception as error:
                job.arrives.set_exception(error)
            else:
                job.arrives.set_result(arrived)

    def _lose(self, jobs: Sequence[Job], error: LostError) -> None:
        if self.placement.is_closed:
            return
        _log.warning("lost %s (%s); its work is repeated", self.seat.name, error)
        again: list[Job] = []
        for job in jobs:
            job.num_losses += 1
            if job.num_losses < _MOST_LOSSES:
                again.append(job)
            else:
                job.arrives.set_exception(
                    TrainingError(
                        f"training of worker {job.twin.origin.rank} ended {_MOST_LOSSES} "
                        "actors, perhaps because memory ran out; use fewer --threads, and "
                        f"--resume. The last error: {error}"
                    )
                )
        self.placement.lose(self.seat, again)


def _arrived(job: Job, reply: Reply) -> Arrived:
    """Update the twin before its next cost or its state can be requested."""
    if reply.error is not None:
        raise reply.error
    assert reply.result is not None
    assert reply.state is not None
    job.twin.follow(reply.state)
    if job.cost > 0:
        job.twin.seconds_per_cost = reply.seconds / job.cost
    return reply.result, reply.warnings


def _train_here(twin: Twin, request: Train, progress: float) -> TrainingResult:
    cost, start = twin.last_cost, time.perf_counter()
    result = train_alone(twin, request, progress)
    if cost > 0:
        twin.seconds_per_cost = (time.perf_counter() - start) / cost
    return result
