"""Races in which every contender has its own, tuned learning rate.

A selection that focuses on high losses lengthens steps, as a higher learning rate does. If this
effect were the whole gain, the gain would vanish once each contender has its best learning
rate, and random samples weighted to the same loss, `loss-matched`, would be as good.

Fields of a row, in addition to those of a race:
    is_tuning: Whether the run only tried its settings, on held-out training samples.
    lr, exchange_probability: These settings.
    held_out_accuracy: Best accuracy of such a run, averaged over an epoch's worth of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import grouped
from edgegossip.runs.study import Row, Session, Study
from edgegossip.training.sampling.selection import (
    Candidates,
    Choice,
    Focused,
    Random,
    with_unvisited,
)
from studies.contest import (
    Attempt,
    Contenders,
    StudySettings,
    Tried,
    TunedContest,
    check_factors,
)
from studies.exhibits import Line, table
from studies.problems import DIGITS_MLP, HAR_CNN, MNIST_LENET5
from studies.race import (
    BASELINE,
    CONTENDERS,
    EDGE_GOSSIP,
    Race,
    Setup,
    less_work,
    race_study,
    work_limit,
)
from studies.race_scores import equal_looks
from studies.speedup import CONTROLLED, TARGET_GAP, speedup_exhibits, uneven_setup


@dataclass(frozen=True)
class LossMatched(Focused):
    """Random samples, all with the same weight, so that their loss is that of `Focused`.

    Samples with high losses have long gradients. In each epoch, this control lengthens the
    gradients of random samples instead: their weight is the mean last loss of the samples that
    `Focused` would choose over the mean of all. Gradients of cross-entropy grow less than
    losses, so the weight is rather too large. EdgeGossip's correction treats both selections
    alike, because `Choice.focus` is equal.
    """

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        chosen = super().choose(candidates, num_samples, random)
        if not chosen.focus:
            return chosen
        losses = with_unvisited(candidates.sample_losses)
        weight = float(losses[chosen.order].mean() / losses.mean().clamp(min=1e-12))
        order = Random().choose(candidates, num_samples, random).order
        return Choice(order, torch.full((num_samples,), weight), chosen.focus)


FACTORS = (0.5, 1.0, 2.0, 4.0)
EXCHANGES = (1.0, 4.0)
"""Multiples of the problem's exchange probability that GoSGD tries with each learning rate."""
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


@dataclass(frozen=True, kw_only=True)
class TunedRace(TunedContest):
    """One problem on one set of machines: trials of settings, then races with the best ones.

    Args:
        setup: Machines and contenders against EpochGossip.
        max_work: As in `Race`.
        factors: Multiples of the problem's learning rate to try.
    """

    setup: Setup
    max_work: float | None
    factors: tuple[float, ...]

    tuned: ClassVar[tuple[str, ...]] = ("lr", "exchange_probability")

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        own, tried = self.problem.settings, dict[str, dict[str, Tried]]()
        for run in (BASELINE, *self.setup.runs):
            draws = run != BASELINE and self.setup.runs[run].draws_exchanges
            tried[run] = {}
            for factor, exchange in product(self.factors, EXCHANGES if draws else (1.0,)):
                lr, probability = factor * own.lr, exchange * own.exchange_probability
                place = f"{self.group}/tuning/lr-{lr:g}-exchange-{probability:g}/{run}"
                tried[run][place] = {"lr": lr, "exchange_probability": probability}
        return tried

    def facts(self) -> Row:
        return {}  # a race's row has them

    def reference(self, seed: int | None) -> str:
        # All trials have as much time as EpochGossip's first one.
        return (
            next(iter(self.trials()[BASELINE])) if seed is None else self.place(BASELINE, seed)
        )

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return trial["held_out_accuracy"]

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        race = Race(
            problem=self.problem_of(attempt),
            setups=(self.setup,),
            seed=attempt.seed,
            max_work=self.max_work,
        )
        if attempt.run == BASELINE:
            row = curve = race.run_baseline(data_dir, session)
        else:
            timed = self.reference(None if attempt.is_tuning else attempt.seed)
            row = race.run_contender(data_dir, timed, self.setup, attempt.run, session)
            curve = equal_looks(row, session.rows[timed]["setups"][self.setup.name])
        if not attempt.is_tuning:
            return row
        return {**row, "held_out_accuracy": max(curve["accuracies"], default=0.0)}


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
        validation_share=contests[0].held_out,
    )


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    results = {name: row for name, row in rows.items() if not row["is_tuning"]}
    exhibits = speedup_exhibits("rates", results)
    if not results:
        return exhibits
    trials = [row for row in rows.values() if row["is_tuning"]]
    by_run = grouped(trials, "group", "run").values()
    best = [max(some, key=itemgetter("held_out_accuracy")) for some in by_run]
    lines = (_trial(row, is_chosen=row in best) for row in trials)
    return replace(exhibits, tables=(*exhibits.tables, table("Trials", lines, NOTE)))


def _trial(row: Row, *, is_chosen: bool) -> Line:
    exchange = row["exchange_probability"] if row["run"] == "gosgd" else None
    return {
        "part": ("text", row["group"]),
        "run": ("text", row["run"]),
        "learning rate": ("number", row["lr"]),
        "exchange probability": ("number", exchange),
        "best accuracy": ("percent", row["held_out_accuracy"]),
        "": ("text", "chosen" if is_chosen else ""),
    }
