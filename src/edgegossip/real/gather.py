"""One run folder from the folders of workers: `edgegossip gather`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank
from edgegossip.data.local import Local
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.local_scores import LocalGathering
from edgegossip.real.worker_folder import require_gathered
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import locked
from edgegossip.runs.results import Results


def gather(
    experiment: Experiment,
    out: Path,
    recipe: str | None = None,
    without: Collection[Rank] = (),
) -> tuple[Results | list[Rank], list[str]]:
    """Make one run folder from the workers' folders in `out`, over an earlier gathering's.

    Args:
        experiment: The workers' experiment.
        out: Run folder.
        recipe: Name of the recipe, for the record.
        without: Workers with `Local` data whose measurements are not awaited.

    Returns:
        The results, and everything missing in them (`Gathering.left_out`). With `Local` data,
        the ranks of workers that have not measured all averaged models, if any, replace the
        results.

    Raises:
        RunFolderError: If no worker left a model, a worker belonged to another experiment, or
            `out` cannot be written, holds a simulated run, or is in use.
    """
    if not (out / WORKERS).is_dir():
        raise RunFolderError(
            f"there is no folder {out / WORKERS}; copy the folder of worker R there as "
            f"{WORKERS}/R, or choose another --out"
        )
    with locked(out):
        require_gathered(out)
        gathering = make_gathering(experiment, out, recipe, without=without)
        waited_for = gathering.average()
        return waited_for or gathering.finish(), gathering.left_out


def make_gathering(
    experiment: Experiment,
    out: Path,
    recipe: str | None = None,
    command: str | None = None,
    without: Collection[Rank] = (),
) -> Gathering:
    """Make the `Gathering` of a run, or for `Local` data a `LocalGathering`."""
    if isinstance(experiment.task.dataset, Local):
        return LocalGathering(experiment, out, recipe, command, without)
    return Gathering(experiment, out, recipe, command)
