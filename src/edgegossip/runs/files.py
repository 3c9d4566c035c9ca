"""Files of a run folder: JSON, checkpoints without pickles, and the lock of the folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.machine.files import (
    NO_ROOM,
    locked_file,
    reserve,
    reserve_of,
    write_reserved,
    write_whole,
)

EVALUATIONS = Path("workers", "evaluations.json")
"""Where a run folder has the evaluations of its workers' snapshots."""


def make_folder(path: Path) -> None:
    """Make a folder for results, unless it exists.

    Raises:
        RunFolderError: If the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot make {path}: {error.strerror}; choose another --out"
        ) from error


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file of a run folder, as `write_whole` does.

    Raises:
        RunFolderError: If the file cannot be written.
    """
    with writing(path):
        write_whole(path, content)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunFolderError that names the file being written."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}; free some space or choose another --out"
        ) from error


def is_for_lack_of_room(error: RunFolderError) -> bool:
    """Whether a file could not be written because the disk, or a quota, is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM


class ReservedFile:
    """A file to write at the end of a run, with room for it from the beginning.

    Args:
        path: The file. Until it is written, the room is kept in a file beside it.
        num_bytes: Bytes to reserve.

    Raises:
        RunFolderError: If there is no room.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        with writing(path):
            reserve(path, num_bytes)

    def write(self, content: bytes) -> None:
        """Write the file atomically.

        Raises:
            RunFolderError: If the file cannot be written; its room is then kept.
        """
        with writing(self._path):
            write_reserved(self._path, content)

    def release(self) -> None:
        """Give the room back, for something else to write."""
        with suppress(OSError):
            reserve_of(self._path).unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file for people and programs, atomically.

    Raises:
        RunFolderError: If the file cannot be written.
    """
    write_atomically(path, json_file(content))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder.

    Raises:
        RunFolderError: If the file is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing; {path.parent} is not a run folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {path}: {error}; run it again") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} is not a JSON object; run it again")
    return content


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from a JSON file is a number; in Python, true and false are, too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_file(content: object) -> bytes:
    """The bytes of a JSON file for people and programs."""
    return to_json(content, indent=2).encode() + b"\n"


def to_json(content: object, **style: Any) -> str:  # noqa: ANN401
    """Write `content` as standard JSON, with null for numbers that are not finite.

    >>> to_json({"loss": float("nan")})
    '{"loss": null}'
    """
    try:
        return json.dumps(content, allow_nan=False, **style)
    except ValueError:
        return json.dumps(_without_nan(content), **style)


def _without_nan(content: object) -> object:
    match content:
        case float() if not math.isfinite(content):
            return None
        case dict():
            return {key: _without_nan(value) for key, value in content.items()}
        case list() | tuple():
            return [_without_nan(value) for value in content]
    return content


def save_checkpoint(path: Path, tree: object) -> None:
    """Write `tree` (see `core.snapshot`) to `path`.

    Raises:
        RunFolderError: If the file cannot be written.
    """
    plain, tensors = dismantle(tree)
    # Not in the header, whose size is limited.
    text = bytearray(json.dumps(plain).encode())
    tensors[_PLAIN] = torch.frombuffer(text, dtype=torch.uint8)
    try:
        metadata = {"digest": _digest(tensors), "version": version("edgegossip")}
        content = safetensors.torch.save(tensors, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise RunFolderError(f"{path} cannot be written ({error})") from error
    write_atomically(path, content)


_PLAIN = "plain"


LOADING_ERRORS = (
    ArithmeticError,
    AttributeError,
    AssertionError,
    LookupError,
    RuntimeError,  # PyTorch's, and RecursionError
    TypeError,
    ValueError,
)
"""Errors raised by reading a foreign checkpoint."""


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_checkpoint(path: Path) -> Any:  # noqa: ANN401
    """Read a file that `save_checkpoint` wrote.

    Raises:
        RunFolderError: If the file is missing or damaged, or its version differs too much.
    """
    own = written_by = version("edgegossip")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["digest"] != _digest(tensors):
            raise ValueError("its content has changed since it was written")
        written_by = metadata.get("version", own)
        return assemble(json.loads(tensors.pop(_PLAIN).numpy().tobytes()), tensors)
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} is missing; --resume needs the --out folder of an interrupted run"
        ) from None
    except (safetensors.SafetensorError, OSError, *LOADING_ERRORS) as error:
        if written_by == own:
            problem, remedy = "is not a checkpoint of this program", "delete it"
        else:
            problem = f"is of edgegossip {written_by}, which keeps other things than {own}"
            remedy = f"resume with {written_by}; or delete it"
        raise RunFolderError(
            f"{path} {problem} ({error!r:.300}); {remedy}, and --resume begins from the start"
        ) from error


# Locks.


LOCK = ".lock"
"""Name of the lock file, which contains the writing process's id."""
_LOG = logging.getLogger("edgegossip.runs")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of `folder` during the block; make a missing folder.

    A lock file of a killed process is harmless. Child processes never inherit the
    lock; a worker's process locks its own folder.

    Raises:
        RunFolderError: If another process, or this one, holds the lock, or the folder cannot be
            written.
    """
    make_folder(folder)
    path = folder / LOCK
    with ExitStack() as stack:
        try:
            problem = stack.enter_context(locked_file(path, wait=False))
        except BlockingIOError as error:
            raise RunFolderError(
                f"{folder} is in use by {error.strerror}; wait until it has ended, or choose "
                "another --out"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"cannot write {path}: {error.strerror}; choose another --out"
            ) from error
        if problem is not None:
            _LOG.warning("%s", problem)
        yield


def require_unlocked(*folders: Path) -> None:
    """Reject folders that a process is writing to, before any work.

    Raises:
        RunFolderError: If a folder is locked.
    """
    for folder in folders:
        if (folder / LOCK).exists():
            with locked(folder):
                pass


def lock_holder(folder: Path) -> int | None:
    """Number of the process that has last locked a folder and not unlocked it, if any.

    The process may have been killed since.
    """
    try:
        text = (folder / LOCK).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
