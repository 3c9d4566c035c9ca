"""The state of an unfinished run, small enough to carry from one machine to another.

A checkpoint is kept exactly: a rounded one would change the run, and copies of one model at two
ends of a link, which an algorithm relies on being equal, would differ for good if a message
between them was in flight. It is made smaller without loss:

- equal tensors, such as the model that all workers of DiLoCo share, are stored once;
- the bytes of float32 numbers are sorted by their place, so that `zlib` finds the exponents;
- the log of events, hundreds of megabytes after 200 epochs, is reduced to the evaluations.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.runs.events import parse_event, whole_lines
from edgegossip.runs.files import (
    LOADING_ERRORS,
    load_checkpoint,
    read_json,
    save_checkpoint,
    write_atomically,
)
from edgegossip.runs.results import ENDS

CHECKPOINT, EVENTS = "checkpoint.safetensors", "events.jsonl"
_STATE, _SHORT_LOG = "state", "events.short"
FILE_BYTES = 12 * 2**20
"""Maximum size of a file; many ways of getting files from a machine have a limit."""
_LEVEL = 1  # higher levels save less than 1 % of random mantissas


def pack(folder: Path) -> int:
    """Replace the checkpoint in the folder of an interrupted run by its packed state.

    A process that is killed meanwhile leaves a checkpoint, the packed state or both, and both
    continue the same run.

    Returns:
        Bytes of the packed state.
    """
    tree = load_checkpoint(folder / CHECKPOINT)
    log = b"".join(_kept_lines(folder / EVENTS, tree["log_size"]))
    write_atomically(folder / _SHORT_LOG, log)
    content = packed({**tree, "log_size": len(log)})
    for each in _packed_files(folder):  # of the last stop
        each.unlink()
    number = -(-len(content) // FILE_BYTES)
    for index in range(number):
        part = content[index * FILE_BYTES : (index + 1) * FILE_BYTES]
        write_atomically(folder / f"{_STATE}-{index + 1}-of-{number}.bin", part)
    (folder / CHECKPOINT).unlink()  # it counts on the whole log
    (folder / _SHORT_LOG).replace(folder / EVENTS)
    return len(content)


def _kept_lines(log: Path, end: int) -> Iterator[bytes]:
    """The experiment and the evaluations, as a finished run's folder must have them."""
    for number, line in enumerate(whole_lines(log, 0, end)):
        if number == 0 or parse_event(line)["type"] == "evaluated":
            yield line


def unpack(folder: Path) -> None:
    """Restore the checkpoint from the packed state, unless there is a checkpoint.

    Raises:
        RunFolderError: If a file of the state is missing or damaged.
    """
    if (folder / CHECKPOINT).exists():
        (folder / _SHORT_LOG).unlink(missing_ok=True)
        return
    if not (files := _packed_files(folder)):
        return
    if (folder / _SHORT_LOG).exists():
        (folder / _SHORT_LOG).replace(folder / EVENTS)
    number = int(files[0].stem.rpartition("-")[2])
    expected = [folder / f"{_STATE}-{index + 1}-of-{number}.bin" for index in range(number)]
    if missing := [each for each in expected if each not in files]:
        raise RunFolderError(
            f"{missing[0]} is missing; bring it here, or delete {folder} to begin the cell anew"
        )
    try:
        tree = unpacked(b"".join(each.read_bytes() for each in expected))
    except (zlib.error, safetensors.SafetensorError, OSError, *LOADING_ERRORS) as error:
        raise RunFolderError(
            f"the state in {folder} is damaged ({error!r:.200}); bring it here again, or "
            f"delete {folder} to begin the cell anew"
        ) from error
    save_checkpoint(folder / CHECKPOINT, tree)


def has_state(folder: Path) -> bool:
    """Whether a folder has a run that can go on, or one that has just ended."""
    if (folder / CHECKPOINT).exists() or _packed_files(folder):
        return True
    with suppress(RunFolderError):
        return read_json(folder / "summary.json").get("reason") in ENDS
    return False


def _packed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_STATE}-*-of-*.bin"))


def packed(tree: object) -> bytes:
    """Write a tree (see `contract.snapshot`) in as few bytes as are exact.

    >>> tree = {"x": torch.arange(3.0), "n": 1}
    >>> unpacked(packed(tree))
    {'x': tensor([0., 1., 2.]), 'n': 1}
    """
    plain, tensors = dismantle(tree)
    first: dict[Any, str] = {}
    same = {name: first.setdefault(_content(each), name) for name, each in tensors.items()}
    kept = {name: _by_place(each) for name, each in tensors.items() if same[name] == name}
    forms = {
        name: [str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)]
        for name in kept
    }
    text = bytearray(json.dumps({"plain": plain, "same": same, "forms": forms}).encode())
    kept["text"] = torch.frombuffer(text, dtype=torch.uint8)
    return zlib.compress(safetensors.torch.save(kept), _LEVEL)


def unpacked(content: bytes) -> Any:  # noqa: ANN401
    """Read what `packed` wrote."""
    kept = safetensors.torch.load(zlib.decompress(content))
    text = json.loads(kept.pop("text").numpy().tobytes())
    found = {name: _from_places(kept[name], *form) for name, form in text["forms"].items()}
    # Copies, because what restores a tree may change its tensors.
    tensors = {
        name: found[other] if name == other else found[other].clone()
        for name, other in text["same"].items()
    }
    return assemble(text["plain"], tensors)


def _content(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, _bytes(tensor).numpy().tobytes()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _by_place(tensor: Tensor) -> Tensor:
    """The first bytes of all numbers, then their second bytes, and so on."""
    return _bytes(tensor).view(tensor.numel(), tensor.element_size()).T.contiguous().view(-1)


def _from_places(content: Tensor, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    numbers = content.view(kind.itemsize, math.prod(shape)).T.contiguous()
    return numbers.view(-1).view(kind).view(shape).clone()
