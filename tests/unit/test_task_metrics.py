"""Metrics against scikit-learn, over batches and workers of any size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.runs.experiment import MetricTarget
from edgegossip.training.loss import TokenCrossEntropy
from edgegossip.training.metrics import (
    F1,
    R2,
    Accuracy,
    BitsPerCharacter,
    ExactMatch,
    MeanAbsoluteError,
    MeanMetric,
    Measurement,
    Metric,
    Perplexity,
    SumsMetric,
)

RANDOM = torch.Generator().manual_seed(0)
SPLITS = [(60,), (1,) * 60, (7, 23, 30), (59, 1)]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


def measured(metric: Metric, outputs: Tensor, targets: Tensor, sizes: tuple[int, ...]) -> float:
    """The value from batches of these sizes, every second of which another worker has."""
    workers = [Measurement(), Measurement()]
    pieces = zip(torch.split(outputs, [*sizes]), torch.split(targets, [*sizes]), strict=True)
    for index, (some, wanted) in enumerate(pieces):
        workers[index % 2].add(metric, metric.sums(some, wanted))
    return (workers[0] + workers[1]).values([metric])[metric.name]


NUMBERS = rand(60, 3) + 100, rand(60, 3) + 100
YES = rand(60, 4), (rand(60, 4) > 0.8).float()
SAID = (YES[0] > 0).numpy()
LOGITS, CLASSES = rand(60, 5), torch.randint(5, (60,), generator=RANDOM)
TOKENS = rand(60, 6, 9), torch.randint(9, (60, 6), generator=RANDOM)
ENTROPY = float(F.cross_entropy(TOKENS[0].flatten(0, 1).double(), TOKENS[1].flatten()))

CASES: list[tuple[Metric, Tensor, Tensor, float]] = [
    (Accuracy(), LOGITS, CLASSES, accuracy_score(CLASSES, LOGITS.argmax(1))),
    (MeanAbsoluteError(), *NUMBERS, mean_absolute_error(NUMBERS[1], NUMBERS[0])),
    (R2(), *NUMBERS, r2_score(NUMBERS[1], NUMBERS[0])),
    (R2(), NUMBERS[0][:, 0], NUMBERS[1][:, 0], r2_score(NUMBERS[1][:, 0], NUMBERS[0][:, 0])),
    (F1(), *YES, f1_score(YES[1].numpy(), SAID, average="macro", zero_division=0)),
    (F1(average="micro"), *YES, f1_score(YES[1].numpy(), SAID, average="micro")),
    (ExactMatch(), *YES, accuracy_score(YES[1].numpy(), SAID)),
    (Perplexity(), *TOKENS, math.exp(ENTROPY)),
    (BitsPerCharacter(), *TOKENS, ENTROPY / math.log(2)),
    (BitsPerCharacter(characters_per_token=4.0), *TOKENS, ENTROPY / math.log(2) / 4),
    (
        MeanMetric(name="bias", of=lambda outputs, targets: (outputs - targets).mean()),
        *NUMBERS,
        float((NUMBERS[0].double() - NUMBERS[1]).mean()),
    ),
]


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "expected"), CASES, ids=lambda each: str(each)[:30]
)
def test_batches_and_workers_add_up_to_the_value_of_all_samples(
    metric: Metric, outputs: Tensor, targets: Tensor, expected: float, sizes: tuple[int, ...]
) -> None:
    tolerance = 1e-4 if metric.name == "bias" else 1e-6
    assert measured(metric, outputs, targets, sizes) == pytest.approx(expected, rel=tolerance)


def test_a_metric_of_ones_own_is_made_of_sums() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([(outputs - targets).square().sum(), torch.tensor(len(targets))])

    metric = SumsMetric(name="RMSE", of=squares, finish=lambda sums: (sums[0] / sums[1]).sqrt())
    expected = float((NUMBERS[0] - NUMBERS[1]).square().sum().div(60).sqrt())
    assert measured(metric, *NUMBERS, (7, 23, 30)) == pytest.approx(expected, rel=1e-6)


def test_ignored_tokens_do_not_count() -> None:
    outputs, targets = TOKENS[0][:2], TOKENS[1][:2].clone()
    targets[0, 2:] = -100
    kept = torch.cat([outputs[0, :2], outputs[1]]), torch.cat([targets[0, :2], targets[1]])
    expected = float(F.cross_entropy(*kept))
    assert measured(Perplexity(), outputs, targets, (1, 1)) == pytest.approx(math.exp(expected))
    loss = TokenCrossEntropy()
    assert float(loss(outputs, targets)) == pytest.approx(expected)
    assert loss.num_terms(outputs, targets) == 8
    each = loss(outputs, targets, reduction="none")
    assert each.tolist() == pytest.approx(
        [float(loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(2)]
    )


def test_targets_without_variance_have_no_r2() -> None:
    ones = torch.full((60,), 0.1)
    assert math.isnan(measured(R2(), rand(60), ones, (30, 30)))


@pytest.mark.parametrize("metric", [R2(), MeanAbsoluteError(), F1(), ExactMatch()])
def test_outputs_of_another_shape_are_refused(metric: Metric) -> None:
    with pytest.raises(DataError, match=r"outputs \[4, 1\] with targets \[4\]; they need one"):
        metric.sums(torch.zeros(4, 1), torch.zeros(4))


def test_classes_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"outputs \[2, 2\] with classes \[2, 1\]; it needs"):
        Accuracy().sums(torch.eye(2), torch.tensor([[0], [1]]))


def test_accuracy_of_pixels_is_a_share_of_all_pixels() -> None:
    outputs, classes = torch.rand(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    share = float((outputs.argmax(1) == classes).double().mean())
    metric = Accuracy()
    assert metric.value(metric.sums(outputs, classes)) == pytest.approx(share)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 4), torch.zeros(5, 2), torch.zeros(10)])
def test_tokens_of_another_shape_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"outputs \[2, 5, 8\] do not fit the tokens"):
        Perplexity().sums(torch.zeros(2, 5, 8), tokens.long())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MetricSpec(name="%!"), "a metric needs a name with a letter or a digit"),
        (lambda: F1(average="mean"), "average must be 'macro' or 'micro', got 'mean'"),  # type: ignore[arg-type]
        (
            lambda: BitsPerCharacter(characters_per_token=0),
            "characters_per_token must be above 0",
        ),
    ],
)
def test_metrics_that_make_no_sense_are_refused(make: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=message):
        make()


def test_the_best_of_a_falling_metric_is_its_least() -> None:
    error = MetricSpec(name="MAE", higher_is_better=False)
    assert error.best([3.0, math.nan, 1.0]) == 1.0
    assert error.worst([3.0, math.nan, 1.0]) == 3.0
    assert math.isnan(error.best([math.nan]))
    assert not error.is_reached(math.nan, 5.0)
    assert ACCURACY.best(np.array([0.1, 0.3]).tolist()) == 0.3


def test_a_target_is_easier_by_a_part_of_the_value_and_of_shares_by_a_difference() -> None:
    assert MetricSpec(name="R2").easier(-2.0, 0.1) == pytest.approx(-2.2)
    assert MetricSpec(name="F1", unit="percent").easier(0.5, 0.1) == pytest.approx(0.4)


def test_measurements_of_workers_add_up() -> None:
    metric, parts = Accuracy(), []
    for some in torch.split(torch.arange(60), [10, 50]):
        part = Measurement(
            num_samples=len(some), total_loss=1.5 * len(some), num_terms=len(some)
        )
        part.add(metric, metric.sums(LOGITS[some], CLASSES[some]))
        parts.append(part)
    both = parts[0] + parts[1]
    assert (both.num_samples, both.loss) == (60, 1.5)
    assert both.sums["accuracy"].tolist()[1] == 60
    assert math.isnan(Measurement().loss)


def test_a_target_of_several_looks_goes_by_their_mean() -> None:
    error = MetricSpec(name="MAE", higher_is_better=False)
    target = MetricTarget(value=1.0, num_looks=2)
    assert not target.is_reached([0.5], error)
    assert not target.is_reached([3.0, 2.0, 0.5], error)
    assert target.is_reached([3.0, 1.4, 0.5], error)
    with pytest.raises(ValueError, match="value must be finite, got nan"):
        MetricTarget(value=math.nan)
