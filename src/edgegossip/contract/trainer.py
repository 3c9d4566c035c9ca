"""Interface of the trainer of one worker's model, as a driver sees it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import (
    Epochs,
    Layout,
    Payload,
    Rank,
    Seconds,
    Steps,
    Train,
    Trained,
)


class Trainer(Protocol):
    """The trainer of one worker, as a driver sees it; `edgegossip.Learner` trains PyTorch.

    A subclass may omit methods that it does not need.
    """

    @property
    def num_samples(self) -> int:
        """Total number of training samples."""

    @property
    def epoch_cost(self) -> float:
        """Cost of a pass over all samples, in training samples; known before `set_up`."""
        return self.cost(Train(torch.empty(0), Epochs()))

    @property
    def num_units(self) -> int:
        """Number of units in an epoch of shared data; 0 if the samples are the worker's own."""
        return 0

    @property
    def layout(self) -> Layout | None:
        """Layout of the parameter vector; None if all entries are trained."""
        return None

    @property
    def setup_cost(self) -> float:
        """Cost of `set_up`, in training samples."""
        return 0.0

    def set_up(self) -> None:
        """Prepare the current data, unless it is already prepared."""
        return

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        """Train on the data of the workers `ranks` from now on.

        Raises:
            LocalProtocolError: If the trainer cannot take over data of others; this is the
                default.
        """
        raise LocalProtocolError(f"{type(self).__name__} cannot take over data of others")

    def cost(self, request: Train) -> float:
        """Cost, in training samples, of calling `train` with `request` next."""

    def announce(self, request: Train, progress: float) -> None:
        """Hear of the next call of `train`, which follows in its own thread; returns at once.

        For a trainer that only passes on what is to be trained.
        """
        return

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train from `request.params`, which stay unchanged; see `Train`.

        Args:
            request: Training to do.
            progress: Completed share of the run, in [0, 1], for the learning rate.
        """

    def prepare(self, request: Train, progress: float) -> Prepared | None:
        """Begin training that other trainers may join; None if this one always trains alone."""
        return None

    def trial(self, params: Tensor, num_steps: int) -> Train | None:
        """A request of at most `num_steps` steps, for timing this trainer.

        None if it cannot train without other workers' messages.
        """
        return Train(params, Steps(num_steps))

    def start_over(self) -> None:
        """Forget momentum: after a failure, training continues from other parameters."""
        return

    def rest(self) -> None:
        """Free memory that other trainers can use until the next `train`."""
        return

    def cancel(self) -> None:
        """Cancel the current work, from another thread.

        `set_up` and `train` then raise `TrainingError`, within about a second.
        """
        return

    def state_dict(self) -> Mapping[str, Any]:
        """All state that training changes, so that a resumed run is the same bit for bit."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""


class Prepared(Protocol):
    """Training that is about to run, alone or together with that of other trainers.

    The result does not depend on the other trainers' work.
    """

    @property
    def key(self) -> Hashable:
        """Key that is equal for training that can run together."""

    def size_of_groups(self, number: int) -> int:
        """How many of `number` trainings of this key should run together, at least 1.

        The answer must not depend on the number of threads, because last bits may depend on who
        runs together.
        """

    def train_with(self, others: Sequence[Any]) -> list[Outcome]:
        """Run together with `others` of the same key; return all outcomes, this one's first."""


@dataclass(slots=True, eq=False)
class TrainingResult:
    """Result of `Trainer.train`: see `Trained`. If `cost` is None, `Trainer.cost` applies."""

    params: Tensor
    num_samples: int
    num_steps: int
    loss: float
    outputs: Payload = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    moments: Payload = field(default_factory=dict)
    cost: float | None = None

    def event(self, before: Tensor, seconds: Seconds, cost: float) -> Trained:
        """Make the event for the worker; `cost` is the result of `Trainer.cost`."""
        return Trained(
            params=self.params,
            before=before,
            num_samples=self.num_samples,
            num_steps=self.num_steps,
            seconds=seconds,
            loss=self.loss,
            outputs=self.outputs,
            cost=cost if self.cost is None else self.cost,
            metrics=self.metrics,
            moments=self.moments,
        )


Outcome: TypeAlias = TrainingResult | TrainingError
"""Outcome for one of several trainers that run together; some may fail, others succeed."""
