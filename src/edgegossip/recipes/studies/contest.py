"""Algorithms that send little, against dense push-sum: cells of one run each, on slow links."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.core.algorithm import Algorithm
from edgegossip.core.topology import Topology
from edgegossip.experiments.describe import describe
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.results import Results
from edgegossip.experiments.study import Cell, Row, Session
from edgegossip.experiments.traffic import traffic
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.partition import Partition
from edgegossip.learning.task import Task
from edgegossip.recipes.push_sum import (
    BYTES_PER_MEGABIT,
    LATENCY,
    affordable_rounds,
    num_steps,
)
from edgegossip.recipes.studies.problems import Problem
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

SLOW_LINK = Link(latency=LATENCY, bandwidth=BYTES_PER_MEGABIT)
"""1 Mbit/s."""

NUM_EVALUATIONS = 60
"""Of each run, over its length."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm that is told how many rounds there are when the data is known.

    Args:
        algorithm: Its class.
        topology: Who talks to whom.
        local_steps: Steps between two messages.
        options: Its other arguments.
        has_momentum: The optimizer has the task's; otherwise none, for those with their own.
        lr_factor: Of the task's learning rate, for those who go further with the same steps.
        ending: What the options of the rounds that end it begin with, where there are to be as
            many of them as add a tenth to its bytes.
    """

    algorithm: Callable[..., Algorithm[Any]]
    topology: Topology
    local_steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    has_momentum: bool = True
    lr_factor: float = 1.0
    ending: str | None = None

    def build(self, steps: int) -> Algorithm[Any]:
        """The algorithm that takes so many steps at each worker."""
        num_rounds = max(1, round(steps / self.local_steps))
        options = dict(self.options)
        if self.ending is not None:
            final = options[f"{self.ending}_compressor"]
            options[f"{self.ending}_rounds"] = affordable_rounds(
                num_rounds, options["compressor"], final
            )
        return self.algorithm(
            topology=self.topology,
            num_rounds=num_rounds,
            local_steps=self.local_steps,
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One problem, dealt out in one way with one seed, learnt in several.

    Args:
        group: What `--only` picks.
        setting: What is special about it, such as "skew 0.8".
        problem: What is learnt.
        partition: Deals the samples to the workers.
        contenders: By the name of the run; `DENSE` among them.
        seed: Of everything random.
    """

    group: str
    setting: str
    problem: Problem
    partition: Partition
    contenders: Mapping[str, Contender]
    seed: int

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        """The runs; data is read when the first of them begins."""
        folder = f"{self.group}/{self.setting.replace(' ', '-')}/seed{self.seed}"
        for name in self.contenders:
            yield Cell(
                name=f"{folder}/{name.replace(' ', '-')}",
                group=self.group,
                work=partial(self._work, data_dir, name),
                scaled_down=self.problem.scaled_down,
            )

    def plain(self) -> dict[str, Any]:
        """What its rows depend on, in JSON, but for problem and seed."""
        return {
            "group": self.group,
            "setting": self.setting,
            "partition": describe(self.partition),
            "runs": {name: describe(each) for name, each in self.contenders.items()},
        }

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        contender = self.contenders[name]
        num_workers = contender.topology.num_workers
        task = self._task(data_dir, contender)
        algorithm = contender.build(
            num_steps(task, num_workers, self.problem.settings.num_epochs)
        )
        experiment = Experiment(
            task=task,
            algorithm=algorithm,
            platforms=(Platform(throughput=self.problem.settings.throughput),) * num_workers,
            links=Links(default=SLOW_LINK),
            seed=self.seed,
            evaluation_epochs=self.problem.settings.num_epochs / NUM_EVALUATIONS,
            name=name.replace(" ", "-"),
        )
        return {
            "group": self.group,
            "setting": self.setting,
            "run": name,
            "seed": self.seed,
        } | _found(experiment, session.run(experiment))

    def _task(self, data_dir: Path, contender: Contender) -> Task:
        task = replace(self.problem.task(data_dir), partition=self.partition)
        own = task.optimizer
        assert isinstance(own, SGD)  # a problem's is
        momentum = own.momentum if contender.has_momentum else 0.0
        optimizer = replace(own, lr=own.lr * contender.lr_factor, momentum=momentum)
        return replace(task, optimizer=optimizer)


def _found(experiment: Experiment, results: Results) -> dict[str, Any]:
    """What a run has shown: its curve, what it sent, and how well each worker does."""
    last, workers = results.history[-1], results.worker_accuracies
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
