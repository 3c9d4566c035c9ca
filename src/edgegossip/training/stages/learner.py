"""The trainer of one stage: a learner with batches from the stage below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Payload, Train
from edgegossip.data.dataset import WorkerData
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.loss import to_model
from edgegossip.training.step import require_plain


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position of a stage in its model.

    Args:
        number: Number of the stage, from 0.
        num_stages: Number of stages of the model.
        shape: Shape of a sample's activations at the stage's outputs; empty for the last stage.
        num_classes: Number of labels.
        cost: Cost of a sample in this stage, in training samples of the whole model.
    """

    number: int
    num_stages: int
    shape: tuple[int, ...]
    num_classes: int
    cost: float

    @property
    def is_first(self) -> bool:
        """Whether the stage takes batches from the worker's own data."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the true loss."""
        return self.number == self.num_stages - 1


class StageLearner(Learner):
    """Base of the trainers of stages.

    Args:
        settings: As in `Learner`.
        data: As in `Learner`.
        place: Position of the stage, from `staged`.
        worker: Seed, rank and incarnation, as in `Learner`.

    Raises:
        ValueError: If there is no `place`, the selection needs losses, which a stage does not
            know, or `step` is not the default.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        *,
        place: Place | None = None,
        **worker: Any,  # noqa: ANN401
    ) -> None:
        if place is None:
            raise ValueError(
                f"{type(self).__name__} trains a stage of a model; instead of "
                f"Task(trainer=...), use the task of staged(task, at, {type(self).__name__})"
            )
        require_plain(settings.step, "a stage")
        super().__init__(settings, data, **worker)
        selection = settings.accuracy_aware.selection
        if selection.needs_losses or selection.needs_sample_losses:
            raise ValueError(
                f"{type(selection).__name__} chooses samples by their losses, which a stage "
                "does not know; choose Random() or Cyclic()"
            )
        self.place = place

    def batch(self, inputs: Payload, request: Train) -> tuple[Tensor, Tensor]:
        """Return activations and labels for training, from `inputs` or from the worker's own
        data.

        Raises:
            LocalProtocolError: If `inputs` lacks activations.
        """
        if self.place.is_first:
            (batch,) = self.take(request)
            x, y = self._samples(batch)
            return x, y
        if "activations" not in inputs:
            raise LocalProtocolError(
                f"worker {self.rank} holds stage {self.place.number}, which trains on what the "
                f"stage below sends, but was given {sorted(inputs)}"
            )
        x = to_model(inputs["activations"], self._torch_device)
        return x, inputs["labels"].to(self._torch_device)

    def own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of unknown origin, perhaps from a file.

        Its layout and alignment would affect the rounding of sums.
        """
        return to_model(tensor, self._torch_device).clone()

    def run(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run a forward pass on inputs that may come from other workers.

        Raises:
            TrainingError: If the stage cannot use the inputs, or its outputs are not finite.
        """
        try:
            outputs = forward()
        except (RuntimeError, ValueError) as error:
            raise TrainingError(
                f"stage {self.place.number} on worker {self.rank} cannot take its inputs: "
                f"{error}; cut the model elsewhere, or look at what the stage below sends"
            ) from error
        if not outputs.detach().isfinite().all():
            raise TrainingError(
                f"stage {self.place.number} on worker {self.rank} gives activations that are "
                f"not finite in its step {self._num_steps + 1}; try a smaller learning rate"
            )
        return outputs

    @property
    def epoch_cost(self) -> float:
        """Cost of a pass over the shard in this stage, in samples of the whole model."""
        return self.place.cost * super().epoch_cost

    def set_up(self) -> None:
        """Prepare the worker's own data, which only the first stage uses."""
        if self.place.is_first:
            super().set_up()

    def trial(self, params: Tensor, num_steps: int) -> Train | None:
        """None, because a stage trains on other stages' messages."""
        return None

    def num_due(self, request: Train) -> float:
        """Number of samples in `request`."""
        for name in ("activations", "gradient"):
            if name in request.inputs:
                return len(request.inputs[name])
        return super().cost(request)
