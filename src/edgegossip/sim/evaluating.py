"""Evaluations that workers ask for."""

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
"""Finds what answers the `Evaluate` of a worker; None if nothing does."""


@dataclass(frozen=True, slots=True)
class FreeEvaluator:
    """A function that answers at no cost.

    Args:
        measure: Returns loss and metrics of parameters.
    """

    measure: Callable[[Tensor], tuple[float, Mapping[str, float]]]
    cost: float = 0.0

    def evaluate(self, params: Tensor) -> tuple[float, Mapping[str, float]]:
        return self.measure(params)


def nothing(rank: Rank) -> None:
    """Find no answer."""


def same_for_all(
    evaluate: Callable[[Tensor], tuple[float, Mapping[str, float]]] | None,
) -> MakeEvaluator:
    """Let one function answer all workers, without cost."""
    if evaluate is None:
        return nothing
    evaluator = FreeEvaluator(evaluate)
    return lambda rank: evaluator
