"""Curves of the chosen metric, in the rows of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edgegossip.core.metric_spec import ACCURACY, MetricSpec
from edgegossip.experiments.exhibits import Unit
from edgegossip.experiments.results import Results
from edgegossip.experiments.study import Row


def learning_curve(results: Results) -> dict[str, Any]:
    """Times and values of the chosen metric, as fields of a row; see `curve_fields`."""
    history = results.history
    return curve_fields(
        results.metric, [each.time for each in history], [each.value for each in history]
    )


def curve_fields(
    metric: MetricSpec, times: Sequence[float], values: Sequence[float]
) -> dict[str, Any]:
    """Times and values of a metric, as fields of a row.

    For accuracy, the values are in `accuracies`; for another metric, in `values`, with its
    description in `metric`.
    """
    if metric == ACCURACY:
        return {"times": times, "accuracies": values}
    return {"times": times, "values": values, "metric": asdict(metric)}


def metric_of(row: Row) -> MetricSpec:
    """The metric of a row's curve."""
    return MetricSpec(**row["metric"]) if "metric" in row else ACCURACY


def values_of(row: Row) -> Sequence[float]:
    """The values of a row's curve."""
    found: Sequence[float] = row["values" if "metric" in row else "accuracies"]
    return found


def unit_of(metric: MetricSpec) -> Unit:
    """The unit of a column or an axis with values of a metric."""
    return "percent" if metric.is_share else "number"
