"""A worker's batches, read ahead while its model trains on another batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future

from torch import Tensor

from edgegossip.core.errors import DataError
from edgegossip.learning.dataset import Split
from edgegossip.learning.nested import Nested
from edgegossip.learning.pooled_split import PooledSplit
from edgegossip.learning.sampling.sampler import Batch


class Reader:
    """Reads a worker's batches in order, some of them ahead.

    Args:
        split: Training samples; only a `PooledSplit` is read ahead.
        shard: [n] indices of the worker's samples in `split`.
    """

    def __init__(self, split: Split, shard: Tensor) -> None:
        self._split = split
        self._shard = shard
        self._ahead: deque[tuple[Batch, Future[Nested]]] = deque()

    def read(self, batch: Batch, upcoming: Callable[[int], Sequence[Batch]]) -> Nested:
        """Read `batch`, and begin to read the following batches.

        Args:
            batch: The next batch.
            upcoming: ``upcoming(n)``: at most n of the following batches; called only if
                batches are read ahead.

        Raises:
            DataError: If a reading process has been killed.
        """
        if not isinstance(self._split, PooledSplit):
            return self._split.batch(self._shard[batch.positions])
        try:
            return self._read_pooled(self._split, batch, upcoming)
        except BrokenExecutor as error:
            raise DataError(
                "a process that reads samples ahead has ended (killed for its memory?); choose "
                "a smaller num_workers, or 0 to read in the training process"
            ) from error

    def _read_pooled(
        self, split: PooledSplit, batch: Batch, upcoming: Callable[[int], Sequence[Batch]]
    ) -> Nested:
        found: Future[Nested] | None = None
        if self._ahead and self._ahead[0][0] is batch:
            _, found = self._ahead.popleft()
        else:  # another pass has begun, or batches were cut anew
            self.forget()
        for each in upcoming(split.most_ahead)[len(self._ahead) :]:
            self._ahead.append((each, split.start(self._shard[each.positions])))
        indices = self._shard[batch.positions]
        return split.batch(indices) if found is None else found.result()

    def forget(self) -> None:
        """Drop the batches that were read ahead."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
