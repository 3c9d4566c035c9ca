"""Twins: trainers on the event loop whose work is done elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgegossip.contract.protocol import Layout, Rank, Train
from edgegossip.contract.trainer import Trainer, TrainingResult

_SERIALS = itertools.count()


@dataclass(frozen=True, slots=True)
class Origin:
    """Arguments with which any seat can make a trainer; the seat looks up `maker`."""

    maker: Any
    rank: Rank
    incarnation: int


class Twin(Trainer):
    """A trainer that receives its remote twin's state after each piece of work.

    Costs are therefore known without a request, and a checkpoint involves no other process. If
    the remote twin is lost, another one is made from this one's state, and the interrupted work
    is repeated, with the same result.

    Args:
        trainer: Answers for both twins; trains only if that is faster than sending the work.
        origin: Arguments for making its remote twin.

    Attributes:
        serial: Unique number of its remote twin.
        seat: Seat of the remote twin with the same state; None if there is none.
        is_new: Whether the state has not changed since this twin was made.
        seconds_per_cost: Seconds per unit of cost in its last work; None before that.
        last_cost: Cost of the last request.
    """

    def __init__(self, trainer: Trainer, origin: Origin) -> None:
        self.trainer = trainer
        self.origin = origin
        self.serial = next(_SERIALS)
        self.seat: Any = None
        self.is_new = True
        self.seconds_per_cost: float | None = None
        self.last_cost = 0.0

    @property
    def num_samples(self) -> int:
        return self.trainer.num_samples

    @property
    def epoch_cost(self) -> float:
        return self.trainer.epoch_cost

    @property
    def layout(self) -> Layout | None:
        return self.trainer.layout

    @property
    def setup_cost(self) -> float:
        return self.trainer.setup_cost

    def set_up(self) -> None:
        self.trainer.set_up()

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        self._leave_twin()
        self.trainer.assign(ranks)

    def cost(self, request: Train) -> float:
        self.last_cost = self.trainer.cost(request)
        return self.last_cost

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._leave_twin()
        return self.trainer.train(request, progress)

    def trial(self, params: Tensor, num_steps: int) -> Train | None:
        return self.trainer.trial(params, num_steps)

    def start_over(self) -> None:
        self._leave_twin()
        self.trainer.start_over()

    def rest(self) -> None:
        self.trainer.rest()

    def cancel(self) -> None:
        self.trainer.cancel()

    def state_dict(self) -> Mapping[str, Any]:
        return self.trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._leave_twin()
        self.trainer.load_state_dict(state)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Adopt the state that the remote twin has after its work."""
        self.is_new = False
        self.trainer.load_state_dict(state)

    def move(self, seat: Any) -> None:  # noqa: ANN401
        """Let only `seat` have the remote twin; with None, no seat has it."""
        if self.seat not in (None, seat):
            self.seat.forgotten.append(self.serial)
        self.seat = seat

    def __del__(self) -> None:
        self.move(None)  # a crashed worker's trainer takes its twin along

    def _leave_twin(self) -> None:
        """Continue alone: from now on, no remote twin has this twin's state."""
        self.move(None)
        self.is_new = False


def twins(make: Callable[[Rank, int], Trainer], maker: object) -> Callable[[Rank, int], Twin]:
    """Wrap `make` to return twins; `maker` refers to `make` in other processes."""
    return lambda rank, incarnation: Twin(
        make(rank, incarnation), Origin(maker, rank, incarnation)
    )
