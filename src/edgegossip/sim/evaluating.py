"""Evaluations that workers request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from edgegossip.core.protocol import Rank


class Evaluates(Protocol):
    """Measures parameters on a worker's validation data."""

    @property
    def cost(self) -> float:
        """Cost of an evaluation for the platform, in training samples."""

    def evaluate(self, params: Tensor) -> tuple[float, Mapping[str, float]]:
        """Mean loss, and metrics by name."""


MakeEvaluator: TypeAlias = Callable[[Rank], Evaluates | None]
"""Finds the evaluator that answers a worker's `Evaluate`; None if there is none."""


@dataclass(frozen=True, slots=True)
class FunctionEvaluator:
    """An evaluator that calls a function.

    Args:
        measure: Returns the loss and metrics of parameters.
        cost: As in `Evaluates`.
    """

    measure: Callable[[Tensor], tuple[float, Mapping[str, float]]]
    cost: float

    def evaluate(self, params: Tensor) -> tuple[float, Mapping[str, float]]:
        return self.measure(params)


def nothing(rank: Rank) -> None:
    """Find no evaluator."""


def same_for_all(
    evaluate: Callable[[Tensor], tuple[float, Mapping[str, float]]] | None, cost: float
) -> MakeEvaluator:
    """Let one function answer all workers."""
    if evaluate is None:
        return nothing
    evaluator = FunctionEvaluator(evaluate, cost)
    return lambda rank: evaluator
