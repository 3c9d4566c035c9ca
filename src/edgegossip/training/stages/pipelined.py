"""A stage that waits for the true gradient, and stores the weights of forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.func import functional_call

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Payload, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.data.dataset import WorkerData
from edgegossip.training.learner import LearnerSettings
from edgegossip.training.stages.learner import StageLearner


@dataclass(slots=True)
class _Passed:
    """A batch after its forward pass.

    `weights` are the model's `values` in the forward pass, and `draws` is the state of the
    dropout stream before this pass. After a restart, `outputs` is None until it is computed
    again.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    draws: Tensor
    outputs: Tensor | None


class PipelinedStage(StageLearner):
    """Trains one stage of `Pipelined`.

    A request names a `batch` by number. A forward pass gets `activations` and `labels` or, in
    the first stage, uses the worker's own data; it changes only running statistics. A backward
    pass gets the `gradient` at the outputs of such a batch. The last stage runs both passes at
    once. The backward pass uses the weights of the forward pass (weight stashing) and updates
    the current weights.

    The request for a forward pass also lists the earlier batches that still wait for a gradient
    (`passed`); the stage drops all other stored batches.

    Args:
        settings: As in `Learner`.
        data: As in `Learner`.
        max_passed: Maximum number of stored batches, at least `Pipelined.max_passed` of the
            stage; None to rely on the limit of the algorithm.
        arguments: Other arguments of `StageLearner`.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        *,
        max_passed: int | None = None,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(settings, data, **arguments)
        self._max_passed = max_passed
        self._passed: dict[int, _Passed] = {}

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Run a forward pass, a backward pass, or both.

        Raises:
            LocalProtocolError: If there is no batch to train on.
            TrainingError: If the loss is not finite, or after `cancel`.
        """
        self._check_cancelled()
        # Also for a backward pass: it differentiates at older weights, but updates these.
        self.model.load(request.params)
        self.model.module.train()
        inputs = request.inputs
        if "gradient" in inputs:
            number = int(inputs["batch"])
            if number not in self._passed:
                raise LocalProtocolError(
                    f"worker {self.rank} was given a gradient of batch {number}, but remembers "
                    f"{[*self._passed]} only"
                )
            passed = self._passed.pop(number)
            gradient = self.own(inputs["gradient"])
            return self._go_back(request, progress, passed, gradient=gradient)
        x, y = self.batch(inputs, request)
        passed = self._go_forward(request.params, x, y)
        assert passed.outputs is not None
        if self.place.is_last:
            loss = self.settings.loss(passed.outputs, y)
            return self._go_back(request, progress, passed, loss=loss)
        self._remember(inputs, passed)
        return self._result(
            {"activations": passed.outputs.detach(), "labels": y},
            num_samples=len(y) if self.place.is_first else 0,
        )

    def _remember(self, inputs: Payload, passed: _Passed) -> None:
        if not {"batch", "passed"} <= inputs.keys():
            raise LocalProtocolError(
                f"worker {self.rank} was given {sorted(inputs)}, no batch with its number; a "
                "PipelinedStage is for Pipelined"
            )
        # Only the algorithm knows which gradients may still come: it gives up those of a stage
        # above that was lost.
        waiting = inputs["passed"].tolist()
        if self._max_passed is not None and len(waiting) >= self._max_passed:
            raise LocalProtocolError(
                f"worker {self.rank} has {len(waiting) + 1} batches that wait for a gradient, "
                f"but max_passed is {self._max_passed}; make it that of the algorithm"
            )
        self._passed = {n: each for n, each in self._passed.items() if n in waiting}
        self._passed[int(inputs["batch"])] = passed

    def start_over(self) -> None:
        """Forget momentum, and the batches that wait for a gradient."""
        super().start_over()
        self._passed = {}

    def _go_forward(self, params: Tensor, x: Tensor, y: Tensor) -> _Passed:
        # Without gaps, batches in flight share one vector.
        own = self.model.values.clone() if self.model.has_gaps else params
        weights = own.to(self._torch_device).detach()
        draws = self._dropout.get_state()  # before the pass, so that it can be repeated
        if not self.place.is_first:
            x = x.detach()
        passed = _Passed(x, y, weights, draws, None)
        measured = self._compute(passed)
        # Here, not in `_compute`: a pass repeated after a restart has already been measured.
        for name, buffer in self.model.module.named_buffers():
            buffer.copy_(measured[name])
        return passed

    def _compute(self, passed: _Passed) -> dict[str, Tensor]:
        """Run the stage on separate weights and statistics; return the statistics.

        An update therefore changes no batch in flight.
        """
        passed.weights.requires_grad_()
        if not self.place.is_first:
            passed.x.requires_grad_()
        own, module = self.model.values, self.model.module
        named = {
            name: passed.weights.as_strided(
                p.shape, p.stride(), p.storage_offset() - own.storage_offset()
            )
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        statistics = {name: buffer.clone() for name, buffer in module.named_buffers()}
        passed.outputs = self.run(
            lambda: functional_call(module, {**named, **statistics}, (passed.x,))
        )
        return statistics

    def _go_back(
        self,
        request: Train,
        progress: float,
        passed: _Passed,
        gradient: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> TrainingResult:
        self._tune(request, progress)
        if passed.outputs is None:
            present = self._dropout.get_state()
            self._dropout.set_state(passed.draws)
            self._compute(passed)
            self._dropout.set_state(present)
        assert passed.outputs is not None
        mean_loss = 0.0 if loss is None else self._mean_loss([loss.detach()])
        if loss is None:
            passed.outputs.backward(gradient)  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        assert passed.weights.grad is not None
        assert self.model.trained.grad is not None
        self.model.trained.grad.copy_(passed.weights.grad[: self.model.trained.numel()])
        self._optimizer.step()
        self._num_steps += 1
        given = {} if passed.x.grad is None else {"gradient": passed.x.grad}
        return self._result(given, loss=mean_loss)

    def _result(
        self, outputs: Payload, *, num_samples: int = 0, loss: float = 0.0
    ) -> TrainingResult:
        return TrainingResult(
            self.model.params.to("cpu", copy=True),
            num_samples,
            1,
            loss,
            {name: tensor.cpu() for name, tensor in outputs.items()},
        )

    def cost(self, request: Train) -> float:
        """A third of a step for a forward pass, two thirds for a backward pass; a whole step in
        the last stage.
        """
        share = 2 / 3 if "gradient" in request.inputs else 1 if self.place.is_last else 1 / 3
        return share * self.place.cost * self.num_due(request)

    def state_dict(self) -> Mapping[str, Any]:
        passed = {
            number: (each.x.detach(), each.y, each.weights.detach(), each.draws)
            for number, each in self._passed.items()
        }
        return {**super().state_dict(), "passed": passed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._passed = {
            number: _Passed(self.own(x), self.own(y), self.own(weights), draws, None)
            for number, (x, y, weights, draws) in state["passed"].items()
        }
