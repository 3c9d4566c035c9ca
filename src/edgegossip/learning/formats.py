"""Public file formats of data sets as arrays, or a `DataError` that says what is wrong."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgegossip.core.errors import DataError

IDX_UNSIGNED_BYTE = 0x08
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or with `.gz` behind its name.

    Four bytes of magic (0, 0, type, number of dimensions), each dimension as a big-endian
    uint32, then the values.

    Args:
        path: The plain file's name; where it does not exist, the name with `.gz` is read.
        num_dims: Dimensions expected: 3 for pictures, 1 for labels.

    Raises:
        DataError: The file is missing, no gzip, of another type or not as long as it says.

    References:
        LeCun, Cortes and Burges, "The MNIST database", section "File formats".
    """
    content, path = _read_plain_or_gzip(path)
    magic = bytes((0, 0, IDX_UNSIGNED_BYTE, num_dims))
    if content[:4] != magic:
        raise DataError(f"{path} starts with {content[:4].hex()!r}, expected {magic.hex()!r}")
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path} has {len(content)} bytes, expected a header of {start}")
    shape = tuple(np.frombuffer(content, ">u4", num_dims, offset=4).tolist())
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} has {len(content) - start} bytes after its header, "
            f"expected {math.prod(shape)} for shape {list(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_plain_or_gzip(path: Path) -> tuple[bytearray, Path]:
    # A bytearray, because PyTorch warns of tensors on memory that cannot be written to.
    packed = path.with_name(f"{path.name}.gz")
    try:
        if path.exists() or not packed.exists():
            return bytearray(path.read_bytes()), path
        return bytearray(gzip.decompress(packed.read_bytes())), packed
    except FileNotFoundError:
        raise DataError(f"{path} is missing, and so is {packed.name}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} or {packed.name} cannot be read: {error}") from error


def read_cifar10(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read one file of the binary version of CIFAR-10.

    Each record is one byte of label, then the red, green and blue planes of 32 rows of 32.

    Returns:
        Pictures [num_samples, 3, 32, 32] and labels [num_samples].

    Raises:
        DataError: The file is missing or does not consist of whole records.
    """
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) == 0 or len(content) % CIFAR_RECORD_BYTES:
        raise DataError(
            f"{path} has {len(content)} bytes, expected a multiple of {CIFAR_RECORD_BYTES} "
            f"(30,730,000 for the 10,000 records of an official file)"
        )
    records = content.reshape(-1, CIFAR_RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_npz(
    path: Path, keys: tuple[str, ...], optional_keys: tuple[str, ...] = ()
) -> dict[str, NDArray[np.generic]]:
    """Read the arrays `keys`, and those of `optional_keys` that exist, from an `.npz` file.

    Pickled objects are refused, because unpickling runs whatever code the file holds.

    Raises:
        DataError: The file is missing or damaged, lacks a key, or holds pickled objects.
    """
    try:
        # Opened here, because np.load forgets to close a damaged file.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} is no .npz archive; write it with numpy.savez")
            missing = [key for key in keys if key not in archive]
            if missing:
                raise DataError(f"{path} lacks {missing}; it holds {sorted(archive)}")
            arrays = {key: archive[key] for key in (*keys, *optional_keys) if key in archive}
            if strange := [k for k, a in arrays.items() if not isinstance(a, np.ndarray)]:
                raise ValueError(f"{strange} are no arrays")
            return arrays
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (
        OSError,
        EOFError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path} is damaged or holds pickled objects; expected an .npz of plain numbers "
            f"({error})"
        ) from error
