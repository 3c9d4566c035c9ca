"""MLflow: runs with parameters and curves in its database or on its server."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgegossip.contract.errors import require_extra
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.tracking import TrackedRun

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
    path = Path(tempfile.gettempdir(), f"edgegossip-mlflow-{os.getuid()}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
