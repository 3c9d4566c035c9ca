"""A stage that updates immediately, by its teacher or, in the last stage, the true loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.protocol import Payload, Steps, Train
from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_range
from edgegossip.contract.trainer import TrainingResult
from edgegossip.data.dataset import WorkerData
from edgegossip.training.learner import LearnerSettings
from edgegossip.training.stages.learner import StageLearner
from edgegossip.training.stages.teachers import Teacher, TeacherFactory


class DecoupledStage(StageLearner):
    """Trains one stage of `Decoupled`.

    A request contains `activations` and `labels`, except in the first stage. It may contain a
    lesson for the teacher (`fit_activations`, `fit_labels`, `fit_gradient`), which is processed
    first. Outputs are the stage's `activations` with `labels`, except in the last stage, and
    the `gradient` of the mean loss at its inputs, except in the first.

    Args:
        settings: As in `Learner`.
        data: As in `Learner`.
        teacher: Source of the gradient for all stages except the last; `staged` passes it on.
        replay: Number of batches to keep from the stage below; each step trains on a random one
            of them, and only the newest returns a gradient. With 0, each batch is used on
            arrival.
        arguments: Other arguments of `StageLearner`.

    Raises:
        ValueError: If there is no teacher, or `replay` is negative.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        *,
        teacher: TeacherFactory | None = None,
        replay: int = 0,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(settings, data, **arguments)
        if teacher is None:
            raise ValueError(
                "a DecoupledStage needs a teacher, such as LocalLosses(): "
                "staged(task, at, DecoupledStage, teacher)"
            )
        check_range("replay", replay, "at least 0")
        self._factory = teacher
        self._teacher: Teacher | None = None
        if not self.place.is_last:
            self._make_teacher()
        self._replay = replay
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._draws = generator(*self._key, "replay")

    def _make_teacher(self) -> None:
        place = self.place
        self._teacher = self._factory.make(place.shape, place.num_classes, *self._key)
        self._teacher.module.to(self._torch_device)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train on one batch.

        Raises:
            LocalProtocolError: If there is no batch to train on.
            TrainingError: If the loss is not finite, or after `cancel`.
        """
        self._check_cancelled()
        self.model.load(request.params)
        self.model.module.train()
        self._tune(request, progress)
        # First, so that the teacher's prediction for this batch uses what it has just learned.
        cosine = self._fit(request.inputs)
        (x, y), is_new = self._replayed(self.batch(request.inputs, request))
        if not self.place.is_first:
            x = x.detach().requires_grad_()  # its gradient is for the stage below
        self.model.zero_grad()
        outputs = self.run(lambda: self.model.module(x))
        if self._teacher is None:
            loss = self.settings.loss(outputs, y)
        else:
            loss = self._teacher.teach(outputs, y)
        mean_loss = self._mean_loss([loss.detach()])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._teacher is not None:
            self._teacher.step()
            mean_loss = mean_loss if self._teacher.has_loss else 0.0
        self._num_steps += 1
        given = {} if self.place.is_last else {"activations": outputs.detach(), "labels": y}
        # The stage below waits for the gradient of its newest batch only.
        if x.grad is not None and is_new:
            given["gradient"] = x.grad
        return TrainingResult(
            self.model.params.to("cpu", copy=True),
            len(y) if self.place.is_first else 0,
            1,
            mean_loss,
            {name: tensor.cpu() for name, tensor in given.items()},
            metrics={} if cosine is None else {"gradient_cosine": cosine},
        )

    def _fit(self, inputs: Payload) -> float | None:
        if self._teacher is None or "fit_gradient" not in inputs:
            return None
        lesson = (inputs[f"fit_{name}"] for name in ("activations", "labels", "gradient"))
        return self._teacher.fit(*(self.own(tensor) for tensor in lesson))

    def _replayed(self, batch: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], bool]:
        if not self._replay or self.place.is_first:
            return batch, True
        self._kept = [*self._kept, batch][-self._replay :]
        chosen = int(torch.randint(len(self._kept), (), generator=self._draws))
        return self._kept[chosen], chosen == len(self._kept) - 1

    def start_over(self) -> None:
        """Forget momentum and kept batches, and replace a teacher whose state is not finite."""
        super().start_over()
        self._kept = []
        if self._teacher is not None and not self._teacher.is_sound:
            self._make_teacher()

    def trial(self, params: Tensor, num_steps: int) -> Train | None:
        """Return a step of the first stage, which needs no other worker.

        None for the other stages, which train on messages.
        """
        return Train(params, Steps(1)) if self.place.is_first else None

    def cost(self, request: Train) -> float:
        """A forward and a backward pass, in samples of the whole model."""
        return self.place.cost * self.num_due(request)

    def state_dict(self) -> Mapping[str, Any]:
        return {
            **super().state_dict(),
            "teacher": None if self._teacher is None else self._teacher.state_dict(),
            "kept": [*self._kept],
            "draws": self._draws.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._teacher is not None:
            self._teacher.load_state_dict(state["teacher"])
        self._kept = [(self.own(x), self.own(y)) for x, y in state["kept"]]
        self._draws.set_state(state["draws"])
