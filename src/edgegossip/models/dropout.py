"""Dropout that draws from its own stream, so that models can train in parallel threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.ranges import check_range


class Dropout(nn.Module):
    """`torch.nn.Dropout` that draws from `generator`, never from the global generator.

    In training mode, each entry becomes 0 with probability `p` and is otherwise divided by
    ``1 - p``; in evaluation mode, nothing changes.

    Args:
        p: Probability in [0, 1] that an entry becomes 0.

    Attributes:
        generator: Source of the masks, on the device of the inputs. Set by `replace_dropout`.

    Raises:
        ValueError: If `p` is out of range.

    >>> layer = Dropout(0.5)
    >>> layer.generator = torch.Generator().manual_seed(0)
    >>> sorted(set(layer(torch.ones(100)).tolist()))
    [0.0, 2.0]
    >>> layer.eval()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_range("p", p, "in [0, 1]")
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Mask `x`, of any shape.

        Raises:
            TrainingError: If the module is in training mode and has no generator.
        """
        if not self.training:
            return x
        if self.generator is None:
            raise TrainingError(
                "a Dropout layer has no random generator to train with; "
                "call edgegossip.replace_dropout(model, generator) first"
            )
        kept = 1 - self.p
        mask = self._empty_mask(x).bernoulli_(kept, generator=self.generator)
        # With p = 1, the mask is zero for any divisor.
        return x * mask.div_(kept or 1.0)

    def _empty_mask(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class ChannelDropout(Dropout):
    """`Dropout` of whole channels, as `torch.nn.Dropout1d`, `Dropout2d` and `Dropout3d` do.

    Inputs are [batch, channels, ...]; a channel of a sample is kept or becomes 0 as a whole.

    >>> layer = ChannelDropout(0.5)
    >>> layer.generator = torch.Generator().manual_seed(0)
    >>> x = layer(torch.ones(2, 3, 4))
    >>> x.amin(-1).equal(x.amax(-1))
    True
    """

    def _empty_mask(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2))


class _Recurrent(nn.Module):
    """A recurrent layer of PyTorch whose dropout between layers is `masks`."""

    masks: Dropout

    def forward(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401
        if not self.training:
            return super().forward(*inputs, **options)
        with _BetweenLayers(self.masks):
            return super().forward(*inputs, **options)


class _Attention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose dropout of the weights is `masks`."""

    masks: Dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        plain = partial(
            super().forward,
            query,
            key,
            value,
            key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
        )
        if not self.training:
            return plain(need_weights, average_attn_weights=average_attn_weights)
        weights = self.masks(plain(average_attn_weights=False)[1])
        is_swapped = value.ndim == 3 and not self.batch_first
        heads = self._values(value.transpose(0, 1) if is_swapped else value)
        outputs = self.out_proj((weights @ heads).transpose(-2, -3).flatten(-2))
        if average_attn_weights:
            weights = weights.mean(-3)
        if is_swapped:
            outputs = outputs.transpose(0, 1)
        return outputs, weights if need_weights else None

    def _values(self, value: Tensor) -> Tensor:
        """Values of all heads, [..., num_heads, length, head_dim]."""
        joint = self.in_proj_weight
        weight = self.v_proj_weight if joint is None else joint.chunk(3)[2]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[2]
        values = F.linear(value, weight, bias)
        if self.bias_v is not None:
            values = torch.cat([values, self.bias_v[0].expand(*values.shape[:-2], 1, -1)], -2)
        if self.add_zero_attn:
            values = F.pad(values, (0, 0, 0, 1))
        return torch.unflatten(values, -1, (self.num_heads, -1)).transpose(-2, -3)


class _BetweenLayers(TorchFunctionMode):
    """Makes recurrent functions apply `masks` between their layers."""

    def __init__(self, masks: Dropout) -> None:
        super().__init__()
        self._masks = masks

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if function in _RECURRENT:
            return _by_layer(function, self._masks, *args)
        return function(*args, **(kwargs or {}))


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _by_layer(function: Callable[..., Any], masks: Dropout, *args: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Call a recurrent function for each layer, with dropout between layers."""
    place = 2 if isinstance(args[2], list) else 3  # packed sequences have a batch size each
    (x, *sizes), hidden, params = args[: place - 1], args[place - 1], args[place]
    has_biases, num_layers, _, *modes = args[place + 1 :]
    per_layer, per_state = len(params) // num_layers, 1 + modes[1]
    states = []
    for number in range(num_layers):
        here = slice(per_state * number, per_state * (number + 1))
        is_single = isinstance(hidden, Tensor)
        begin = hidden[here] if is_single else tuple(each[here] for each in hidden)
        own = params[per_layer * number : per_layer * (number + 1)]
        masked = masks(x) if number else x
        x, *ended = function(masked, *sizes, begin, own, has_biases, 1, 0.0, *modes)
        states.append(ended)
    return (x, *map(torch.cat, zip(*states, strict=True)))


_OURS = {
    nn.Dropout: Dropout,
    nn.Dropout1d: ChannelDropout,
    nn.Dropout2d: ChannelDropout,
    nn.Dropout3d: ChannelDropout,
}

_INNER = {
    nn.LSTM: _Recurrent,
    nn.GRU: _Recurrent,
    nn.RNN: _Recurrent,
    nn.MultiheadAttention: _Attention,
}


def replace_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Make every dropout layer within `module` one that draws from `generator`.

    So do the dropout between the layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`, and that of the
    weights of `nn.MultiheadAttention`, whose layers keep their parameters and their results in
    evaluation mode.

    Args:
        module: Module to change in place.
        generator: Generator on the device of the module.

    Raises:
        ValueError: If a layer has a kind of dropout with no counterpart here
            (`nn.AlphaDropout`, a share `dropout` in a layer of another class).

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
    >>> replace_dropout(model, torch.Generator())
    >>> model[1]
    Dropout(p=0.2)
    """
    # A layer used under two names has to be replaced under both.
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        counterparts = [ours for kind, ours in _OURS.items() if isinstance(layer, kind)]
        if counterparts:
            ours = counterparts[0](layer.p).train(layer.training)
            ours.generator = generator
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, ours)
        elif isinstance(layer, Dropout):
            layer.generator = generator
        elif type(layer) in _INNER and layer.dropout > 0:
            kind = type(layer)
            layer.masks = Dropout(layer.dropout).train(layer.training)
            layer.masks.generator = generator
            layer.dropout = 0.0
            layer.__class__ = type(kind.__name__, (_INNER[kind], kind), {})
        elif _draws_globally(layer):
            share = "p" if isinstance(layer, nn.modules.dropout._DropoutNd) else "dropout"
            path = ".".join(filter(None, ("model", name, share)))
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__} with dropout from the global "
                f"generator, so runs would not repeat; set {path} = 0.0 and use nn.Dropout"
            )


def _draws_globally(layer: nn.Module) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    share = getattr(layer, "dropout", 0)
    return isinstance(share, float) and share > 0
