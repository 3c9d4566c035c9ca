"""Races in which every contender has its own, tuned learning rate.

A selection that focuses on high losses lengthens steps, as a higher learning rate does. If this
effect were the whole gain, the gain would vanish once each contender has its best learning
rate, and random samples weighted to the same loss, `loss-matched`, would be as good.

Fields of a row, in addition to those of a race:
    lr, exchange_probability: Settings of the run.
    is_tuning: Whether the run only tried these settings, measured on held-out training samples.
    held_out_accuracy: Best accuracy of such a run, averaged over an epoch's worth of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.recipes.studies.contest import Contenders, Contest
from edgegossip.recipes.studies.loss_matched import LossMatched
from edgegossip.recipes.studies.problems import DIGITS_MLP, HAR_CNN, MNIST_LENET5, Problem
from edgegossip.recipes.studies.race import (
    BASELINE,
    CONTENDERS,
    EDGE_GOSSIP,
    Race,
    Setup,
    less_work,
    race_study,
    work_limit,
)
from edgegossip.recipes.studies.race_scores import equal_looks
from edgegossip.recipes.studies.server_tuning import (
    TUNING_SEED,
    check_factors,
    trials,
    without_test_data,
)
from edgegossip.recipes.studies.speedup import (
    CONTROLLED,
    TARGET_GAP,
    speedup_exhibits,
    uneven_setup,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.exhibits import Exhibits, Table, Unit
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.task import Task

FACTORS = (0.5, 1.0, 2.0, 4.0)
EXCHANGES = (1.0, 4.0)
"""Multiples of the problem's exchange probability that GoSGD tries with each learning rate."""
TUNED = ("lr", "exchange_probability")
VALIDATION_SHARE = 0.1
RUNS: Contenders = {
    **CONTENDERS,
    "loss-matched": replace(
        EDGE_GOSSIP, accuracy_aware=replace(ACCURACY_AWARE, selection=LossMatched())
    ),
}
NOTE = (
    "The best accuracy on held-out training samples, averaged over an epoch's worth of "
    "samples; EpochGossip is measured once in that time. The chosen settings are those of the "
    "results."
)


class Trial(Race):
    """A race measured on held-out training samples instead of the test samples."""

    def task(self, data_dir: Path) -> Task:
        """The learning task."""
        task = super().task(data_dir)
        return replace(task, dataset=without_test_data(task.dataset, VALIDATION_SHARE))


@dataclass(frozen=True, kw_only=True)
class TunedRace(Contest):
    """One problem on one set of machines: trials of settings, then races with the best ones.

    Args:
        setup: Machines and contenders against EpochGossip.
        seeds: Seeds of the results; trials have the seed of this contest.
        max_work: As in `Race`.
        factors: Multiples of the problem's learning rate to try.
    """

    setup: Setup
    seeds: tuple[int, ...]
    max_work: float | None
    factors: tuple[float, ...]

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        timed, trials = "", dict[str, list[str]]()
        for run in (BASELINE, *self.setup.runs):
            trials[run] = []
            for problem in self._candidates(run):
                settings = problem.settings
                tried = f"lr-{settings.lr:g}-exchange-{settings.exchange_probability:g}"
                place = f"{self.group}/tuning/{tried}/{run}"
                timed = timed or place
                work = partial(self._try, data_dir, timed, problem, run)
                yield self.cell(place, work, after=() if place == timed else (timed,))
                trials[run].append(place)
        for seed in self.seeds:
            baseline = f"{self.group}/seed{seed}/{BASELINE}"
            for run, tried_cells in trials.items():
                place = f"{self.group}/seed{seed}/{run}"
                work = partial(self._run, data_dir, baseline, seed, run)
                first = () if place == baseline else (baseline,)
                yield self.cell(place, work, after=(*first, *tried_cells))

    def _candidates(self, run: str) -> Iterator[Problem]:
        """The problem with each of the settings that a contender tries."""
        own = self.problem.settings
        draws = run != BASELINE and self.setup.runs[run].draws_exchanges
        for factor in self.factors:
            for exchange in EXCHANGES if draws else (1.0,):
                probability = exchange * own.exchange_probability
                settings = replace(own, lr=factor * own.lr, exchange_probability=probability)
                yield replace(self.problem, settings=settings)

    def _try(
        self, data_dir: Path, timed: str, problem: Problem, run: str, session: Session
    ) -> Row:
        row = self._row(self._race(Trial, problem, self.seed), data_dir, timed, run, session)
        curve = row
        if run != BASELINE:
            curve = equal_looks(row, session.rows[timed]["setups"][self.setup.name])
        accuracy = max(curve["accuracies"], default=0.0)
        return {**row, "is_tuning": True, "held_out_accuracy": accuracy}

    def _run(self, data_dir: Path, baseline: str, seed: int, run: str, session: Session) -> Row:
        own = self.problem.settings
        trial = best_trial(session.rows.values(), self.group, run)
        chosen = {name: trial[name] for name in TUNED}
        problem = replace(self.problem, settings=replace(own, **chosen))
        race = self._race(Race, problem, seed)
        row = self._row(race, data_dir, baseline, run, session)
        return {**row, "is_tuning": False}

    def _race(self, kind: type[Race], problem: Problem, seed: int) -> Race:
        return kind(problem=problem, setups=(self.setup,), seed=seed, max_work=self.max_work)

    def _row(
        self, race: Race, data_dir: Path, baseline: str, run: str, session: Session
    ) -> Row:
        if run == BASELINE:
            row = race.run_baseline(data_dir, session)
        else:
            row = race.run_contender(data_dir, baseline, self.setup, run, session)
        return {**row, **{name: getattr(race.problem.settings, name) for name in TUNED}}


def best_trial(rows: Iterable[Row], group: str, run: str) -> Row:
    """The trial with the highest accuracy on held-out samples."""
    return max(trials(rows, group, run), key=lambda row: row["held_out_accuracy"])


def rates(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    factors: tuple[float, ...] = FACTORS,
) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points, all with tuned learning rates.

    Data: HAR (100 minutes on one core) and MNIST, at imbalance 4. GoSGD tries two exchange
    probabilities with each rate. The settings are chosen on a held-out tenth of the training
    samples, with a seed that no result uses.

    Args:
        settings: Settings of the study.
        factors: Multiples of the problem's learning rate that every contender tries; the short
            form tries only the first two.
    """
    check_factors(factors)
    problems = (DIGITS_MLP,) if settings.short else (HAR_CNN, MNIST_LENET5)
    factors = factors[:2] if settings.short else factors
    limit = work_limit(settings)
    contests = [
        TunedRace(
            problem=problem,
            seed=TUNING_SEED,
            setup=uneven_setup(problem, CONTROLLED, RUNS),
            seeds=settings.seeds,
            max_work=limit,
            factors=factors,
        )
        for problem in problems
    ]
    return race_study(
        "rates",
        "Does EdgeGossip gain more than a higher learning rate would?",
        settings,
        contests,
        _exhibits,
        printed=("The paper uses a single learning rate, 0.01.",),
        scaled_down=less_work(limit),
        max_work=limit,
        target_gap=TARGET_GAP,
        factors=factors,
        exchanges=EXCHANGES,
        validation_share=VALIDATION_SHARE,
    )


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    results = {name: row for name, row in rows.items() if not row["is_tuning"]}
    exhibits = speedup_exhibits("rates", results)
    if not results:
        return exhibits
    tuning = _tuning_table([row for row in rows.values() if row["is_tuning"]])
    return replace(exhibits, tables=(*exhibits.tables, tuning))


def _tuning_table(trials: list[Row]) -> Table:
    kinds = {(row["group"], row["run"]) for row in trials}
    best = {kind: best_trial(trials, *kind) for kind in kinds}
    columns: tuple[tuple[str, Unit], ...] = (
        ("part", "text"),
        ("run", "text"),
        ("learning rate", "number"),
        ("exchange probability", "number"),
        ("best accuracy", "percent"),
        ("", "text"),
    )
    told = [
        (
            row["group"],
            row["run"],
            row["lr"],
            row["exchange_probability"] if row["run"] == "gosgd" else None,
            row["held_out_accuracy"],
            "chosen" if row is best[row["group"], row["run"]] else "",
        )
        for row in trials
    ]
    return Table(heading="Trials", columns=columns, rows=tuple(told), note=NOTE)
