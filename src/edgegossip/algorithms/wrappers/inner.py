"""Questions that wrappers ask about the algorithm inside."""

from __future__ import annotations

from typing import Any

from edgegossip.contract import Rank, Role, Wrapper
from edgegossip.contract.protocol import WORKER


def num_workers_in(wrapper: Wrapper[Any]) -> int:
    """Number of workers of the inner algorithm.

    Raises:
        ValueError: If it has no topology.
    """
    topology = wrapper.inner.traits.topology
    if topology is None:
        raise ValueError(
            f"{type(wrapper).__name__} needs an algorithm with a topology, but "
            f"{wrapper.inner!r} has none; name one in its traits"
        )
    return topology.num_workers


def require_fixed_roles(wrapper: Wrapper[Any]) -> None:
    """Raise `ValueError` unless every worker inside trains its own whole model."""
    inner, own = wrapper.inner, type(wrapper).__name__
    name = type(inner).__name__
    if inner.traits.changes_roles:
        raise ValueError(
            f"{own} needs ranks that keep their roles, and those of {name} do not: an "
            f"elected server continues to train, without a forecast; leave out {name}"
        )
    if any(inner.role(rank).num_slices > 1 for rank in range(num_workers_in(wrapper))):
        raise ValueError(
            f"{own} sends forecasts with whole models, and {name} has slices; leave out {name}"
        )


def whole_model_role(wrapper: Wrapper[Any], rank: Rank, leave_out: str) -> Role:
    """The role of `rank` in the inner algorithm.

    Args:
        wrapper: The wrapper.
        rank: The rank.
        leave_out: What the wrapper adds, for the advice to leave it out.

    Raises:
        ValueError: If the rank has no data, or a part of a model.
    """
    role = wrapper.inner.role(rank)
    if role.name != WORKER.name or not role.has_data:
        raise ValueError(
            f"{type(wrapper).__name__} needs an algorithm whose ranks all train a whole model, "
            f"but rank {rank} of {type(wrapper.inner).__name__} is a {role.name} "
            f"{'with' if role.has_data else 'without'} data; leave out {leave_out}"
        )
    return role
