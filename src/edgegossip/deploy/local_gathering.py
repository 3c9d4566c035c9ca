"""Gathering of a run whose data stays with the workers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sized
from pathlib import Path

from torch import Tensor

from edgegossip.core.protocol import Rank
from edgegossip.deploy.gathering import Gathering
from edgegossip.deploy.local_scores import LocalScores
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.roles import with_article

_MOST_MOMENTS = 60
"""Maximum number of averaged models over time to measure: the resolution of a plot."""


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
    def _num_train(self) -> int:
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
