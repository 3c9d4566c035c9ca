"""The consensus step: how far workers move toward each other's compressed models."""

from __future__ import annotations

import warnings

from edgegossip.core.compression.compressor import Compressor
from edgegossip.core.protocol import Rank

TOO_LITTLE = 1e-4
"""Smallest useful step; with smaller steps, agreement would take over ten thousand rounds."""


def require_step(step: float | None) -> None:
    """Raise ValueError unless a consensus step is None or in (0, 1]."""
    if step is not None and not 0 < step <= 1:
        raise ValueError(
            f"consensus_step must be in (0, 1], got {step}; None takes one that fits the "
            "compressor"
        )


def step_or_default(step: float | None, compressor: Compressor, numel: int) -> float:
    r"""Return the given step, or by default the compressor's own.

    >>> from edgegossip.core.compression.sparse import TopK
    >>> step_or_default(None, TopK(keep_ratio=0.01), numel=1000)
    0.01
    """
    return compressor.consensus_step(numel) if step is None else step


def warn_of_step(step: float | None, compressor: Compressor, rank: Rank, numel: int) -> None:
    """Warn once per run about a step that may cause divergence or is too small to be useful.

    A large step is not an error, because some graphs allow larger steps than others.
    """
    suited = compressor.consensus_step(numel)
    if rank != 0:
        return
    if step is None and suited < TOO_LITTLE:
        warnings.warn(
            f"the consensus step is {suited:.2g} by default, as suits {compressor}: workers "
            "will hardly come closer to each other; give a consensus_step, or choose another "
            "compressor",
            stacklevel=2,
        )
    if step is not None and step >= compressor.divergence_factor * suited:
        warnings.warn(
            f"consensus_step={step:g} is {step / suited:.0f} times what suits {compressor}, "
            f"{suited:.2g}: workers will probably diverge; leave consensus_step out, or try "
            f"less than {compressor.divergence_factor:g} times as much",
            stacklevel=2,
        )
