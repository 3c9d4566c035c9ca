"""Trackers by name, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from edgegossip.integrations.mlflow import MLflow
from edgegossip.integrations.tensorboard import TensorBoard
from edgegossip.integrations.trackio import Trackio
from edgegossip.integrations.wandb import WandB
from edgegossip.runs.tracking import Tracker

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
