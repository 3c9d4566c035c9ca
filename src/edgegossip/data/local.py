"""Data that stays with the workers: each worker reads its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Rank
from edgegossip.contract.ranges import check_ranges
from edgegossip.data.dataset import (
    NO_SAMPLES,
    Dataset,
    JoinedSplit,
    Split,
    TrainingData,
    WorkerData,
)
from edgegossip.data.hold_out import hold_out


class _Elsewhere:
    """The training samples of all workers together, which no process has."""

    def __len__(self) -> int:
        raise _elsewhere()

    def batch(self, indices: Tensor) -> Tensor:
        """Raise `DataError`, like the other members."""
        raise _elsewhere()

    @property
    def labels(self) -> Tensor:
        raise _elsewhere()


@dataclass(frozen=True, eq=False, kw_only=True)
class Local(Dataset):
    """Data that stays with the workers, in place of a data set that is divided among them.

    Each worker reads its own data when needed; without `may_share`, its process reads no other
    worker's data. The simulator runs all workers, so it reads all workers' data. Sizes may
    differ; names and numbers of classes, shapes and preparation must be equal. Workers compare
    these properties when they connect, but do not exchange samples.

    Reports measure the averaged model on the validation samples of all workers together. On
    real machines, each worker measures the model on its own samples and reports only sums.

    Args:
        name: Name for reports and messages.
        load: ``load(rank)`` reads the data of a worker: training samples and, optionally, a
            validation split. A test split is not used. It is also called for a server whose
            algorithm evaluates (`ADSP`, `ADACOMM`). Without a validation split, all samples of
            a server are validation samples.
        num_classes: As in `Dataset`; by default the number of `classes`.
        input_shape: As in `Dataset`, for each worker's data.
        mean: As in `Dataset`, common to all workers.
        std: As in `Dataset`, common to all workers.
        classes: Names of the classes, in the order of their labels; empty without names.
        held_out: Share of its training samples that a worker without a validation split holds
            out, in (0, 1), by `hold_out`; with None, every worker needs a validation split.
        may_share: Whether workers may read each other's data, which EdgeGossip needs for
            ``on_failure="reassign"``; `load` must then accept any rank.

    Raises:
        ValueError: If a number is out of range, `classes` contradicts `num_classes`, or `mean`
            or `std` does not fit (see `Dataset`).

    >>> from edgegossip.data.dataset import from_tensors
    >>> own = Local("points", load=lambda rank: from_tensors("mine", torch.rand(20 + rank, 2)))
    >>> own.of(3).name, len(own.of(3).train), len(own.of(3).validation)
    ('points', 21, 2)
    """

    train: Split = field(init=False, default=_Elsewhere(), repr=False)
    test: Split = field(init=False, default=NO_SAMPLES, repr=False)
    subjects: Tensor | None = field(init=False, default=None, repr=False)
    validation: Split | None = field(init=False, default=None, repr=False)
    load: Callable[[Rank], Dataset]
    classes: tuple[str, ...] = ()
    held_out: float | None = 0.1
    may_share: bool = False
    _loaded: dict[Rank, Dataset] = field(init=False, default_factory=dict, repr=False)
    # A rank may be a server in one run of a comparison and a worker in another.
    _loaded_by_servers: dict[Rank, Dataset] = field(
        init=False, default_factory=dict, repr=False
    )
    _lock: _Lock = field(init=False, default_factory=lambda: _Lock(), repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, held_out="in (0, 1) or None")
        if self.classes and self.num_classes not in (0, len(self.classes)):
            raise ValueError(
                f"num_classes is {self.num_classes}, but {len(self.classes)} classes are "
                "named; leave out num_classes"
            )
        if self.classes:
            object.__setattr__(self, "num_classes", len(self.classes))
        self._validate_channels()

    def of(self, rank: Rank) -> Dataset:
        """Return the data of a worker, read only once.

        Raises:
            DataError: If the data cannot be read, is empty, does not fit the task, or lacks a
                validation split.
        """
        return self._once(rank, self._held_out_of, self._loaded)

    def for_validation(self, rank: Rank) -> Dataset:
        """Return the data of a server, whose samples are all for validation; read only once.

        Raises:
            DataError: If the data cannot be read, is empty, or does not fit the task.
        """
        return self._once(rank, _all_for_validation, self._loaded_by_servers)

    def _once(
        self, rank: Rank, divide: Callable[[Dataset], Dataset], loaded: dict[Rank, Dataset]
    ) -> Dataset:
        # Held while reading: the simulator's threads would otherwise read the same data twice.
        with self._lock.held:
            if rank not in loaded:
                try:
                    loaded[rank] = divide(self._read(rank))
                except (DataError, OSError, ValueError) as error:
                    raise DataError(f"data of worker {rank}: {error}") from error
            return loaded[rank]

    def _read(self, rank: Rank) -> Dataset:
        data = self.load(rank)
        if not isinstance(data, Dataset) or isinstance(data, Local):
            raise DataError(f"load gave {data!r:.60}; it must return a Dataset")
        self._require_alike(data)
        return replace(data, name=self.name, mean=self.mean, std=self.std, test=NO_SAMPLES)

    def _held_out_of(self, data: Dataset) -> Dataset:
        if data.validation is not None:
            return data
        if self.held_out is None:
            raise DataError(
                "it has no validation split, on which the averaged model is measured; take one "
                "out of the training samples with hold_out, or give Local a held_out"
            )
        return hold_out(data, self.held_out)

    def _require_alike(self, data: Dataset) -> None:
        """Check that a worker's data fits the task's description."""
        for name in ("num_classes", "input_shape"):
            expected = getattr(self, name)
            if (found := getattr(data, name)) != expected and expected != ():
                raise DataError(
                    f"its {name} is {found}, but the task says {expected}; correct the data "
                    "or the recipe of all workers"
                )
        for name in ("mean", "std"):
            own, common = getattr(data, name), getattr(self, name)
            if own is not None and (common is None or not torch.equal(own, common)):
                raise DataError(
                    f"it has a {name} of its own, {own.tolist()}, but workers must prepare "
                    f"their samples alike; give Local the {name}, and load data without it"
                )


def _all_for_validation(data: Dataset) -> Dataset:
    return data if data.validation is not None else replace(data, validation=data.train)


class _Lock:
    """A lock that unpickles as a new lock, so a data set can be copied to other processes."""

    def __init__(self) -> None:
        self.held = threading.RLock()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return _Lock, ()


def _elsewhere() -> DataError:
    return DataError(
        "the data of this task stays with its workers, and this needs all of it in one place; "
        "give the task a Dataset instead of Local"
    )


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

    def worker_data(self, rank: Rank) -> WorkerData:
        """The data of a worker; other workers' data is read when it is assigned."""
        own = [rank] if rank in self._ranks else []
        reached = _Reached(self, self._ranks if self._local.may_share else own)
        local = self._local
        shape = (local.num_classes, local.input_shape, local.mean, local.std)
        return WorkerData(
            # First the worker's own samples, which therefore come first in the joined split.
            shard=reached[rank] if own else torch.empty(0, dtype=torch.int64),
            shards=reached,
            dataset=TrainingData(reached.split, *shape),
        )


class _Reached(Mapping[Rank, Tensor]):
    """The samples of all workers whose data a trainer can reach, read on first access.

    Args:
        shards: Reads the workers' data.
        ranks: The workers whose data can be reached.

    Attributes:
        split: The samples read so far.
    """

    def __init__(self, shards: LocalShards, ranks: Sequence[Rank]) -> None:
        self.split = JoinedSplit()
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
