"""Gradients for the outputs of a stage, before any stage above has computed them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.core.randomness import derive_seed
from edgegossip.learning.models.initialization import drawn_from

Shape: TypeAlias = tuple[int, ...]


class Teacher(ABC):
    """Provides the gradient for the training of one stage.

    Args:
        module: Module that the teacher trains.
        lr: Learning rate of Adam for this module.

    Attributes:
        has_loss: Whether `teach` returns a real loss, not a product with a gradient.
    """

    has_loss: bool = True

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module = module
        self._optimizer = torch.optim.Adam(module.parameters(), lr=lr)

    @abstractmethod
    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar whose backward pass produces the gradient at `outputs`.

        Args:
            outputs: [n, ...] outputs of the stage, with their graph.
            labels: [n].
        """

    def step(self) -> None:
        """Update from the gradients of `module` after the backward pass."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float | None:
        """Learn from the returned gradient of the mean loss for `activations`.

        Returns:
            The cosine between the predicted and the returned gradient; None without a
            prediction.
        """
        return None

    @property
    def is_sound(self) -> bool:
        """Whether the teacher's state is finite."""
        return all(bool(x.isfinite().all()) for x in self.module.state_dict().values())

    def state_dict(self) -> dict[str, Any]:
        """All state that changes during training."""
        return {"module": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])


class TeacherFactory(ABC):
    """Settings of a teacher; makes one for each stage except the last.

    Attributes:
        learns_from_gradients: Whether the teacher needs returned gradients.
    """

    learns_from_gradients: bool = False

    @abstractmethod
    def build(self, shape: Shape, num_classes: int) -> Teacher:
        """Make the teacher of a stage whose outputs for one sample have `shape`."""

    def make(self, shape: Shape, num_classes: int, seed: int, *key: int | str) -> Teacher:
        """Make the teacher with weights from the random stream of `key`."""
        with drawn_from(derive_seed(seed, *key, "teacher")):
            return self.build(shape, num_classes)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Labels [n] as float rows [n, num_classes]."""
    return torch.nn.functional.one_hot(labels, num_classes).to(torch.float32)
