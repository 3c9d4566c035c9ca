"""The contests of a study: one problem and seed, with a cell for each contender."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.topology import Topology
from edgegossip.recipes.baselines import balanced
from edgegossip.recipes.push_sum_comparison import affordable_rounds
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.describe import describe
from edgegossip.runs.study import Cell, Row, Session
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm that is built for the workers and rounds of a contest.

    Args:
        algorithm: Class of the algorithm.
        topology: Makes the topology from the number of workers.
        local_steps: Steps between two messages.
        options: Other arguments of the class.
        has_momentum: Whether to use the task's momentum; false for algorithms with their own.
        lr_factor: Factor for the task's learning rate, for algorithms with longer steps.
        ending: Prefix of the options for final rounds that add a tenth to the bytes; None for
            no such rounds.
        per_layer: Whether to compress each layer separately.
        accuracy_aware: Choice of samples of an `EdgeGossip` around the algorithm; None for no
            `EdgeGossip`.
        balancing: Other arguments of that `EdgeGossip`.
        control: Weight of `ControlVariates` around that `EdgeGossip`; 0 for none.
        has_profiles: Whether forecasts start from a profile of each platform.
        draws_exchanges: Whether the algorithm takes the problem's `exchange_probability` and a
            seed.
    """

    algorithm: Callable[..., Algorithm[Any]]
    topology: Callable[[int], Topology]
    local_steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    has_momentum: bool = True
    lr_factor: float = 1.0
    ending: str | None = None
    per_layer: bool = False
    accuracy_aware: AccuracyAware | None = None
    balancing: Mapping[str, Any] = field(default_factory=dict)
    control: float = 0.0
    has_profiles: bool = False
    draws_exchanges: bool = False

    def build(self, num_workers: int, num_steps: int, **others: object) -> Algorithm[Any]:
        """Build the algorithm for `num_steps` steps per worker; `others` are more options."""
        num_rounds = max(1, round(num_steps / self.local_steps))
        options = {**self.options, **others}
        if self.local_steps > 1:  # not every algorithm has this option
            options["local_steps"] = self.local_steps
        if self.ending is not None:
            options[f"{self.ending}_rounds"] = affordable_rounds(
                num_rounds, options["compressor"], options[f"{self.ending}_compressor"]
            )
        topology = self.topology(num_workers)
        algorithm = self.algorithm(topology=topology, num_rounds=num_rounds, **options)
        if self.accuracy_aware is None:
            return algorithm
        return balanced(algorithm, self.control, **self.balancing)

    def task(self, task: Task) -> Task:
        """Adapt `task` to this contender."""
        own = task.optimizer
        assert isinstance(own, SGD)  # a problem's optimizer is SGD
        momentum = own.momentum if self.has_momentum else 0.0
        return replace(
            task,
            optimizer=replace(own, lr=own.lr * self.lr_factor, momentum=momentum),
            accuracy_aware=self.accuracy_aware or task.accuracy_aware,
        )

    def plain(self, num_workers: int) -> dict[str, Any]:
        """Everything that the contender's rows depend on, as JSON values."""
        described: dict[str, Any] = describe(self)
        later = (
            "per_layer",
            "accuracy_aware",
            "balancing",
            "control",
            "has_profiles",
            "draws_exchanges",
        )
        for name in later:
            if not getattr(self, name):
                del described[name]  # older folders have none, and can be resumed
        return described | {"topology": self.topology(num_workers).name}


Contenders: TypeAlias = Mapping[str, Contender]
"""Contenders by name of the run."""


@dataclass(frozen=True, kw_only=True)
class Contest(ABC):
    """One problem and seed, with several contenders.

    Args:
        problem: Problem to learn; `--only` picks it by name.
        seed: Seeds the random choices.
    """

    problem: Problem
    seed: int

    @property
    def group(self) -> str:
        """The part of the study that the contest belongs to."""
        return self.problem.name

    @abstractmethod
    def cells(self, data_dir: Path) -> Iterator[Cell]:
        """Make the cells; the first one that runs reads the data."""

    def cell(
        self, name: str, work: Callable[[Session], Row], after: Sequence[str] = ()
    ) -> Cell:
        """Make a cell of this contest; see `Cell`."""
        return Cell(
            name=name,
            group=self.group,
            work=work,
            scaled_down=self.problem.scaled_down,
            after=tuple(after),
        )


def settings_and_cells(
    contests: Sequence[Contest], settings: StudySettings
) -> tuple[dict[str, object], tuple[Cell, ...]]:
    """Everything that a study of these contests depends on, as JSON values, and its cells."""
    problems = {each.problem.name: each.problem.plain() for each in contests}
    depends_on = {**settings.plain(), "problems": [*problems.values()]}
    cells = (cell for each in contests for cell in each.cells(settings.data_dir))
    return depends_on, tuple(cells)
