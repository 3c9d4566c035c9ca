"""Warnings about metrics that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from edgegossip.core.errors import TrainingError

_LOG = logging.getLogger("edgegossip.experiments")


class FiniteMetrics:
    """Reports the first metric that is not finite although the loss is.

    If the loss is not finite either, the model has diverged, and the metric is not at fault.

    >>> FiniteMetrics().check(0.5, {"R2": 0.1})
    """

    def __init__(self) -> None:
        self._has_complained = False

    def check(
        self, loss: float, metrics: Mapping[str, float], *, is_fatal: bool = False
    ) -> None:
        """Warn about the first metric that is not finite.

        Args:
            loss: Mean loss of the evaluation.
            metrics: Its metrics by name.
            is_fatal: Raise an error instead of a warning; for evaluations before any training.

        Raises:
            TrainingError: If `is_fatal`, and a metric is not finite although the loss is.
        """
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not wrong or self._has_complained or not math.isfinite(loss):
            return
        self._has_complained = True
        complaint = (
            f"metric {wrong[0]!r} is {metrics[wrong[0]]} on the test split, where the loss is "
            f"{loss:.4g}; a metric must be finite (R2 is not if all targets are equal), so "
            "look at the test data, or give the task other metrics"
        )
        if is_fatal:
            raise TrainingError(complaint)
        _LOG.warning("%s", complaint)
