"""Weights & Biases, offline: a run's numbers in files that can be sent later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from edgegossip.contract.errors import require_extra
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.tracking import TrackedRun


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Writes a run's numbers for Weights & Biases, into `wandb` in the run's folder.

    Nothing is sent during the run; ``wandb sync RUN/wandb/offline-run-*`` uploads the files
    afterwards. The horizontal axis of curves is the number of processed samples; `seconds`, the
    time in the run, is an alternative.

    Args:
        project: Name of the project.
        mode: "offline", "online" or "disabled"; None for the environment variable WANDB_MODE
            or, if that is not set, "offline".

    Raises:
        UsageError: If the package `wandb` is missing.
    """

    project: str = "edgegossip"
    mode: str | None = None

    def __post_init__(self) -> None:
        require_extra("Weights & Biases", "wandb")

    def begin(self, run: TrackedRun) -> _WandBRun:
        """Begin to write a run."""
        return _WandBRun(
            self.project, self.mode or os.environ.get("WANDB_MODE", "offline"), run
        )


class _WandBRun:
    """Writes one run."""

    def __init__(self, project: str, mode: str, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=run.name,
            group=run.group,
            config=dict(run.header),
            dir=str(run.folder),
            mode=mode,
            # Its lines would be between those of our live view.
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="samples_processed")

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        self._run.log({**numbers, "samples_processed": step, "seconds": seconds})

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update({**summary, "reason": reason})
        self._run.finish(exit_code=int(reason == "failed"))
