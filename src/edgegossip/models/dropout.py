"""Dropout that draws from its own stream, so that models can train in parallel threads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


_OURS = {
    nn.Dropout: Dropout,
    nn.Dropout1d: ChannelDropout,
    nn.Dropout2d: ChannelDropout,
    nn.Dropout3d: ChannelDropout,
}


def replace_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Make every dropout layer within `module` one that draws from `generator`.

    Args:
        module: Module to change in place.
        generator: Generator on the device of the module.

    Raises:
        ValueError: If a layer has a kind of dropout with no counterpart here
            (`nn.AlphaDropout`, the `dropout` of `nn.LSTM` and `nn.MultiheadAttention`).

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
