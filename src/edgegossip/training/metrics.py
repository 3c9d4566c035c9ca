"""Metrics: sums over the samples of a batch, which add up over batches and workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from edgegossip.contract.errors import DataError, unknown_name
from edgegossip.contract.metrics import PERCENT, MetricSpec
from edgegossip.contract.ranges import check_ranges, check_type
from edgegossip.data.dataset import Dataset
from edgegossip.data.nested import num_samples
from edgegossip.training.loss import IGNORED

RESERVED = {
    *("type", "time", "epochs", "loss", "consensus_distance", "bytes_sent"),
    *("samples_processed", "joules", "busy_joules", "idle_joules", "link_joules"),
    *("goodput", "compute_used", "node_seconds"),
}
"""Names of other fields in a run's log, which no metric may have."""


@dataclass(frozen=True, kw_only=True)
class Metric(MetricSpec, ABC):
    """Base of metrics; subclasses are frozen dataclasses that give `name` a default.

    The mean of a metric's values over batches is not its value over all samples if batches
    differ in size, or if the metric is not a mean (R2, F1, perplexity). A metric therefore
    gives sums, and its value is computed once, from the sums over all batches of all workers.

    If the loss is finite, a value that is not finite is an error before any training; later, it
    causes one warning, and ``null`` in the files. The built-in metrics raise `DataError` if the
    shapes of outputs and targets do not match, because PyTorch would broadcast them.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
    """

    needs_classes: ClassVar[bool] = False
    """Whether the metric compares outputs with class labels."""

    @property
    def spec(self) -> MetricSpec:
        """Name, unit and direction only."""
        return MetricSpec(
            name=self.name, unit=self.unit, higher_is_better=self.higher_is_better
        )

    @abstractmethod
    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        """Sums over the samples of a batch; their shape is the same for all batches.

        Args:
            outputs: First result of the task's `forward`: the model's outputs.
            targets: Second result of `forward`.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Compute the value from the sums over all samples, float64."""


class _Mean(Metric, ABC):
    """Metrics whose sums are a total and the number of its terms."""

    def value(self, sums: Tensor) -> float:
        total, number = sums.tolist()
        return total / number if number else math.nan


@dataclass(frozen=True, kw_only=True)
class MeanMetric(_Mean):
    """Your own mean over samples, such as a share of correct answers.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
        of: ``of(outputs, targets)``: the mean over a batch; batches are weighted by their
            numbers of samples.

    >>> def bias(outputs, targets): return (outputs - targets).mean()
    >>> metric = MeanMetric(name="bias", of=bias, higher_is_better=False)
    >>> metric.value(metric.sums(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0])))
    1.0
    """

    of: Callable[[Any, Any], Tensor | float]

    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        number = num_samples(targets)
        return torch.tensor([float(self.of(outputs, targets)) * number, number]).double()


@dataclass(frozen=True, kw_only=True)
class SumsMetric(Metric):
    """Your own metric that is not a mean over samples.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
        of: ``of(outputs, targets)``: sums over the samples of a batch, in one tensor, of the
            same shape for all batches.
        finish: ``finish(sums)``: the value, from the sums over all samples.

    >>> def errors(outputs, targets):
    ...     return torch.stack([(outputs - targets).square().sum(), torch.tensor(len(targets))])
    >>> rmse = SumsMetric(name="RMSE", of=errors, finish=lambda s: (s[0] / s[1]).sqrt(),
    ...                   higher_is_better=False)
    >>> rmse.value(rmse.sums(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])))
    3.0
    """

    of: Callable[[Any, Any], Tensor]
    finish: Callable[[Tensor], Tensor | float]

    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        return self.of(outputs, targets)

    def value(self, sums: Tensor) -> float:
        return float(self.finish(sums))


@dataclass(slots=True, eq=False)
class Measurement:
    """Loss and metrics on some samples, as sums that add up over several parts.

    Attributes:
        num_samples: Number of samples.
        total_loss: Sum of the loss over `num_terms`.
        num_terms: Number of terms in the loss: samples, or tokens.
        sums: Sums of each metric, by name, float64.
    """

    num_samples: int = 0
    total_loss: float = 0.0
    num_terms: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metric: Metric, sums: Tensor) -> None:
        """Add the sums of a batch."""
        sums = sums.detach().to("cpu", torch.float64)
        before = self.sums.get(metric.name)
        self.sums[metric.name] = sums if before is None else before + sums

    def __add__(self, other: Measurement) -> Measurement:
        names = {**self.sums, **other.sums}
        parts = (
            [each.sums[name] for each in (self, other) if name in each.sums] for name in names
        )
        return Measurement(
            self.num_samples + other.num_samples,
            self.total_loss + other.total_loss,
            self.num_terms + other.num_terms,
            {name: torch.stack(part).sum(0) for name, part in zip(names, parts, strict=True)},
        )

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.total_loss / self.num_terms if self.num_terms else math.nan

    def values(self, metrics: Iterable[Metric]) -> dict[str, float]:
        """The value of each metric, by name."""
        return {each.name: float(each.value(self.sums[each.name])) for each in metrics}


def check_metrics(
    metrics: Sequence[Metric], target_metric: str | None, dataset: Dataset
) -> None:
    """Check the metrics of a task.

    Raises:
        ValueError: If there is no metric, one is not a `Metric`, names are equal or reserved,
            `target_metric` is unknown, or a metric does not fit the data.
    """
    check_type("metrics", metrics, Sequence, "(R2(),)")
    if not metrics:
        raise ValueError("metrics is empty; name at least one, e.g. metrics=(R2(),)")
    for metric in metrics:
        check_type("a metric", metric, Metric, "MeanMetric(name='bias', of=bias)")
    keys = Counter(metric.key for metric in metrics)
    for metric in metrics:
        if keys[metric.key] > 1 or metric.key in RESERVED:
            raise ValueError(
                f"a metric cannot be called {metric.name!r}, which is the name of another "
                "one or of a field of the log; choose another name"
            )
        if metric.needs_classes and not dataset.num_classes:
            raise ValueError(
                f"{metric.name} needs classes, and {dataset.name!r} has none; give "
                "the task metrics that fit, e.g. metrics=(R2(), MeanAbsoluteError())"
            )
    names = [metric.name for metric in metrics]
    if target_metric not in (None, *names):
        raise ValueError(unknown_name("target_metric", str(target_metric), names))


@dataclass(frozen=True, kw_only=True)
class Accuracy(_Mean):
    """Share of samples whose largest output is that of their class.

    Outputs are [batch, num_classes], targets int64 [batch]; with further dimensions, such as
    those of pixels, each entry counts. Other shapes raise `DataError`.

    >>> metric = Accuracy()
    >>> outputs = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    >>> metric.value(metric.sums(outputs, torch.tensor([1, 1])))
    0.5
    """

    name: str = "accuracy"
    unit: str = PERCENT

    needs_classes: ClassVar[bool] = True

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            raise DataError(
                f"{self.name} compares outputs {list(outputs.shape)} with classes "
                f"{list(targets.shape)}; it needs [batch, num_classes] and [batch]"
            )
        return _pair((outputs.argmax(1) == targets).sum(), targets.numel())


@dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(_Mean):
    """Mean absolute difference between outputs and targets, over all entries.

    Args:
        name: See `MetricSpec`.
        unit: Unit of the targets, e.g. "years".
        higher_is_better: False.

    >>> metric = MeanAbsoluteError()
    >>> metric.value(metric.sums(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])))
    1.5
    """

    name: str = "MAE"
    higher_is_better: bool = False

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_one_shape(self, outputs, targets)
        return _pair((_double(outputs) - _double(targets)).abs().sum(), targets.numel())


@dataclass(frozen=True, kw_only=True)
class R2(Metric):
    r"""Coefficient of determination: the share of the targets' variance that is explained.

    .. math:: R^2 = 1 - \frac{\sum_i (y_i - \hat y_i)^2}{\sum_i (y_i - \bar y)^2}

    It is 1 for perfect outputs, 0 for the mean of the targets, and may be below 0. With several
    targets per sample, it is the mean over them. It is NaN if a target never varies.

    >>> metric = R2()
    >>> targets = torch.tensor([1.0, 2.0, 3.0])
    >>> metric.value(metric.sums(torch.tensor([1.0, 2.0, 2.0]), targets))
    0.5
    """

    name: str = "R2"

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_one_shape(self, outputs, targets)
        y = _double(targets).reshape(len(targets), -1)
        errors = y - _double(outputs).reshape(len(targets), -1)
        number = torch.full_like(y[0], len(y))
        return torch.stack([errors.square().sum(0), y.square().sum(0), y.sum(0), number])

    def value(self, sums: Tensor) -> float:
        errors, squares, total, number = sums
        variance = squares - total.square() / number
        # A remainder from rounding two large sums is not variance.
        is_constant = variance <= 1e-12 * squares
        return float(torch.where(is_constant, torch.nan, 1 - errors / variance).mean())


@dataclass(frozen=True, kw_only=True)
class Perplexity(_Mean):
    r"""Perplexity of the next token: :math:`e^{H}`, with the mean cross entropy :math:`H`.

    Outputs are [batch, ..., num_tokens], targets int64 [batch, ...]. Targets of -100 do not
    count.

    >>> metric = Perplexity()
    >>> round(metric.value(metric.sums(torch.zeros(1, 5, 8), torch.zeros(1, 5).long())), 4)
    8.0
    """

    name: str = "perplexity"
    higher_is_better: bool = False

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return token_sums(outputs, targets)

    def value(self, sums: Tensor) -> float:
        mean = super().value(sums)
        return math.exp(mean) if mean < math.log(1e300) else math.inf


@dataclass(frozen=True, kw_only=True)
class BitsPerCharacter(_Mean):
    r"""Bits per character of a text: :math:`H / (c \ln 2)`, with cross entropy :math:`H`.

    Unlike perplexity, it is comparable between models with different tokens. Outputs and
    targets are as in `Perplexity`.

    Args:
        name: See `MetricSpec`; "bits per byte" for tokens that are bytes.
        unit: See `MetricSpec`.
        higher_is_better: False.
        characters_per_token: :math:`c`, above 0: the mean number of characters in a token.

    Raises:
        ValueError: If `characters_per_token` is out of range, or `name` has no letter or digit.

    >>> metric = BitsPerCharacter()
    >>> round(metric.value(metric.sums(torch.zeros(1, 5, 8), torch.zeros(1, 5).long())), 4)
    3.0
    """

    name: str = "bits per character"
    higher_is_better: bool = False
    characters_per_token: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, characters_per_token="above 0 and finite")

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return token_sums(outputs, targets)

    def value(self, sums: Tensor) -> float:
        return super().value(sums) / (self.characters_per_token * math.log(2))


@dataclass(frozen=True, kw_only=True)
class F1(Metric):
    r"""F1 of several labels per sample: the harmonic mean of precision and recall.

    .. math:: F_1 = \frac{2\,TP}{2\,TP + FP + FN}

    Outputs are [batch, num_labels]; targets are zeros and ones of the same shape. A label
    without any true or predicted sample counts as 0.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: True.
        average: "macro" for the mean over the labels; "micro" pools all labels, so frequent
            labels weigh more.
        threshold: Outputs above it predict the label: 0 for logits, 0.5 for probabilities.

    Raises:
        ValueError: If `average` is unknown, or `name` has no letter or digit.

    >>> metric = F1(average="micro")
    >>> targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> round(metric.value(metric.sums(torch.tensor([[2.0, -1.0], [-1.0, 3.0]]), targets)), 6)
    0.8
    """

    name: str = "F1"
    unit: str = PERCENT
    average: Literal["macro", "micro"] = "macro"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average not in ("macro", "micro"):
            raise ValueError(f"average must be 'macro' or 'micro', got {self.average!r}")

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_one_shape(self, outputs, targets)
        predicted, true = outputs > self.threshold, targets > 0.5
        both = (predicted & true).sum(0)
        return torch.stack([2 * both, predicted.sum(0) + true.sum(0)])

    def value(self, sums: Tensor) -> float:
        if self.average == "micro":
            sums = sums.flatten(1).sum(1, keepdim=True)
        return float((sums[0] / sums[1].clamp(min=1)).mean())


@dataclass(frozen=True, kw_only=True)
class ExactMatch(_Mean):
    """Share of samples with all labels correct: subset accuracy for several labels per sample.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: True.
        threshold: See `F1`.

    >>> metric = ExactMatch()
    >>> targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> metric.value(metric.sums(torch.tensor([[2.0, -1.0], [-1.0, 3.0]]), targets))
    0.5
    """

    name: str = "exact match"
    unit: str = PERCENT
    threshold: float = 0.0

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _require_one_shape(self, outputs, targets)
        is_right = ((outputs > self.threshold) == (targets > 0.5)).flatten(1).all(1)
        return _pair(is_right.sum(), len(targets))


def token_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of all tokens that count, and their number.

    Raises:
        DataError: If there is not one target per token.
    """
    if outputs.shape[:-1] != targets.shape:
        raise DataError(
            f"outputs {list(outputs.shape)} do not fit the tokens {list(targets.shape)}; they "
            "need [batch, length, num_tokens] and [batch, length]"
        )
    losses = F.cross_entropy(
        outputs.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return _pair(_double(losses).sum(), int((targets != IGNORED).sum()))


def _pair(total: Tensor, number: int) -> Tensor:
    total = _double(total)
    return torch.stack([total, total.new_tensor(number)])


def _double(values: Tensor) -> Tensor:
    """The values in float64, which mps does not have."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _require_one_shape(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise DataError(
            f"{metric.name} compares outputs {list(outputs.shape)} with targets "
            f"{list(targets.shape)}; they need one shape, so squeeze or unsqueeze one of them"
        )
