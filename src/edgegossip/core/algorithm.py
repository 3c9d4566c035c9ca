"""Interface of an algorithm: two functions on a state, and the facts that drivers may know."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from edgegossip.core.protocol import WORKER, Effect, Event, Rank, Role, Seconds, State
from edgegossip.core.schema import MessageSpec, lacks
from edgegossip.core.topology import Topology

UNTIL_CUT_OFF = 10**9
"""The `num_rounds` of an algorithm that goes on until the run's time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The facts about an algorithm that drivers, wrappers and reports go by.

    Attributes:
        topology: Whom a worker may send to; None where the algorithm has no graph.
        num_rounds: The `WorkerState.round` with which a worker finishes; None where a run ends
            otherwise, for instance at a time.
        local_steps: SGD steps between two exchanges; None where a round is no fixed number.
        is_synchronous: A worker that is late makes its neighbors wait.
        takes_repeats: A message that comes twice does no harm. Then a worker that resumes from
            a checkpoint may send other messages than it had sent after that checkpoint.
    """

    topology: Topology | None = None
    num_rounds: int | None = None
    local_steps: int | None = None
    is_synchronous: bool = False
    takes_repeats: bool = False

    def progress(self, round: int, now: Seconds, max_seconds: Seconds = math.inf) -> float:
        """Say how much of the run is over, in [0, 1], so that workers agree on it.

        Workers that wait for each other go by rounds, so all are at one value in one round,
        whatever their speeds. Others go by time where the run has a limit, and so do those
        whose rounds are `UNTIL_CUT_OFF`; without a limit they go by their own rounds. Where
        there is neither, the value stays 0.

        >>> Traits(num_rounds=8, is_synchronous=True).progress(round=2, now=99.0)
        0.25
        >>> Traits(num_rounds=8).progress(round=2, now=30.0, max_seconds=60.0)
        0.5

        Args:
            round: Rounds that the worker has completed.
            now: Seconds since the run began.
            max_seconds: Time at which the run is cut off; infinite for never.
        """
        goes_by_rounds = self.is_synchronous and 0 < (self.num_rounds or 0) < UNTIL_CUT_OFF
        if max_seconds < math.inf and not goes_by_rounds:
            return min(1.0, now / max_seconds)
        return min(1.0, round / self.num_rounds) if self.num_rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The facts about a run that an algorithm may warn of; see `Algorithm.warnings`.

    Attributes:
        momentum: The momentum of the workers' optimizer, in [0, 1).
        drops_messages: The network loses some messages.
    """

    momentum: float = 0.0
    drops_messages: bool = False


class Algorithm(ABC, Generic[State]):
    """One decentralized training algorithm, seen from one worker.

    Implementations are frozen dataclasses of hyperparameters. Everything that changes during
    a run lives in the state, and only `handle` changes it.
    """

    @property
    def traits(self) -> Traits:
        """The facts that drivers go by; none by default."""
        return Traits()

    @abstractmethod
    def init(self, rank: Rank, params: Tensor) -> State:
        """Build the state of worker `rank`, which starts from `params` ([num_params])."""

    @abstractmethod
    def handle(self, state: State, event: Event, now: Seconds) -> list[Effect]:
        """Account for `event`, which happened at `now`, and say what to do next."""

    def role(self, rank: Rank) -> Role:
        """Say what `rank` does in this run; by default every rank trains and is evaluated."""
        return WORKER

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Describe the messages by kind; `params` ([num_params]) as for `init`.

        Only networks ask. Without a schema an algorithm runs in the simulator alone.

        Raises:
            LocalProtocolError: If the algorithm has none.
        """
        raise lacks(self, "schema")

    def warnings(self, setting: Setting) -> list[str]:
        """List the conflicts with `setting`, each with its remedy."""
        return []
