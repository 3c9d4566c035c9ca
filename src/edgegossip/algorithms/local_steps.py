"""Rounds with a fixed number of SGD steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from edgegossip.algorithms.rounds import RoundState, Synchronous
from edgegossip.core.algorithm import Traits
from edgegossip.core.protocol import Steps, Work
from edgegossip.core.ranges import check_counts, check_ranges

S = TypeVar("S", bound=RoundState)


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Synchronous[S], Generic[S]):
    """`Synchronous` for algorithms with the same number of SGD steps in each round.

    Args:
        local_steps: SGD steps between two exchanges, at least 1.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.
    """

    local_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "local_steps")
        check_ranges(self, local_steps="at least 1")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=self.local_steps)

    def work(self, state: S) -> Work | None:
        return Steps(self.local_steps)
