"""Any asynchronous gossip algorithm, with received models clipped around the worker's own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Wrapper,
    WrapperState,
    check_ranges,
)
from edgegossip.contract.robust import trust_note

_MODEL, _CHANGE = "params", "change"


@dataclass(slots=True, kw_only=True)
class ClippedState(WrapperState):
    """State of one worker.

    Attributes:
        lengths: Length of the last difference that each neighbor sent.
    """

    lengths: dict[Rank, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClippedMessages(Wrapper[ClippedState]):
    r"""Clip each received model at a radius around the worker's own, before it is merged.

    A model :math:`x_j` that worker :math:`i` receives becomes

    .. math:: x_i + \min(1, \tau_i / \|x_j - x_i\|) (x_j - x_i)

    :math:`\tau_i` is `factor` times the median of the last distances of all neighbors that the
    worker has heard, of this one, too. Changes, which `ADPSGD` answers with, are clipped in the
    same way around zero, at half of it. A weight, as `GoSGD` sends, counts for no more than the
    larger of the worker's own and :math:`1/n`, what all have at the start.

    Nothing is sent in addition. A worker that has just come back adopts a model as it is. The
    first neighbor that a worker hears is believed, and among two the nearer one decides.

    Args:
        inner: `GoSGD` or `ADPSGD`; other algorithms have an argument `robust`.
        factor: Multiple of the median distance, above 0.

    Raises:
        ValueError: If `factor` is out of range, or `inner` is another algorithm.

    References:
        The clipping is that of He, Karimireddy & Jaggi, arXiv:2202.01545 (see
        `SelfCenteredClipping`), with one message at a time; the radius is ours.
    """

    inner: GoSGD | ADPSGD
    factor: float = 1.5

    def __post_init__(self) -> None:
        check_ranges(self, factor="above 0 and finite")
        if not isinstance(self.inner, GoSGD | ADPSGD):
            raise ValueError(
                "ClippedMessages needs GoSGD or ADPSGD inside, whose workers take one model at "
                f"a time, got {type(self.inner).__name__}; give an algorithm that averages "
                "several robust=NearestNeighbors() instead"
            )

    def init(self, rank: Rank, params: Tensor) -> ClippedState:
        inner = self.inner.init(rank, params)
        return ClippedState(rank=rank, params=inner.params, inner=inner)

    def handle(self, state: ClippedState, event: Event, now: Seconds) -> list[Effect]:
        notes: list[Effect] = []
        # A worker that has come back has no model of its own to judge others by.
        is_new = getattr(state.inner, "is_new", False) or getattr(state.inner, "weight", 1) == 0
        if isinstance(event, Received) and not is_new:
            event, notes = self._clipped(state, event)
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        return [*notes, *effects]

    def _clipped(self, state: ClippedState, event: Received) -> tuple[Received, list[Effect]]:
        message, own = event.message, state.inner.params
        payload = dict(message.payload)
        notes: list[Effect] = []
        if (model := payload.get(_MODEL)) is not None:
            share = self._share(state, event.sender, model - own)
            notes.append(trust_note({event.sender: share}))
            # The same tensor if nothing is clipped, so that rounding changes nothing.
            payload[_MODEL] = model if share == 1 else own.lerp(model, share)
        elif (change := payload.get(_CHANGE)) is not None:
            share = self._share(state, event.sender, 2 * change)
            notes.append(trust_note({event.sender: share}))
            payload[_CHANGE] = change if share == 1 else share * change
        numbers = self._limited(message, state)
        return replace(event, message=replace(message, payload=payload, numbers=numbers)), notes

    def _share(self, state: ClippedState, sender: Rank, difference: Tensor) -> float:
        # In float64, because squares of large entries do not fit in float32.
        length = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
        state.lengths = {**state.lengths, sender: length}
        radius = self.factor * statistics.median_low(state.lengths.values())
        return 1.0 if length <= radius else radius / length

    def _limited(self, message: Message, state: ClippedState) -> Mapping[str, float]:
        own, told = getattr(state.inner, "weight", None), message.numbers.get("weight")
        if own is None or told is None:
            return message.numbers
        return {
            **message.numbers,
            "weight": min(told, max(own, 1 / self.inner.topology.num_workers)),
        }
