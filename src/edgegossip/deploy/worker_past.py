"""A worker's earlier progress, found in its folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from edgegossip.core.errors import RunFolderError
from edgegossip.core.protocol import Seconds
from edgegossip.deploy.introducing import shared_settings, without_machine
from edgegossip.deploy.worker_folder import read_summary, require_numbers
from edgegossip.experiments.describe import header
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.files import load_checkpoint
from edgegossip.experiments.run_folder import (
    difference,
    holds_run,
    read_json,
)

_LOG = logging.getLogger("edgegossip.deploy")
ENDS = ("finished", "time limit")
"""Reasons after which a worker has ended for good."""


def require_gathered(out: Path) -> None:
    """Check that the run in `out`, if any, is of workers, and not simulated.

    Raises:
        RunFolderError: If the run is simulated.
    """
    if holds_run(out) and read_json(out / "experiment.json").get("driver") != "network":
        raise RunFolderError(
            f"{out} holds a simulated run; choose another --out, and move the folder workers "
            "there if there is one"
        )


def require_worker_of(experiment: Experiment, out: Path) -> None:
    """Check that the worker whose folder is `out`, if any, took part in this experiment.

    Raises:
        RunFolderError: If the worker took part in another experiment.
    """
    path = out / "experiment.json"
    if path.exists():
        described = (read_json(path), header(experiment, None))
        if changed := difference(*map(shared_settings, described)):
            raise RunFolderError(
                f"{out} holds a worker of another experiment: {changed}; gather with the "
                "recipe and the options that all workers had"
            )


def has_ended(out: Path, header: dict[str, Any]) -> bool:
    """Whether the worker whose folder is `out` has finished for good.

    Args:
        out: Folder, which may be missing.
        header: Header of the experiment that the worker must belong to.

    Raises:
        RunFolderError: If the worker belongs to another experiment.
    """
    path = out / "experiment.json"
    if not path.exists():
        return False
    # A worker may continue on another device of its machine.
    described = (
        without_machine({**each, "versions": None, "commit": None})
        for each in (read_json(path), header)
    )
    if changed := difference(*described):
        raise RunFolderError(
            f"{out} holds a worker of another experiment: {changed}; choose another --out, or "
            "give the options that it had"
        )
    return final_summary(out) is not None


def final_summary(out: Path) -> dict[str, Any] | None:
    """The summary of a worker that has finished for good; None for any other worker.

    Raises:
        RunFolderError: If the summary is damaged.
    """
    path = out / "summary.json"
    summary = read_summary(path) if path.exists() else None
    return summary if summary is not None and summary["reason"] in ENDS else None


def goes_on_at(out: Path) -> Seconds:
    """Time in the run at which the worker with the folder `out` continues, or ended."""
    if (summary := final_summary(out)) is not None:
        return float(summary["seconds"])
    checkpoint = kept_checkpoint(out / "checkpoint.safetensors")
    return 0.0 if checkpoint is None else float(checkpoint["now"])


def kept_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint of a worker; None if it is missing or unusable."""
    if not path.exists():
        return None
    try:
        checkpoint = load_checkpoint(path)
        if not isinstance(checkpoint, dict):
            raise ValueError(f"it holds {checkpoint!r:.60}")
        require_numbers(checkpoint, ("now", "incarnation"))
        return checkpoint
    except ValueError as error:
        _LOG.warning("%s is not a worker's checkpoint (%s) - starting without it", path, error)
        return None
    except RunFolderError as error:
        _LOG.warning("%s - beginning without it", error)
        return None
