"""Trackio: a local dashboard by Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

from edgegossip.contract.errors import require_extra
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.tracking import TrackedRun


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Logs a run's numbers with trackio: ``trackio show --project edgegossip`` shows them.

    The step axis counts processed samples.

    Args:
        project: Name of the project. Its database is in the folder that the environment
            variable TRACKIO_DIR names, or by default in trackio's own folder.

    Raises:
        UsageError: If the package `trackio` is missing.
    """

    project: str = "edgegossip"

    def __post_init__(self) -> None:
        require_extra("Trackio", "trackio")

    def begin(self, run: TrackedRun) -> _TrackioRun:
        """Begin to log a run."""
        return _TrackioRun(self.project, run)


class _TrackioRun:
    """Logs one run."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import trackio

        with redirect_stdout(StringIO()):  # its advice would be between our lines
            self._run = trackio.init(
                project=project,
                name=run.name,
                group=run.group,
                config={**run.settings, "folder": str(run.folder.resolve())},
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self._finish = trackio.finish  # `self._run.finish` would be called again at exit

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        self._run.log({**numbers, "seconds": seconds}, step=step)

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        self._run.log({f"end/{name}": value for name, value in summary.items()})
        with redirect_stdout(StringIO()):
            self._finish()
