"""What a live view is told while a run goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from edgegossip.core.protocol import Algorithm, Seconds
from edgegossip.experiments.results import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run stands.

    Attributes:
        name: Of the run.
        time: Virtual seconds.
        share: Of the run that is done, in [0, 1].
        evaluation: The newest; None before the first.
        wall_seconds: Since the run began.
        samples_per_second: Samples processed per wall second, since this process began.
    """

    name: str
    time: Seconds
    share: float
    evaluation: Evaluation | None
    wall_seconds: float
    samples_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """Wall seconds until the end, if it goes on like this."""
        return self.wall_seconds * (1 / self.share - 1) if self.share > 0 else None


class Progress(Protocol):
    """A live view."""

    def update(self, status: Status) -> None:
        """Show it."""


class Silent:
    """Shows nothing."""

    def update(self, status: Status) -> None:
        pass


def num_exchanges(algorithm: Algorithm[Any]) -> float:
    """What `state.round` of each worker comes to; infinite where the algorithm does not say.

    >>> from edgegossip.algorithms.gossip import Gossip
    >>> from edgegossip.core.topology import ring
    >>> num_exchanges(Gossip(topology=ring(4), num_rounds=3))
    3
    """
    num_rounds: float = getattr(algorithm, "num_rounds", math.inf)
    return getattr(algorithm, "num_exchanges", num_rounds)
