"""Splits whose samples are nested tensors and have no class."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset, IterableDataset, default_collate

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_counts, check_range
from edgegossip.data.nested import Nested, leaves, map_leaves, num_samples, placed

Collate: TypeAlias = Callable[[list[Any]], Nested]
"""Makes a batch of nested tensors from a list of samples."""


class NestedSplit:
    """Samples in memory: nested tensors whose first dimension indexes the samples.

    Args:
        samples: Tensors in dicts, tuples and lists, nested in any way, e.g. a pair (x, y), or
            the fields that a tokenizer returns.

    Raises:
        DataError: If `samples` holds anything but tensors, or tensors differ in length.

    >>> split = NestedSplit({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)})
    >>> len(split), split.batch(torch.tensor([2]))["ids"]
    (3, tensor([[4, 5]]))
    """

    def __init__(self, samples: Nested) -> None:
        self._num_samples = num_samples(samples)
        self.samples = map_leaves(lambda leaf: leaf, samples)

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]."""
        return map_leaves(lambda leaf: leaf.index_select(0, indices), self.samples)

    @property
    def labels(self) -> Tensor:
        """Zeros, as if all samples were of one class."""
        return torch.zeros(len(self), dtype=torch.int64)


class CollatedSplit:
    """Samples of any map-style `torch.utils.data.Dataset`, collated into nested batches.

    The data set's transforms run whenever a sample is read.

    Args:
        dataset: Yields samples of one structure, e.g. dicts of tensors.
        collate: Makes a batch from a list of samples; by default PyTorch's.
    """

    def __init__(self, dataset: TorchDataset[Any], collate: Collate = default_collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(cast("Sized", self._dataset))

    def batch(self, indices: Tensor) -> Nested:
        """Read and collate the samples at `indices`, int64 [batch].

        Raises:
            DataError: If the samples do not form a batch.
        """
        samples = fetch(self._dataset, indices)
        try:
            batch = self._collate(samples)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"samples {_shown(indices)} do not make a batch ({reason:.200}); give all of "
                "them one structure and shape, or from_torch a collate function that pads them"
            ) from error
        if (found := num_samples(batch)) != len(indices):
            raise DataError(
                f"collate made a batch of {found} out of {len(indices)} samples; it must keep "
                "them all"
            )
        return batch

    @property
    def labels(self) -> Tensor:
        """Zeros, as if all samples were of one class."""
        return torch.zeros(len(self), dtype=torch.int64)


def require_map_style(name: str, dataset: object) -> None:
    """Check that samples can be counted, and read by number.

    Args:
        name: Name for messages.
        dataset: Any object.

    Raises:
        DataError: If `dataset` is not a map-style data set, such as an iterable one.
    """
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise DataError(
            f"{name}: {type(dataset).__name__} is not a map-style data set, with __len__ and "
            "__getitem__; give from_torch such a data set (not its loader), or from_tensors "
            "all samples"
        )


def fetch(dataset: TorchDataset[Any], indices: Tensor) -> list[Any]:
    """Read samples, all at once if the data set supports it (``__getitems__``)."""
    all_at_once = getattr(dataset, "__getitems__", None)
    if all_at_once is not None:
        return list(all_at_once(indices.tolist()))
    return [dataset[index] for index in indices.tolist()]


def _shown(indices: Tensor) -> Sequence[int]:
    return indices[:4].tolist()


# A split whose batches are read by a pool of threads or processes.


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


# Data sets: splits of raw samples, and their preparation for a model.


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


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Samples in memory.

    Args:
        x: Pictures, uint8 [num_samples, channels, height, width]; or features, float32, or
            tokens, int64, both [num_samples, ...].
        y: Labels, int64 [num_samples].
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        # Up to five times faster than self.x[indices].
        return self.x.index_select(0, indices), self.y.index_select(0, indices)

    @property
    def labels(self) -> Tensor:
        return self.y


class NoSamples:
    """A missing split."""

    def __len__(self) -> int:
        return 0

    def batch(self, indices: Tensor) -> Nested:
        """Raise `DataError`."""
        raise DataError("there are no samples in this split")

    @property
    def labels(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64)


class TorchSplit:
    """Samples with classes: pairs (x, y) from any map-style `torch.utils.data.Dataset`.

    The data set's transforms run whenever a sample is read. Transforms that draw from a global
    generator make runs irreproducible (`augmentation.flip_and_crop` does not draw from one).

    Args:
        dataset: Yields tensors or NumPy arrays of one shape, with whole numbers as labels. If
            it has an attribute `targets` and no `target_transform`, labels are read from that
            attribute, not sample by sample.
    """

    def __init__(self, dataset: TorchDataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(cast("Sized", self._dataset))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        samples = fetch(self._dataset, indices)
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
        found = _listed({path: (leaf.dtype, leaf.ndim) for path, leaf in leaves(batch)})
        raise DataError(
            "samples must be pairs (x, y) with one whole number y, but a batch of them has "
            f"{found}; make them such pairs, or leave out num_classes"
        )

    @cached_property
    def labels(self) -> Tensor:
        targets = getattr(self._dataset, "targets", None)
        if targets is None or getattr(self._dataset, "target_transform", None) is not None:
            targets = [self._dataset[index][1] for index in range(len(self))]
        labels = torch.as_tensor(targets)
        # Fractions are not cut off here but refused by `Dataset`.
        return labels if labels.is_floating_point() else labels.long()


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
        scale, shift = self._scale_and_shift[is_picture]
        # In place on the copy: twice as fast as (x / 255 - mean) / std.
        prepared = x.to(torch.float32, copy=True)
        return prepared.mul_(scale.to(x.device)).add_(shift.to(x.device))

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
    test: Split = NoSamples()
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
                if split is not None and not isinstance(split, NoSamples):
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
        self._validate_samples(split)

    def _validate_nested(self, split: Split) -> None:
        """Check that samples without classes are finite and match the training samples."""
        first = split.batch(torch.zeros(1, dtype=torch.int64))
        kinds = {path: (leaf.dtype, leaf.ndim) for path, leaf in leaves(first)}
        if split is not self.train:
            sample = self.train.batch(torch.zeros(1, dtype=torch.int64))
            expected = {path: (leaf.dtype, leaf.ndim) for path, leaf in leaves(sample)}
            if kinds != expected:
                raise DataError(
                    f"samples have {_listed(kinds)}; expected those of the train split, "
                    f"{_listed(expected)}"
                )
        match first:
            case (Tensor() as x, _):
                shape = tuple(x.shape[1:])
            case _:
                shape = ()
        if self.input_shape not in ((), shape):
            raise DataError(f"samples have shape {list(shape)}; expected {self.input_shape}")
        # As in `_validate_samples`, splits outside memory are checked by their first sample.
        for path, leaf in leaves(split.samples if isinstance(split, NestedSplit) else first):
            if leaf.dtype == torch.float64:
                raise DataError(
                    f"numbers{placed(path)} are torch.float64, and models torch.float32; "
                    "convert them with .float()"
                )
            _require_finite(leaf, path)

    def _validate_samples(self, split: Split) -> None:
        # Splits in memory are checked completely, other splits by their first sample.
        first = torch.zeros(1, dtype=torch.int64)
        x = split.x if isinstance(split, ArraySplit) else split.batch(first)[0]
        if x.shape[1:] != self.input_shape or x.dtype not in SAMPLE_DTYPES:
            raise DataError(
                f"samples have shape {list(x.shape[1:])} and {x.dtype}; expected "
                f"{list(self.input_shape)} and one of {', '.join(map(str, SAMPLE_DTYPES))}"
            )
        _require_finite(x)


def _require_finite(x: Tensor, path: str = "") -> None:
    if x.is_floating_point() and not bool(x.isfinite().all()):
        index, *position = (~x.isfinite()).nonzero()[0].tolist()
        where = f" of {path}" if path else ""
        raise DataError(
            f"sample {index} has {x[index, *position].item()} at {position}{where}; "
            "expected finite numbers, so remove or replace it"
        )


def _listed(kinds: Mapping[str, tuple[torch.dtype, int]]) -> str:
    each = (
        f"{dtype} of {ndim} dimensions{placed(path)}" for path, (dtype, ndim) in kinds.items()
    )
    return " and ".join(each)


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
    check_range("num_workers", num_workers, "at least 0")
    require_map_style(f"{name}, train split", train)
    if test is not None:
        require_map_style(f"{name}, test split", test)
    first: Split
    tested: Split
    if num_classes:
        first = TorchSplit(train)
        tested = NoSamples() if test is None else TorchSplit(test)
        x = first.batch(torch.zeros(1, dtype=torch.int64))[0] if len(first) else torch.empty(0)
    else:
        first = CollatedSplit(train, collate)
        tested = NoSamples() if test is None else CollatedSplit(test, collate)
    if num_workers:
        first = PooledSplit(first, num_workers, in_processes=True)
    if not num_classes:
        return without_classes(name, first, tested)
    return Dataset(name, first, tested, num_classes, tuple(x.shape[1:]))


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
        DataError: See `Dataset` and `NestedSplit`.
    """
    try:
        splits = NestedSplit(train), NoSamples() if test is None else NestedSplit(test)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return without_classes(name, *splits)


def without_classes(name: str, train: Split, test: Split) -> Dataset:
    """Make a data set from nested samples; set `input_shape` if they are pairs of tensors."""
    try:
        first = train.batch(torch.zeros(1, dtype=torch.int64)) if len(train) else None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    match first:
        case (Tensor() as x, Tensor()):
            return Dataset(name, train, test, input_shape=tuple(x.shape[1:]))
    return Dataset(name, train, test)


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
