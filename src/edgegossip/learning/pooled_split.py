"""A split whose batches are read by a pool of threads or processes."""

from __future__ import annotations

import signal
import threading
import weakref
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgegossip.core.ranges import check_counts, check_range
from edgegossip.learning.nested import Nested

if TYPE_CHECKING:
    from edgegossip.learning.dataset import Split

BATCHES_A_WORKER = 2
"""Number of batches that each thread or process may read ahead, as in PyTorch's `DataLoader`.
"""
MOST_AHEAD = 64
"""Maximum batches in progress for one worker, for any number of readers."""

# Learners that begin at once share one pool. A first batch forks the pool's processes: if two
# pools forked at once, each could inherit the other's pipes, and the death of a process would
# go unnoticed.
_STARTING = threading.Lock()


class PooledSplit:
    """A split whose batches are read by a pool of threads or processes, in any order.

    The pool starts with the first batch that is read ahead, and all learners of this process
    share it. The contents of batches do not depend on the pool.

    Args:
        split: The samples.
        num_workers: Threads or processes, at least 1.
        in_processes: Whether to read in processes, which suits slow Python code. Threads, the
            default, suit slow files.

    Raises:
        ValueError: If `num_workers` is out of range.
    """

    def __init__(self, split: Split, num_workers: int, *, in_processes: bool = False) -> None:
        check_range("num_workers", num_workers, "at least 1")
        self.split = split
        self.num_workers = num_workers
        self._in_processes = in_processes
        check_counts(self, "num_workers")
        self._pool: Executor | None = None

    def __len__(self) -> int:
        return len(self.split)

    @property
    def labels(self) -> Tensor:
        """Labels of the split."""
        return self.split.labels

    @property
    def most_ahead(self) -> int:
        """Maximum batches in progress."""
        return min(MOST_AHEAD, BATCHES_A_WORKER * self.num_workers)

    def batch(self, indices: Tensor) -> Nested:
        """Take samples now, in this thread."""
        return self.split.batch(indices)

    def start(self, indices: Tensor) -> Future[Nested]:
        """Begin to read a batch."""
        read = _read if self._in_processes else self.split.batch
        with _STARTING:
            if self._pool is None:
                self._pool = self._make_pool()
                weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
            return self._pool.submit(read, indices)

    def _make_pool(self) -> Executor:
        if not self._in_processes:
            return ThreadPoolExecutor(self.num_workers, "read-ahead")
        return ProcessPoolExecutor(
            self.num_workers, initializer=_begin_reading, initargs=(self.split,)
        )

    def part(self, split: Split) -> PooledSplit:
        """Make a split with a pool of the same size for some of these samples."""
        return PooledSplit(split, self.num_workers, in_processes=self._in_processes)

    def __getstate__(self) -> dict[str, Any]:
        # Another process that is sent this split starts a pool of its own.
        return {**self.__dict__, "_pool": None}


_READ: list[Split] = []  # in a process that reads: the split


def _begin_reading(split: Split) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process ends the run
    torch.set_num_threads(1)
    _READ[:] = [split]


def _read(indices: Tensor) -> Nested:
    return _READ[0].batch(indices)
