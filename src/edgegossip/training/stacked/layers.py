"""Layers of several models at once, on stacked parameters and activations.

Activations are [num_models, batch, ...]. Pictures have the channels of all models side by side
in memory, as [batch, height, width, num_models, channels]: then a convolution of all models is
one convolution in groups, and a batch normalization is an ordinary one with more channels.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgegossip.models.dropout import Dropout

StackedLayer: TypeAlias = Callable[[Tensor], Tensor]
"""A layer of all models, from [num_models, batch, ...] to [num_models, batch, ...]."""

POINTWISE = (nn.Identity, nn.GELU, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.Tanh)
"""Layers that do the same to each number, wherever it stands in a tensor. ELU, SiLU, sigmoid
and ``GELU("tanh")`` round a value differently at the end of a tensor, so that a result would
depend on the other models."""
POOLING = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
)
CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
}


_KNOWN = {
    *POINTWISE,
    *POOLING,
    *CONVOLUTIONS,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.Embedding,
    nn.Flatten,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Linear,
    Dropout,
}


@dataclass(slots=True, eq=False)
class Stacked:
    """A parameter of all models.

    Attributes:
        values: [num_models, ...].
        gradient: [num_models, ...]; the backward pass adds to it.
        factor: Factor on `gradient` before a `Linear` or `LayerNorm` adds to it, so that a
            momentum buffer decays in the same pass over memory; 1 if it has decayed before.
    """

    values: Tensor
    gradient: Tensor
    factor: float = 1.0

    def add(self, gradient: Tensor) -> None:
        if self.factor:
            torch.add(gradient, self.gradient, alpha=self.factor, out=self.gradient)
        else:  # not 0 * v, which is not finite if v is not
            self.gradient.copy_(gradient)

    @property
    def side_by_side(self) -> Tensor:
        """The values with the first dimensions of all models joined, for layers in groups."""
        return self.values.flatten(0, 1)


class _Linear(torch.autograd.Function):
    """Products of stacked inputs, [num_models, batch, num_inputs], and matrices.

    The backward pass adds the gradient to the velocity within the matrix product: a step that
    stores gradients first takes 1.1 to 1.4 times as long.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        _weight: Tensor,  # tells autograd that a backward pass is needed
        weight: Stacked,
        bias: Stacked | None,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.bias = x, weight, bias
        if bias is None:
            return torch.bmm(x, weight.values.mT)
        return torch.baddbmm(bias.values.unsqueeze(1), x, weight.values.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:  # noqa: ANN401
        weight, bias = ctx.weight, ctx.bias
        weight.gradient.baddbmm_(gradient.mT, ctx.x, beta=weight.factor)
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
        weight: Stacked,
        bias: Stacked | None,
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


def _each(parameter: Stacked, x: Tensor) -> Tensor:
    """The values of a parameter, in a shape for x, [num_models, batch, ...]."""
    values = parameter.values
    return values.view(len(values), *(1,) * (x.ndim - values.ndim), *values.shape[1:])


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential` modules, in the order of their computation."""
    if type(module) is nn.Sequential:  # a subclass may do more, such as adding its input
        for child in module:
            yield from leaves(child)
    else:
        yield module


def stacked_layer(
    layer: nn.Module,
    parameters: Mapping[Tensor, Stacked],
    buffers: Mapping[Tensor, Tensor],
    generators: Iterable[torch.Generator],
    *,
    has_pictures: bool,
) -> StackedLayer | None:
    """Make a layer of all models; None if there is no faster way than `torch.vmap`.

    Args:
        layer: The layer of one model.
        parameters: All models' values of each parameter.
        buffers: All models' values of each buffer, [num_models, ...].
        generators: Each model's source of dropout masks.
        has_pictures: Whether activations [num_models, batch, ...] of five dimensions are
            pictures.
    """
    get: Callable[[Any], Stacked | None] = parameters.get
    if type(layer) not in _KNOWN:  # a subclass may do something else
        return None
    if not all(each in parameters for each in layer.parameters()):
        return None  # some are frozen, and equal in all models
    match layer:
        case nn.Linear(weight=weight, bias=bias):
            return partial(_linear, parameters[weight], get(bias))
        case nn.Conv1d() | nn.Conv2d() if layer.padding_mode == "zeros":
            return partial(_convolution, layer, parameters[layer.weight], get(layer.bias))
        case nn.LayerNorm(weight=weight, bias=bias):
            return partial(_layer_norm, layer, get(weight), get(bias))
        case nn.BatchNorm1d(momentum=float()) | nn.BatchNorm2d(momentum=float()):
            return _BatchNorm(layer, get(layer.weight), get(layer.bias), buffers)
        case nn.GroupNorm(weight=weight, bias=bias):
            return partial(_group_norm, layer, get(weight), get(bias))
        case nn.Embedding(max_norm=None, weight=weight):
            return partial(_embedding, layer, parameters[weight])
        case Dropout():
            return partial(_dropout, layer, generators, has_pictures)
        case nn.Flatten(start_dim=start, end_dim=end):
            dims = (start + (start >= 0), end + (end >= 0))
            return lambda x: x.flatten(*dims)
    if isinstance(layer, POINTWISE):
        return layer if getattr(layer, "approximate", "none") == "none" else None
    if isinstance(layer, POOLING) and not getattr(layer, "return_indices", False):
        return partial(_pooling, layer, 1 if type(layer).__name__.endswith("1d") else 2)
    return None


def _beside(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `layer` to the channels of all models side by side."""
    outputs = layer(x.movedim(0, 1).flatten(1, 2))
    return torch.unflatten(outputs, 1, (len(x), -1)).movedim(1, 0)


def _pooling(layer: Callable[[Tensor], Tensor], num_dims: int, x: Tensor) -> Tensor:
    if x.ndim == num_dims + 2:  # without channels, for which PyTorch then takes the samples
        return torch.unflatten(layer(x.flatten(0, 1)), 0, x.shape[:2])
    return _beside(layer, x)


def side_by_side(x: Tensor) -> Tensor:
    """Copy pictures, [num_models, batch, channels, height, width], into the fast layout."""
    places = (1, 3, 4, 0, 2)
    x = x.permute(places).contiguous()
    return x.permute(*(places.index(dim) for dim in range(5)))


def _linear(weight: Stacked, bias: Stacked | None, x: Tensor) -> Tensor:
    rows = x.flatten(1, -2)
    if torch.is_autocast_enabled(x.device.type):  # whose types only autograd keeps track of
        product = torch.bmm(rows, weight.values.mT)
        outputs = product if bias is None else product + bias.values.unsqueeze(1)
    else:
        outputs = _Linear.apply(rows, weight.values, weight, bias)  # type: ignore[no-untyped-call]
    return outputs if x.ndim == 3 else torch.unflatten(outputs, 1, x.shape[1:-1])


def _convolution(
    layer: nn.Conv1d | nn.Conv2d, weight: Stacked, bias: Stacked | None, x: Tensor
) -> Tensor:
    convolve = partial(
        CONVOLUTIONS[type(layer)],
        weight=weight.side_by_side,
        bias=None if bias is None else bias.side_by_side,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=len(x) * layer.groups,
    )
    return _beside(convolve, x)


def _layer_norm(
    layer: nn.LayerNorm, weight: Stacked | None, bias: Stacked | None, x: Tensor
) -> Tensor:
    x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if weight is None:
        return x
    if torch.is_autocast_enabled(x.device.type):
        x = x * _each(weight, x)
        return x if bias is None else x + _each(bias, x)
    scaled: Tensor = _Scale.apply(x, weight.values, weight, bias)  # type: ignore[no-untyped-call]
    return scaled


def _embedding(layer: nn.Embedding, weight: Stacked, x: Tensor) -> Tensor:
    numbers = torch.arange(len(x), device=x.device)  # on the device, for CUDA graphs
    places = x + (numbers * layer.num_embeddings).view(-1, *(1,) * (x.ndim - 1))
    frequent = layer.scale_grad_by_freq
    found = F.embedding(places, weight.side_by_side, scale_grad_by_freq=frequent)
    if layer.padding_idx is None:
        return found
    # `vmap` would keep the gradient from the first model's padding only.
    return torch.where((x == layer.padding_idx).unsqueeze(-1), found.detach(), found)


class _BatchNorm:
    """A batch normalization, with running statistics of each model."""

    def __init__(
        self,
        layer: nn.BatchNorm1d | nn.BatchNorm2d,
        weight: Stacked | None,
        bias: Stacked | None,
        buffers: Mapping[Tensor, Tensor],
    ) -> None:
        self._layer, self._weight, self._bias = layer, weight, bias
        self._mean, self._variance, self._count = (
            None if each is None else buffers[each]
            for each in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        )

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        if layer.training and self._count is not None:
            self._count.add_(1)
        normalize = partial(
            F.batch_norm,
            running_mean=None if self._mean is None else self._mean.flatten(),
            running_var=None if self._variance is None else self._variance.flatten(),
            weight=None if self._weight is None else self._weight.side_by_side,
            bias=None if self._bias is None else self._bias.side_by_side,
            training=layer.training or self._mean is None,
            momentum=layer.momentum or 0.0,
            eps=layer.eps,
        )
        return _beside(normalize, x)


def _group_norm(
    layer: nn.GroupNorm, weight: Stacked | None, bias: Stacked | None, x: Tensor
) -> Tensor:
    normalize = partial(
        F.group_norm,
        num_groups=len(x) * layer.num_groups,
        weight=None if weight is None else weight.side_by_side,
        bias=None if bias is None else bias.side_by_side,
        eps=layer.eps,
    )
    return _beside(normalize, x)


def _dropout(
    layer: Dropout, generators: Iterable[torch.Generator], has_pictures: bool, x: Tensor
) -> Tensor:
    if not layer.training:
        return x
    kept = 1 - layer.p
    # Each model's masks are those that it draws alone, in the same order: that of memory, in
    # which pictures have their channels last, even if `vmap` has changed that.
    layout = torch.channels_last if has_pictures and x.ndim == 5 else torch.preserve_format
    masks = [
        torch.empty_like(each, memory_format=layout).bernoulli_(kept, generator=generator)
        for each, generator in zip(x, generators, strict=True)
    ]
    return x * torch.stack(masks).div_(kept or 1.0)


class Bridge(nn.Module):
    """A layer of a model that `torch.vmap` runs, computed for all models at once.

    `bridge` makes it also a layer of the original's class, with its parameters and attributes,
    because models may look at these.
    """

    original: nn.Module
    stacked: StackedLayer

    def train(self, mode: bool = True) -> Bridge:
        """Switch the mode of the original layer, too."""
        self.original.train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(x) or x.ndim < 2:
            outputs: Tensor = super().forward(x)  # the same for all models, or not a batch
        else:
            outputs = _Bridged.apply(x, self.stacked)  # type: ignore[no-untyped-call]
        return outputs


def bridge(layer: nn.Module, stacked: StackedLayer) -> nn.Module:
    """Make a layer like `layer` that computes with `stacked`."""
    made = copying.copy(layer)  # not `layer` itself, to which `stacked` refers
    vars(made).update(original=layer, stacked=stacked)
    made.__class__ = type(type(layer).__name__, (Bridge, type(layer)), {})
    return made


class _Bridged(torch.autograd.Function):
    """Runs a stacked layer on the tensors beneath `torch.vmap`, where autograd records it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, layer: StackedLayer) -> Tensor:
        raise NotImplementedError  # only `vmap` is called

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
        pass

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401
        in_dims: tuple[int | None, ...],
        x: Tensor,
        layer: StackedLayer,
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return layer(x.movedim(in_dims[0], 0)), 0


class FoldedAttention(TorchFunctionMode):
    """Computes the attention of all models with one kernel, for which `torch.vmap` has no rule.

    It would call the kernel for each model, or on a CPU for each sample.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if function is F.scaled_dot_product_attention:
            query, key, value, mask, options = _attention_of(*args, **(kwargs or {}))
            if not options.get("dropout_p"):
                return _Attention.apply(query, key, value, mask, options)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def _attention_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """The tensors, and the options, of a call of PyTorch's attention."""
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    return query, key, value, attn_mask, options


def _first_dim(x: Tensor, dim: int | None, number: int) -> Tensor:
    """`x` with the models in its first dimension."""
    return x.expand(number, *x.shape) if dim is None else x.movedim(dim, 0)


class _Attention(torch.autograd.Function):
    """Attention, [batch, heads, length, size], with the models in one batch."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
        pass

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401
        in_dims: tuple[int | None, ...],
        *arguments: Any,  # noqa: ANN401
    ) -> tuple[Tensor, int]:
        *tensors, options = arguments
        number = info.batch_size
        query, key, value, *masks = (
            _first_dim(each, dim, number)
            for each, dim in zip(tensors, in_dims, strict=False)
            if each is not None
        )
        mask = masks[0] if masks else None
        if mask is not None:  # which may have fewer dimensions than the query
            mask = mask.view(number, *(1,) * (query.ndim - mask.ndim), *mask.shape[1:])
            mask = mask.expand(number, query.shape[1], *mask.shape[2:]).flatten(0, 1)
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, mask, **options)
        return torch.unflatten(found, 0, (number, -1)), 0
