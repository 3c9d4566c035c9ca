"""Contests of a study: contenders on one problem, with given settings or with tuned ones.

Fields of a row of each tuned contest:
    is_tuning: Whether the run only tried its settings, on held-out training samples.
    lr: Learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import edgegossip as eg
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.ranges import check_range
from edgegossip.contract.topology import Topology
from edgegossip.recipes.baselines import balanced
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.push_sum_comparison import affordable_rounds
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.runs.tuning import TUNING_SEED, check_seeds, slug

Tried: TypeAlias = Mapping[str, Any]
"""Settings that a contender tries, as fields of its rows."""


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Settings common to studies.

    Args:
        short: Run for seconds instead of an hour, with built-in data and a small model. This
            shows that everything works, but the numbers mean nothing.
        seeds: Seeds, all different; every run is repeated with each of them.
        data_dir: Folder of the data sets (see docs/recipes.md); by default $EDGEGOSSIP_DATA.

    Raises:
        ValueError: If there is no seed, or a duplicate.
    """

    short: bool = False
    seeds: tuple[int, ...] = (0,)
    data_dir: Path = default_data_dir()

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    def plain(self) -> dict[str, object]:
        """The settings that affect results, as JSON values."""
        return {"short": self.short, "seeds": list(self.seeds)}


@dataclass(frozen=True)
class Option:
    """A contender's own setting, to tune in addition to the learning rate.

    Args:
        name: Name in tables and folders.
        argument: Name of the argument.
        values: Values to try.
    """

    name: str
    argument: str
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm with its settings, which is built for the workers and rounds of a contest.

    Args:
        algorithm: Makes the algorithm, such as its class.
        topology: Makes the topology from the number of workers; None for an algorithm with a
            server, an additional first rank that does not train.
        local_steps: Steps between two messages.
        options: Other arguments of the algorithm.
        option: Setting to tune; of `EdgeGossip`, if that is around the algorithm.
        has_momentum: Whether to use the task's momentum; false for algorithms with their own.
        lr_factor: Factor for the task's learning rate, for algorithms with longer steps.
        ending: Prefix of the options for final rounds that add a tenth to the bytes; None for
            no such rounds.
        per_layer: Whether to compress each layer separately.
        accuracy_aware: Choice of samples; None for random ones and no `EdgeGossip`.
        is_balanced: Whether an `EdgeGossip` is around an algorithm with a choice of samples.
        balancing: Other arguments of that `EdgeGossip`.
        control: See `balanced`.
        has_profiles: Whether forecasts start from a profile of each platform.
        is_proportional: Whether shards are in proportion to the platforms' speeds.
        is_shared: Whether all workers read all data and claim units of it, so that `balancing`
            is of `ClaimedWork`; a choice of samples is within the units.
        draws_exchanges: Whether the algorithm takes the problem's `exchange_probability` and a
            seed.
    """

    algorithm: Callable[..., eg.Algorithm[Any]]
    topology: Callable[[int], Topology] | None
    local_steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    option: Option | None = None
    has_momentum: bool = True
    lr_factor: float = 1.0
    ending: str | None = None
    per_layer: bool = False
    accuracy_aware: eg.AccuracyAware | None = None
    is_balanced: bool = True
    balancing: Mapping[str, Any] = field(default_factory=dict)
    control: float | Literal["auto"] = 0.0
    has_profiles: bool = False
    is_proportional: bool = False
    is_shared: bool = False
    draws_exchanges: bool = False

    @property
    def values(self) -> tuple[float | None, ...]:
        """Values to try for the option; None alone without one."""
        return (None,) if self.option is None else self.option.values

    @property
    def waits(self) -> bool:
        """Whether fast workers wait for slow ones after each epoch, as in EpochGossip."""
        return not (self.is_balanced or self.is_proportional)

    def build(
        self,
        num_workers: int,
        num_steps: int = eg.UNTIL_CUT_OFF,
        value: float | None = None,
        **others: object,
    ) -> eg.Algorithm[Any]:
        """Build the algorithm.

        Args:
            num_workers: Number of workers, not counting a server.
            num_steps: Steps of each worker.
            value: Value of the option, if there is one.
            others: More arguments of the algorithm.
        """
        num_rounds = max(1, round(num_steps / self.local_steps))
        options, balancing = {**self.options, **others}, dict(self.balancing)
        if self.option is not None:
            (options if self.accuracy_aware is None else balancing)[self.option.argument] = (
                value
            )
        if self.local_steps > 1:  # not every algorithm has this option
            options["local_steps"] = self.local_steps
        if self.ending is not None:
            options[f"{self.ending}_rounds"] = affordable_rounds(
                num_rounds, self.options["compressor"], options[f"{self.ending}_compressor"]
            )
        if self.topology is None:
            options["num_workers"] = num_workers
        else:
            options["topology"] = self.topology(num_workers)
        algorithm = self.algorithm(num_rounds=num_rounds, **options)
        if self.is_shared:
            return eg.ClaimedWork(inner=algorithm, **balancing)
        if self.accuracy_aware is None or not self.is_balanced:
            return algorithm
        return balanced(algorithm, self.control, **balancing)

    def task(self, task: eg.Task) -> eg.Task:
        """Adapt `task` to this contender."""
        own = task.optimizer
        assert isinstance(own, eg.SGD)  # a problem's optimizer is SGD
        momentum = own.momentum if self.has_momentum else 0.0
        return replace(
            task,
            optimizer=replace(own, lr=own.lr * self.lr_factor, momentum=momentum),
            accuracy_aware=self.accuracy_aware or task.accuracy_aware,
        )

    def on(
        self, task: eg.Task, num_workers: int, value: float | None
    ) -> tuple[eg.Task, eg.Algorithm[Any]]:
        """The adapted task, and the algorithm for it, which continues until it is cut off."""
        return self.task(task), self.build(num_workers, value=value)

    def plain(self, num_workers: int) -> dict[str, Any]:
        """Everything that the contender's rows depend on, as JSON values."""
        assert self.topology is not None
        described: dict[str, Any] = describe(self)
        # What only some contenders have would make most descriptions three times as long.
        for name in (
            *("option", "per_layer", "accuracy_aware", "balancing", "control"),
            *("has_profiles", "is_proportional", "is_shared", "draws_exchanges"),
        ):
            if not getattr(self, name):
                del described[name]
        if self.is_balanced:
            del described["is_balanced"]
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


@dataclass(frozen=True)
class Attempt:
    """A run of a contender with some settings.

    Args:
        run: Name of the run.
        settings: The settings that are tuned.
        seed: Seeds the random choices.
        is_tuning: Whether the run only tries the settings, on held-out samples.
    """

    run: str
    settings: Tried
    seed: int
    is_tuning: bool


@dataclass(frozen=True, kw_only=True)
class TunedContest(Contest):
    """A contest in which each run has the best of the settings that its contender has tried.

    Trials have the seed of this contest, which no result has, and are measured on
    held-out training samples instead of the test samples.

    Args:
        seeds: Seeds of the results; empty for trials alone.
        setting: Distinguishing feature among the contests of the problem, if there are several.
    """

    seed: int = TUNING_SEED
    seeds: tuple[int, ...]
    setting: str = ""

    tuned: ClassVar[tuple[str, ...]] = ("lr",)
    """Names of the settings that trials differ in."""
    is_sequential: ClassVar[bool] = False
    """Whether a trial reads the rows of the earlier trials of its run."""

    @property
    def held_out(self) -> float:
        """Share of the training samples that trials are measured on."""
        return 0.1

    @abstractmethod
    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        """For each run, the settings to try, by name of the cell."""

    @property
    def folder(self) -> str:
        """Beginning of the names of the cells."""
        return f"{self.group}/{slug(self.setting)}" if self.setting else self.group

    def place(self, run: str, seed: int) -> str:
        """The name of a result's cell."""
        return f"{self.folder}/seed{seed}/{slug(run)}"

    def trials_of_rates(
        self, runs: Iterable[str], rates: Sequence[float]
    ) -> Mapping[str, Mapping[str, Tried]]:
        """Trials that differ in their learning rates alone."""
        return {
            run: {f"{self.folder}/tuning/lr-{lr:g}/{slug(run)}": {"lr": lr} for lr in rates}
            for run in runs
        }

    def to_try(self, run: str, settings: Tried, earlier: Sequence[Row]) -> Tried:
        """Complete the settings of a trial; `earlier` has rows if `is_sequential`."""
        return settings

    @abstractmethod
    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        """Carry out an attempt; return the fields that this class does not add."""

    @abstractmethod
    def merit(self, trial: Row) -> Any:  # noqa: ANN401 - anything that can be compared
        """How good the settings of a trial are: the highest wins, or the first of equals."""

    def facts(self) -> Row:
        """Fields that all rows of this contest share."""
        return {"group": self.group, "setting": self.setting}

    def references(self, seed: int | None) -> Sequence[str]:
        """The cells whose rows all other attempts with a seed (None: trials) read."""
        return ()

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for run, tried in self.trials().items():
            before = list[str]()
            for place, settings in tried.items():
                work = partial(self._trial, data_dir, run, settings)
                yield self._after_references(place, None, work, before)
                if self.is_sequential:
                    before.append(place)
            for seed in self.seeds:
                work = partial(self._result, data_dir, run, seed)
                yield self._after_references(self.place(run, seed), seed, work, [*tried])

    def _after_references(
        self, place: str, seed: int | None, work: Callable[[Session], Row], after: Sequence[str]
    ) -> Cell:
        needed = self.references(seed)
        first = () if place in needed else needed
        return self.cell(place, work, (*first, *after))

    def _trial(self, data_dir: Path, run: str, settings: Tried, session: Session) -> Row:
        tried = self.to_try(run, settings, [*session.rows.values()])
        return self._row(data_dir, Attempt(run, tried, self.seed, is_tuning=True), session)

    def _result(self, data_dir: Path, run: str, seed: int, session: Session) -> Row:
        best = self.best([*session.rows.values()], run)
        settings = {name: best[name] for name in self.tuned}
        return self._row(data_dir, Attempt(run, settings, seed, is_tuning=False), session)

    def _row(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        return {
            **self.facts(),
            "run": attempt.run,
            "seed": attempt.seed,
            **self.work(data_dir, attempt, session),
            **attempt.settings,
            "is_tuning": attempt.is_tuning,
        }

    def problem_of(self, attempt: Attempt) -> Problem:
        """The problem with an attempt's settings, and in a trial without its test samples."""
        own = self.problem.settings
        known = {k: each for k, each in attempt.settings.items() if hasattr(own, k)}
        held_out = self.held_out if attempt.is_tuning else 0.0
        return replace(self.problem, settings=replace(own, **known), held_out=held_out)

    def best(self, rows: Iterable[Row], run: str) -> Row:
        """The best trial of a run among the rows of this contest's cells.

        Raises:
            TrainingError: If no trial of the run has finished.
        """
        trials = [row for row in rows if row["is_tuning"] and row["run"] == run]
        if not trials:
            raise TrainingError(
                f"no trial of {run} on {self.group} finished, so nothing is tuned"
            )
        return max(trials, key=self.merit)


def check_factors(factors: Sequence[float]) -> None:
    """Check the multiples of a learning rate that contenders try.

    Raises:
        ValueError: If there is none, or one is not above 0 or given twice.
    """
    if not factors or len(set(factors)) < len(factors):
        raise ValueError(f"factors must be at least one number, all different, got {factors}")
    for factor in factors:
        check_range("factors", factor, "above 0 and finite")


def accuracy_curve(results: eg.Results) -> dict[str, Any]:
    """Times and accuracies of the evaluations, as fields of a row."""
    history = results.history
    return {
        "times": [each.time for each in history],
        "accuracies": [each.accuracy for each in history],
    }


def contest_study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Sequence[Contest],
    exhibit: Callable[[Mapping[str, Row]], Exhibits],
    /,
    *,
    printed: tuple[str, ...],
    scaled_down: tuple[str, ...] = (),
    **varied: object,
) -> Study:
    """Make a study of contests; `varied` adds settings that the rows depend on."""
    problems = {each.problem.name: each.problem.plain() for each in contests}
    return Study(
        name=name,
        title=title,
        printed=printed,
        scaled_down=scaled_down,
        settings={**settings.plain(), "problems": [*problems.values()], **varied},
        cells=tuple(cell for each in contests for cell in each.cells(settings.data_dir)),
        exhibit=exhibit,
    )
