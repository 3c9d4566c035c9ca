"""Alone: training without any exchange."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgegossip.contract import (
    Algorithm,
    Effect,
    Event,
    Finish,
    MessageSpec,
    Rank,
    Received,
    Seconds,
    Started,
    Steps,
    Train,
    Trained,
    Traits,
    WorkerState,
    check_counts,
    check_ranges,
)


@dataclass(frozen=True, kw_only=True)
class Alone(Algorithm[WorkerState]):
    """Plain SGD on each worker's own data: the baseline for algorithms that exchange models.

    With one worker, `Alone` trains a whole model on one machine. Within `Decoupled` and
    `Pipelined`, the worker trains the first stage; after a restart, it continues in the latest
    round that the stages above know.

    Args:
        num_rounds: Number of rounds of training before a worker finishes.
        local_steps: SGD steps in a round.

    Raises:
        ValueError: If a number is not whole, or below 1.
    """

    num_rounds: int
    local_steps: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_rounds", "local_steps")
        check_ranges(self, num_rounds="at least 1", local_steps="at least 1")

    @property
    def traits(self) -> Traits:
        return Traits(num_rounds=self.num_rounds, local_steps=self.local_steps)

    def init(self, rank: Rank, params: Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """No messages."""
        return {}

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return self._train(state)
            case Trained():
                state.params, state.round = event.params, state.round + 1
                return self._train(state)
            # The stages above know the round that this worker had reached before a restart.
            case Received(_, message):
                state.round = max(state.round, message.round)
        return []

    def _train(self, state: WorkerState) -> list[Effect]:
        if state.round >= self.num_rounds:
            return [Finish()]
        return [Train(state.params, Steps(self.local_steps))]
