"""TensorBoard: curves of runs in a browser, from files in their folders."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import require_extra
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.tracking import TrackedRun


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Writes a run's numbers for TensorBoard: ``tensorboard --logdir runs`` shows them.

    The step axis counts processed samples. The axis "Relative" shows the time of the run, which
    is virtual in the simulator.

    Args:
        folder: Folder with a subfolder for each run; None for `tensorboard` in the run's
            folder.

    Raises:
        UsageError: If the package `tensorboard` is missing.
    """

    folder: Path | str | None = None

    def __post_init__(self) -> None:
        require_extra("TensorBoard", "tensorboard")

    def begin(self, run: TrackedRun) -> _TensorBoardRun:
        """Begin to write a run."""
        within = run.folder / "tensorboard"
        folder = within if self.folder is None else Path(self.folder) / run.name
        return _TensorBoardRun(folder, run)


class _TensorBoardRun:
    """Writes one run."""

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run is written from its beginning: what was there before is hidden.
        self._writer: Any = SummaryWriter(str(folder), purge_step=0)
        self._settings = run.settings
        self._started = time.time()

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=self._started + seconds)
        self._writer.flush()

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        results = {f"end/{name}": value for name, value in summary.items()}
        self._writer.add_hparams({**self._settings, "reason": reason}, results, run_name=".")
        self._writer.close()
