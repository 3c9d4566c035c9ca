"""Readers of well-known data sets in their original formats, with a `DataError` for every flaw.

Pictures stay uint8 in memory and take a quarter of the space of floats.
"""

from __future__ import annotations

import gzip
import inspect
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.contract.errors import DataError, UsageError
from edgegossip.data.dataset import ArraySplit, Dataset, channel_statistics

IDX_UNSIGNED_BYTE = 0x08
MAX_RATIO = 1032
"""Maximum expansion of deflated data."""
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or with the suffix `.gz`.

    The file has four bytes of magic (0, 0, type, number of dimensions), each dimension as a
    big-endian uint32, then the values.

    Args:
        path: Path of the plain file; if that is missing, the path with `.gz` is read.
        num_dims: Expected number of dimensions: 3 for pictures, 1 for labels.

    Raises:
        DataError: If the file is missing or unreadable, or has a wrong type or length.

    References:
        LeCun, Cortes and Burges, "The MNIST database", section "File formats".
    """
    packed = path.with_name(f"{path.name}.gz")
    is_packed = packed.exists() and not path.exists()
    found = packed if is_packed else path
    try:
        with gzip.open(found) if is_packed else found.open("rb") as file:
            return _read_idx(file, found, num_dims, is_packed=is_packed)
    except FileNotFoundError:
        raise DataError(f"{path} is missing, and so is {packed.name}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{found} cannot be read: {error}") from error


def _read_idx(
    file: gzip.GzipFile | BufferedReader, path: Path, num_dims: int, *, is_packed: bool
) -> NDArray[np.uint8]:
    """Read the amount that the header states, if the file can contain it."""
    start = 4 + 4 * num_dims
    header = file.read(start)
    magic = bytes((0, 0, IDX_UNSIGNED_BYTE, num_dims))
    if header[:4] != magic:
        raise DataError(f"{path} starts with {header[:4].hex()!r}, expected {magic.hex()!r}")
    if len(header) < start:
        raise DataError(f"{path} has {len(header)} bytes, expected a header of {start}")
    shape = tuple(np.frombuffer(header, ">u4", num_dims, offset=4).tolist())
    expected, size = math.prod(shape), path.stat().st_size
    most = size * MAX_RATIO if is_packed else size - start
    if expected > most or (expected < most and not is_packed):
        raise _wrong_length(path, f"at most {most}" if is_packed else str(most), shape)
    _require_room(path, expected)
    # A NumPy array, because PyTorch warns about tensors on read-only memory.
    content = np.empty(expected, np.uint8)
    num_read = 0
    while num_read < expected and (more := file.readinto(content[num_read:].data)):
        num_read += more
    if num_read < expected:
        raise _wrong_length(path, str(num_read), shape)
    if file.read(1):  # at the end, gzip compares its checksum
        raise _wrong_length(path, f"more than {num_read}", shape)
    return content.reshape(shape)


def _wrong_length(path: Path, found: str, shape: tuple[int, ...]) -> DataError:
    return DataError(
        f"{path} has {found} bytes after its header, expected {math.prod(shape)} for shape "
        f"{list(shape)}"
    )


def _require_room(path: Path, num_bytes: int) -> None:
    """Reject sizes that would leave too little memory for work."""
    room = psutil.virtual_memory().available // 2
    if num_bytes > room:
        raise DataError(
            f"{path} says that it holds {num_bytes:,} bytes, but half of the free memory is "
            f"{room:,}; if it is not damaged, use a machine with more memory"
        )


def read_cifar10(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read one file of the binary version of CIFAR-10.

    Each record is one byte of label, then red, green and blue planes of 32 rows of 32 pixels.

    Returns:
        Pictures [num_samples, 3, 32, 32] and labels [num_samples].

    Raises:
        DataError: If the file is missing or has an incomplete record.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0 or num_bytes % CIFAR_RECORD_BYTES:
            raise DataError(
                f"{path} has {num_bytes} bytes, expected a multiple of {CIFAR_RECORD_BYTES} "
                f"(30,730,000 for the 10,000 records of an official file)"
            )
        _require_room(path, num_bytes)
        content = np.fromfile(path, np.uint8, num_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    records = content.reshape(-1, CIFAR_RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_npz(
    path: Path, keys: tuple[str, ...], optional_keys: tuple[str, ...] = ()
) -> dict[str, NDArray[np.generic]]:
    """Read the arrays `keys`, and those of `optional_keys` that exist, from an `.npz` file.

    Pickled objects are rejected, because unpickling would run any code in the file.

    Raises:
        DataError: If the file is missing or damaged, lacks a key, or holds pickled objects.
    """
    try:
        # Opened here, because np.load forgets to close a damaged file.
        with path.open("rb") as file:
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                raise DataError(f"{path} is not an .npz archive; write it with numpy.savez")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            missing = [key for key in keys if key not in archive]
            if missing:
                raise DataError(f"{path} lacks {missing}; it holds {sorted(archive)!r:.300}")
            wanted = [key for key in (*keys, *optional_keys) if key in archive]
            _require_plain_members(path, archive.zip, wanted)
            arrays = {key: archive[key] for key in wanted}
            if strange := [k for k, a in arrays.items() if not isinstance(a, np.ndarray)]:
                raise ValueError(f"{strange} are not arrays")
            return arrays
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (
        ArithmeticError,
        EOFError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,  # RecursionError and NotImplementedError too
        SyntaxError,
        TypeError,
        ValueError,
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path} is damaged or holds pickled objects; expected an .npz of plain numbers "
            f"({error})"
        ) from error


def _require_plain_members(path: Path, archive: zipfile.ZipFile, keys: list[str]) -> None:
    """Reject members whose stated size is impossible, or does not fit into memory."""
    names = {*keys, *(f"{key}.npy" for key in keys)}
    members = [each for each in archive.infolist() if each.filename in names]
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{member.filename!r} is packed in a way that NumPy does not use")
        if member.file_size > MAX_RATIO * (member.compress_size + 1):
            raise ValueError(f"{member.filename!r} cannot hold {member.file_size} bytes")
    _require_room(path, sum(member.file_size for member in members))


NUM_TEST_DIGITS = 360
NUM_CIFAR10_BATCHES = 5
MAX_CLASSES = 1000
"""Maximum number of classes, or the number of samples if that is larger; a model has an output
for each class."""


def digits(seed: int = 0) -> Dataset:
    """Read scikit-learn's 1797 handwritten digits of 8x8 pixels; needs no file.

    The 17 gray levels are scaled to 0 .. 255. One fifth of each class is for testing.

    Args:
        seed: Seeds the split into 1437 samples for training and 360 for testing.

    >>> task = digits()
    >>> len(task.train), len(task.test), task.input_shape
    (1437, 360, (1, 8, 8))
    """
    # Imported here, because the import takes a second.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    gray, y = load_digits(return_X_y=True)
    x = np.round(gray * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=NUM_TEST_DIGITS, stratify=y, random_state=seed
    )
    return _standardized("digits", _split(x_train, y_train), _split(x_test, y_test), 10)


def mnist(data_dir: Path | str) -> Dataset:
    """Read MNIST from the four IDX files, plain or `.gz`, in `data_dir`/mnist.

    The mean and standard deviation are those of PyTorch's own MNIST example.

    Raises:
        DataError: If a file is missing, truncated or inconsistent.

    References:
        LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document
        recognition", Proceedings of the IEEE 1998.
    """
    mirror = "https://ossci-datasets.s3.amazonaws.com/mnist/<file>.gz"
    folder = Path(data_dir) / "mnist"
    with _obtainable("MNIST", f"http://yann.lecun.com/exdb/mnist (mirror: {mirror})", folder):
        train, test = _idx_splits(folder)
        mean, std = torch.tensor([0.1307]), torch.tensor([0.3081])
        return Dataset("mnist", train, test, 10, (1, 28, 28), mean, std)


def fashion_mnist(data_dir: Path | str) -> Dataset:
    """Read Fashion-MNIST from the four IDX files, plain or `.gz`, in `data_dir`/fashion-mnist.

    Raises:
        DataError: If a file is missing, truncated or inconsistent.

    References:
        Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
        Learning Algorithms", arXiv:1708.07747.
    """
    folder, url = Path(data_dir) / "fashion-mnist", "https://github.com/zalandoresearch"
    with _obtainable("Fashion-MNIST", f"{url}/fashion-mnist", folder):
        train, test = _idx_splits(folder)
        return _standardized("fashion-mnist", train, test, 10)


def cifar10(data_dir: Path | str) -> Dataset:
    """Read the binary version of CIFAR-10 in `data_dir`/cifar-10-batches-bin.

    The mean and standard deviation are those of all pixels of the training pictures.

    Raises:
        DataError: If a file is missing, truncated or inconsistent.

    References:
        Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    url = "https://www.cs.toronto.edu/~kriz/cifar.html ('binary version')"
    folder = Path(data_dir) / "cifar-10-batches-bin"
    with _obtainable("CIFAR-10", url, folder):
        names = [f"data_batch_{number}.bin" for number in range(1, NUM_CIFAR10_BATCHES + 1)]
        batches = [read_cifar10(folder / name) for name in names]
        x_train, y_train = map(np.concatenate, zip(*batches, strict=True))
        test = _split(*read_cifar10(folder / "test_batch.bin"))
        mean, std = (
            torch.tensor([0.4914, 0.4822, 0.4465]),
            torch.tensor([0.2470, 0.2435, 0.2616]),
        )
        return Dataset("cifar10", _split(x_train, y_train), test, 10, (3, 32, 32), mean, std)


def downsampled_imagenet(data_dir: Path | str, size: int = 8) -> Dataset:
    """Read downsampled ImageNet, all `train_data_batch_*.npz` and `val_data.npz`.

    Args:
        data_dir: Folder that contains imagenet8x8 (or 16x16, 32x32, 64x64).
        size: Pixels per side, 8, 16, 32 or 64.

    Raises:
        DataError: If a file is missing, truncated or inconsistent.

    References:
        Chrabaszcz, Loshchilov and Hutter, "A Downsampled Variant of ImageNet as an Alternative
        to the CIFAR datasets", arXiv:1707.08819. Its labels start at 1, ours at 0.
    """
    name = f"imagenet{size}x{size}"
    folder, url = Path(data_dir) / name, "https://image-net.org/download-images"
    with _obtainable(f"ImageNet {size}x{size} (npz)", url, folder):
        # Numbered without a gap, so that a missing batch is noticed.
        num_batches = max(1, len(list(folder.glob("train_data_batch_*.npz"))))
        paths = [folder / f"train_data_batch_{number + 1}.npz" for number in range(num_batches)]
        batches = [_imagenet_batch(path, size) for path in paths]
        x_train, y_train = map(np.concatenate, zip(*batches, strict=True))
        test = _split(*_imagenet_batch(folder / "val_data.npz", size))
        train = _split(x_train, y_train)
        return _standardized(name, train, test, _num_classes(train, name))


def npz(path: Path | str) -> Dataset:
    """Read your own data set, written by `numpy.savez`.

    The file holds x_train, y_train, x_test, y_test and, if samples have natural owners,
    subject_train. Pictures are uint8 [num_samples, height, width] or [num_samples, channels,
    height, width], features are floats [num_samples, channels, ...], and labels start at 0.
    Each channel is standardized by its statistics over the training samples.

    Raises:
        DataError: If the file is missing, damaged or inconsistent, or holds pickled objects.
    """
    path = Path(path)
    arrays = read_npz(path, ("x_train", "y_train", "x_test", "y_test"), ("subject_train",))
    train = _split(arrays["x_train"], arrays["y_train"], f"{path}, train")
    test = _split(arrays["x_test"], arrays["y_test"], f"{path}, test")
    task = _standardized(path.stem, train, test, _num_classes(train, f"{path}, train"))
    if "subject_train" not in arrays:
        return task
    return replace(task, subjects=_int64(arrays["subject_train"], f"{path}: subject_train"))


def har(data_dir: Path | str) -> Dataset:
    """Read UCI HAR, six activities of 30 people, from `data_dir`/uci_har.npz.

    Samples are phone accelerometer and gyroscope windows [9, 128], in g and rad/s. The data are
    naturally skewed, because people walk differently. The file has the layout that `npz` reads;
    the repository's examples/uci_har.py makes it from the official archive.

    Raises:
        DataError: If the file is missing, damaged or inconsistent.

    References:
        Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using
        Smartphones", ESANN 2013.
    """
    path = Path(data_dir) / "uci_har.npz"
    with _obtainable("UCI HAR", "https://archive.ics.uci.edu/dataset/240", path):
        return replace(npz(path), name="har")


def huggingface(
    name: str,
    *,
    configuration: str | None = None,
    input_column: str = "image",
    label_column: str = "label",
    train_split: str = "train",
    test_split: str = "test",
) -> Dataset:
    """Load a data set into memory from the Hugging Face hub or a local folder.

    Args:
        name: Name on the hub, such as "ylecun/mnist", or the path of a folder in a known
            format.
        configuration: Name of a configuration, if there are several.
        input_column: Column with pictures of one size, or lists of numbers of one length.
        label_column: Column with labels, whole numbers from 0.
        train_split: Name of the training split.
        test_split: Name of the test split.

    Raises:
        UsageError: If the package `datasets` is not installed.
        DataError: If the data set cannot be loaded, or its samples differ in shape.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(
            f"{name!r} comes from Hugging Face, which needs another package: "
            "pip install edgegossip[huggingface]"
        ) from None
    try:
        tables = load_dataset(name, configuration, **_without_remote_code(load_dataset))
        columns = {
            (split, column): _column(tables[split], column)
            for split in (train_split, test_split)
            for column in (input_column, label_column)
        }
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{name!r} of Hugging Face cannot be loaded, or lacks a split or column: {error}"
        ) from error
    train, test = (
        _split(columns[split, input_column], columns[split, label_column], f"{name}, {split}")
        for split in (train_split, test_split)
    )
    return _standardized(name, train, test, _num_classes(train, name))


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": lambda _: digits(),
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "imagenet8x8": downsampled_imagenet,
    "har": har,
}
"""Readers of data sets from the data folder, by name."""


@contextmanager
def _obtainable(title: str, url: str, place: Path) -> Iterator[None]:
    """Add the source of the data set, and its place in the data folder, to any `DataError`."""
    try:
        yield
    except DataError as error:
        given = place.parent
        is_too_deep = not place.exists() and given.name == place.name
        hint = f" (did you mean {given.parent}?)" if is_too_deep else ""
        raise DataError(
            f"{error}; get {title} from {url}, and name the folder that holds {place.name} "
            f"with --data-dir or EDGEGOSSIP_DATA{hint}"
        ) from error


def _idx_splits(folder: Path) -> tuple[ArraySplit, ArraySplit]:
    train, test = (
        _split(
            read_idx(folder / f"{part}-images-idx3-ubyte", num_dims=3),
            read_idx(folder / f"{part}-labels-idx1-ubyte", num_dims=1),
        )
        for part in ("train", "t10k")
    )
    return train, test


def _imagenet_batch(path: Path, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = read_npz(path, ("data", "labels"))
    data, labels = arrays["data"], arrays["labels"]
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * size * size:
        raise DataError(
            f"{path}: data is {data.dtype} {list(data.shape)}, "
            f"expected uint8 [num_samples, {3 * size * size}]"
        )
    if labels.shape != data.shape[:1]:
        raise DataError(
            f"{path}: labels are {list(labels.shape)}, expected one for each of {len(data)} "
            "samples"
        )
    return data.reshape(-1, 3, size, size), _int64(labels, f"{path}: labels").numpy() - 1


def _without_remote_code(load: Callable[..., Any]) -> dict[str, bool]:
    """Arguments that forbid a data set's own code; `datasets` 4 and later never runs any."""
    is_asked = "trust_remote_code" in inspect.signature(load).parameters
    return {"trust_remote_code": False} if is_asked else {}


def _column(table: Any, name: str) -> NDArray[Any]:  # noqa: ANN401 - `datasets` has no types
    column = np.stack([np.asarray(value) for value in table[name]])
    is_colored = column.dtype == np.uint8 and column.ndim == 4
    return column.transpose(0, 3, 1, 2) if is_colored else column


def _split(x: NDArray[Any], y: NDArray[Any], where: str = "") -> ArraySplit:
    """Convert arrays to tensors: pictures stay uint8, all other samples become float32."""
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, np.newaxis]  # gray pictures have one channel
    if x.ndim < 2 or 0 in x.shape[1:] or x.dtype.kind not in "iuf":
        raise DataError(
            f"{where}: samples are {x.dtype} {list(x.shape)}, "
            "expected numbers [num_samples, channels, ...]"
        )
    if x.dtype != np.uint8:
        # Numbers that are too large become infinite, and `Dataset` says where.
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    return ArraySplit(torch.from_numpy(np.ascontiguousarray(x)), _int64(y, f"{where}: labels"))


def _int64(array: NDArray[Any], where: str) -> Tensor:
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where} are {array.dtype}, expected whole numbers")
    return torch.from_numpy(array.astype(np.int64))


def _num_classes(train: ArraySplit, where: str) -> int:
    # Splits without labels are left to `Dataset` to refuse.
    num_classes = int(train.y.max()) + 1 if train.y.numel() else 1
    most = max(MAX_CLASSES, len(train))
    if num_classes > most:
        raise DataError(
            f"{where}: a label is {num_classes - 1}, expected 0 .. {most - 1} for {len(train)} "
            "samples; number the classes from 0 without gaps"
        )
    return num_classes


def _standardized(name: str, train: ArraySplit, test: ArraySplit, num_classes: int) -> Dataset:
    """Make a data set with channels standardized by their statistics over `train`."""
    mean, std = channel_statistics(train.x)
    return Dataset(name, train, test, num_classes, tuple(train.x.shape[1:]), mean, std)
