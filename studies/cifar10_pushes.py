"""Sparse-Push itself on all pictures of CIFAR-10, beside dense push-sum on the same graph.

LeNet-5: each contender climbs to its own learning rate and consensus step, with equally many
trials. ResNet-20: the settings of the first author's code.

A row has the fields of `compressed_push`. Rows of tuned contests have those of `contest`, and:
    consensus_step: Consensus step; null without one.
    notches: Powers of two that learning rate and consensus step are from the first trial's.
    worker_mean: Mean accuracy of the workers' own models at the end; the merit of a trial.
    is_repeat: Whether the climb had ended, so that the row repeats the best trial.
    error: The reason why a trial failed; null otherwise.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import edgegossip as eg
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.topology import complete
from edgegossip.data.partition import IID, LabelSkew, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import resnet20
from edgegossip.recipes import push_sum_comparison as recipes
from edgegossip.recipes.push_sum_comparison import DENSE
from edgegossip.runs.exhibits import Exhibits, Unit, Value
from edgegossip.runs.scoreboard import last_looks, median
from edgegossip.runs.study import Row, Session, Study
from edgegossip.runs.tuning import slug
from studies import problems
from studies.compressed_push import (
    CIFAR10_LENET5,
    FINAL,
    NUM_WORKERS,
    OURS,
    PAPER,
    PRINTED,
    SHORT,
    Rung,
    SlowLinkContest,
    compressed,
    contest_curves,
    pushed,
)
from studies.contest import (
    Attempt,
    Contender,
    Contenders,
    StudySettings,
    Tried,
    TunedContest,
    contest_study,
)
from studies.exhibits import Line, figure_and_tables, table
from studies.problems import with_epochs

EVEN, SKEWED = "even data", "skew 0.8"
COMPLETE = "gossip, complete graph"
EIGHT = Rung(0.1, 32)
"""Settings that send 8 times fewer bytes than dense push-sum."""
PAPER_SELDOM = replace(PAPER, local_steps=7)
"""Settings that send 466 times fewer bytes on the same graph, with the code's compressor."""

NUM_TRIALS = 9
TUNING_SHARE = 0.2
NUM_LOOKS, NUM_TRIAL_LOOKS = 30, 5


def sparse_push(rung: Rung, **others: Any) -> Contender:  # noqa: ANN401
    """Sparse-Push in a directed ring, each layer compressed by itself, as in the code."""
    algorithm = others.pop("algorithm", eg.SparsePush)
    step = rung.keep_ratio  # the compressor's own; the climb begins here
    return compressed(algorithm, rung, per_layer=True, consensus_step=step, **others)


_COMPENSATED = partial(sparse_push, algorithm=eg.SkewCompensatedSparsePush)
DENSE_PUSH = Contender(algorithm=eg.StochasticGradientPush, topology=eg.directed_ring)
EVEN_RUNS: Contenders = {
    DENSE: DENSE_PUSH,
    **{f"sparse-push {each}": sparse_push(each) for each in (EIGHT, PAPER, OURS, PAPER_SELDOM)},
    # The control of `double-squeeze`, which averages among all workers.
    COMPLETE: Contender(algorithm=eg.Gossip, topology=complete),
}
SKEWED_RUNS: Contenders = {
    DENSE: DENSE_PUSH,
    f"sparse-push {PAPER}": sparse_push(PAPER),
    f"skew-compensated-sparse-push {PAPER}": _COMPENSATED(PAPER, compensation_rounds=50),
    f"sparse-push {OURS}": sparse_push(OURS),
    f"skew-compensated-sparse-push {OURS}": _COMPENSATED(
        OURS, ending="compensation", compensation_compressor=FINAL
    ),
}
PARTITIONS: Mapping[str, Partition] = {EVEN: IID(), SKEWED: LabelSkew(0.8)}

LENET5 = replace(CIFAR10_LENET5, scaled_down="LeNet-5 on all pictures of CIFAR-10, 30 epochs.")
RESNET20 = replace(
    pushed(problems.CIFAR10_RESNET20, recipes.CIFAR10_RESNET20_SETTINGS),
    model=partial(resnet20, normalization="evonorm"),
    num_train=None,
    num_test=None,
    augmentation=flip_and_crop,
    schedule=recipes.schedule("steps", recipes.CIFAR10_RESNET20_SETTINGS.num_epochs),
    scaled_down="ResNet-20 (EvoNorm) learns for 30 epochs instead of 200, with the learning "
    "rate, its decay and the consensus step of the first author's code.",
)


@dataclass(frozen=True, kw_only=True)
class ClimbingContest(TunedContest):
    """One problem and partition: each contender climbs to its settings, then runs with them.

    A climb starts from the problem's learning rate and the contender's consensus step. A trial
    halves or doubles one of the two, next to the best trial so far; the climb ends when no such
    neighbor is better, so that the best is never at an edge. The trials that are left repeat
    the best one without running.

    Args:
        partition: Partition of the samples among the workers.
        contenders: Contenders by name of the run.
        num_trials: Trials of each contender; 0 for results with the first settings.
        tuning_share: Length of a trial, as a share of a result's run, in (0, 1].
    """

    partition: Partition
    contenders: Contenders
    num_trials: int = NUM_TRIALS
    tuning_share: float = TUNING_SHARE

    tuned: ClassVar[tuple[str, ...]] = ("lr", "consensus_step")
    is_sequential: ClassVar[bool] = True

    @property
    def group(self) -> str:
        return f"{self.problem.name}-{slug(self.setting)}"

    @property
    def folder(self) -> str:
        return self.group

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        return {
            run: {
                f"{self.folder}/tuning/trial-{number}/{slug(run)}": {"trial": number}
                for number in range(self.num_trials)
            }
            for run in self.contenders
        }

    def best(self, rows: Iterable[Row], run: str) -> Row:
        return super().best(rows, run) if self.num_trials else self._settings(run, (0, 0))

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return trial["worker_mean"]

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        if not attempt.is_tuning:
            return self._run(data_dir, attempt, session)
        before = [row for row in session.rows.values() if row["run"] == attempt.run]
        notches = next_notches(before, self._step(attempt.run))
        if notches is None:
            return {**self.best(before, attempt.run), "is_repeat": True}
        settings = self._settings(attempt.run, notches)
        facts = {**settings, "notches": list(notches), "is_repeat": False, "error": None}
        try:
            row = self._run(data_dir, replace(attempt, settings=settings), session)
        except TrainingError as error:  # a loss that is not finite
            return {**facts, "accuracies": [], "worker_mean": 0.0, "error": str(error)}
        return {**row, **facts}

    def _step(self, run: str) -> float | None:
        step: float | None = self.contenders[run].options.get("consensus_step")
        return step

    def _settings(self, run: str, notches: tuple[int, int]) -> dict[str, float | None]:
        step = self._step(run)
        return {
            "lr": self.problem.settings.lr * 2 ** notches[0],
            "consensus_step": None if step is None else step * 2 ** notches[1],
        }

    def _run(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        problem, num_looks = self.problem_of(attempt), NUM_LOOKS
        if attempt.is_tuning:
            num_epochs = max(1, round(self.tuning_share * problem.settings.num_epochs))
            problem, num_looks = with_epochs(problem, num_epochs), NUM_TRIAL_LOOKS
        contender, step = self.contenders[attempt.run], attempt.settings["consensus_step"]
        if step is not None:
            options = {**contender.options, "consensus_step": step}
            contender = replace(contender, options=options)
        contest = SlowLinkContest(
            problem=problem,
            seed=attempt.seed,
            setting=self.setting,
            partition=self.partition,
            contenders={attempt.run: contender},
            num_workers=NUM_WORKERS,
            nesterov=True,
            num_looks=num_looks,
        )
        with warnings.catch_warnings():
            # Climbs try steps that may diverge.
            warnings.filterwarnings("ignore", "consensus_step")
            row = contest.row(data_dir, attempt.run, session)
        mean = statistics.fmean(row["worker_accuracies"])
        return {**row, "group": self.group, "worker_mean": mean}


def next_notches(trials: Iterable[Row], step: float | None) -> tuple[int, int] | None:
    """The next trial of a climb, in powers of two from the first; None at its end.

    Args:
        trials: Rows of the trials so far.
        step: Consensus step of the first trial; None for a contender without one.

    >>> next_notches([], None)
    (0, 0)
    >>> tried = {(0, 0): 0.5, (-1, 0): 0.4, (1, 0): 0.6, (2, 0): 0.5}
    >>> rows = [{"notches": [*each], "worker_mean": mean} for each, mean in tried.items()]
    >>> next_notches(rows, None), next_notches(rows, 0.01)
    (None, (1, 1))
    """
    known = {tuple(row["notches"]): row["worker_mean"] for row in trials}
    if not known:
        return 0, 0
    rate, own = max(known, key=lambda notches: known[notches])
    neighbors = [(rate - 1, own), (rate + 1, own)]
    if step is not None:
        # A step above 1 would give away more than a worker has.
        neighbors += [(rate, each) for each in (own + 1, own - 1) if step * 2**each <= 1]
    return next((each for each in neighbors if each not in known), None)


DEFAULTS = StudySettings()


def cifar10(settings: StudySettings = DEFAULTS) -> Study:
    """Sparse-Push on all pictures of CIFAR-10, 8 to 500 times less than dense push-sum.

    Eight workers in a directed ring, even data and skew 0.8, with and without compensation;
    Nesterov's momentum, each layer compressed by itself. On one core, a run of LeNet-5 takes 7
    to 10 minutes and its trials as long; a run of ResNet-20 takes hours.

    Args:
        settings: Settings of the study.
    """
    runs = {EVEN: EVEN_RUNS, SKEWED: SKEWED_RUNS}
    tuned = partial(ClimbingContest, seeds=settings.seeds)
    if settings.short:
        few = {each: EVEN_RUNS[each] for each in (DENSE, f"sparse-push {OURS}")}
        contests = [
            tuned(
                problem=SHORT,
                setting=EVEN,
                partition=IID(),
                contenders=few,
                num_trials=2,
            )
        ]
    else:
        contests = [
            tuned(
                problem=problem,
                setting=setting,
                partition=PARTITIONS[setting],
                contenders=contenders,
                num_trials=0 if problem is RESNET20 else NUM_TRIALS,
            )
            for problem in (LENET5, RESNET20)
            for setting, contenders in runs.items()
        ]
    return contest_study(
        "sparse-push/cifar10",
        "How much accuracy does Sparse-Push itself lose on CIFAR-10, and for how many bytes?",
        settings,
        contests,
        cifar10_exhibits,
        printed=PRINTED,
        nesterov=True,
        num_trials=NUM_TRIALS,
        tuning_share=TUNING_SHARE,
        validation_share=contests[0].held_out,
        runs={
            setting: {name: each.plain(NUM_WORKERS) for name, each in contenders.items()}
            for setting, contenders in runs.items()
        },
    )


NOTE = (
    "Medians over the seeds, at the end of the run. Lost: the mean accuracy of the dense run's "
    "workers minus that of this run's, seed by seed. Less: the bytes of dense push-sum on the "
    "same graph divided by the run's. Trials: different settings tried on a held-out tenth of "
    "the training samples with a seed that no result uses; 0 for the settings of the first "
    "author's code. Inside: whether the chosen learning rate and step are better than half and "
    "twice of each."
)


def cifar10_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    """Curves of the averaged model against bytes and time, and one table."""
    results = [row for row in rows.values() if not row["is_tuning"]]
    trials = [row for row in rows.values() if row["is_tuning"]]
    kinds = dict.fromkeys((row["group"], row["run"]) for row in results)
    contests = dict.fromkeys((row["group"], row["setting"]) for row in results)
    seed = min((row["seed"] for row in results), default=0)
    return figure_and_tables(
        "cifar10",
        "Accuracy against bytes and time",
        f"The averaged model, seed {seed}.",
        (
            replace(panel, title=f"{group}: {panel.title}")
            for group, setting in contests
            for panel in contest_curves(results, (group, setting, seed))
        ),
        table("Ours", (_summary(*kind, results, trials) for kind in kinds), NOTE),
    )


def _summary(group: str, run: str, results: list[Row], trials: list[Row]) -> Line:
    rows = [row for row in results if (row["group"], row["run"]) == (group, run)]
    dense = {
        row["seed"]: row for row in results if (row["group"], row["run"]) == (group, DENSE)
    }
    pairs = [(dense[row["seed"]], row) for row in rows if row["seed"] in dense]
    tried = [row for row in trials if (row["group"], row["run"]) == (group, run)]
    lost = [theirs["worker_mean"] - own["worker_mean"] for theirs, own in pairs]
    less = [
        theirs["bytes_per_worker"][-1] / own["bytes_per_worker"][-1] for theirs, own in pairs
    ]
    end = next_notches(tried, rows[0]["consensus_step"])
    inside: tuple[Unit, Value] = ("text", ("yes" if end is None else "no") if tried else None)
    return {
        "part": ("text", group),
        "run": ("text", run),
        "learning rate": ("number", rows[0]["lr"]),
        "step": ("number", rows[0]["consensus_step"]),
        "trials": ("number", sum(not row["is_repeat"] for row in tried)),
        "inside": inside,
        "seeds": ("number", len(rows)),
        "averaged model": ("percent", median([last_looks(row["accuracies"]) for row in rows])),
        "mean worker": ("percent", median([row["worker_mean"] for row in rows])),
        "worst worker": ("percent", median([min(row["worker_accuracies"]) for row in rows])),
        "lost": ("points", median(lost) if lost else None),
        "most lost": ("points", max(lost, default=None)),
        "sent per worker": ("bytes", median([row["bytes_per_worker"][-1] for row in rows])),
        "less": ("times", median(less) if less else None),
    }
