"""The search for ADSP's commit rate: rates, rewards and results.

Fields of a row:
    has_diverged: See the function `has_diverged`; also true if a loss is not finite.
    losses: Loss at each evaluation.
    search: The server's notes at the end of each window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import edgegossip as eg
from edgegossip.algorithms.server.reward import ConstrainedFit, LogSlope, PaperReward, Reward
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.describe import describe
from edgegossip.runs.events import EventReader
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import median
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.runs.tuning import slug
from studies.contest import Contest, StudySettings, contest_study
from studies.exhibits import Line, figure_and_tables, panel, table
from studies.problems import MNIST_MLP, SMALL_MLP
from studies.servers import MIN_INTERVAL, Cluster, machines

NUM_WORKERS = 18
HETEROGENEITY = 2.0
WINDOW: Seconds = 5.0
NUM_WINDOWS = 30
NUM_LOOKS = 60
VALIDATION_SHARE = 0.02
SPEED = 64.0
MOMENTUM = 0.9
"""Explicit momentum; together with much implicit momentum, training may diverge."""
RATES = (0.2, 0.5)
REWARDS: dict[str, tuple[Reward, float]] = {
    "log-slope": (LogSlope(), 2.0),
    "constrained-fit": (ConstrainedFit(), 2.0),
    "log-slope, one more": (LogSlope(), 1.0),
    "paper": (PaperReward(final_loss=0.2), 1.0),
}
"""Reward and growth of each run; the last run is the published search."""
DEFAULTS = StudySettings(seeds=tuple(range(50)))


@dataclass(frozen=True, kw_only=True)
class Searches(Contest):
    """One problem, seed and learning rate, with a run for each of `rewards`.

    Args:
        machines: The server and the workers.
        lr: Learning rate.
        rewards: Names in `REWARDS`.
        num_windows: Number of windows in a run.
    """

    machines: Cluster
    lr: float
    rewards: tuple[str, ...]
    num_windows: int

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for name in self.rewards:
            folder = f"{self.group}/lr-{self.lr:g}/seed{self.seed}/{slug(name)}"
            yield self.cell(folder, partial(self._work, data_dir, name))

    def experiment(self, data_dir: Path, name: str) -> eg.Experiment:
        """Make the experiment of this name."""
        reward, growth = REWARDS[name]
        settings = replace(self.problem.settings, lr=self.lr, momentum=MOMENTUM)
        problem = replace(self.problem, settings=settings, validation_share=VALIDATION_SHARE)
        seconds = self.num_windows * WINDOW
        return eg.Experiment(
            task=problem.task(data_dir),
            algorithm=eg.ADSP(
                num_workers=self.machines.num_workers,
                num_rounds=eg.UNTIL_CUT_OFF,
                window=WINDOW,
                min_interval=MIN_INTERVAL,
                reward=reward,
                growth=growth,
                waits_for_answer=name == "paper",
            ),
            platforms=self.machines.platforms,
            links=self.machines.links,
            seed=self.seed,
            max_seconds=seconds,
            evaluation_interval=seconds / NUM_LOOKS,
            name=slug(name),
        )

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        facts = {"group": self.group, "lr": self.lr, "run": name, "seed": self.seed}
        try:
            history = session.run(self.experiment(data_dir, name)).history
        except TrainingError as error:  # a loss that is not finite
            return {**facts, "has_diverged": True, "error": str(error), "losses": []}
        losses = [each.loss for each in history]
        return {
            **facts,
            "has_diverged": has_diverged(losses),
            "losses": losses,
            "times": [each.time for each in history],
            "final_accuracy": history[-1].accuracy,
            "search": EventReader(session.folder / "events.jsonl").notes("search"),
        }


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the mean of a run's last ten losses exceeds 1.5 times the lowest.

    >>> has_diverged([2.0] * 10 + [1.0] * 10), has_diverged([1.0] * 10 + [2.0] * 10)
    (False, True)
    """
    means = [math.fsum(losses[i : i + 10]) / 10 for i in range(len(losses) - 9)]
    return bool(means) and means[-1] > 1.5 * min(means)


def search(settings: StudySettings = DEFAULTS) -> Study:
    """Four searches for the commit rate: rates tried, rewards, losses, implicit momentum.

    Data: MNIST, with 50 seeds. `log-slope` and `paper` together take half an hour on one core.

    Args:
        settings: Settings of the study.
    """
    contests = _contests(settings)
    return contest_study(
        "adsp/search",
        "Does the search for the commit rate find a good one, and does it ever diverge?",
        settings,
        contests,
        _exhibits,
        printed=(
            "The paper shows rewards that rise and fall once with the rate. In the only run "
            "that was published, a window in which the loss rose was rewarded with 4.81; the "
            "choice that this led to had ended in a divergence before.",
        ),
        scaled_down=(
            f"Windows of {WINDOW:g} s, ten steps of the fastest, instead of the paper's 60 s.",
        ),
        machines=describe(contests[0].machines),
        momentum=MOMENTUM,
        rates=RATES,
        rewards={name: describe(reward) for name, (reward, _) in REWARDS.items()},
        growth={name: growth for name, (_, growth) in REWARDS.items()},
    )


def _contests(settings: StudySettings) -> list[Searches]:
    problem = SMALL_MLP if settings.short else MNIST_MLP
    if not settings.short:
        problem = replace(problem, settings=replace(problem.settings, throughput=SPEED))
    setup = machines(
        f"H = {HETEROGENEITY:g}",
        problem,
        num_workers=3 if settings.short else NUM_WORKERS,
        heterogeneity=HETEROGENEITY,
    )
    return [
        Searches(
            problem=problem,
            seed=seed,
            machines=setup,
            lr=lr,
            rewards=tuple(REWARDS)[:: 3 if settings.short else 1],
            num_windows=4 if settings.short else NUM_WINDOWS,
        )
        for lr in (RATES[:1] if settings.short else RATES)
        for seed in (settings.seeds[:2] if settings.short else settings.seeds)
    ]


NOTE = (
    "A run has diverged if a loss was not finite, or the mean of its last ten test losses is "
    "more than 1.5 times the lowest such mean before. Rates, momenta and losses are medians "
    "over the seeds, at the end of the run."
)


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    kinds = dict.fromkeys((row["run"], row["lr"]) for row in rows.values())
    lines = table("Ours", (_summary(*kind, rows) for kind in kinds), NOTE)
    first = next((row for row in rows.values() if row.get("search")), None)
    if first is None:
        return Exhibits(tables=(lines,)) if rows else Exhibits()
    lr, seed = first["lr"], first["seed"]
    mine = [row for row in rows.values() if (row["lr"], row["seed"]) == (lr, seed)]
    return figure_and_tables(
        "search",
        "The rates that the searches try, and their rewards",
        f"Learning rate {lr:g}, seed {seed}. Rewards are shown during a search.",
        (
            panel(
                label.capitalize(),
                {row["run"]: _curve(row, field) for row in mine if row.get("search")},
                kind="lines",
                x_label="virtual time",
                x_unit="seconds",
                y_label=label,
                y_unit="number",
            )
            for field, label in FIELDS.items()
        ),
        lines,
    )


def _summary(run: str, lr: float, rows: Mapping[str, Row]) -> Line:
    mine = [row for row in rows.values() if (row["run"], row["lr"]) == (run, lr)]
    ends = [row["search"][-1] for row in mine if row.get("search")] or [{}]
    losses = [row["losses"][-1] for row in mine if row["losses"]] or [None]
    momentum = median([each.get("implicit_momentum") for each in ends])
    return {
        "search": ("text", run),
        "learning rate": ("number", lr),
        "runs": ("number", len(mine)),
        "diverged": ("number", sum(row["has_diverged"] for row in mine)),
        "rate at the end": ("number", median([each.get("rate") for each in ends])),
        "implicit momentum": ("number", momentum),
        "test loss at the end": ("number", median(losses)),
    }


FIELDS = {
    "rate": "commits in a window",
    "reward": "reward",
    "loss": "validation loss",
    "implicit_momentum": "implicit momentum",
}


def _curve(row: Row, field: str) -> tuple[list[Seconds], list[float]]:
    known = [each for each in row["search"] if field in each]
    return [each["time"] for each in known], [each[field] for each in known]
