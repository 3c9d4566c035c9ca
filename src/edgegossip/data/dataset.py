"""Data sets: splits of raw samples, and their preparation for a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset, IterableDataset, default_collate

from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Rank
from edgegossip.contract.ranges import check_range
from edgegossip.data.mapped import MappedFile, Pages, pages_of, place_of
from edgegossip.data.nested import (
    Nested,
    concatenated,
    leaves,
    listed,
    map_leaves,
    num_samples,
    placed,
)
from edgegossip.data.read_ahead import Reader, ReadingPool

Collate: TypeAlias = Callable[[list[Any]], Nested]
"""Makes a batch of nested tensors from a list of samples."""

SAMPLE_DTYPES = (torch.uint8, torch.float32, torch.int64)
"""Allowed types of samples with classes: pictures, features and tokens."""


class Split(Protocol):
    """Training, validation or test part of a `Dataset`: samples, with or without classes."""

    def __len__(self) -> int:
        """Count the samples."""

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]: nested tensors of `batch` entries each.

        With classes: raw x [batch, ...] and y int64 [batch].
        """

    @property
    def labels(self) -> Tensor:
        """The label of every sample, int64 [num_samples]; zeros without classes."""


@dataclass(frozen=True)
class FlippedLabels:
    """A split with false labels: the last class in place of the first one, and so on.

    Args:
        inner: Samples with classes.
        num_classes: Number of classes.
    """

    inner: Split
    num_classes: int

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Tensor) -> Nested:
        """Take samples, with their false labels."""
        x, y = self.inner.batch(indices)
        return x, self.num_classes - 1 - y

    @property
    def labels(self) -> Tensor:
        """The false label of every sample."""
        return self.num_classes - 1 - self.inner.labels


class ArraySplit:
    """Samples in memory, or in files that are mapped to memory.

    Args:
        x: Tensors or NumPy arrays (also `numpy.memmap`) in dicts, tuples and lists, nested in
            any way; the first dimension of each indexes the samples. With classes, a single
            one: pictures, uint8 [num_samples, channels, height, width]; or features, float32,
            or tokens, int64, both [num_samples, ...].
        y: Labels, int64 [num_samples]; None for samples without classes.
        num_workers: Number of threads that read training batches ahead.

    Attributes:
        is_mapped: Whether some samples are in files, so that a batch reads only its own.

    Raises:
        DataError: If `x` holds anything but numeric tensors and arrays, or they differ in
            length.
        ValueError: If `num_workers` is negative.

    >>> split = ArraySplit({"ids": torch.arange(6).view(3, 2), "mask": np.ones((3, 2))})
    >>> len(split), split.batch(torch.tensor([2]))["ids"]
    (3, tensor([[4, 5]]))
    """

    def __init__(
        self,
        x: Nested,
        y: Tensor | NDArray[Any] | None = None,
        *,
        num_workers: int = 0,
    ) -> None:
        check_range("num_workers", num_workers, "at least 0")
        self._given, self.num_workers = (x, y), num_workers
        self._num_samples = num_samples(x, _ARRAYS)
        self._pages: list[Pages] = []
        self.is_mapped = False
        self.x = map_leaves(self._tensor, x, _ARRAYS)
        labels = None if y is None else self._tensor(y)
        if isinstance(y, np.ndarray) and labels is not None:
            # Fractions are not cut off here but refused by `Dataset`.
            labels = labels if labels.is_floating_point() else labels.long()
        self.y: Any = labels  # a tensor, or None without classes
        self.pool = ReadingPool(ArraySplit(x, y).batch, num_workers) if num_workers else None

    def _tensor(self, array: Tensor | NDArray[Any]) -> Tensor:
        """A tensor that shares the memory of `array`."""
        if isinstance(array, Tensor):
            return array
        self.is_mapped |= isinstance(array, np.memmap)
        if (pages := pages_of(array)) is not None:
            self._pages.append(pages)
        with warnings.catch_warnings():
            # Nothing writes to this tensor.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            try:
                return torch.from_numpy(array)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"an array of {array.dtype} holds no samples: {error}"
                ) from None

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]."""
        if self._pages:  # all at once: otherwise each missing page waits for the one before
            wanted = indices.tolist()
            for pages in self._pages:
                pages.request(wanted)
        # Up to five times faster than leaf[indices]. Unlike NumPy's indexing, it releases the
        # interpreter while it waits for a file.
        x = map_leaves(lambda leaf: leaf.index_select(0, indices), self.x)
        return x if self.y is None else (x, self.y.index_select(0, indices))

    @property
    def labels(self) -> Tensor:
        """The labels; without classes, zeros, as if all samples were of one class."""
        return torch.zeros(len(self), dtype=torch.int64) if self.y is None else self.y

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that receives this split maps the files itself, instead of getting a copy.
        x, y = self._given
        return _reopened, (
            map_leaves(_sent, x, _ARRAYS),
            y if y is None else _sent(y),
            self.num_workers,
        )


_ARRAYS = (Tensor, np.ndarray)


def _sent(array: Tensor | NDArray[Any]) -> Any:  # noqa: ANN401
    return array if isinstance(array, Tensor) else place_of(array) or array


def _reopened(x: Nested, y: Any, num_workers: int) -> ArraySplit:  # noqa: ANN401
    def opened(leaf: Any) -> Any:  # noqa: ANN401
        return leaf.opened() if isinstance(leaf, MappedFile) else leaf

    return ArraySplit(
        map_leaves(opened, x, (*_ARRAYS, MappedFile)), opened(y), num_workers=num_workers
    )


class TorchSplit:
    """Samples of any map-style `torch.utils.data.Dataset`, read when a batch needs them.

    The data set's transforms run whenever a sample is read. Transforms that draw from a global
    generator make runs irreproducible (`flip_and_crop` does not draw from one).

    Args:
        dataset: Yields samples of one structure, e.g. dicts of tensors. With classes: pairs
            (x, y) of a tensor or NumPy array of one shape and a whole number. If it has an
            attribute `targets` and no `target_transform`, labels are read from that attribute,
            not sample by sample.
        has_classes: Whether samples are such pairs.
        collate: Makes a batch from a list of samples without classes.
        num_workers: Number of processes that read training batches ahead.

    Raises:
        ValueError: If `num_workers` is negative.
    """

    def __init__(
        self,
        dataset: TorchDataset[Any],
        *,
        has_classes: bool = False,
        collate: Collate = default_collate,
        num_workers: int = 0,
    ) -> None:
        check_range("num_workers", num_workers, "at least 0")
        self._dataset = dataset
        self._has_classes = has_classes
        self._collate = collate
        self.pool: ReadingPool | None = None
        if num_workers:
            own = TorchSplit(dataset, has_classes=has_classes, collate=collate)
            self.pool = ReadingPool(own.batch, num_workers, in_processes=True)

    def __len__(self) -> int:
        return len(cast("Sized", self._dataset))

    @property
    def has_own_collate(self) -> bool:
        """Whether a sample may look different in another batch, e.g. padded to its longest."""
        return not self._has_classes and self._collate is not default_collate

    def batch(self, indices: Tensor) -> Nested:
        """Read and collate the samples at `indices`, int64 [batch].

        Raises:
            DataError: If the samples do not form a batch or, with classes, are no such pairs.
        """
        all_at_once = getattr(self._dataset, "__getitems__", None)
        wanted = indices.tolist()
        samples = [*all_at_once(wanted)] if all_at_once else [self._dataset[i] for i in wanted]
        return self._pairs(samples) if self._has_classes else self._collated(samples, wanted)

    def _pairs(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                "samples must be pairs of a tensor, all of one shape, and a whole number; give "
                "the data set a transform, e.g. torchvision.transforms.PILToTensor() "
                f"({reason})"
            ) from error
        match batch:
            case (Tensor() as x, Tensor() as y) if y.ndim == 1:
                return x, y.long()
        raise DataError(
            "samples must be pairs (x, y) with one whole number y, but a batch of them has "
            f"{listed(batch)}; make them such pairs, or leave out num_classes"
        )

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> Nested:
        try:
            batch = self._collate(samples)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"samples {indices[:4]} do not make a batch ({reason:.200}); give all of them "
                "one structure and shape, or from_torch a collate function that pads them"
            ) from error
        if (found := num_samples(batch)) != len(indices):
            raise DataError(
                f"collate made a batch of {found} out of {len(indices)} samples; it must keep "
                "them all"
            )
        return batch

    @cached_property
    def labels(self) -> Tensor:
        """The labels; without classes, zeros, as if all samples were of one class."""
        if not self._has_classes:
            return torch.zeros(len(self), dtype=torch.int64)
        targets = getattr(self._dataset, "targets", None)
        if targets is None or getattr(self._dataset, "target_transform", None) is not None:
            targets = [self._dataset[index][1] for index in range(len(self))]
        labels = torch.as_tensor(targets)
        # Fractions are not cut off here but refused by `Dataset`.
        return labels if labels.is_floating_point() else labels.long()


class JoinedSplit:
    """Samples of other splits, one after another; without any, a missing split.

    Args:
        parts: Splits, and int64 indices [n] of the samples that are taken from each.
    """

    def __init__(self, *parts: tuple[Split, Tensor]) -> None:
        self._parts = [*parts]
        self._starts = [0]
        for _, indices in parts:
            self._starts.append(self._starts[-1] + len(indices))

    def add(self, split: Split) -> Tensor:
        """Append all samples of a split; return their indices, int64 [n]."""
        self._parts.append((split, torch.arange(len(split))))
        self._starts.append(len(self) + len(split))
        return torch.arange(*self._starts[-2:])

    def __len__(self) -> int:
        return self._starts[-1]

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch].

        Raises:
            DataError: If the split is missing.
        """
        if not self._parts:
            raise DataError("there are no samples in this split")
        if len(self._parts) == 1:
            split, own = self.resolved(indices)
            return split.batch(own)
        places = torch.bucketize(indices, torch.tensor(self._starts[:-1]), right=True) - 1
        pieces = []
        for place in sorted(set(places.tolist())):
            split, own = self._parts[place]
            pieces.append(split.batch(own[indices[places == place] - self._starts[place]]))
        back = places.argsort(stable=True).argsort()
        return map_leaves(lambda leaf: leaf[back], concatenated(pieces))

    @property
    def labels(self) -> Tensor:
        """The label of every sample, int64 [num_samples]."""
        nothing = torch.empty(0, dtype=torch.int64)
        return torch.cat([nothing, *(split.labels[own] for split, own in self._parts)])

    @property
    def num_parts(self) -> int:
        """Number of splits that are joined."""
        return len(self._parts)

    def resolved(self, indices: Tensor) -> tuple[Split, Tensor]:
        """The only part, and the indices in it of the samples at `indices`."""
        ((split, own),) = self._parts
        return split, own[indices]


NO_SAMPLES = JoinedSplit()
"""A missing split."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The part of a `Dataset` that a worker may see: training samples and their preparation.

    Args:
        train: Training samples.
        num_classes: As in `Dataset`.
        input_shape: As in `Dataset`.
        mean: As in `Dataset`.
        std: As in `Dataset`.
    """

    train: Split
    num_classes: int
    input_shape: tuple[int, ...]
    mean: Tensor | None = None
    std: Tensor | None = None

    def prepare(self, x: Tensor, *, is_picture: bool | None = None) -> Tensor:
        """See `Dataset.prepare`."""
        if is_picture is None:
            is_picture = x.dtype == torch.uint8
        if not is_picture and self.mean is None and self.std is None:
            return x
        if x.device not in self._scalings:
            # Copied once: a copy in each step would wait until a GPU has computed the last one.
            own = self._scale_and_shift.items()
            self._scalings[x.device] = {
                k: (a.to(x.device), b.to(x.device)) for k, (a, b) in own
            }
        scale, shift = self._scalings[x.device][is_picture]
        # In place on the copy: twice as fast as (x / 255 - mean) / std.
        prepared = x.to(torch.float32, copy=True)
        return prepared.mul_(scale).add_(shift)

    def reader(self, shard: Tensor) -> Reader:
        """Make the reader of a worker's batches.

        Args:
            shard: [n] indices of the worker's training samples.
        """
        # The pool of samples that were held out is that of the whole split.
        split, indices = self.resolved(shard)
        return Reader(split.batch, indices, getattr(split, "pool", None))

    def resolved(self, shard: Tensor) -> tuple[Split, Tensor]:
        """The split that holds the samples of a shard, and their indices in it."""
        split = self.train
        while isinstance(split, JoinedSplit) and split.num_parts == 1:
            split, shard = split.resolved(shard)
        return split, shard

    def __getstate__(self) -> dict[str, Any]:
        # A process that is sent this data may have other devices.
        return {k: v for k, v in vars(self).items() if k != "_scalings"}

    @cached_property
    def _scalings(self) -> dict[torch.device, dict[bool, tuple[Tensor, Tensor]]]:
        """Scale and shift on each device that has needed them."""
        return {}

    @cached_property
    def _scale_and_shift(self) -> dict[bool, tuple[Tensor, Tensor]]:
        """Scale and shift, as (x / unit - mean) / std = x * scale + shift, by `is_picture`."""
        std = torch.ones(1) if self.std is None else self.std
        mean = torch.zeros(1) if self.mean is None else self.mean
        per_channel = (-1, *(1 for _ in self.input_shape[1:]))
        shift = (-mean.double() / std).float().view(per_channel)
        return {
            is_picture: ((1 / (std.double() * unit)).float().view(per_channel), shift)
            for is_picture, unit in ((False, 1), (True, 255))
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerData:
    """The training data of one worker.

    Args:
        dataset: The training split and its preparation.
        shard: [n] indices of this worker's samples in the training split; may be empty before
            an assignment.
        shards: Shards of all workers whose data this worker can reach, by rank, for `assign`.
        unit_size: Samples per unit if all workers share the data (`Shared`); 0 otherwise.
    """

    dataset: TrainingData
    shard: Tensor
    shards: Mapping[Rank, Tensor] = field(default_factory=dict)
    unit_size: int = 0


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test samples, and their preparation.

    Only reports use `test`; algorithms and learners have no access to it. `Evaluate` uses
    `validation`, which `hold_out` takes from `train`.

    Samples with classes are pairs (x, y) of a tensor and a label. Other samples are any nested
    tensors, such as a dict, or a pair (x, y) whose y is to be predicted; see `from_tensors`.

    Args:
        name: Name for reports and messages.
        train: Training samples.
        test: Test samples, only for reports; left out in a worker's own data (`Local`).
        num_classes: Labels are 0 .. num_classes - 1; 0 for samples without classes.
        input_shape: Shape of one sample's x, channels first; empty if samples are not pairs.
        mean: Mean of each channel [input_shape[0]], in the units of x, or of x / 255 for uint8;
            None for no subtraction.
        std: Standard deviation of each channel, like `mean`; None for no division.
        subjects: Subject of each training sample, int64 [num_train]; None if unknown.
        validation: Samples for `Evaluate`; None if no algorithm needs it.

    Raises:
        DataError: If a split is empty, or its labels are out of range; if x, y and `subjects`
            differ in length or shape; if a number is not finite; if splits differ in structure;
            or if `validation` is `test`. In a split that is not in memory, only the labels and
            the first sample are checked.
        ValueError: If `mean` or `std` does not have one value per channel, or `std` is not
            above 0.

    >>> split = ArraySplit(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.tensor([1]))
    >>> task = Dataset("two-pixels", split, split, num_classes=2, input_shape=(1, 1, 2))
    >>> task.prepare(split.x)
    tensor([[[[0., 1.]]]])
    """

    name: str
    train: Split
    test: Split = NO_SAMPLES
    num_classes: int = 0
    input_shape: tuple[int, ...] = ()
    mean: Tensor | None = None
    std: Tensor | None = None
    subjects: Tensor | None = None
    validation: Split | None = None

    def __post_init__(self) -> None:
        if self.validation is self.test:
            raise DataError(
                f"{self.name}: the validation split is the test split, so algorithms would "
                "tune themselves on what reports measure; use hold_out"
            )
        splits = {"train": self.train, "test": self.test, "validation": self.validation}
        for where, split in splits.items():
            try:
                # A missing split may come from another process, so it may be no NO_SAMPLES.
                is_missing = isinstance(split, JoinedSplit) and not len(split)
                if split is not None and not is_missing:
                    self._validate_split(split)
            except DataError as error:
                raise DataError(f"{self.name}, {where} split: {error}") from None
        # After the samples, so that the mean of wrong samples is not blamed for their flaws.
        self._validate_channels()
        if self.subjects is not None and self.subjects.shape != (len(self.train),):
            raise DataError(
                f"{self.name}: subjects have shape {list(self.subjects.shape)}; "
                f"expected one for each training sample, [{len(self.train)}]"
            )

    @cached_property
    def training(self) -> TrainingData:
        """The training split and its preparation, without access to the other splits."""
        return TrainingData(self.train, self.num_classes, self.input_shape, self.mean, self.std)

    def prepare(self, x: Tensor, *, is_picture: bool | None = None) -> Tensor:
        """Turn raw x into a model's input: float32, standardized by `mean` and `std`.

        Pictures (uint8) are first scaled to [0, 1]. Without `mean` and `std`, other samples are
        returned unchanged, not copied.

        Args:
            x: Raw samples, ``[batch, *input_shape]``.
            is_picture: Whether `x` is in units of uint8; None derives it from the type.
        """
        return self.training.prepare(x, is_picture=is_picture)

    def _validate_channels(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not self.input_shape:
                raise ValueError(
                    f"{name} needs an input_shape, and samples that are pairs (x, y)"
                )
            if values is not None and values.shape != self.input_shape[:1]:
                raise ValueError(
                    f"{name} must have one value for each channel, [{self.input_shape[0]}], "
                    f"got shape {list(values.shape)}"
                )
        if self.std is not None and not bool((self.std > 0).all()):
            raise ValueError(f"std must be > 0 in each channel, got {self.std.tolist()}")

    def _validate_split(self, split: Split) -> None:
        if len(split) == 0:
            raise DataError("no samples; expected at least 1")
        if not self.num_classes:
            self._validate_nested(split)
            return
        labels = split.labels
        if labels.shape != (len(split),) or labels.dtype != torch.int64:
            raise DataError(
                f"labels have shape {list(labels.shape)} and {labels.dtype}; expected one "
                f"torch.int64 for each sample, [{len(split)}]"
            )
        is_wrong = (labels < 0) | (labels >= self.num_classes)
        if is_wrong.any():
            index = int(is_wrong.nonzero()[0])
            raise DataError(
                f"label {int(labels[index])} of sample {index} is out of range; "
                f"expected 0 .. {self.num_classes - 1}"
            )
        x = _checked_part(split)[0]
        if x.shape[1:] != self.input_shape or x.dtype not in SAMPLE_DTYPES:
            raise DataError(
                f"samples have shape {list(x.shape[1:])} and {x.dtype}; expected "
                f"{list(self.input_shape)} and one of {', '.join(map(str, SAMPLE_DTYPES))}"
            )
        _require_finite(x)

    def _validate_nested(self, split: Split) -> None:
        """Check that samples without classes are finite and match the training samples."""
        first = split.batch(torch.zeros(1, dtype=torch.int64))
        if split is not self.train:
            found = listed(first)
            expected = listed(self.train.batch(torch.zeros(1, dtype=torch.int64)))
            if found != expected:
                raise DataError(
                    f"samples have {found}; expected those of the train split, {expected}"
                )
        if self.input_shape not in ((), shape := _input_shape(first)):
            raise DataError(f"samples have shape {list(shape)}; expected {self.input_shape}")
        for path, leaf in leaves(_checked_part(split)):
            if leaf.dtype == torch.float64:
                raise DataError(
                    f"numbers{placed(path)} are torch.float64, and models torch.float32; "
                    "convert them with .float()"
                )
            _require_finite(leaf, path)


def _checked_part(split: Split) -> Nested:
    """All samples that are in memory; otherwise the first, because reading all takes long."""
    if isinstance(split, ArraySplit) and not split.is_mapped:
        return split.x if split.y is None else (split.x, split.y)
    return split.batch(torch.zeros(1, dtype=torch.int64))


def _input_shape(batch: Nested) -> tuple[int, ...]:
    """The shape of one sample's x if samples are pairs of tensors, otherwise empty."""
    match batch:
        case (Tensor() as x, Tensor()):
            return tuple(x.shape[1:])
    return ()


def _require_finite(x: Tensor, path: str = "") -> None:
    if x.is_floating_point() and not bool(x.isfinite().all()):
        index, *position = (~x.isfinite()).nonzero()[0].tolist()
        where = f" of {path}" if path else ""
        raise DataError(
            f"sample {index} has {x[index, *position].item()} at {position}{where}; "
            "expected finite numbers, so remove or replace it"
        )


def from_torch(
    name: str,
    train: TorchDataset[Any],
    test: TorchDataset[Any] | None = None,
    num_classes: int = 0,
    collate: Collate = default_collate,
    num_workers: int = 0,
) -> Dataset:
    """Wrap two map-style PyTorch data sets, e.g. those of torchvision.

    With classes, samples are pairs (x, y). Float samples are used as the transforms return
    them; uint8 samples are scaled to [0, 1]. Samples are read when a batch needs them, so the
    data set may be larger than memory.

    >>> pairs = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 1, 0]))
    >>> from_torch("pairs", pairs, pairs, num_classes=2).input_shape
    (3,)

    Args:
        name: Name for reports and messages.
        train: Training samples.
        test: Test samples, only for reports; None for a worker's own data (`Local`).
        num_classes: Labels are 0 .. num_classes - 1; 0 for samples without classes, which are
            any nested tensors.
        collate: Makes a batch from a list of samples without classes; by default PyTorch's.
        num_workers: Number of processes that read training batches ahead, as in PyTorch's
            `DataLoader`, shared by all workers that one process trains. 0 reads in the training
            process. The order of the samples does not depend on this number.

    Raises:
        DataError: If a data set is not map-style, or a sample has something other than a
            tensor, such as a PIL picture, or with classes is not a pair; see also `Dataset`.
        ValueError: If `num_workers` is negative.
    """

    def split(where: str, dataset: TorchDataset[Any], num_workers: int) -> TorchSplit:
        is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise DataError(
                f"{name}, {where} split: {type(dataset).__name__} is not a map-style data set, "
                "with __len__ and __getitem__; give from_torch such a data set (not its "
                "loader), or from_tensors all samples"
            )
        return TorchSplit(
            dataset, has_classes=num_classes > 0, collate=collate, num_workers=num_workers
        )

    own = split("train", train, num_workers)
    return _made(name, own, NO_SAMPLES if test is None else split("test", test, 0), num_classes)


def from_tensors(name: str, train: Nested, test: Nested | None = None) -> Dataset:
    """Make a data set without classes from tensors in memory.

    >>> x, y = torch.rand(8, 3), torch.rand(8)
    >>> data = from_tensors("prices", train=(x[:6], y[:6]), test=(x[6:], y[6:]))
    >>> len(data.train), data.input_shape
    (6, (3,))

    Args:
        name: Name for reports and messages.
        train: Training samples: tensors in dicts, tuples and lists, nested in any way. The
            first dimension of every tensor indexes the samples.
        test: Test samples of the same structure, only for reports; None for a worker's own data
            (`Local`).

    Raises:
        DataError: See `Dataset` and `ArraySplit`.
    """
    try:
        own, tested = ArraySplit(train), NO_SAMPLES if test is None else ArraySplit(test)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return _made(name, own, tested)


def from_numpy(
    name: str,
    train: Nested,
    test: Nested,
    num_classes: int = 0,
    *,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    num_workers: int = 0,
) -> Dataset:
    """Make a data set from NumPy arrays, in memory or mapped from files.

    Mapped arrays, such as ``numpy.load("x.npy", mmap_mode="r")``, may be larger than memory: a
    batch reads only its own samples, all at once. On a slow disk, set `num_workers` to 1 or 2.

    >>> x, y = np.random.default_rng(0).random((8, 3), np.float32), np.arange(8) % 2
    >>> data = from_numpy("rows", train=(x[:6], y[:6]), test=(x[6:], y[6:]), num_classes=2)
    >>> len(data.train), data.input_shape
    (6, (3,))

    Args:
        name: Name for reports and messages.
        train: Training samples: arrays in dicts, tuples and lists, nested in any way, whose
            first dimension indexes the samples; with classes, a pair (x, y).
        test: Test samples of the same structure, only for reports.
        num_classes: Labels are 0 .. num_classes - 1; 0 for samples without classes.
        mean: See `Dataset`.
        std: See `Dataset`.
        num_workers: Number of threads that read training batches ahead, shared by all workers
            that one process trains. 0 reads in the training thread.

    Raises:
        DataError: See `Dataset` and `ArraySplit`. Of mapped arrays, only the first sample is
            checked for non-finite numbers; training stops at a non-finite loss.
        ValueError: If `num_workers` is negative; see also `Dataset`.
    """

    def split(arrays: Nested, num_workers: int) -> ArraySplit:
        if not num_classes:
            return ArraySplit(arrays, num_workers=num_workers)
        if not (isinstance(arrays, tuple | list) and len(arrays) == 2):
            raise DataError("samples with classes are a pair (x, y) of arrays")
        num_samples(arrays, np.ndarray)
        return ArraySplit(*arrays, num_workers=num_workers)

    try:
        own, tested = split(train, num_workers), split(test, 0)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return _made(name, own, tested, num_classes, mean, std)


def _made(
    name: str,
    train: Split,
    test: Split,
    num_classes: int = 0,
    mean: Tensor | None = None,
    std: Tensor | None = None,
) -> Dataset:
    """Make a data set whose `input_shape` is that of its first sample."""
    try:
        first = train.batch(torch.zeros(1, dtype=torch.int64)) if len(train) else None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return Dataset(name, train, test, num_classes, _input_shape(first), mean, std)


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each channel's mean and standard deviation, both float32 [channels].

    They are in the units of `x`, or of x / 255 for uint8. A constant channel gets a standard
    deviation of 1, which allows division.

    Args:
        x: Samples, [num_samples, channels, ...].

    >>> channel_statistics(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    (tensor([2., 5.]), tensor([1., 1.]))
    """
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    # In chunks, because a double of every pixel would take eight times the memory of pictures.
    for chunk in torch.split(x, 8192):
        values = chunk.transpose(0, 1).flatten(1).double()  # [channels, values]
        total += values.sum(1)
        squares += values.square().sum(1)
    mean = total * x.shape[1] / x.numel()
    std = (squares * x.shape[1] / x.numel() - mean.square()).clamp(min=0).sqrt()
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    # The remainder that rounding leaves of a constant is noise, which must not be amplified;
    # nor may the divisor make results infinite.
    least = (1e-6 * mean.abs()).clamp(min=unit * torch.finfo(torch.float32).tiny)
    std = torch.where(std <= least, unit, std)
    return (mean / unit).float(), (std / unit).float()
