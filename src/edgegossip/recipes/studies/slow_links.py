"""Contests of dense push-sum against algorithms that send fewer bytes: runs and results.

Fields of a row:
    group, setting, run, seed: Names of the contest and the run.
    times, accuracies, bytes_per_worker: One number per evaluation.
    worker_accuracies, consensus_distance: Values at the end.
    traffic: `bytes_sent`, `samples_processed`, `num_workers` and the mean `out_degree`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.contract.protocol import Seconds
from edgegossip.data.partition import Partition
from edgegossip.recipes.push_sum_comparison import (
    BYTES_PER_MEGABIT,
    DENSE,
    LATENCY,
    num_steps,
    per_layer,
)
from edgegossip.recipes.studies.contest import Contender, Contenders, Contest
from edgegossip.runs.comparison import Traffic, traffic
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Unit
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.runs.scoreboard import (
    ContestKey,
    Measures,
    Score,
    bars,
    curves,
    score_table,
    scores,
)
from edgegossip.runs.study import Cell, Row, Session
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.task import Task

SLOW_LINK = Link(latency=LATENCY, bandwidth=BYTES_PER_MEGABIT)
"""A link of 1 Mbit/s and 30 ms."""

NUM_EVALUATIONS = 60
"""Evaluations of each run, spread over its length."""

TARGET_GAP = 0.01
"""The target is the dense run's best accuracy minus this gap."""

MEAN_WORKER, WORST_WORKER = "mean worker", "worst worker"


@dataclass(frozen=True, kw_only=True)
class SlowLinkContest(Contest):
    """One problem, partition and seed, with several contenders.

    Args:
        setting: Distinguishing feature of the contest, such as "skew 0.8".
        partition: Partition of the samples among the workers.
        contenders: Contenders, including `DENSE`, by name of the run.
        num_workers: Number of workers, on equal platforms.
    """

    setting: str
    partition: Partition
    contenders: Contenders
    num_workers: int = 8

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{self.setting.replace(' ', '-')}/seed{self.seed}"
        for name in self.contenders:
            work = partial(self.row, data_dir, name)
            yield self.cell(f"{folder}/{name.replace(' ', '-')}", work)

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {
            "group": self.group,
            "setting": self.setting,
            "partition": describe(self.partition),
            "runs": {
                name: each.plain(self.num_workers) for name, each in self.contenders.items()
            },
        }

    def task(self, data_dir: Path, contender: Contender) -> Task:
        """The learning task of a contender."""
        return replace(contender.task(self.problem.task(data_dir)), partition=self.partition)

    def experiment(self, data_dir: Path, name: str) -> Experiment:
        """The experiment of a contender."""
        contender, settings = self.contenders[name], self.problem.settings
        task = self.task(data_dir, contender)
        steps = num_steps(task, self.num_workers, settings.num_epochs)
        others = {}
        if contender.per_layer:
            others["compressor"] = per_layer(contender.options["compressor"], task)
        return Experiment(
            task=task,
            algorithm=contender.build(self.num_workers, steps, **others),
            platforms=(Platform(throughput=settings.throughput),) * self.num_workers,
            links=Links(default=SLOW_LINK),
            seed=self.seed,
            evaluation_epochs=settings.num_epochs / NUM_EVALUATIONS,
            name=name.replace(" ", "-"),
        )

    def row(self, data_dir: Path, name: str, session: Session) -> Row:
        """Run a contender."""
        experiment = self.experiment(data_dir, name)
        return {
            "group": self.group,
            "setting": self.setting,
            "run": name,
            "seed": self.seed,
        } | _found(experiment, session.run(experiment))


def _found(experiment: Experiment, results: Results) -> dict[str, Any]:
    """The results of a run: its curve, its traffic and the accuracy of each worker."""
    last, workers = results.history[-1], results.worker_values
    return {
        "times": [evaluation.time for evaluation in results.history],
        "accuracies": [evaluation.accuracy for evaluation in results.history],
        "bytes_per_worker": [
            evaluation.bytes_sent / experiment.num_workers for evaluation in results.history
        ],
        "worker_accuracies": workers,
        "consensus_distance": last.consensus_distance,
        "traffic": dataclasses.asdict(traffic(experiment, results)),
    }


def placings(rows: Iterable[Row]) -> list[Score]:
    """Compare each run with the dense run of its group, setting and seed.

    Args:
        rows: Rows of `SlowLinkContest.cells`, in any order.
    """
    return scores(rows, DENSE, TARGET_GAP, _measures)


def _measures(
    row: Row, dense: Row | None, time: Seconds | None, speedup: float | None
) -> Measures:
    own = Traffic(**row["traffic"])
    of_dense = None if dense is None else Traffic(**dense["traffic"])
    complete = own.ratios(of_dense)["bytes_ratio_complete_graph"]
    mean = _mean_worker(row)
    return {
        "averaged model": ("percent", row["accuracies"][-1]),
        MEAN_WORKER: ("percent", mean),
        WORST_WORKER: ("percent", min(row["worker_accuracies"])),
        "mean worker, lost": ("points", None if dense is None else _mean_worker(dense) - mean),
        "sent per worker": ("bytes", own.per_worker),
        "less": ("times", None if of_dense is None else own.times_less_than(of_dense)),
        "less, complete graph": ("times", complete),
        "time to target": ("seconds", time),
        "sooner": ("times", speedup),
    }


def _mean_worker(row: Row) -> float:
    return sum(row["worker_accuracies"]) / len(row["worker_accuracies"])


NOTE = (
    "Medians over the seeds; a dash: never, or nothing to compare with. Accuracies at the end "
    "are those of the averaged model and of the workers' own models. Lost: the mean accuracy "
    "of the dense run's workers minus that of this run's. Bytes include headers, positions and "
    "weights in all rounds. Less: bytes of the dense run for as many samples, or (as the paper "
    "seems to count) of one on the complete graph, divided by the run's bytes. The target is "
    "the dense run's best accuracy less "
    f"{100 * TARGET_GAP:g} pp; time is virtual, on uplinks of 1 Mbit/s and 30 ms."
)


def contest_curves(rows: Iterable[Row], contest: ContestKey) -> list[Panel]:
    """Plot the averaged model's accuracy against bytes and against time for one contest."""
    axes: tuple[tuple[str, str, Unit], ...] = (
        ("bytes_per_worker", "sent per worker", "bytes"),
        ("times", "virtual time at 1 Mbit/s", "seconds"),
    )
    rows = list(rows)
    panels = [
        curves(rows, contest, contest[1], label, x=field, x_unit=unit, is_x_log=True)
        for field, label, unit in axes
    ]
    return [panel for panel in panels if panel.series]


def contest_exhibits(
    name: str, contests: Sequence[SlowLinkContest], has_bars: bool, rows: Mapping[str, Row]
) -> Exhibits:
    """Make a figure for each problem, with the curves of `contests`, and one table."""
    found = placings(rows.values())
    caption = f"Curves: the averaged model, seed {contests[0].seed}."
    if has_bars:
        caption += " Bars: medians over the seeds; thin lines: their range."
    figures = []
    for group in dict.fromkeys(each.group for each in contests):
        panels = [
            panel
            for each in contests
            if each.group == group
            for panel in contest_curves(rows.values(), (group, each.setting, each.seed))
        ]
        if has_bars and panels:
            mine = [each for each in found if each.group == group]
            workers = [
                bars(mine, measure, y_label="accuracy")
                for measure in (MEAN_WORKER, WORST_WORKER)
            ]
            panels = [*workers, *panels]
        if panels:
            heading = f"Accuracy against bytes and time: {group}"
            figures.append(
                Figure(
                    name=f"{name}-{group}",
                    heading=heading,
                    caption=caption,
                    panels=tuple(panels),
                )
            )
    tables = (score_table(found, heading="Ours", note=NOTE),) if found else ()
    return Exhibits(figures=tuple(figures), tables=tables)
