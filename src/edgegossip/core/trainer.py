"""What trains one worker's model, seen from a driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from edgegossip.core.errors import LocalProtocolError
from edgegossip.core.protocol import Epochs, Payload, Rank, Seconds, Trained, Work


class Trainer(Protocol):
    """What a driver needs to train one worker; `learning.Learner` is one for PyTorch models.

    One that derives from it may leave out what it has no use for.
    """

    @property
    def num_samples(self) -> int:
        """Training samples in all."""

    @property
    def epoch_cost(self) -> float:
        """What a pass over all of them costs, in samples' worth; known before `set_up`."""
        return self.cost(Epochs(), {})

    @property
    def setup_cost(self) -> float:
        """What `set_up` costs, in training samples' worth."""
        return 0.0

    def set_up(self) -> None:
        """Get ready with the data it has, unless that was done; `train` does if nobody did."""
        return

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        """Train on the data of the workers `ranks` from now on."""
        raise LocalProtocolError(f"{type(self).__name__} cannot take over data of others")

    def cost(self, work: Work, inputs: Payload) -> float:
        """What `train` would cost if called next, in training samples' worth of time."""

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        """Train from `params` ([num_params], not written to); see `Train`."""

    def cancel(self) -> None:
        """Leave off, from another thread: nobody waits for the work under way any more."""
        return

    def state_dict(self) -> Mapping[str, Any]:
        """All that changes while it trains, so that a checkpoint resumes to the last bit."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict`."""


@dataclass(slots=True, eq=False)
class TrainingResult:
    """What `Trainer.train` did: see `Trained`. `cost` None is what `Trainer.cost` had said."""

    params: Tensor
    num_samples: int
    num_steps: int
    loss: float
    outputs: Payload = field(default_factory=dict)
    num_trained: int | None = None
    focus: float = 0.0
    cost: float | None = None

    def event(self, before: Tensor, seconds: Seconds, cost: float) -> Trained:
        """What the worker is told of it; `cost` is what `Trainer.cost` had said."""
        cost = cost if self.cost is None else self.cost
        facts = (self.num_samples, self.num_steps, seconds, self.loss, self.outputs, cost)
        return Trained(self.params, before, *facts, self.num_trained, self.focus)
