"""The compute pool: real training on all cores while virtual time stands still."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from edgegossip.core.protocol import Rank, Train
from edgegossip.core.ranges import check_range
from edgegossip.core.trainer import Trainer, TrainingResult
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.cores import num_cores

MakeTrainer: TypeAlias = Callable[[Rank, int], Trainer]
"""``make_trainer(rank, incarnation)``: a crashed worker comes back as its next incarnation."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result that may not be there yet."""

    def result(self) -> T_co:
        """Wait for it; raises what the task raised."""


class Pool(Protocol):
    """What the simulator needs of the place where training runs."""

    def trainers(self, make_trainer: MakeTrainer) -> MakeTrainer:
        """Have what `make_trainer` makes train here."""

    def train(
        self, trainer: Trainer, request: Train, progress: float
    ) -> Pending[TrainingResult]:
        """Start training, as `Trainer.train` says."""


OpenPool: TypeAlias = Callable[[], AbstractContextManager[Pool]]
"""Opens a pool that is closed at the end of a run."""


class _Deferred(Generic[T]):
    """A task that runs once, in the caller's thread, when its result is asked for."""

    __slots__ = ("_error", "_result", "_task")

    def __init__(self, task: Callable[[], T]) -> None:
        self._task: Callable[[], T] | None = task
        self._result: T
        self._error: Exception | None = None

    def result(self) -> T:
        if self._task is not None:
            task, self._task = self._task, None
            try:
                self._result = task()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result


class ComputePool:
    """Runs tasks on `num_threads` threads, one intra-op thread each.

    PyTorch releases the interpreter lock inside its kernels, so threads keep all cores busy
    and share memory. Results do not depend on `num_threads`, because no two tasks touch the
    same learner at once and each draws from streams of its own.

    Args:
        num_threads: None for one a core; 0 runs each task in the caller's thread when its
            result is needed, which is fastest for tasks of microseconds.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = num_cores()
        check_range("num_threads", num_threads, "at least 0")
        self.num_threads = num_threads
        if num_threads:
            keep_freed_memory(block_bytes=32 << 20, total_bytes=256 << 20, is_shared=False)
        self._executor = (
            ThreadPoolExecutor(num_threads, "compute", torch.set_num_threads, (1,))
            if num_threads
            else None
        )

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Start `task`, or remember it where there are no threads."""
        if self._executor is None:
            return _Deferred(task)
        future: Future[T] = self._executor.submit(task)
        return future

    def trainers(self, make_trainer: MakeTrainer) -> MakeTrainer:
        """Trainers as they are: threads share their memory."""
        return make_trainer

    def train(
        self, trainer: Trainer, request: Train, progress: float
    ) -> Pending[TrainingResult]:
        """Start training, as `Trainer.train` says."""
        return self.submit(partial(trainer.train, request, progress))

    def close(self) -> None:
        """Forget tasks that have not begun and wait for the others."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ComputePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
