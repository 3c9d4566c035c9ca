"""Compressed exchanges against equally rare dense ones, all with tuned learning rates.

Compared with dense push-sum after each step, compressed runs send about 500 times fewer bytes,
for two reasons: fewer exchanges and smaller messages. The control for the second reason sends
whole models just as rarely.

A row has the fields of `compressed_push` and those of each tuned contest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import edgegossip as eg
from edgegossip.contract.ranges import check_range
from edgegossip.data.partition import IID
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import last_looks, median
from edgegossip.runs.study import Row, Session, Study
from studies.compressed_push import (
    CIFAR10_LENET5,
    FLOODED,
    HAR_CNN,
    MNIST_LENET5,
    NUM_WORKERS,
    OURS,
    PRINTED,
    SHORT,
    SQUEEZED,
    SlowLinkContest,
    contest_curves,
    difference_push,
    diloco,
    double_squeeze,
)
from studies.contest import (
    Attempt,
    Contender,
    Contenders,
    StudySettings,
    Tried,
    TunedContest,
    check_factors,
    contest_study,
)
from studies.exhibits import Line, figure_and_tables, table
from studies.problems import with_epochs

SETTING = "even data"
FACTORS = (0.5, 1.0, 2.0)
TUNING_SHARE = 1 / 3


def _dense_push(local_steps: int) -> Contender:
    return Contender(
        algorithm=eg.StochasticGradientPush, topology=eg.directed_ring, local_steps=local_steps
    )


RARE = replace(OURS, local_steps=32)
CONTROLS = {
    f"difference-push {OURS}": "dense push every 14 steps",
    f"difference-push {RARE}": "dense push every 32 steps",
    f"diloco {FLOODED}": "dense diloco every 32 steps",
    f"double-squeeze {SQUEEZED}": f"dense double-squeeze every {SQUEEZED.local_steps} steps",
}
"""The control of each compressed run: whole models, after as many local steps."""
RUNS: Contenders = {
    "dense push every 14 steps": _dense_push(OURS.local_steps),
    f"difference-push {OURS}": difference_push(OURS),
    "dense push every 32 steps": _dense_push(RARE.local_steps),
    f"difference-push {RARE}": difference_push(RARE),
    "dense diloco every 32 steps": Contender(
        algorithm=eg.DiLoCo, topology=eg.directed_ring, local_steps=FLOODED.local_steps
    ),
    f"diloco {FLOODED}": replace(diloco(), lr_factor=1.0),
    f"dense double-squeeze every {SQUEEZED.local_steps} steps": Contender(
        algorithm=eg.DoubleSqueeze, topology=eg.complete, local_steps=SQUEEZED.local_steps
    ),
    f"double-squeeze {SQUEEZED}": replace(double_squeeze(), lr_factor=1.0),
}


@dataclass(frozen=True, kw_only=True)
class RareContest(TunedContest):
    """One problem: trials of learning rates, then runs with the best rate of each contender.

    Args:
        contenders: Contenders by name of the run.
        factors: Multiples of the problem's learning rate that every contender tries.
        tuning_share: Length of a trial, as a share of a result's run, in (0, 1].
    """

    contenders: Contenders
    factors: tuple[float, ...] = FACTORS
    tuning_share: float = TUNING_SHARE

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        rates = [factor * self.problem.settings.lr for factor in self.factors]
        return self.trials_of_rates(self.contenders, rates)

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return last_looks(trial["accuracies"])

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        problem = self.problem_of(attempt)
        if attempt.is_tuning:
            num_epochs = max(1, round(self.tuning_share * problem.settings.num_epochs))
            problem = with_epochs(problem, num_epochs)
        contest = SlowLinkContest(
            problem=problem,
            seed=attempt.seed,
            setting=SETTING,
            partition=IID(),
            contenders=self.contenders,
            num_workers=NUM_WORKERS,
        )
        return contest.row(data_dir, attempt.run, session)


def controls(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    factors: tuple[float, ...] = FACTORS,
    tuning_share: float = TUNING_SHARE,
) -> Study:
    """Compressed exchanges against equally rare exchanges of whole models, all tuned.

    Push-sum sends every 14 or 32 steps and DiLoCo every 32, in a directed ring of 8;
    DoubleSqueeze sends every 12, among all 8. Each contender tries the same multiples of the
    problem's learning rate on a held-out tenth of the training samples, with a seed that no
    result uses. Data: MNIST and CIFAR-10 with LeNet-5, HAR with a CNN.

    Args:
        settings: Settings of the study.
        factors: Multiples of the problem's learning rate that every contender tries.
        tuning_share: Length of a trial, as a share of a result's run, in (0, 1]. A rate that
            is best in a short trial may diverge later.
    """
    check_factors(factors)
    check_range("tuning_share", tuning_share, "in (0, 1]")
    contests = [
        RareContest(
            problem=problem,
            seeds=settings.seeds,
            contenders=RUNS,
            factors=factors,
            tuning_share=tuning_share,
        )
        for problem in ((SHORT,) if settings.short else (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5))
    ]
    return contest_study(
        "sparse-push/controls",
        "What does compression cost, in addition to infrequent exchanges?",
        settings,
        contests,
        control_exhibits,
        printed=PRINTED,
        factors=factors,
        tuning_share=tuning_share,
        validation_share=contests[0].held_out,
        runs={name: each.plain(NUM_WORKERS) for name, each in RUNS.items()},
    )


NOTE = (
    "Medians over the seeds, and ranges. Accuracy of the averaged model, the mean of the last "
    "five evaluations. Lost: the control's accuracy minus this run's, seed by seed. Less: the "
    "control's bytes divided by the run's. The control sends whole models after as many steps; "
    "each run has the best of the learning rates tried."
)


def control_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    found = [row for row in rows.values() if not row["is_tuning"]]
    seed = min((row["seed"] for row in found), default=0)
    kinds = dict.fromkeys((row["group"], row["run"]) for row in found)
    return figure_and_tables(
        "controls",
        "Accuracy against bytes and time",
        f"The averaged model, seed {seed}.",
        (
            replace(panel, title=f"{group}: {panel.title}")
            for group in dict.fromkeys(row["group"] for row in found)
            for panel in contest_curves(found, (group, SETTING, seed))
        ),
        table("Ours", (_summary(*kind, found) for kind in kinds), NOTE),
    )


def _summary(group: str, run: str, rows: list[Row]) -> Line:
    mine = {row["seed"]: row for row in rows if (row["group"], row["run"]) == (group, run)}
    control = CONTROLS.get(run)
    pairs = [
        (mine[row["seed"]], row)
        for row in rows
        if (row["group"], row["run"]) == (group, control) and row["seed"] in mine
    ]
    lost = [_accuracy(theirs) - _accuracy(own) for own, theirs in pairs]
    less = [_sent(theirs) / _sent(own) for own, theirs in pairs]
    return {
        "part": ("text", group),
        "run": ("text", run),
        "learning rate": ("number", next(iter(mine.values()))["lr"]),
        "seeds": ("number", len(mine)),
        "accuracy": ("percent", statistics.median(map(_accuracy, mine.values()))),
        "lost": ("points", median(lost) if lost else None),
        "least lost": ("points", min(lost, default=None)),
        "most lost": ("points", max(lost, default=None)),
        "sent per worker": ("bytes", statistics.median(map(_sent, mine.values()))),
        "less": ("times", median(less) if less else None),
    }


def _accuracy(row: Row) -> float:
    return last_looks(row["accuracies"])


def _sent(row: Row) -> float:
    sent: float = row["bytes_per_worker"][-1]
    return sent
