"""Each worker's training data: a shard of one data set, or its own data."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Rank
from edgegossip.data.dataset import Dataset, Split, TrainingData
from edgegossip.data.local import Local
from edgegossip.data.nested import Nested, concatenated, map_leaves

_NOTHING = torch.empty(0, dtype=torch.int64)


class Shards(Protocol):
    """The training data of a run, by rank."""

    @property
    def indices(self) -> Mapping[Rank, Tensor]:
        """Indices, int64 [n], of the samples of each worker with data, in its split."""

    @property
    def num_samples(self) -> int:
        """Total number of training samples of all workers."""

    def of_trainer(self, rank: Rank) -> dict[str, Any]:
        """The arguments `dataset`, `shard` and `shards` of a worker's trainer."""


class DealtShards:
    """Shards of one data set.

    Args:
        dataset: The data set.
        ranks: The workers that have data, in order.
        shards: Indices of the training samples of each of these workers.

    Raises:
        ValueError: If the number of shards is not that of the workers, or a shard has anything
            but indices of training samples.
    """

    def __init__(
        self, dataset: Dataset, ranks: Sequence[Rank], shards: Iterable[Tensor]
    ) -> None:
        shards = [*shards]
        if len(shards) != len(ranks):
            raise ValueError(
                f"partition made {len(shards)} shards for {len(ranks)} workers; return one "
                "for each worker"
            )
        self.indices = dict(zip(ranks, shards, strict=True))
        self._dataset = dataset
        for rank, shard in self.indices.items():
            if not _are_indices(shard, self.num_samples):
                raise ValueError(
                    f"partition gave worker {rank} {shard!r:.80}; return indices of training "
                    f"samples, int64 [n] in 0 .. {self.num_samples - 1}"
                )

    @property
    def num_samples(self) -> int:
        return len(self._dataset.train)

    def of_trainer(self, rank: Rank) -> dict[str, Any]:
        return {
            "dataset": self._dataset.training,  # no trainer gets the test split
            "shard": self.indices.get(rank, _NOTHING),
            "shards": self.indices,
        }


def _are_indices(shard: object, num_samples: int) -> bool:
    if not isinstance(shard, Tensor) or shard.ndim != 1:
        return False
    if shard.dtype not in (torch.int64, torch.int32):
        return False
    return not len(shard) or bool(shard.min() >= 0 and shard.max() < num_samples)


class LocalShards:
    """The workers' own data, read when needed.

    Args:
        local: The data.
        ranks: The workers that have data.
        reads: The workers whose data this process may read; None for all, as in the simulator.
    """

    def __init__(
        self, local: Local, ranks: Sequence[Rank], reads: Container[Rank] | None = None
    ) -> None:
        self._local = local
        self._ranks = tuple(ranks)
        self._reads = reads

    def dataset(self, rank: Rank) -> Dataset:
        """Read the data of a worker.

        Raises:
            DataError: If the data cannot be used, or this process must not read it.
        """
        if rank not in self._ranks:
            raise DataError(f"rank {rank} has no training data")
        self._require_readable(rank)
        return self._local.of(rank)

    def validation(self, rank: Rank) -> Dataset:
        """Read the data on which a rank evaluates, which may be a server.

        Raises:
            DataError: As in `dataset`.
        """
        if rank in self._ranks:
            return self.dataset(rank)
        self._require_readable(rank)
        return self._local.for_validation(rank)

    def _require_readable(self, rank: Rank) -> None:
        if not (self._reads is None or self._local.may_share or rank in self._reads):
            raise DataError(f"the data of worker {rank} must not be read here")

    @property
    def indices(self) -> dict[Rank, Tensor]:
        return {rank: torch.arange(len(self.dataset(rank).train)) for rank in self._ranks}

    @property
    def num_samples(self) -> int:
        return sum(len(self.dataset(rank).train) for rank in self._ranks)

    def of_trainer(self, rank: Rank) -> dict[str, Any]:
        own = [rank] if rank in self._ranks else []
        reached = _Reached(self, self._ranks if self._local.may_share else own)
        local = self._local
        shape = (local.num_classes, local.input_shape, local.mean, local.std)
        return {
            "shard": reached[rank] if own else _NOTHING,
            "shards": reached,
            "dataset": TrainingData(reached.split, *shape),
        }


class _Reached(Mapping[Rank, Tensor]):
    """The samples of all workers whose data a trainer can reach, read on first access.

    Args:
        shards: Reads the workers' data.
        ranks: The workers whose data can be reached.

    Attributes:
        split: The samples read so far.
    """

    def __init__(self, shards: LocalShards, ranks: Sequence[Rank]) -> None:
        self.split = _JoinedSplit()
        self._shards = shards
        self._found: dict[Rank, Tensor] = {}
        self._ranks = ranks

    def __getitem__(self, rank: Rank) -> Tensor:
        if rank not in self._ranks:
            raise KeyError(rank)
        if rank not in self._found:
            self._found[rank] = self.split.add(self._shards.dataset(rank).train)
        return self._found[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class _JoinedSplit:
    """Several splits, one after another."""

    def __init__(self) -> None:
        self._splits: list[Split] = []
        self._starts: list[int] = []
        self._num_samples = 0

    def add(self, split: Split) -> Tensor:
        """Append a split; return the indices of its samples."""
        self._splits.append(split)
        self._starts.append(self._num_samples)
        self._num_samples += len(split)
        return torch.arange(self._starts[-1], self._num_samples)

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]."""
        if len(self._splits) == 1:
            return self._splits[0].batch(indices)
        places = torch.bucketize(indices, torch.tensor(self._starts), right=True) - 1
        order = places.argsort(stable=True)
        parts = [
            self._splits[place].batch(indices[places == place] - self._starts[place])
            for place in sorted(set(places.tolist()))
        ]
        back = order.argsort()
        return map_leaves(lambda leaf: leaf[back], concatenated(parts))

    @property
    def labels(self) -> Tensor:
        """The label of every sample, int64 [num_samples]."""
        return torch.cat([_NOTHING, *(split.labels for split in self._splits)])
