"""The moments in an optimizer's state, as vectors that workers can exchange."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Payload
from edgegossip.training.copies import OptimizerState

_KEYS = {"first": ("exp_avg", "momentum_buffer"), "second": ("exp_avg_sq",)}
"""Names of the moments in the states of PyTorch's optimizers, such as AdamW, Muon and SGD."""


def moments_of(memory: OptimizerState | None) -> dict[str, Tensor]:
    """Join the moments of all tensors, by kind; a kind that the optimizer lacks is left out.

    Muon has only the first moment of matrices, so the second is that of the other parameters.

    >>> memory = [{"exp_avg": torch.tensor([1.0])}, {"momentum_buffer": torch.tensor([2.0])}]
    >>> moments_of(memory)
    {'first': tensor([1., 2.])}
    """
    found = {kind: [each for *_, each in _places(memory or [], kind)] for kind in _KEYS}
    return {
        kind: torch.cat([each.flatten() for each in tensors]).cpu()
        for kind, tensors in found.items()
        if tensors
    }


def with_moments(memory: OptimizerState, moments: Payload) -> OptimizerState:
    """Replace moments; an optimizer that has none yet, before its first step, stays as it is.

    Raises:
        LocalProtocolError: If a vector does not have as many entries as the optimizer's.
    """
    changed = [dict(state) for state in memory]
    for kind, vector in moments.items():
        places = [*_places(memory, kind)]
        sizes = [each.numel() for *_, each in places]
        if places and sum(sizes) != len(vector):
            raise LocalProtocolError(
                f"Train has a {kind} moment of {len(vector)} entries, and the optimizer's has "
                f"{sum(sizes)}; send back what Trained reported"
            )
        pieces = torch.split(vector, sizes) if places else ()
        for (index, key, own), piece in zip(places, pieces, strict=True):
            changed[index][key] = piece.view(own.shape).to(own.dtype, copy=True)
    return changed


def _places(memory: OptimizerState, kind: str) -> Iterator[tuple[int, str, Tensor]]:
    for index, state in enumerate(memory):
        for key in _KEYS[kind]:
            if isinstance(each := state.get(key), Tensor):
                yield index, key, each
