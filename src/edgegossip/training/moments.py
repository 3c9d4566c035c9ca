r"""The moments in an optimizer's state, as vectors that workers can exchange.

Adam's moments begin at 0, so after :math:`t` steps they are too small by the factor
:math:`1 - \beta^t`, for which each step of Adam corrects them. Workers exchange the corrected
moments: after different numbers of steps, only these have the same scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Payload
from edgegossip.training.copies import OptimizerState

Betas: TypeAlias = tuple[float, float]

_KEYS = {"first": ("exp_avg", "momentum_buffer"), "second": ("exp_avg_sq",)}
"""Names of the moments in the states of PyTorch's optimizers, such as AdamW, Muon and SGD."""


def moments_of(
    memory: OptimizerState | None, betas: Sequence[Betas | None]
) -> dict[str, Tensor]:
    """Join the moments of all tensors, by kind; a kind that the optimizer lacks is left out.

    Muon has only the first moment of matrices, so the second is that of the other parameters.

    Args:
        memory: The optimizer's state.
        betas: Decay of both moments of each tensor; None if their bias is not corrected.

    >>> memory = [{"exp_avg": torch.tensor([0.1]), "step": 1}]
    >>> memory += [{"momentum_buffer": torch.tensor([2.0])}]
    >>> moments_of(memory, [(0.9, 0.95), None])
    {'first': tensor([1., 2.])}
    """
    found = {kind: [*_places(memory or [], kind, betas)] for kind in _KEYS}
    return {
        kind: torch.cat([own.flatten() / share for *_, own, share in places]).cpu()
        for kind, places in found.items()
        if places
    }


def with_moments(
    memory: OptimizerState, moments: Payload, betas: Sequence[Betas | None]
) -> OptimizerState:
    """Replace moments; an optimizer that has none yet, before its first step, stays as it is.

    Args:
        memory: The optimizer's state.
        moments: New moments, in the form that `moments_of` returns.
        betas: See `moments_of`.

    Raises:
        LocalProtocolError: If a vector does not have as many entries as the optimizer's.
    """
    changed = [dict(state) for state in memory]
    for kind, vector in moments.items():
        places = [*_places(memory, kind, betas)]
        sizes = [own.numel() for *_, own, _ in places]
        if places and sum(sizes) != len(vector):
            raise LocalProtocolError(
                f"Train has a {kind} moment of {len(vector)} entries, and the optimizer's has "
                f"{sum(sizes)}; send back what Trained reported"
            )
        pieces = torch.split(vector, sizes) if places else ()
        for (index, key, own, share), piece in zip(places, pieces, strict=True):
            given = piece.view(own.shape).to(own)
            # Entries that come back as they were reported stay the same to the last bit.
            changed[index][key] = torch.where(given == own / share, own, given * share)
    return changed


def _places(
    memory: OptimizerState, kind: str, betas: Sequence[Betas | None]
) -> Iterator[tuple[int, str, Tensor, float]]:
    """Yield where the moments are, and which share of its corrected value each has."""
    # Behind the state of each tensor, there may be that of groups.
    for index, (state, decay) in enumerate(
        zip(memory, chain(betas, repeat(None)), strict=False)
    ):
        share = 1.0
        if decay is not None and (num_steps := float(state.get("step", 0))):
            share = 1 - decay[0 if kind == "first" else 1] ** num_steps
        for key in _KEYS[kind]:
            if isinstance(each := state.get(key), Tensor):
                yield index, key, each, share
