"""Snapshots of a worker's model, at times common to all workers, for later evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Seconds
from edgegossip.net.runtime import BackgroundThread
from edgegossip.real.lapse import Lapse
from edgegossip.runs.files import write_atomically

_SHORTEST: Seconds = 0.5
MAX_BYTES = 2**30
"""Maximum total bytes of one worker's snapshots; large models get fewer snapshots."""


def schedule() -> Iterator[Seconds]:
    """The times of snapshots: at first every half second, then at the resolution of a plot.

    >>> times = schedule()
    >>> [next(times) for _ in range(3)]
    [0.0, 0.5, 1.0]
    """
    time = 0.0
    while True:
        yield time
        time += max(_SHORTEST, time / 60)


class Snapshots:
    """Writes snapshots during training; `due` is a chore for the host.

    Args:
        folder: Folder, made if missing.
        estimate: Returns the current parameters to evaluate, [num_params], or an empty tensor
            while this worker's parameters do not count.
        checkpoint_bytes: Returns the size of the last checkpoint, 0 if there is none. No
            snapshot takes the room of two checkpoints: the last and the next one.
    """

    def __init__(
        self,
        folder: Path,
        estimate: Callable[[], Tensor],
        checkpoint_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._folder = folder
        self._estimate = estimate
        self._checkpoint_bytes = checkpoint_bytes
        self._lapse = Lapse("new snapshots")
        self._times = enumerate(schedule())
        self._next = next(self._times)
        self._num_bytes = 0
        self._writer = BackgroundThread("snapshots")
        folder.mkdir(parents=True, exist_ok=True)

    def due(self, now: Seconds) -> Seconds:
        """Take the snapshot that is due; return the time of the next snapshot."""
        index = self._next[0]
        while self._next[1] <= now:
            index = self._next[0]
            self._next = next(self._times)
        params = self._estimate()
        num_bytes = params.numel() * params.element_size()
        if self._num_bytes + num_bytes <= MAX_BYTES and self._has_room(num_bytes):
            self._num_bytes += num_bytes
            self._writer.submit(lambda: self._write(index, params))
        return self._next[1]

    def _has_room(self, num_bytes: int) -> bool:
        needed = num_bytes + 2 * max(num_bytes, self._checkpoint_bytes())
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._lapse.begin(error)
            return False
        if free < needed:
            self._lapse.begin(
                f"{free / 1e6:.1f} MB are free in {self._folder}, and a snapshot must leave "
                f"room for two checkpoints ({needed / 1e6:.1f} MB in all)"
            )
        return free >= needed

    def close(self) -> None:
        """Wait up to 60 s for all snapshots to be written."""
        self._writer.close(60.0)

    def _write(self, index: int, params: Tensor) -> None:
        try:
            write_atomically(
                snapshot_path(self._folder, index), safetensors.torch.save({"params": params})
            )
        except RunFolderError as error:
            self._lapse.begin(error)
        else:
            self._lapse.end()

    def delete(self) -> None:
        """Delete all snapshots, for the room that they take."""
        for index in indices(self._folder):
            with suppress(OSError):
                snapshot_path(self._folder, index).unlink()


def snapshot_path(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.safetensors"


def indices(folder: Path) -> list[int]:
    """Indices of the existing snapshots, in order."""
    found = (path.stem for path in folder.glob("*.safetensors"))
    return sorted(int(stem) for stem in found if stem.isdecimal())


def read_params(path: Path, num_params: int | None = None) -> Tensor:
    """Read a snapshot, or a worker's last parameters.

    Args:
        path: Path of the file.
        num_params: Required number of parameters; None for any number.

    Raises:
        RunFolderError: If the file is missing or damaged, or belongs to another model.
    """
    try:
        params = safetensors.torch.load_file(path)["params"]
    except (OSError, LookupError, ValueError, safetensors.SafetensorError) as error:
        raise RunFolderError(f"cannot read {path}: {error!r}; expected parameters") from error
    if params.dim() != 1 or len(params) != (len(params) if num_params is None else num_params):
        expected = f"[{'num_params' if num_params is None else num_params}]"
        raise RunFolderError(
            f"{path} has parameters of shape {list(params.shape)}, expected {expected}; is it "
            "of another model?"
        )
    if params.dtype != torch.float32:
        raise RunFolderError(f"{path} has parameters of {params.dtype}, expected torch.float32")
    return params
