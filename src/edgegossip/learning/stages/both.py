"""A synthetic gradient combined with a local loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from edgegossip.core.ranges import check_ranges
from edgegossip.learning.stages.local_losses import LocalLosses
from edgegossip.learning.stages.synthetic_gradients import SyntheticGradients
from edgegossip.learning.stages.teacher import Shape, Teacher, TeacherFactory


@dataclass(frozen=True, kw_only=True)
class Both(TeacherFactory):
    """Train a stage with the sum of a synthetic gradient and a local loss.

    The local loss is useful from the first batch on, when the prediction is still zero. The
    gradient adds information from the stages above.

    Args:
        gradients: Predicts the gradient.
        losses: The local loss, or another teacher that does not learn from gradients.
        weight: Weight of the local loss, at least 0.

    Raises:
        ValueError: If `weight` is below 0.
    """

    gradients: SyntheticGradients = SyntheticGradients()
    losses: TeacherFactory = LocalLosses()
    weight: float = 1.0

    learns_from_gradients = True

    def __post_init__(self) -> None:
        check_ranges(self, weight="in [0, inf)")

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        gradient = self.gradients.build(shape, num_classes)
        return _Both(gradient, self.losses.build(shape, num_classes), self.weight)


class _Both(Teacher):
    has_loss = False

    def __init__(self, gradient: Teacher, loss: Teacher, weight: float) -> None:
        self._gradient, self._loss, self._weight = gradient, loss, weight
        super().__init__(nn.ModuleList([gradient.module, loss.module]), lr=0.0)  # they learn

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        local = self._loss.teach(outputs, labels)
        return self._gradient.teach(outputs, labels) + self._weight * local

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float | None:
        return self._gradient.fit(activations, labels, gradient)

    def step(self) -> None:
        self._loss.step()

    def state_dict(self) -> dict[str, Any]:
        return {"gradient": self._gradient.state_dict(), "loss": self._loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gradient.load_state_dict(state["gradient"])
        self._loss.load_state_dict(state["loss"])
