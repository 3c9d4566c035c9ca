"""Training that a wrapper does in several pieces, and answers as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from edgegossip.contract import Payload, Seconds, Train, Trained, Work


@dataclass(slots=True, kw_only=True, eq=False)
class Pieces:
    """A request for training, and what is done of it.

    Attributes:
        train: The request.
        start: When the work began.
        params: Parameters after the work so far, [num_params].
        done: Work done so far, in training samples.
        num_samples: Samples processed.
        num_steps: Steps taken.
        total_loss: Sum of the losses over the steps.
        outputs, metrics, moments: As in `Trained`, of the newest piece.
    """

    train: Train
    start: Seconds
    params: Tensor
    done: float = 0.0
    num_samples: int = 0
    num_steps: int = 0
    total_loss: float = 0.0
    outputs: Payload = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    moments: Payload = field(default_factory=dict)

    def piece(self, work: Work, **changes: Any) -> Train:  # noqa: ANN401
        """The next piece: `work` from where the last one ended, with other `changes`."""
        moments = self.train.moments
        if moments and self.num_steps:
            moments = {}  # the first piece began with them; this one is to report its own
        return replace(self.train, params=self.params, work=work, moments=moments, **changes)

    def add(self, event: Trained) -> None:
        """Add a piece."""
        self.done += event.cost or event.num_samples
        self.num_samples += event.num_samples
        self.num_steps += event.num_steps
        self.total_loss += event.loss * event.num_steps
        self.params, self.outputs = event.params, event.outputs
        self.metrics, self.moments = event.metrics, event.moments

    def total(self, now: Seconds, params: Tensor) -> Trained:
        """The answer to the request: all pieces, which lead to `params`, [num_params]."""
        if not self.num_steps:
            return Trained.skipped(self.train.params)
        return Trained(
            params=params,
            before=self.train.params,
            num_samples=self.num_samples,
            num_steps=self.num_steps,
            seconds=now - self.start,
            loss=self.total_loss / self.num_steps,
            outputs=self.outputs,
            cost=self.done,
            metrics=self.metrics,
            moments=self.moments,
        )
