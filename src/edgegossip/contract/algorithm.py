"""Interface of an algorithm: two functions on a state, and facts for drivers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Generic

from torch import Tensor

from edgegossip.contract.protocol import (
    WORKER,
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    State,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, lacks
from edgegossip.contract.topology import Topology

UNTIL_CUT_OFF = 10**9
"""The `num_rounds` of an algorithm that continues until the run's time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about an algorithm for drivers, wrappers and reports.

    Attributes:
        topology: Permitted receivers of each worker; None without a graph.
        num_rounds: The `WorkerState.round` at which a worker finishes; None if, for example, a
            time limit ends the run.
        local_steps: SGD steps between two exchanges; None without a fixed number.
        is_synchronous: Whether a late worker makes its neighbors wait.
        takes_repeats: Whether duplicate messages do no harm. A worker resumed from a checkpoint
            may therefore repeat messages, even with other contents.
        is_balanced: Whether each worker trains on a share of its data that fits its speed.
        changes_roles: Whether a rank may take over the role of another, as an elected server
            does.
        moves_data: Whether a worker may train on the data of another (`Assign`).
        claims_units: Whether workers divide shared data among themselves (`Units`).
    """

    topology: Topology | None = None
    num_rounds: int | None = None
    local_steps: int | None = None
    is_synchronous: bool = False
    takes_repeats: bool = False
    is_balanced: bool = False
    changes_roles: bool = False
    moves_data: bool = False
    claims_units: bool = False

    def progress(self, round: int, now: Seconds, max_seconds: Seconds = math.inf) -> float:
        """Return the completed share of the run, in [0, 1].

        Workers that wait for each other use rounds, so in a given round all of them have the
        same value, whatever their speed. Other workers, and workers with `UNTIL_CUT_OFF`
        rounds, use time if the run has a time limit, and otherwise their own rounds. Without a
        limit on time or rounds, the value stays 0.

        >>> Traits(num_rounds=8, is_synchronous=True).progress(round=2, now=99.0)
        0.25
        >>> Traits(num_rounds=8).progress(round=2, now=30.0, max_seconds=60.0)
        0.5

        Args:
            round: Rounds that the worker has completed.
            now: Seconds since the beginning of the run.
            max_seconds: Time limit of the run, in seconds; infinite if there is none.
        """
        goes_by_rounds = self.is_synchronous and 0 < (self.num_rounds or 0) < UNTIL_CUT_OFF
        if max_seconds < math.inf and not goes_by_rounds:
            return min(1.0, now / max_seconds)
        return min(1.0, round / self.num_rounds) if self.num_rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a run for which an algorithm may give warnings; see `Algorithm.warnings`.

    Attributes:
        momentum: The momentum of the workers' optimizer, in [0, 1).
        drops_messages: Whether the network loses some messages.
    """

    momentum: float = 0.0
    drops_messages: bool = False


class Algorithm(ABC, Generic[State]):
    """One decentralized training algorithm, seen from one worker.

    Implementations are frozen dataclasses of hyperparameters. All mutable data is in the state,
    and only `handle` changes it.
    """

    @property
    def traits(self) -> Traits:
        """Facts for drivers; empty by default."""
        return Traits()

    @abstractmethod
    def init(self, rank: Rank, params: Tensor) -> State:
        """Build the state of worker `rank`, which starts from `params` ([num_params])."""

    @abstractmethod
    def handle(self, state: State, event: Event, now: Seconds) -> list[Effect]:
        """Handle `event`, which happened at `now`, and return the effects."""

    def renew(self, state: State, params: Tensor) -> State:
        """Build the state of a worker that comes back too late to continue from its checkpoint.

        Args:
            state: The checkpoint's state; the others have gone on without it. By default it
                counts for nothing.
            params: Parameters to start from, as for `init`: the estimate of `state` if it is a
                whole model.
        """
        return self.init(state.rank, params)

    def role(self, rank: Rank) -> Role:
        """Return the role of `rank`; by default every rank trains and is evaluated."""
        return WORKER

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Describe the messages of each kind; `params` ([num_params]) is as for `init`.

        Only networks need a schema; without one, an algorithm runs only in the simulator.

        Raises:
            LocalProtocolError: If the algorithm has no schema.
        """
        raise lacks(self, "schema")

    def joined(self, older: Message, newer: Message) -> Message | None:
        """Return one message with the effect of both, or None if there is none.

        Args:
            older: A message that waits to be sent.
            newer: The next message to the same receiver. On a slow link, a driver sends the
                result in place of both.
        """
        return None

    def replaces(self, newer: Message, older: Message) -> bool:
        """Whether nobody needs `older` once `newer` has arrived; by default, all are needed.

        A message that replaces any other also replaces one that says the same; a driver asks
        this first.

        Args:
            newer: A message to the same receiver.
            older: One that was sent before it, and may have arrived or not. On a link that is
                slow or was lost, a driver drops it.
        """
        return False

    def counts_after_end(self, message: Message) -> bool:
        """Whether a receiver whose time limit is over needs `message`; by default it does not,
        because its final model can no longer change.
        """
        return False

    def warnings(self, setting: Setting) -> list[str]:
        """List the algorithm's conflicts with `setting`, each with its remedy."""
        return []


@dataclass(slots=True, kw_only=True)
class WrapperState(WorkerState):
    """State of a worker of a `Wrapper`, which evaluates what the inner algorithm does.

    Attributes:
        inner: State of the inner algorithm.
    """

    inner: Any

    @property
    def estimate(self) -> Tensor:
        """Estimate of the inner algorithm, [num_params]."""
        estimate: Tensor = self.inner.estimate
        return estimate

    @property
    def is_evaluated(self) -> bool:
        """Whether the estimate counts, according to the inner algorithm."""
        return bool(self.inner.is_evaluated)


@dataclass(frozen=True, kw_only=True)
class Wrapper(Algorithm[State]):
    """An algorithm around another one, with that one's traits, roles, messages and warnings.

    A subclass defines `init` and `handle`, and what it changes of the rest.

    Args:
        inner: The algorithm inside.
    """

    keeps_name: ClassVar[bool] = False
    """Whether a run is named after the inner algorithm, because both train alike."""
    inner: Algorithm[Any]

    @property
    def traits(self) -> Traits:
        """Traits of the inner algorithm."""
        return self.inner.traits

    def role(self, rank: Rank) -> Role:
        """Role in the inner algorithm."""
        return self.inner.role(rank)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages."""
        return self.inner.schema(params)

    def joined(self, older: Message, newer: Message) -> Message | None:
        """Join as the inner algorithm does, which must know all that the messages hold."""
        return self.inner.joined(older, newer)

    def replaces(self, newer: Message, older: Message) -> bool:
        """As the inner algorithm says, which must know all that the messages hold."""
        return self.inner.replaces(newer, older)

    def counts_after_end(self, message: Message) -> bool:
        """As the inner algorithm says."""
        return self.inner.counts_after_end(message)

    def warnings(self, setting: Setting) -> list[str]:
        """List the inner algorithm's warnings."""
        return self.inner.warnings(setting)


def opened(algorithm: Algorithm[State]) -> Algorithm[State]:
    """The same algorithm for a run whose workers come and go: its graph follows its members.

    Algorithms on complete graphs stay the same: the number of workers is the limit, and who is
    not there is lost. Parameter servers divide by the number of present workers. See
    `Topology.open`.

    Raises:
        ValueError: If the algorithm needs the same neighbors all the time.
    """
    changes: dict[str, Any] = {}
    names: list[str] = [f.name for f in fields(algorithm)] if is_dataclass(algorithm) else []
    for name in names:
        value = getattr(algorithm, name)
        if isinstance(value, Topology):
            changes[name] = value.open()
        elif isinstance(value, Algorithm):
            changes[name] = opened(value)
        elif name == "is_open":
            changes[name] = True
    return replace(algorithm, **changes) if changes else algorithm  # type: ignore[type-var]


# Numbers that a wrapper adds to its inner algorithm's messages.


def with_numbers(send: Send, numbers: Mapping[str, float]) -> Send:
    """Add these numbers to the message of `send`."""
    carried = {**send.message.numbers, **numbers}
    return replace(send, message=replace(send.message, numbers=carried))


def without_numbers(event: Received, names: Collection[str]) -> Received:
    """Restore the message of `event` as the inner algorithm sent it."""
    known = event.message.numbers.items()
    numbers = {name: number for name, number in known if name not in names}
    return replace(event, message=replace(event.message, numbers=numbers))
