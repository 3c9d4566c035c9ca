"""Several models of one architecture, and their training together."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from edgegossip.data.nested import Nested, leaves as each_leaf, map_leaves
from edgegossip.models.blocks import hooks, is_channels_last
from edgegossip.training.copies import ModelCopy, OptimizerState
from edgegossip.training.feed import Feed
from edgegossip.training.graphs import StackGraphs
from edgegossip.training.learner import LearnerSettings
from edgegossip.training.loss import IGNORED, forward_pair, losses_of
from edgegossip.training.optimizer import SGD
from edgegossip.training.stacked.layers import (
    FoldedAttention,
    Stacked,
    StackedLayer,
    bridge,
    leaves,
    side_by_side,
    stacked_layer,
)
from edgegossip.training.stacked.update import JoinedOptimizer, Rows, StackedSGD, along


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """The state of one learner that a stack takes, and gives back.

    Attributes:
        params: [num_params], trained parameters and exchanged buffers.
        optimizer: State of the optimizer; None before its first step, and if it has not
            changed.
        buffers: The other buffers, by name.
        dropout: State of the source of dropout masks; None without dropout.
        factor: Factor on the optimizer's learning rates.
    """

    params: Tensor
    optimizer: OptimizerState | None
    buffers: Mapping[str, Tensor]
    dropout: Tensor | None
    factor: float


class Stack:
    r"""Models of one architecture whose steps are computed together.

    A step gives each model the update that it would have alone, on its own batch, up to
    rounding: with edgegossip's `SGD`, for parameters :math:`x` stacked as [num_models, ...],

    .. math:: v \leftarrow \mu v + g(x) + \lambda x, \qquad x \leftarrow x - \eta v

    with the gradient :math:`g(x)` of each model's own loss, momentum :math:`\mu`, weight decay
    :math:`\lambda`, and a learning rate :math:`\eta` for each model. With Nesterov's momentum,
    :math:`x` moves by :math:`g(x) + \lambda x + \mu v` instead. Other optimizers are PyTorch's,
    with the parameters of all models.

    A sequence of known layers runs layer by layer. Any other module runs under `torch.vmap`,
    which passes its known layers on (`stacked_layer`).

    Args:
        copy: A copy of the model, whose layers are used and whose values are not.
        settings: How the models are trained.
        num_models: Number of models.
        momentum: SGD's momentum; None for that of the optimizer.
    """

    def __init__(
        self,
        copy: ModelCopy,
        settings: LearnerSettings,
        num_models: int,
        momentum: float | None,
    ) -> None:
        self.num_models = num_models
        flat, module = copy.model, copy.model.module
        self._settings = settings
        trained = [each for each in module.parameters() if each.requires_grad]
        self._rows = Rows([*trained, *flat.moved_buffers], num_models)
        values = [each.requires_grad_() for each in self._rows.tensors[: len(trained)]]
        self._own_buffers = {
            name: each.new_empty(num_models, *each.shape)
            for name, each in copy.own_buffers.items()
        }
        buffers = dict(zip(flat.moved_buffers, self._rows.tensors[len(trained) :], strict=True))
        buffers |= {copy.own_buffers[n]: each for n, each in self._own_buffers.items()}
        self._generators = [torch.Generator(flat.values.device) for _ in range(num_models)]
        self._update: StackedSGD | JoinedOptimizer
        optimizer, is_clipped = settings.optimizer, settings.step.max_grad_norm is not None
        if isinstance(optimizer, SGD):
            self._update = StackedSGD(optimizer, momentum, values, is_clipped)
        else:
            self._update = JoinedOptimizer(optimizer, momentum, values)
        self._graphs = None
        if settings.step.cuda_graph and isinstance(optimizer, SGD):
            drawn = [] if copy.drawn is None else self._generators
            self._graphs = StackGraphs(drawn, flat.values.device)
        self._gradients = self._update.gradients
        stacked = [Stacked(*pair) for pair in zip(values, self._gradients, strict=True)]
        for each in stacked:
            each.values.grad = each.gradient
        of: dict[Tensor, Stacked] = dict(zip(trained, stacked, strict=True))
        self._forward = _Forward(module, settings, of, buffers, self._generators)
        decay = self._update.decay
        for each in self._forward.in_one_pass:
            each.factor = decay
        self._to_decay = [each.gradient for each in stacked if each.factor == 1.0 != decay]

    def load(self, members: Sequence[Member]) -> None:
        """Take the state of `num_models` learners."""
        self._rows.fill([each.params for each in members])
        for name, buffer in self._own_buffers.items():
            buffer.copy_(torch.stack([each.buffers[name] for each in members]))
        for generator, each in zip(self._generators, members, strict=True):
            if each.dropout is not None:
                generator.set_state(each.dropout)
        self._factors = [each.factor for each in members]
        self._has_dropout = members[0].dropout is not None
        self._update.load([each.optimizer for each in members], self._factors)

    def members(self) -> list[Member]:
        """The state of each learner, for keeping; parameters are on the CPU."""
        return [
            Member(
                params=params,
                optimizer=optimizer,
                buffers={n: each[number].clone() for n, each in self._own_buffers.items()},
                dropout=self._generators[number].get_state() if self._has_dropout else None,
                factor=self._factors[number],
            )
            for number, (params, optimizer) in enumerate(
                zip(self._rows.vectors("cpu"), self._update.states(), strict=True)
            )
        ]

    def step(
        self, inputs: Nested, feed: Feed, weights: Tensor | None, *, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Take a step of all models, each on its own samples.

        Args:
            inputs: Samples of the first model, of the second, ..., with equal numbers, or
                their indices, as the feed brings them to the device.
            feed: Prepares them.
            weights: [num_models, batch] weight of each sample's loss; None for all 1.
            needs_losses: Whether to return the loss of each sample; with weights, it is
                returned in any case.

        Returns:
            Mean loss of each model, [num_models], and of each sample, [num_models, batch].
        """
        if self._graphs is not None and weights is None and not needs_losses:
            step = partial(self._mean_losses, feed)
            return self._graphs.take(feed.key, inputs, step), None
        return self._take(feed.prepare(inputs), weights, needs_losses)

    def _mean_losses(self, feed: Feed, inputs: Nested) -> Tensor:
        return self._take(feed.prepare(inputs), None, needs_losses=False)[0]

    def _take(
        self, samples: Nested, weights: Tensor | None, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None]:
        samples = map_leaves(lambda leaf: leaf.unflatten(0, (self.num_models, -1)), samples)
        if self._to_decay:
            if self._update.decay:
                torch._foreach_mul_(self._to_decay, self._update.decay)
            else:  # not 0 * v, which is not finite if v is not
                torch._foreach_zero_(self._to_decay)
        means, losses = self._forward(samples, weights, needs_losses)
        means.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if self._settings.step.max_grad_norm is not None:
                self._clip(self._settings.step.max_grad_norm)
            self._update.step()
        return means.detach(), losses

    def _clip(self, max_norm: float) -> None:
        """As `nn.utils.clip_grad_norm_` does for each model."""
        squares = [each.flatten(1).square().sum(1) for each in self._gradients]
        norms = torch.stack(squares).sum(0).sqrt_()
        factors = (max_norm / (norms + 1e-6)).clamp_(max=1.0)
        for each in self._gradients:
            each.mul_(along(factors, each))


class _Forward:
    """The losses of all models.

    Attributes:
        in_one_pass: Parameters whose layer also decays their gradient, in the same pass.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: LearnerSettings,
        parameters: Mapping[Tensor, Stacked],
        buffers: Mapping[Tensor, Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._settings = settings
        self._is_pictorial = any(isinstance(each, nn.Conv2d) for each in module.modules())
        self._precision: AbstractContextManager[object] = nullcontext()
        if settings.step.autocast is not None:
            kind = torch.device(settings.torch_device).type
            self._precision = torch.autocast(kind, settings.step.autocast)
        of = (parameters, buffers, generators)
        self._layers = self._in_sequence(module, *of)
        self.in_one_pass: list[Stacked] = []
        if self._layers:
            for layer in module.modules():
                if type(layer) in (nn.Linear, nn.LayerNorm) and not settings.step.autocast:
                    self.in_one_pass += [parameters[each] for each in layer.parameters()]
            return
        whole = _Whole(_bridged(module, *of), settings)
        self._whole = whole
        self._raw = {
            name: parameters[p].values
            for name, p in whole.named_parameters()
            if p in parameters
        }
        self._raw_buffers = {name: buffers[each] for name, each in whole.named_buffers()}

    def _in_sequence(
        self,
        module: nn.Module,
        parameters: Mapping[Tensor, Stacked],
        buffers: Mapping[Tensor, Tensor],
        generators: Sequence[torch.Generator],
    ) -> list[StackedLayer]:
        """The layers, if the module is a sequence of known ones; otherwise nothing."""
        if self._settings.forward is not forward_pair or _has_hooks(module):
            return []
        layers = [*leaves(module)]
        num_used = sum(len([*layer.parameters()]) for layer in layers)
        if num_used != len(parameters) or len(set(layers)) < len(layers):
            return []  # a layer that stands twice would decay its gradient twice
        for index, (layer, following) in enumerate(pairwise(layers)):
            if type(layer) is nn.ReLU and type(following) is nn.MaxPool2d:
                # The same maximum, of a quarter of the numbers.
                layers[index : index + 2] = following, layer
        found = [
            stacked_layer(
                layer, parameters, buffers, generators, has_pictures=self._is_pictorial
            )
            for layer in layers
        ]
        return [] if None in found else [each for each in found if each is not None]

    def __call__(
        self, samples: Nested, weights: Tensor | None, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._is_pictorial:
            samples = map_leaves(
                lambda leaf: side_by_side(leaf) if leaf.ndim == 5 else leaf, samples
            )
        _, first = next(each_leaf(samples))
        judge = partial(self._judge, number=first.shape[1], needs_losses=needs_losses)
        weights_dim = None if weights is None else 0
        with self._precision:
            if not self._layers:
                apart = vmap(partial(self._apart, judge), in_dims=(0, 0, 0, weights_dim))
                found = apart(self._raw, self._raw_buffers, samples, weights)
                return found if isinstance(found, tuple) else (found, None)
            x, y = samples
            for layer in self._layers:
                x = layer(x)
            has_classes = self._settings.loss is F.cross_entropy and not y.is_floating_point()
            if has_classes and weights is None and not needs_losses:
                return _cross_entropies(x, y), None
            found = vmap(judge, in_dims=(0, 0, weights_dim))(x, y, weights)
            return found if isinstance(found, tuple) else (found, None)

    def _apart(
        self,
        judge: Callable[..., Any],
        raw: dict[str, Tensor],
        buffers: dict[str, Tensor],
        samples: Nested,
        weights: Tensor | None,
    ) -> Any:  # noqa: ANN401
        """The losses of one model; `vmap` maps this."""
        with FoldedAttention():
            return functional_call(self._whole, (raw, buffers), (samples, judge, weights))

    def _judge(
        self,
        outputs: Any,  # noqa: ANN401
        targets: Any,  # noqa: ANN401
        weights: Tensor | None,
        *,
        number: int,
        needs_losses: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mean loss of one model, and with weights or if needed also that of each sample."""
        loss = self._settings.loss
        if weights is not None:
            losses = losses_of(loss, outputs, targets, number)
            return losses @ weights / number, losses.detach()
        mean = loss(outputs, targets)
        if not needs_losses:
            return mean
        with torch.no_grad():
            return mean, losses_of(loss, outputs, targets, number)


class _Whole(nn.Module):
    """A module, the task's `forward` and the loss, as one module for `functional_call`.

    The loss may run the module, too (`model_and_batch`).
    """

    def __init__(self, module: nn.Module, settings: LearnerSettings) -> None:
        super().__init__()
        self.module = module
        self._forward = settings.forward

    def forward(
        self, samples: Nested, judge: Callable[..., Any], weights: Tensor | None
    ) -> Any:  # noqa: ANN401
        return judge(*self._forward(self.module, samples), weights)


def _has_hooks(module: nn.Module) -> bool:
    """Whether any module within has hooks, other than the one for the memory layout."""
    layout = is_channels_last(module)
    return sum(len(hooks(each)) for each in module.modules()) > layout


def _bridged(
    module: nn.Module,
    parameters: Mapping[Tensor, Stacked],
    buffers: Mapping[Tensor, Tensor],
    generators: Sequence[torch.Generator],
) -> nn.Module:
    """A copy of `module` with stacked layers in place of those that are known."""
    shared = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(each): each for each in shared}
    module = copying.deepcopy(module, memo)
    if is_channels_last(module):
        module._forward_pre_hooks.clear()
    has_convolutions = any(isinstance(each, nn.Conv2d) for each in module.modules())
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if not name or hooks(layer) or [*layer.children()]:
            continue
        known = stacked_layer(
            layer, parameters, buffers, generators, has_pictures=has_convolutions
        )
        if known is None or known is layer or isinstance(layer, nn.Flatten):
            continue  # `vmap` runs what has no parameters as fast
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, bridge(layer, known))
    return module


def _cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean loss of each model, for targets that are classes.

    It takes 0.5 ms less than `vmap`.
    """
    each = F.cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1), reduction="none")
    number = (y != IGNORED).flatten(1).sum(1)
    return each.view(len(y), -1).sum(1) / number
