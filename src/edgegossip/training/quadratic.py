"""Quadratics, the standard problem of theory: each worker pulls toward its own target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.trainer import Trainer, TrainingResult


@dataclass(frozen=True, slots=True, eq=False)
class QuadraticTrainer(Trainer):
    r"""Exact gradient steps on :math:`f_i(x) = \frac12 \|x - b_i\|^2`, a few microseconds each.

    The common optimum of all workers is the mean of the targets. An epoch is one step, and a
    step costs one sample. The moments are those of an optimizer that forgets all but the last
    gradient: that gradient and its square, so other moments change nothing.

    Args:
        target: :math:`b_i`, [num_params].
        lr: Learning rate, in [0, 1]; 0 keeps the parameters, for studies of mixing alone.
    """

    target: Tensor
    lr: float = 0.1

    @property
    def num_samples(self) -> int:
        return 1

    def cost(self, request: Train) -> float:
        return request.work.num_steps if isinstance(request.work, Steps) else 1

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        num_steps = request.work.num_steps if isinstance(request.work, Steps) else 1
        distance = request.params - self.target
        # Each step leaves (1 - lr) of the distance.
        after = self.target + (1 - self.lr) ** num_steps * distance
        loss, moments = 0.5 * float(distance @ distance), {}
        if request.moments is not None:
            moments = {"first": distance, "second": distance.square()}
        return TrainingResult(after, num_steps, num_steps, loss, moments=moments)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
