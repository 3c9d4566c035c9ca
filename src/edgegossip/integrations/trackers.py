"""Trackers: other packages' files, databases and dashboards for the numbers of a run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

from edgegossip.contract.errors import require_extra
from edgegossip.contract.protocol import Seconds
from edgegossip.machine.files import locked_file
from edgegossip.machine.system import user_number
from edgegossip.runs.tracking import TrackedRun, Tracker

_STATUS = {"interrupted": "KILLED", "failed": "FAILED"}
_MAX_PARAMS = 100
"""Maximum number of parameters in one call of MLflow."""


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Logs a run's numbers with MLflow: ``mlflow ui`` shows them.

    The step axis counts processed samples. The axis "Time (Relative)" shows the time of the
    run, which is virtual in the simulator.

    Args:
        experiment: Name of the experiment in MLflow, which groups runs.
        tracking_uri: Database or server; None for the environment variable MLFLOW_TRACKING_URI
            or, if that is not set, MLflow's own default.

    Raises:
        UsageError: If the package `mlflow` is missing.
    """

    experiment: str = "edgegossip"
    tracking_uri: str | None = None

    def __post_init__(self) -> None:
        require_extra("MLflow", "mlflow")

    def begin(self, run: TrackedRun) -> _MLflowRun:
        """Begin to log a run."""
        return _MLflowRun(self.experiment, self.tracking_uri, run)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep two processes from making a new database or experiment at once; one would fail."""
    path = Path(tempfile.gettempdir(), f"edgegossip-mlflow-{user_number()}.lock")
    with locked_file(path, wait=True):
        yield


class _MLflowRun:
    """Logs one run."""

    def __init__(self, experiment: str, tracking_uri: str | None, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        # A client, and no global run: a program may follow several runs at once.
        with _one_at_a_time():
            self._client = MlflowClient(tracking_uri)
            found = self._client.get_experiment_by_name(experiment)
            number = (
                found.experiment_id if found else self._client.create_experiment(experiment)
            )
        tags = {"recipe": run.group, "folder": str(run.folder.resolve())}
        self._id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        self._started = time.time()
        params = [Param(name, str(value)) for name, value in run.settings.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        when = round(1000 * (self._started + seconds))
        metrics = [self._metric(name, value, when, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [
            self._metric(f"end/{name}", value, now, 0) for name, value in summary.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)
        self._client.set_tag(self._id, "reason", reason)
        self._client.set_terminated(self._id, _STATUS.get(reason, "FINISHED"))


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


TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow", "trackio"]

_BY_NAME: dict[TrackerName, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def trackers(names: Iterable[TrackerName]) -> tuple[Tracker, ...]:
    """Make the trackers with these names and their default settings.

    Raises:
        UsageError: If the package of a tracker is missing.
    """
    return tuple(_BY_NAME[name]() for name in dict.fromkeys(names))
