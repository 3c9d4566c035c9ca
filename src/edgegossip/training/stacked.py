"""Training of several learners of one dense model together.

With stacked parameters, one call computes a layer of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Train
from edgegossip.contract.trainer import Outcome, TrainingResult
from edgegossip.data.dataset import WorkerData
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.loss import IGNORED, Loss, prepare_batch
from edgegossip.training.optimizer import SGD
from edgegossip.training.step import require_plain

DENSE = (
    nn.Sequential,
    nn.Flatten,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.GELU,
    nn.LeakyReLU,
    nn.ReLU,
    nn.Tanh,
)
"""Layers that one call computes for many models. Convolutions have no fast kernel for this.
ELU, SiLU and sigmoid round a value differently at the end of a tensor, so a result would depend
on its place in the stack; so does GELU with ``approximate="tanh"``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stacked:
    """One parameter of all learners.

    Attributes:
        values: [num_learners, ...]; its storage is that of the flat vectors.
        velocity: SGD's momentum buffer, [num_learners, ...].
        gradient: The tensor to which the backward pass adds the gradient.
        momentum: Factor on `gradient` before that.
    """

    values: Tensor
    velocity: Tensor
    gradient: Tensor
    momentum: float

    def add(self, gradient: Tensor) -> None:
        if self.momentum:
            torch.add(gradient, self.gradient, alpha=self.momentum, out=self.gradient)
        else:  # not 0 * v, which is not finite if v is not
            self.gradient.copy_(gradient)


class _Linear(torch.autograd.Function):
    """Products of stacked inputs, [num_learners, batch, num_inputs], and matrices.

    The backward pass adds the gradient to the velocity within the matrix product: a step that
    stores gradients first takes 1.1 to 1.4 times as long.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        _weight: Tensor,  # tells autograd that a backward pass is needed
        weight: _Stacked,
        bias: _Stacked | None,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.bias = x, weight, bias
        if bias is None:
            return torch.bmm(x, weight.values.mT)
        return torch.baddbmm(bias.values.unsqueeze(1), x, weight.values.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:  # noqa: ANN401
        weight, bias = ctx.weight, ctx.bias
        weight.gradient.baddbmm_(gradient.mT, ctx.x, beta=weight.momentum)
        if bias is not None:
            bias.add(gradient.sum(1))
        need = ctx.needs_input_grad[0]
        return torch.bmm(gradient, weight.values) if need else None, None, None, None


class _Scale(torch.autograd.Function):
    """The trained part of a layer normalization."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        _weight: Tensor,
        weight: _Stacked,
        bias: _Stacked | None,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.bias = x, weight, bias
        scaled = x * _each(weight, x)
        return scaled if bias is None else scaled.add_(_each(bias, x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        weight, bias = ctx.weight, ctx.bias
        inner = range(1, ctx.x.ndim - weight.values.ndim + 1)
        scaled = gradient * _each(weight, ctx.x)
        weight.add((gradient * ctx.x).sum(tuple(inner)))
        if bias is not None:
            bias.add(gradient.sum(tuple(inner)))
        return scaled, None, None, None


def _each(parameter: _Stacked, x: Tensor) -> Tensor:
    """The values of a parameter, in a shape for x, [num_learners, batch, ...]."""
    values = parameter.values
    return values.view(len(values), *(1,) * (x.ndim - values.ndim), *values.shape[1:])


class DenseStack:
    r"""Several dense models of the same layers, and their training together.

    A step is

    .. math:: v \leftarrow \mu v + g(x) + \lambda x, \qquad x \leftarrow x - \eta v

    with the gradient :math:`g(x)` of each model's own batch, momentum :math:`\mu` and weight
    decay :math:`\lambda`. With Nesterov's momentum, :math:`x` moves by :math:`g(x) + \lambda x
    + \mu v` instead.

    Args:
        module: The layers, of the types in `DENSE`.
        loss: Mean loss of a batch.
        sgd: Gives weight decay and Nesterov's momentum.
        momentum: SGD's momentum.
        params: [num_params] of each learner.
        velocities: [num_params] of each learner; None before its first step.
        lr: Learning rate of each learner.

    Attributes:
        params: [num_learners, num_params], as of the last step.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        sgd: SGD,
        momentum: float,
        params: Sequence[Tensor],
        velocities: Sequence[Tensor | None],
        lr: Sequence[float],
    ) -> None:
        parameters = [*module.parameters()]
        self.params = torch.stack([*params]).to(parameters[0].device)
        self._lr = self.params.new_tensor(lr)
        self._momentum, self._sgd = momentum, sgd
        zeros = torch.zeros_like(self.params[0])
        old = [zeros if each is None else each for each in velocities]
        sizes = [each.numel() for each in parameters]
        columns = zip(*(torch.split(each, sizes) for each in old), strict=True)
        pieces = zip(torch.split(self.params, sizes, dim=1), columns, strict=True)
        stacked = [
            self._stacked(like.shape, *piece)
            for like, piece in zip(parameters, pieces, strict=True)
        ]
        self._parameters = stacked
        of: dict[Tensor, _Stacked] = dict(zip(parameters, stacked, strict=True))
        self._layers = [_layer(each, of) for each in leaves(module)]
        self._loss, self._losses = loss, vmap(loss)

    def _stacked(
        self, shape: torch.Size, values: Tensor, velocities: Sequence[Tensor]
    ) -> _Stacked:
        values = values.view(-1, *shape).requires_grad_()
        velocity = torch.stack([*velocities]).view(-1, *shape)
        if self._sgd.nesterov:  # its update needs the gradient itself
            return _Stacked(values, velocity, torch.zeros_like(velocity), 0.0)
        return _Stacked(values, velocity, velocity, self._momentum)

    def velocities(self) -> Iterator[Tensor]:
        """The velocity of each learner, [num_params]."""
        for pieces in zip(*(each.velocity for each in self._parameters), strict=True):
            yield torch.cat([piece.flatten() for piece in pieces])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step for all learners, each on its own samples; return the losses."""
        x, y = (torch.unflatten(each, 0, (len(self._lr), -1)) for each in (x, y))
        for layer in self._layers:
            x = layer(x)
        has_classes = self._loss is F.cross_entropy and not y.is_floating_point()
        losses = _cross_entropies(x, y) if has_classes else self._losses(x, y)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for each in self._parameters:
                self._move(each)
        return losses.detach()

    def _move(self, each: _Stacked) -> None:
        gradient = each.gradient
        if self._sgd.weight_decay:
            gradient.add_(each.values, alpha=self._sgd.weight_decay)
        if self._sgd.nesterov:
            torch.add(gradient, each.velocity, alpha=self._momentum, out=each.velocity)
            gradient.add_(each.velocity, alpha=self._momentum)
        lr = self._lr.view(-1, *(1 for _ in each.values.shape[1:]))
        each.values.addcmul_(gradient, lr, value=-1)


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential` modules, in the order of their computation."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from leaves(child)
    else:
        yield module


def _layer(layer: nn.Module, of: Mapping[Tensor, _Stacked]) -> Callable[[Tensor], Tensor]:
    """Compute `layer` for all learners, on [num_learners, batch, ...]."""
    match layer:
        case nn.Flatten(start_dim=start, end_dim=end):
            dims = (start + (start >= 0), end + (end >= 0))
            return lambda x: x.flatten(*dims)
        case nn.Linear(weight=weight, bias=bias):
            return partial(_linear, of[weight], of.get(bias))
        case nn.LayerNorm(normalized_shape=shape, eps=eps, weight=weight, bias=bias):
            normalize = partial(F.layer_norm, normalized_shape=[*shape], eps=eps)
            if weight is None:
                return normalize
            return partial(_scaled, normalize, of[weight], of.get(bias))
    return layer


def _linear(weight: _Stacked, bias: _Stacked | None, x: Tensor) -> Tensor:
    rows = x.flatten(1, -2)
    outputs: Tensor = _Linear.apply(rows, weight.values, weight, bias)  # type: ignore[no-untyped-call]
    return outputs if x.ndim == 3 else torch.unflatten(outputs, 1, x.shape[1:-1])


def _scaled(
    normalize: Callable[[Tensor], Tensor], weight: _Stacked, bias: _Stacked | None, x: Tensor
) -> Tensor:
    scaled: Tensor = _Scale.apply(normalize(x), weight.values, weight, bias)  # type: ignore[no-untyped-call]
    return scaled


def _cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of each learner, for targets that are classes.

    It takes 0.5 ms less than `vmap`.
    """
    each = F.cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1), reduction="none")
    number = (y != IGNORED).flatten(1).sum(1)
    return each.view(len(y), -1).sum(1) / number


class StackedLearner(Learner):
    r"""A `Learner` that trains with other learners whose requests have the same shape.

    With all parameters stacked as :math:`x`, of shape [num_learners, num_params], a step is

    .. math:: v \leftarrow \mu v + g(x) + \lambda x, \qquad x \leftarrow x - \eta v

    with the gradient :math:`g(x)` of each learner's own batch, momentum :math:`\mu`, weight
    decay :math:`\lambda`, and a learning rate :math:`\eta` for each learner: `SGD`, optionally
    with Nesterov's momentum. A few large kernels replace many small ones (`DenseStack`). The
    result differs from a `Learner`'s in the last bits, because PyTorch multiplies stacks of
    matrices with a different kernel. It does not depend on the other learners in a stack, as
    long as each learner's rows are aligned in memory: with a batch of 1, or odd numbers of
    samples and units, the last bits may depend on them.

    Args:
        settings: As in `Learner`. The optimizer must be an `SGD`, the model must have no
            buffers or dropout, there must be no augmentation, and the selection must not use
            losses; `experiments.batching` checks this.
        data: As in `Learner`.
        arguments: Other arguments of `Learner`.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        require_plain(settings.step, "StackedLearner")
        super().__init__(settings, data, **arguments)
        self._is_sharing = True
        self._sgd = cast("SGD", settings.optimizer)

    def prepare(self, request: Train, progress: float) -> StackedWork:
        """Choose the samples of all steps; from then on other learners can join."""
        self._require_no_inputs(request)
        self.rest()
        return StackedWork(
            learner=self,
            params=request.params,
            samples=[self.shard[batch.positions] for batch in self.take(request)],
            lr=self._sgd.lr * request.rate_ratio * self.settings.schedule.factor(progress),
            momentum=self._sgd.momentum if request.momentum is None else request.momentum,
        )

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train alone, with the same result as in a stack; see `Learner.train`."""
        (outcome,) = self.prepare(request, progress).train_with([])
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome

    @property
    def model_id(self) -> int:
        """Equal for learners that can train together, because they share copies of a model."""
        return id(self._copies)

    @property
    def velocity(self) -> Tensor | None:
        """SGD's momentum buffer, [num_params]; None before the first step."""
        kept = self._at_rest["optimizer"]
        return kept[0].get("momentum_buffer") if kept else None

    def train_together(
        self, work: Sequence[StackedWork]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Take all steps of this learner and of the learners that joined it.

        Returns:
            Losses, [num_steps, num_learners]; parameters and velocities after the last step,
            both [num_learners, num_params].
        """
        copy = self._copies.borrow()
        try:
            copy.model.module.train()
            stack = DenseStack(
                copy.model.module,
                self.settings.loss,
                self._sgd,
                work[0].momentum,
                [each.params for each in work],
                [each.learner.velocity for each in work],
                [each.lr for each in work],
            )
            losses = []
            for some in zip(*(each.samples for each in work), strict=True):
                samples = self._dataset.train.batch(torch.cat(some))
                x, y = prepare_batch(self._dataset, samples, self._torch_device)
                losses.append(stack.step(x, y))
        finally:
            self._copies.give_back(copy)
        return torch.stack(losses), stack.params, [*stack.velocities()]

    def finish(
        self, losses: Tensor, num_samples: int, params: Tensor, velocity: Tensor | None
    ) -> TrainingResult:
        """Store the velocity after training, and return the result.

        Args:
            losses: Losses of all steps, [num_steps].
            num_samples: Number of samples in all batches.
            params: The new parameters, [num_params].
            velocity: SGD's momentum buffer; None if it has not changed.
        """
        if velocity is not None:
            self._at_rest = {**self._at_rest, "optimizer": [{"momentum_buffer": velocity}]}
        return self._summed_up(params, [*losses], num_samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class StackedWork:
    """Work that a `StackedLearner` is about to carry out.

    Args:
        learner: The learner.
        params: Parameters to start from, [num_params].
        samples: Indices of the samples of each step.
        lr: Learning rate.
        momentum: SGD's momentum.
    """

    learner: StackedLearner
    params: Tensor
    samples: list[Tensor]
    lr: float
    momentum: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for work that can be done together."""
        return self.learner.model_id, self.momentum, *map(len, self.samples)

    def train_with(self, others: Sequence[StackedWork]) -> list[Outcome]:
        """Carry out this and other work of the same `key`; return all outcomes, this one's
        first.

        Failures are separate: an outcome is a `TrainingError` if its own losses are not finite.
        """
        work = [self, *others]
        losses, params, velocities = self.learner.train_together(work)
        num_samples = sum(map(len, self.samples))
        outcomes: list[Outcome] = []
        for number, each in enumerate(work):
            # Clones: otherwise each would keep the memory of all.
            own = params[number].cpu().clone()
            kept = velocities[number] if self.momentum else None
            try:
                result = each.learner.finish(losses[:, number], num_samples, own, kept)
            except TrainingError as error:
                outcomes.append(error)
            else:
                outcomes.append(result)
        return outcomes
