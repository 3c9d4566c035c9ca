"""Reading a worker's batches ahead, while its model trains on another batch."""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.data.nested import Nested

Read: TypeAlias = Callable[[Tensor], Nested]
"""Takes the samples at some indices, int64 [batch]: `Split.batch`."""

BATCHES_A_WORKER = 2
"""Number of batches that each thread or process may read ahead, as in PyTorch's `DataLoader`.
"""
MOST_AHEAD = 64
"""Maximum batches in progress for one worker, for any number of readers."""

# Learners that begin at once share one pool. A first batch forks the pool's processes: if two
# pools forked at once, each could inherit the other's pipes, and the death of a process would
# go unnoticed.
_STARTING = threading.Lock()


class ReadingPool:
    """Threads or processes that read batches, in any order.

    They start with the first batch that is read ahead, and all learners of this process share
    them. The contents of batches do not depend on them.

    Args:
        read: Reads a batch.
        num_workers: Threads or processes, at least 1.
        in_processes: Whether to read in processes, which suits slow Python code. Threads, the
            default, suit slow files.
    """

    def __init__(self, read: Read, num_workers: int, *, in_processes: bool = False) -> None:
        self._read = read
        self._num_workers = num_workers
        self._in_processes = in_processes
        self._executor: Executor | None = None

    @property
    def most_ahead(self) -> int:
        """Maximum batches in progress."""
        return min(MOST_AHEAD, BATCHES_A_WORKER * self._num_workers)

    def start(self, indices: Tensor) -> Future[Nested]:
        """Begin to read a batch."""
        read = _read if self._in_processes else self._read
        with _STARTING:
            if self._executor is None:
                self._executor = self._make_executor()
                stop = self._executor.shutdown
                weakref.finalize(self, stop, wait=False, cancel_futures=True)
            return self._executor.submit(read, indices)

    def _make_executor(self) -> Executor:
        if not self._in_processes:
            return ThreadPoolExecutor(self._num_workers, "read-ahead")
        return ProcessPoolExecutor(
            self._num_workers, initializer=_begin_reading, initargs=(self._read,)
        )

    def __getstate__(self) -> dict[str, Any]:
        # Another process that is sent this pool starts threads or processes of its own.
        return {**self.__dict__, "_executor": None}


_READ: list[Read] = []  # in a process that reads


def _begin_reading(read: Read) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process ends the run
    torch.set_num_threads(1)
    _READ[:] = [read]


def _read(indices: Tensor) -> Nested:
    return _READ[0](indices)


class Reader:
    """Reads a worker's batches in order, some of them ahead if there is a pool.

    Args:
        read: Reads a batch.
        shard: [n] indices of the worker's samples.
        pool: Reads the same batches.
    """

    def __init__(self, read: Read, shard: Tensor, pool: ReadingPool | None = None) -> None:
        self._read, self._shard, self._pool = read, shard, pool
        self._ahead: deque[tuple[Tensor, Future[Nested]]] = deque()

    def read(self, positions: Tensor, upcoming: Callable[[int], Sequence[Tensor]]) -> Nested:
        """Read a batch, and begin to read the following batches.

        Args:
            positions: [batch] positions in the worker's data.
            upcoming: ``upcoming(n)``: the positions of at most n of the following batches;
                called only if batches are read ahead.

        Raises:
            DataError: If a reading process has been killed.
        """
        if self._pool is None:
            return self._read(self._shard[positions])
        try:
            return self._read_pooled(self._pool, positions, upcoming)
        except BrokenExecutor as error:
            raise DataError(
                "a process that reads samples ahead has ended (killed for its memory?); choose "
                "a smaller num_workers, or 0 to read in the training process"
            ) from error

    def _read_pooled(
        self,
        pool: ReadingPool,
        positions: Tensor,
        upcoming: Callable[[int], Sequence[Tensor]],
    ) -> Nested:
        found: Future[Nested] | None = None
        if self._ahead and self._ahead[0][0] is positions:
            _, found = self._ahead.popleft()
        else:  # another pass has begun, or batches were cut anew
            for _, future in self._ahead:
                future.cancel()
            self._ahead.clear()
        # Before waiting for this batch, so that the pool is busy meanwhile.
        for each in upcoming(pool.most_ahead)[len(self._ahead) :]:
            self._ahead.append((each, pool.start(self._shard[each])))
        indices = self._shard[positions]
        return self._read(indices) if found is None else found.result()
