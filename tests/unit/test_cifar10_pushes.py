"""The study of Sparse-Push itself: climbs to a learning rate and a step, and what follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.cifar10_pushes import (
    EVEN,
    SKEWED_RUNS,
    ClimbingContest,
    cifar10,
    cifar10_exhibits,
    sparse_push,
)
from studies.compressed_push import OURS, PAPER, SHORT, SlowLinkContest
from studies.contest import StudySettings

from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.compression.compressor import PerLayer
from edgegossip.contract.errors import TrainingError
from edgegossip.data.partition import IID
from edgegossip.recipes.push_sum_comparison import DENSE
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Row, Session

NAME = f"sparse-push {PAPER}"
CONTEST = ClimbingContest(
    problem=SHORT,
    setting=EVEN,
    partition=IID(),
    contenders={NAME: sparse_push(PAPER)},
    seeds=(0,),
)
LR = SHORT.settings.lr


class Runs:
    """Stands for runs whose accuracy depends on the learning rate and the step alone."""

    def __init__(self, best_lr: float, best_step: float, largest_step: float = 1.0) -> None:
        self.best = best_lr, best_step
        self.largest_step = largest_step
        self.settings: list[tuple[float, float]] = []

    def row(self, contest: SlowLinkContest, data_dir: Path, run: str, session: Session) -> Row:
        lr = contest.problem.settings.lr
        step = contest.contenders[run].options["consensus_step"]
        self.settings.append((lr, step))
        if step > self.largest_step:
            raise TrainingError("the loss became nan")
        factors = [max(a / b, b / a) for a, b in zip((lr, step), self.best, strict=True)]
        accuracy = 1 / (factors[0] * factors[1])
        return {
            "run": run,
            "seed": contest.seed,
            "accuracies": [accuracy] * 3,
            "times": [0.0, 1.0, 2.0],
            "bytes_per_worker": [0, 1, 2],
            "worker_accuracies": [accuracy, accuracy],
        }


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:  # noqa: ANN401
    def climb(runs: Runs, contest: ClimbingContest = CONTEST) -> dict[str, Row]:
        monkeypatch.setattr(SlowLinkContest, "row", lambda *given: runs.row(*given))
        rows: dict[str, Row] = {}
        for cell in contest.cells(tmp_path):
            needed = {name: rows[name] for name in cell.after}
            rows[cell.name] = cell.work(Session(folder=tmp_path, rows=needed))
        return rows

    return climb


@pytest.mark.parametrize(("up", "bold"), [(2.0, 1.0), (0.5, 1.0), (1.0, 2.0), (1.0, 0.5)])
def test_a_climb_ends_where_no_neighbor_is_better(
    climbed: Any,  # noqa: ANN401
    up: float,
    bold: float,
) -> None:
    lr, step = up * LR, bold * PAPER.keep_ratio
    runs = Runs(best_lr=lr, best_step=step)
    rows = climbed(runs)
    trials = [row for row in rows.values() if row["is_tuning"]]
    result = rows[CONTEST.place(NAME, 0)]
    assert (result["lr"], result["consensus_step"]) == runs.best == runs.settings[-1]
    tried = {(row["lr"], row["consensus_step"]) for row in trials}
    for factor in (0.5, 2.0):
        assert {(lr * factor, step), (lr, step * factor)} <= tried
    # The rest of the trials repeat the best one, and nothing runs for them.
    assert len(trials) == CONTEST.num_trials
    assert sum(not row["is_repeat"] for row in trials) == len(runs.settings) - 1 < len(trials)
    [(*_, inside)] = [each[:6] for each in cifar10_exhibits(rows).tables[0].rows]
    assert inside == "yes"


def test_a_climb_that_is_cut_short_says_so(climbed: Any) -> None:  # noqa: ANN401
    rows = climbed(Runs(best_lr=2**20 * LR, best_step=PAPER.keep_ratio))
    [line] = cifar10_exhibits(rows).tables[0].rows
    assert line[5] == "no"
    assert line[4] == CONTEST.num_trials


def test_a_trial_that_diverges_is_the_worst(climbed: Any) -> None:  # noqa: ANN401
    step = PAPER.keep_ratio
    rows = climbed(Runs(best_lr=LR, best_step=4 * step, largest_step=2 * step))
    result = rows[CONTEST.place(NAME, 0)]
    assert result["consensus_step"] == 2 * step
    assert "the loss became nan" in {row["error"] for row in rows.values() if row["is_tuning"]}


def test_without_trials_a_run_has_the_first_settings(climbed: Any) -> None:  # noqa: ANN401
    runs = Runs(best_lr=2 * LR, best_step=1.0)
    rows = climbed(runs, replace(CONTEST, num_trials=0))
    assert [*rows] == [CONTEST.place(NAME, 0)]
    assert runs.settings == [(LR, PAPER.keep_ratio)]


def test_final_rounds_that_cost_a_tenth_follow_layers_that_are_compressed_apart() -> None:
    contender = SKEWED_RUNS[f"skew-compensated-sparse-push {OURS}"]
    own = PerLayer(contender.options["compressor"], (10, 20))
    algorithm = contender.build(8, num_steps=14_000, compressor=own)
    assert isinstance(algorithm, SkewCompensatedSparsePush)
    assert algorithm.compressor == own
    assert algorithm.num_rounds == 1000
    assert algorithm.compensation_rounds == 29


def test_all_are_compared_with_dense_push_sum_on_their_own_partition() -> None:
    study = cifar10(StudySettings())
    results = [cell for cell in study.cells if "/seed0/" in cell.name]
    groups = {cell.group for cell in results}
    assert len(groups) == 4
    assert {cell.group for cell in results if cell.run == DENSE} == groups


def test_nothing_is_shown_before_anything_has_run() -> None:
    assert cifar10_exhibits({}) == Exhibits()
