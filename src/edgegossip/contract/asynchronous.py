"""Asynchronous training: blocks of steps in sequence, without waiting.

`Asynchronous` implements the life of a worker: it trains block by block, draws random neighbors
for exchanges, and keeps track of lost workers. A derived algorithm handles finished blocks
(`learn`) and messages (`receive`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Seconds,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.randomness import uniform
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.topology import Topology


@dataclass(slots=True, kw_only=True)
class AsynchronousState(WorkerState):
    """State of a worker that never waits.

    Attributes:
        lost: Workers that cannot be reached, as keys.
        has_finished: Whether the worker no longer trains and only handles messages.
    """

    lost: dict[Rank, None] = field(default_factory=dict)
    has_finished: bool = False


S = TypeVar("S", bound=AsynchronousState)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Algorithm[S], Generic[S]):
    """Base of algorithms whose workers train block by block and never wait.

    Args:
        topology: Neighbors to exchange with; may vary with the worker's own rounds.
        num_rounds: Blocks that each worker trains before it finishes.
        exchange_probability: Probability of an exchange after each block, in [0, 1].
        local_steps: SGD steps in a block.
        seed: Seeds the random choices.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.
    """

    topology: Topology
    num_rounds: int
    exchange_probability: float = 1.0
    local_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "num_rounds", "local_steps")
        check_ranges(self, num_rounds="at least 1", local_steps="at least 1")
        check_ranges(self, exchange_probability="in [0, 1]")

    # For algorithms to define.

    @abstractmethod
    def learn(self, state: S, trained: Trained, now: Seconds) -> list[Effect]:
        """Handle the result of a block, begin an exchange if one is due, and `go_on`."""

    @abstractmethod
    def receive(self, state: S, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        """Handle a message."""

    def start(self, state: S, has_rejoined: bool) -> None:
        """Prepare for the first block; a worker that rejoined has lost its memory."""

    def wake(self, state: S, now: Seconds) -> list[Effect]:
        """Handle a timer."""
        return []

    def lose(self, state: S, rank: Rank) -> list[Effect]:
        """Continue without worker `rank`."""
        return []

    def forget(self, state: S, rank: Rank) -> None:
        """Drop unused messages of `rank`."""
        return

    def welcome(self, state: S, event: WorkerJoined) -> list[Effect]:
        """Help a worker that is reachable again."""
        return []

    # Common to all algorithms.

    @property
    def traits(self) -> Traits:
        rounds, steps = self.num_rounds, self.local_steps
        return Traits(topology=self.topology, num_rounds=rounds, local_steps=steps)

    def handle(self, state: S, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                self.start(state, event.has_rejoined)
                return [self._train(state)]
            case Trained():
                return self.learn(state, event, now)
            case Received():
                return self.receive(state, event.sender, event.message, now)
            case TimerFired():
                return self.wake(state, now)
            case WorkerLost():
                state.lost[event.rank] = None
                if event.has_lied:
                    self.forget(state, event.rank)
                return self.lose(state, event.rank)
            case WorkerJoined():
                state.lost.pop(event.rank, None)
                return self.welcome(state, event)
        return []

    def reachable(self, state: S) -> Sequence[Rank]:
        """Reachable neighbors in this round; none if no exchange is drawn.

        The draw is keyed by (seed, rank, round), so it does not depend on speeds.
        """
        draw = uniform(self.seed, state.rank, "exchange", state.round)
        if draw >= self.exchange_probability:
            return ()
        neighbors = self.graph(state).out_neighbors(state.rank, state.round)
        return [j for j in neighbors if j not in state.lost] if state.lost else neighbors

    def graph(self, state: S) -> Topology:
        """The graph of this moment: in an open run, that of the workers that are present."""
        return self.topology.present(state.lost)

    def draw_neighbor(self, state: S, purpose: str) -> Rank | None:
        """Draw the neighbor to exchange with in this round; None if there is none.

        Draws are keyed by (seed, rank, purpose, round), so they do not depend on speeds.
        """
        reachable = self.reachable(state)
        if not reachable:
            return None
        choice = uniform(self.seed, state.rank, purpose, state.round)
        return reachable[int(choice * len(reachable))]

    def go_on(self, state: S) -> list[Effect]:
        """Train the next block, or finish after the last one."""
        if state.round < self.num_rounds:
            return [self._train(state)]
        state.has_finished = True
        return self.finish(state)

    def finish(self, state: S) -> list[Effect]:
        """Finish, now or after the remaining messages are answered."""
        return [Finish()]

    def _train(self, state: S) -> Train:
        return Train(state.params, Steps(self.local_steps))
