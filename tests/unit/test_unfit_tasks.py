"""Tasks that are no classifications: what is refused, and metrics that are not finite."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_runs import events, summary
from tests.small_tasks import experiment, numbers, regression, regression_data
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract.errors import DataError, TrainingError
from edgegossip.data.dataset import Dataset, from_tensors
from edgegossip.report.page import write_report
from edgegossip.runs.experiment import Comparison, MetricTarget
from edgegossip.runs.folder import load_results
from edgegossip.runs.runner import run
from edgegossip.training.metrics import R2, Accuracy, MeanMetric
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import staged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_metric": "r2"}, "unknown target_metric 'r2'; choose one of 'MAE', 'R2'"),
        ({"metrics": ()}, r"metrics is empty; name at least one"),
        ({"metrics": (R2(), R2())}, "a metric cannot be called 'R2', which is the name of an"),
        ({"metrics": (R2(name="Loss"),)}, "a metric cannot be called 'Loss'"),
        (
            {"metrics": (Accuracy(),)},
            "accuracy needs classes, and 'numbers' has none; give the",
        ),
    ],
)
def test_metrics_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regression(**changes)


def test_targets_of_unknown_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown metric 'F1'; choose one of 'MAE', 'R2'"):
        experiment(regression(), until=MetricTarget(value=0.5, metric="F1"))


@pytest.mark.parametrize(("target", "gap"), [(math.nan, 0.1), (1.0, 1.5)])
def test_targets_out_of_range_are_refused(target: float, gap: float) -> None:
    with pytest.raises(ValueError, match=r"target( must be finite|_gap must be in \[0, 1\])"):
        Comparison(
            experiments={"one": experiment(regression())},
            baseline="one",
            target=target,
            target_gap=gap,
        )


def test_a_batch_that_is_no_pair_needs_a_forward(tmp_path: Path) -> None:
    x, y = numbers()
    data = from_tensors("dicts", {"x": x, "y": y}, {"x": x, "y": y})
    with pytest.raises(
        DataError, match=r"batch is a dict with \['x', 'y'\], not a pair .* give"
    ):
        run(experiment(regression(dataset=data)), out=tmp_path, num_threads=0)


def test_what_has_no_classes_is_not_cut_into_stages() -> None:
    with pytest.raises(ValueError, match=r"stages send labels .* 'numbers' has none"):
        staged(regression(), [2], PipelinedStage)


class OddSplit:
    """Gives batches whose tensors differ in length."""

    def __init__(self, num_samples: int = 64) -> None:
        self.samples = numbers(num_samples)

    def __len__(self) -> int:
        return len(self.samples[0])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.samples
        return x[indices], y[indices[: max(1, len(indices) - 1)]]

    @property
    def labels(self) -> Tensor:
        return torch.zeros(len(self), dtype=torch.int64)


def test_batches_of_odd_structure_end_a_run_with_one_line(tmp_path: Path) -> None:
    data = Dataset("odd", OddSplit(), regression_data().test)
    with pytest.raises(DataError, match=r"unequal length, 8 at \[0\] and 7 at \[1\]") as caught:
        run(experiment(regression(dataset=data)), out=tmp_path, num_threads=0)
    assert "\n" not in str(caught.value)


# Metrics that are not finite.


def constant_test() -> Dataset:
    x, y = numbers()
    return from_tensors("flat", train=(x[:64], y[:64]), test=(x[64:], torch.ones(32, 1)))


def test_a_metric_that_is_not_finite_ends_a_run_before_it_is_trained(tmp_path: Path) -> None:
    task = regression(dataset=constant_test(), target_metric="R2")
    with pytest.raises(TrainingError, match="metric 'R2' is nan on the test split, where the"):
        run(experiment(task), out=tmp_path, num_threads=0)
    assert summary(tmp_path)["reason"] == "failed"
    assert events(tmp_path, "trained") == []
    assert summary(tmp_path)["final_r2"] is None
    assert "R2" in write_report(tmp_path).read_text()


@thorough
def test_a_metric_that_is_not_finite_later_is_a_warning_and_counts_as_never_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def sometimes(outputs: Tensor, targets: Tensor) -> float:
        calls.append(1)
        return 1.0 if len(calls) == 1 else math.inf

    task = regression(metrics=(MeanMetric(name="odd", of=sometimes), R2()))
    with caplog.at_level(logging.WARNING):
        results = run(experiment(task), out=tmp_path, num_threads=0)
    assert results.reason == "finished"
    assert caplog.text.count("metric 'odd' is inf on the test split") == 1
    assert [each["odd"] for each in events(tmp_path, "evaluated")[:2]] == [1.0, None]
    assert math.isnan(load_results(tmp_path).final_value)
    write_report(tmp_path)
