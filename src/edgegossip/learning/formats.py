"""Readers of public data formats, with a `DataError` for every flaw."""

from __future__ import annotations

import gzip
import math
import tokenize
import zipfile
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from edgegossip.core.errors import DataError

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
