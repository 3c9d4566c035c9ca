"""Files of a run folder: atomic writing, and checkpoints without pickles."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edgegossip.core.atomic import write_whole
from edgegossip.core.errors import RunFolderError
from edgegossip.core.snapshot import assemble, dismantle


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
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}; free some space or choose another --out"
        ) from error


def write_json(path: Path, content: object) -> None:
    """Write a JSON file for people and programs, atomically.

    Raises:
        RunFolderError: If the file cannot be written.
    """
    write_atomically(path, to_json(content, indent=2).encode() + b"\n")


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
        content = safetensors.torch.save(tensors, metadata={"digest": _digest(tensors)})
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
        RunFolderError: If the file is missing or damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["digest"] != _digest(tensors):
            raise ValueError("its content has changed since it was written")
        return assemble(json.loads(tensors.pop(_PLAIN).numpy().tobytes()), tensors)
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} is missing; --resume needs the --out folder of an interrupted run"
        ) from None
    except (safetensors.SafetensorError, OSError, *LOADING_ERRORS) as error:
        raise RunFolderError(
            f"{path} is not a checkpoint of this program ({error!r:.300}); delete it, and "
            "--resume begins from the start"
        ) from error
