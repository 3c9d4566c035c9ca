"""Races in which every contender has its own, tuned learning rate.

A selection that focuses on high losses lengthens steps, as a higher learning rate does. If this
effect were the whole gain, the gain would vanish once each contender has its best learning
rate, and random samples weighted to the same loss, `loss-matched`, would be as good.

Fields of a row, in addition to those of a race:
    is_tuning: Whether the run only tried its settings, on held-out training samples.
    lr, exchange_probability: These settings.
    held_out_accuracy: Best accuracy of such a run, averaged over an epoch's worth of samples.
    held_out_seconds: Time until such a run reached the target of the trials: the best accuracy
        of EpochGossip's trials less 0.3 points. Null if it did not, and for EpochGossip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import ClassVar

import torch

from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import grouped, time_to
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
from studies.problems import (
    CIFAR10_LENET5,
    DIGITS_MLP,
    HAR_BY_SUBJECT,
    HAR_CNN,
    MNIST_LENET5,
)
from studies.race import (
    BASELINE,
    CONTENDERS,
    EDGE_GOSSIP,
    SELECTED,
    Race,
    Setup,
    less_work,
    race_study,
    work_limit,
)
from studies.race_scores import equal_looks
from studies.speedup import ALONE, CONTROLLED, TARGET_GAP, speedup_exhibits, uneven_setup


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


# The likeliest first, because a trial ends at the time of the best one before it.
FACTORS = (2.0, 4.0, 1.0, 8.0, 0.5, 16.0)
EXCHANGES = (0.4, 0.1, 1.0, 0.02)
"""Exchange probabilities that GoSGD tries with each learning rate."""
RUNS: Contenders = {
    **CONTENDERS,
    "epoch-gossip-focused": SELECTED,
    "loss-matched": replace(
        EDGE_GOSSIP, accuracy_aware=replace(ACCURACY_AWARE, selection=LossMatched())
    ),
}
SKEWED_RUNS: Contenders = {
    **RUNS,
    "edge-gossip-controlled": ALONE["edge-gossip-controlled"],
}
NOTE = (
    "Accuracy on held-out training samples, averaged over an epoch's worth of samples; "
    "EpochGossip is measured once in that time. EpochGossip's results have the learning rate "
    "with the best accuracy. The others' have the settings that are soonest at this accuracy "
    "less 0.3 points. A trial is cut off when it can no longer be the soonest."
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
    is_sequential: ClassVar[bool] = True

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        own, tried = self.problem.settings, dict[str, dict[str, Tried]]()
        for run in (BASELINE, *self.setup.runs):
            draws = run != BASELINE and self.setup.runs[run].draws_exchanges
            exchanges = EXCHANGES if draws else (own.exchange_probability,)
            tried[run] = {}
            for factor, probability in product(self.factors, exchanges):
                lr = factor * own.lr
                place = f"{self.group}/tuning/lr-{lr:g}-exchange-{probability:g}/{run}"
                tried[run][place] = {"lr": lr, "exchange_probability": probability}
        return tried

    def facts(self) -> Row:
        return {}  # a race's row has them

    def references(self, seed: int | None) -> Sequence[str]:
        return [*self.trials()[BASELINE]] if seed is None else [self.place(BASELINE, seed)]

    def merit(self, trial: Row) -> tuple[float, float]:
        return merit(trial)

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        race = Race(
            problem=self.problem_of(attempt),
            setups=(self.setup,),
            seed=attempt.seed,
            max_work=self.max_work,
        )
        if attempt.run == BASELINE:
            row = race.run_baseline(data_dir, session)
            best = {"held_out_accuracy": max(row["accuracies"]), "held_out_seconds": None}
            return {**row, **best} if attempt.is_tuning else row
        if not attempt.is_tuning:
            place = self.place(BASELINE, attempt.seed)
            return race.run_contender(data_dir, place, self.setup, attempt.run, session)
        place = self._tried_baselines(session)[0]
        earlier = [row for row in session.rows.values() if row["run"] == attempt.run]
        known = [row["held_out_seconds"] for row in earlier if row["held_out_seconds"]]
        row = race.run_contender(
            data_dir, place, self.setup, attempt.run, session, min(known, default=math.inf)
        )
        return {**row, **self._held_out(row, session)}

    def _tried_baselines(self, session: Session) -> Sequence[str]:
        """The baseline's trials, without those at whose rate it diverged: they have no row."""
        return [place for place in self.references(None) if place in session.rows]

    def _held_out(self, trial: Row, session: Session) -> Row:
        """When a trial was first at the target, and its accuracy then; or its best accuracy."""
        baselines = [session.rows[place] for place in self._tried_baselines(session)]
        target = max(row["held_out_accuracy"] for row in baselines) - TARGET_GAP
        curve = equal_looks(trial, baselines[0]["setups"][self.setup.name])
        seconds = time_to(curve, target)
        known = curve["accuracies"]
        best = max(known, default=0.0)
        there = best if seconds is None else known[curve["times"].index(seconds)]
        return {"held_out_seconds": seconds, "held_out_accuracy": there}


def merit(trial: Row) -> tuple[float, float]:
    """The soonest trial wins; of those as soon, or never there, the most accurate one."""
    seconds = trial["held_out_seconds"]
    return -math.inf if seconds is None else -seconds, trial["held_out_accuracy"]


def rates(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    factors: tuple[float, ...] = FACTORS,
) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points, all with tuned learning rates.

    Data: HAR, MNIST and CIFAR-10, at imbalance 4; HAR by subject also has the run with control
    variates. GoSGD tries four exchange probabilities with each rate. The settings are chosen on
    a held-out tenth of the training samples, with a seed that no result uses: EpochGossip's for
    its best accuracy, the others' for the time until they reach that accuracy less 0.3 points.

    Args:
        settings: Settings of the study.
        factors: Multiples of the problem's learning rate that every contender tries, the
            likeliest first; the short form tries only the first two.
    """
    check_factors(factors)
    problems: Sequence[Problem] = (HAR_CNN, MNIST_LENET5, CIFAR10_LENET5, HAR_BY_SUBJECT)
    if settings.short:
        problems = (DIGITS_MLP,)
    factors = factors[:2] if settings.short else factors
    limit = work_limit(settings)
    contests = [
        TunedRace(
            problem=problem,
            setup=uneven_setup(
                problem, CONTROLLED, SKEWED_RUNS if problem == HAR_BY_SUBJECT else RUNS
            ),
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
    lines = [
        _trial(row, some, is_chosen=row is max(some, key=merit))
        for some in grouped(trials, "group", "run").values()
        for row in some
    ]
    return replace(exhibits, tables=(*exhibits.tables, table("Trials", lines, NOTE)))


def _trial(row: Row, trials: Sequence[Row], *, is_chosen: bool) -> Line:
    exchange = row["exchange_probability"] if row["run"] == "gosgd" else None
    tried = [each["lr"] for each in trials]
    is_at_edge = row["lr"] in (min(tried), max(tried))
    return {
        "part": ("text", row["group"]),
        "run": ("text", row["run"]),
        "learning rate": ("number", row["lr"]),
        "exchange probability": ("number", exchange),
        "time to target": ("seconds", row["held_out_seconds"]),
        "accuracy": ("percent", row["held_out_accuracy"]),
        "": (
            "text",
            "" if not is_chosen else "chosen, at the edge" if is_at_edge else "chosen",
        ),
    }
