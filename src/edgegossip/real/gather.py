"""`edgegossip gather` and `edgegossip measure`, also for data that stays with the workers.

In the folder of a run, `averaged` holds models named by their content, and `measured` a file of
numbers for each worker. Models are sent to the data; only numbers are sent back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.algorithm import opened
from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank
from edgegossip.data.local import Local
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.introduction import shared_settings
from edgegossip.real.worker_files import read_params
from edgegossip.real.worker_folder import require_gathered
from edgegossip.runs.describe import header, with_article
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import locked, make_folder, read_json, write_atomically, write_json
from edgegossip.runs.folder import difference
from edgegossip.runs.results import Results
from edgegossip.training.evaluator import together
from edgegossip.training.metrics import Measurement, Metric

AVERAGED, MEASURED = "averaged", "measured"
_MOST_MOMENTS = 60
"""Maximum number of averaged models over time to measure: the resolution of a plot."""


class LocalScores:
    """Scores of averaged models, as far as workers have measured them.

    Args:
        experiment: The workers' experiment.
        out: Run folder.

    Attributes:
        behind: Workers that have not measured all requested models.
    """

    def __init__(self, experiment: Experiment, out: Path) -> None:
        self._experiment = experiment
        self._out = out
        self._metrics = experiment.task.chosen_first
        self._found: dict[Rank, dict[str, Measurement]] = {}
        self.behind: list[Rank] = []

    @property
    def silent(self) -> list[Rank]:
        """The workers with data that have measured nothing."""
        return [rank for rank in self._experiment.data_ranks if not self._found.get(rank)]

    def read(self) -> None:
        """Read the numbers that have arrived, and clear `behind`.

        Raises:
            RunFolderError: If a file is damaged.
        """
        self.behind.clear()
        for rank in self._experiment.data_ranks:
            self._found[rank] = read_measured(measured_path(self._out, rank), self._metrics)

    def find(
        self, params: Tensor, ranks: Sequence[Rank]
    ) -> tuple[float, dict[str, float]] | None:
        """Mean loss and metrics of a model over the data of `ranks`; None if any are missing.

        A model with missing numbers is written for the workers to measure.
        """
        # Models are named by their content.
        content = params.detach().cpu().contiguous()
        name = hashlib.sha256(content.numpy().tobytes()).hexdigest()[:24]
        late = [rank for rank in ranks if name not in self._found.get(rank, {})]
        if ranks and not late:
            total = together([self._found[rank][name] for rank in ranks])
            return total.loss, total.values(self._metrics)
        self.behind += (rank for rank in late if rank not in self.behind)
        folder = self._out / AVERAGED
        make_folder(folder)
        if not (folder / "experiment.json").exists():
            write_json(folder / "experiment.json", header(self._experiment, None))
        write_atomically(
            folder / f"{name}.safetensors", safetensors.torch.save({"params": content})
        )
        return None


def measure(experiment: Experiment, rank: Rank, out: Path) -> int:
    """Measure the averaged models in a run folder on this worker's data, as `edgegossip
    measure` does.

    Args:
        experiment: The workers' experiment.
        rank: Rank of the worker whose data is on this machine.
        out: Run folder; its `averaged` holds the models, and its `measured` gets the numbers.

    Returns:
        Number of models measured now.

    Raises:
        RunFolderError: If there is no model, or the models are of another experiment.
        DataError: If this worker's data cannot be read.
        ValueError: If the worker has no data.
    """
    if rank not in experiment.data_ranks:
        raise ValueError(f"rank must be one of {experiment.data_ranks}, which have data")
    folder = out / AVERAGED
    _require_same(experiment, folder)
    metrics = experiment.task.chosen_first
    found = read_measured(measured_path(out, rank), metrics)
    before = len(found)
    evaluator = experiment.workload((rank,)).validator(rank)
    assert evaluator is not None
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem not in found:
            found[path.stem] = evaluator.measure(read_params(path))
    make_folder(out / MEASURED)
    content = {name: _numbers(each) for name, each in found.items()}
    write_json(measured_path(out, rank), content)
    return len(found) - before


def measured_path(out: Path, rank: Rank) -> Path:
    """Path of the file with a worker's numbers."""
    return out / MEASURED / f"{rank}.json"


def read_measured(path: Path, metrics: Iterable[Metric]) -> dict[str, Measurement]:
    """Read the numbers of a worker; none if there is no file.

    Raises:
        RunFolderError: If the file is damaged.
    """
    if not path.exists():
        return {}
    names = [metric.name for metric in metrics]
    try:
        return {name: _measurement(each, names) for name, each in read_json(path).items()}
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} is damaged ({error!r:.200}); delete it, and let its worker measure again"
        ) from error


def _numbers(found: Measurement) -> dict[str, Any]:
    return {
        "num_samples": found.num_samples,
        "num_terms": found.num_terms,
        "total_loss": found.total_loss,
        "sums": {name: sums.tolist() for name, sums in found.sums.items()},
    }


def _measurement(told: Mapping[str, Any], names: Iterable[str]) -> Measurement:
    num_samples, num_terms = int(told["num_samples"]), int(told["num_terms"])
    if num_samples < 1 or num_terms < 0:
        raise ValueError(f"num_samples is {num_samples}, num_terms {num_terms}")
    loss = math.nan if told["total_loss"] is None else float(told["total_loss"])
    sums = {name: _tensor(told["sums"][name]) for name in names}
    return Measurement(num_samples, loss, num_terms, sums)


def _tensor(told: object) -> Tensor:
    """Read nested lists of numbers, in which null stands for a number that is not finite."""

    def numbers(each: object) -> object:
        if isinstance(each, list):
            return [numbers(item) for item in each]
        return math.nan if each is None else each

    return torch.tensor(numbers(told), dtype=torch.float64)


def _require_same(experiment: Experiment, folder: Path) -> None:
    path = folder / "experiment.json"
    if not path.exists():
        raise RunFolderError(
            f"there is no folder {folder} with averaged models; copy it from the machine where "
            "`edgegossip gather` has made it"
        )
    described = (read_json(path), header(experiment, None))
    if changed := difference(*map(shared_settings, described)):
        raise RunFolderError(
            f"{folder} holds models of another experiment: {changed}; measure with the recipe "
            "and the options of all workers"
        )


class LocalGathering(Gathering):
    """Averages models in this process, and scores them by the numbers that workers report.

    Args:
        experiment: The workers' experiment.
        out: Run folder; see `Gathering` and `LocalScores`.
        recipe: Name of the recipe, for the record.
        command: Command that repeats the run, for the record.
        without: Workers whose measurements are not awaited.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        recipe: str | None = None,
        command: str | None = None,
        without: Collection[Rank] = (),
    ) -> None:
        super().__init__(experiment, out, recipe, command)
        self._scores = LocalScores(experiment, out)
        self._without = set(without)

    def measure_next(self) -> bool:
        """After the run, evaluate the newest moment, or write its model to be measured."""
        return all(worker.has_ended for worker in self.workers) and super().measure_next()

    def _chosen(self, moments: set[int]) -> set[int]:
        # This rule uses only the newest moment; others vanish as they are evaluated.
        newest = max([*moments, *self._evaluations.kept], default=0)
        stride = math.ceil((newest + 1) / _MOST_MOMENTS)
        return {i for i in super()._chosen(moments) if (newest - i) % stride == 0}

    def _score(self, params: Tensor) -> tuple[float, dict[str, float]] | None:
        return self._scores.find(params, self._measuring)

    @property
    def _measuring(self) -> list[Rank]:
        """Workers whose measurements count: all but `without` and absent, silent workers."""
        absent = {each.rank for each in self.workers if each.summary is None}
        left_out = self._without | (absent & set(self._scores.silent))
        return [rank for rank in self._experiment.data_ranks if rank not in left_out]

    @property
    def _shards(self) -> Mapping[Rank, Sized]:
        """The number of samples that each worker reported."""
        return {each.rank: range(each.num_samples) for each in self.workers}

    @property
    def num_train(self) -> int:
        return max(1, sum(worker.num_samples for worker in self.workers))

    def average(self) -> list[Rank]:
        """Write the averaged models for the workers; return workers that lack some measurement.

        Raises:
            RunFolderError: See `finish`.
        """
        self._come_to_the_end()
        estimates = self._last_estimates(self._summaries)
        mean, _ = self._workload.average(estimates)
        for params in (mean, *self._own_models(mean, estimates)):
            self._score(params)
        return sorted(self._scores.behind)

    def leave_out(self, ranks: Collection[Rank]) -> None:
        self._without |= set(ranks)

    def _come_to_the_end(self) -> None:
        self._scores.read()
        self._unmeasured.clear()
        super()._come_to_the_end()

    @property
    def left_out(self) -> list[str]:
        """Also list the workers whose data is not in the results."""
        counted = self._measuring
        return super().left_out + [
            f"{with_article(self.roles, rank)} has not measured: the results exclude its data"
            for rank in self._experiment.data_ranks
            if rank not in counted
        ]


def gather(
    experiment: Experiment,
    out: Path,
    recipe: str | None = None,
    without: Collection[Rank] = (),
    *,
    is_open: bool = False,
) -> tuple[Results | list[Rank], list[str]]:
    """Make one run folder from the workers' folders in `out`, over an earlier gathering's.

    Args:
        experiment: The workers' experiment.
        out: Run folder.
        recipe: Name of the recipe, for the record.
        without: Workers with `Local` data whose measurements are not awaited.
        is_open: Whether the run was open; workers without a folder were never there.

    Returns:
        The results, and everything missing in them (`Gathering.left_out`). With `Local` data,
        the ranks of workers that have not measured all averaged models, if any, replace the
        results.

    Raises:
        RunFolderError: If no worker left a model, a worker belonged to another experiment, or
            `out` cannot be written, holds a simulated run, or is in use.
    """
    if is_open:
        experiment = replace(experiment, algorithm=opened(experiment.algorithm))
    if not (out / WORKERS).is_dir():
        raise RunFolderError(
            f"there is no folder {out / WORKERS}; copy the folder of worker R there as "
            f"{WORKERS}/R, or choose another --out"
        )
    with locked(out):
        require_gathered(out)
        gathering = make_gathering(experiment, out, recipe, without=without)
        gathering.is_open = is_open
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
