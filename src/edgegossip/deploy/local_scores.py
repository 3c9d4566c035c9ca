"""Averaged models, and each worker's measurements of them on its own data.

In the folder of a run, `averaged` holds models named by their content, and `measured` a file of
numbers for each worker. Models are sent to the data; only numbers are sent back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from edgegossip.core.errors import RunFolderError
from edgegossip.core.protocol import Rank
from edgegossip.deploy.introducing import shared_settings
from edgegossip.deploy.snapshots import read_params
from edgegossip.experiments.describe import header
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.files import make_folder, write_atomically, write_json
from edgegossip.experiments.run_folder import difference, read_json
from edgegossip.learning.local_reports import together
from edgegossip.learning.metric import Measurement, Metric

AVERAGED, MEASURED = "averaged", "measured"


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
        name = _name(params)
        late = [rank for rank in ranks if name not in self._found.get(rank, {})]
        if ranks and not late:
            total = together([self._found[rank][name] for rank in ranks])
            return total.loss, total.values(self._metrics)
        self.behind += (rank for rank in late if rank not in self.behind)
        folder = self._out / AVERAGED
        make_folder(folder)
        if not (folder / "experiment.json").exists():
            write_json(folder / "experiment.json", header(self._experiment, None))
        content = safetensors.torch.save({"params": params.contiguous()})
        write_atomically(folder / f"{name}.safetensors", content)
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


def _name(params: Tensor) -> str:
    """Name a model by its content."""
    content = params.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:24]


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
