"""Rounds of two exchanges: each chunk of the model goes to its owner, and from it to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgegossip.contract import LocalSteps, Rank, RoundBased, RoundState

S = TypeVar("S", bound=RoundState)


@dataclass(frozen=True, kw_only=True)
class OwnedChunks(LocalSteps[S], RoundBased[S], Generic[S]):
    """Base of algorithms in which each worker owns a chunk of the model and combines it.

    In a round's first exchange (even `RoundState.exchange`) every worker sends each chunk to
    its owner; in the second the owners send the combined chunks to all.

    Raises:
        ValueError: If the topology is not complete or a number is out of range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        degrees = {
            self.topology.out_degree(rank, round)
            for round in range(self.topology.period)
            for rank in range(self.num_workers)
        }
        if degrees != {self.num_workers - 1}:
            name = type(self).__name__
            raise ValueError(f"{name} needs the complete topology: complete(num_workers)")

    @property
    def exchanges_per_round(self) -> int:
        return 2

    @property
    def num_workers(self) -> int:
        return self.topology.num_workers

    def successors(self, chunk: Rank) -> Iterator[Rank]:
        """All workers, in the order in which they hold a chunk: its owner, then the next ranks
        while those before are absent.
        """
        n = self.num_workers
        return (rank % n for rank in range(chunk, chunk + n))

    def holder(self, state: S, chunk: Rank) -> Rank:
        """The worker that combines a chunk in this exchange, as far as this worker knows."""
        # A worker that is back, but takes part only from a later exchange on, would combine
        # nothing. A worker is never absent to itself, so there is always one.
        first, exchange = state.first_exchange, state.exchange
        return next(rank for rank in self.successors(chunk) if first.get(rank, 0) <= exchange)

    def is_first(self, state: S) -> bool:
        """Whether the exchange is the first of its round, from the workers to the owners."""
        return state.exchange % 2 == 0
