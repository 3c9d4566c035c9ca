"""The metrics of a run, from its header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgegossip.core.metric_spec import ACCURACY, MetricSpec


def recorded_metrics(header: Mapping[str, Any]) -> tuple[MetricSpec, ...]:
    """The metrics of the run with this header, the chosen one first.

    Headers that name no metric are from classification runs, which are measured by accuracy.

    Raises:
        LookupError: If a field of a metric is missing.
        TypeError: If a field has the wrong type.
        ValueError: If the chosen metric is not among the run's metrics.

    >>> recorded_metrics({"task": {}})[0].name
    'accuracy'
    """
    task = header.get("task", {})
    if not isinstance(task, Mapping):
        raise TypeError(f"`task` is {task!r:.60}")
    described = task.get("metrics", [])
    if not isinstance(described, list):
        raise TypeError(f"`metrics` is {described!r:.60}")
    metrics = {each.name: each for each in map(_metric, described)} or {ACCURACY.name: ACCURACY}
    chosen = task.get("target_metric") or next(iter(metrics))
    if chosen not in metrics:
        raise ValueError(f"`target_metric` is {chosen!r:.60}, none of {[*metrics]!r:.60}")
    return tuple({chosen: metrics[chosen], **metrics}.values())


def _metric(described: object) -> MetricSpec:
    if not isinstance(described, Mapping):
        raise TypeError(f"a metric is {described!r:.60}")
    name, unit, higher = (described[key] for key in ("name", "unit", "higher_is_better"))
    if not (isinstance(name, str) and isinstance(unit, str) and isinstance(higher, bool)):
        raise TypeError(f"a metric is {described!r:.60}")
    return MetricSpec(name=name, unit=unit, higher_is_better=higher)
