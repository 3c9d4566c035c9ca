"""The compute pool: real training on all cores."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Rank, Train
from edgegossip.contract.ranges import check_range
from edgegossip.contract.trainer import Outcome, Prepared, Trainer, TrainingResult
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.quota import num_cores

MakeTrainer: TypeAlias = Callable[[Rank, int], Trainer]
"""``make_trainer(rank, incarnation)``: a crashed worker comes back as its next incarnation."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result that may still be pending."""

    def result(self) -> T_co:
        """Wait for the result; raise the task's error, if any."""


class _Deferred(Generic[T]):
    """A task that runs once, in the caller's thread, when its result is needed."""

    __slots__ = ("_arguments", "_error", "_result", "_task")

    def __init__(self, task: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self._task: Callable[..., T] | None = task
        self._arguments = arguments
        self._result: T
        self._error: Exception | None = None

    def result(self) -> T:
        # The task and its arguments are dropped before it runs: a result may be kept long, and
        # would keep the parameters alive.
        if self._task is not None:
            task, self._task = self._task, None
            arguments, self._arguments = self._arguments, ()
            try:
                self._result = task(*arguments)
            except Exception as error:
                self._error = error  # raised again for each caller, as a future does
        if self._error is not None:
            raise self._error
        return self._result


class _Later:
    """Training that runs alone, in the caller's thread, when its result is needed.

    A `_Deferred` of `train_alone` does the same but takes one more object per worker, so the
    processor's caches hold less of a large run.
    """

    __slots__ = ("_outcome", "_progress", "_request", "_trainer")

    def __init__(self, trainer: Trainer, request: Train, progress: float) -> None:
        self._trainer: Trainer | None = trainer
        self._request = request
        self._progress = progress
        self._outcome: TrainingResult | Exception

    def result(self) -> TrainingResult:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            try:
                self._outcome = train_alone(trainer, self._request, self._progress)
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class _Waiting:
    """Training that waits with others, and starts when the result of any is needed."""

    __slots__ = ("_start", "outcome", "prepared")

    def __init__(self, prepared: Prepared, start: Callable[[_Waiting], None]) -> None:
        self.prepared = prepared
        self._start = start
        self.outcome: Callable[[], Outcome] | None = None

    def result(self) -> TrainingResult:
        # By now, the simulator has asked for all training that it can ask for before this
        # result, so the groups are as large as they get.
        if self.outcome is None:
            self._start(self)
            assert self.outcome is not None
        outcome = self.outcome()
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome


class ComputePool:
    """Runs tasks on `num_threads` threads, with one intra-op thread each.

    PyTorch releases the interpreter lock inside its kernels, so threads keep all cores busy and
    share memory. Results do not depend on `num_threads`, because parallel tasks never share a
    learner and each draws from its own streams.

    Args:
        num_threads: Number of threads; None for one per core. With 0, each task runs in the
            caller's thread when its result is needed, which is fastest for tasks of
            microseconds.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = num_cores()
        check_range("num_threads", num_threads, "at least 0")
        self.num_threads = num_threads
        self._waiting: list[_Waiting] = []
        if num_threads:
            keep_freed_memory(block_bytes=32 << 20, total_bytes=256 << 20, is_shared=False)
        # One thread inside PyTorch: several small models side by side use the cores better than
        # one after the other on all of them, and sums do not depend on the number of cores.
        self._executor = (
            ThreadPoolExecutor(num_threads, "compute", torch.set_num_threads, (1,))
            if num_threads
            else None
        )

    def submit(self, task: Callable[..., T], *arguments: object) -> Pending[T]:
        """Start ``task(*arguments)``, or store it if there are no threads."""
        if self._executor is None:
            return _Deferred(task, arguments)
        future: Future[T] = self._executor.submit(task, *arguments)
        return future

    def train(
        self, trainer: Trainer, request: Train, progress: float
    ) -> Pending[TrainingResult]:
        """Start training, as described in `Trainer.train`; the trainer rests afterwards.

        Requests that can run together wait until one of their results is needed.
        """
        prepared = trainer.prepare(request, progress)
        if prepared is None and self._executor is None:
            return _Later(trainer, request, progress)
        if prepared is None:
            return self.submit(train_alone, trainer, request, progress)
        waiting = _Waiting(prepared, self._start)
        self._waiting.append(waiting)
        return waiting

    def _start(self, first: _Waiting) -> None:
        """Start all waiting requests in groups that run together, beginning with `first`."""
        # The needed one first, so that its group is the first to run.
        waiting = [first, *(each for each in self._waiting if each is not first)]
        self._waiting = []
        groups: dict[Hashable, list[_Waiting]] = {}
        for each in waiting:
            groups.setdefault(each.prepared.key, []).append(each)
        for group in groups.values():
            size = group[0].prepared.size_of_groups(len(group))
            for start in range(0, len(group), size):
                some = group[start : start + size]
                work = [each.prepared for each in some]
                outcomes = self.submit(work[0].train_with, work[1:])
                for index, each in enumerate(some):
                    each.outcome = partial(_pick, outcomes, index)

    def close(self) -> None:
        """Drop tasks that have not begun, and wait for running tasks."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ComputePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def train_alone(trainer: Trainer, request: Train, progress: float) -> TrainingResult:
    """Train, and let the trainer rest."""
    result = trainer.train(request, progress)
    # Between two requests, a trainer's working memory is free for the others.
    trainer.rest()
    return result


def _pick(outcomes: Pending[list[Outcome]], index: int) -> Outcome:
    return outcomes.result()[index]
