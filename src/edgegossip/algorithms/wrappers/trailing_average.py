"""Any algorithm, evaluated by a trailing average of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from edgegossip.contract import (
    Effect,
    Event,
    Rank,
    Seconds,
    Trained,
    Wrapper,
    WrapperState,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class TrailingState(WrapperState):
    """State of one worker.

    Attributes:
        average: The trailing average of the inner algorithm's estimates; None before the first
            round.
        num_averaged: Number of estimates in the average.
    """

    average: Tensor | None = None
    num_averaged: int = 0

    @property
    def estimate(self) -> Tensor:
        """The average or, before there is one, the inner algorithm's estimate."""
        inner: Tensor = self.inner.estimate
        return inner if self.average is None else self.average


@dataclass(frozen=True, kw_only=True)
class TrailingAverage(Wrapper[TrailingState]):
    r"""Evaluate and save an average over the last rounds in place of the newest parameters.

    After its :math:`k`-th round, a worker updates the average :math:`\bar x` with its estimate
    :math:`x`:

    .. math:: \bar x \leftarrow \bar x + \max(1/k, 2/(w + 1)) \, (x - \bar x)

    Training and messages are those of the inner algorithm; nothing more is sent. The weights
    are equal in the first :math:`(w + 1) / 2` rounds and fall exponentially from then on. The
    mean age equals that of an unweighted average over :math:`w` rounds, but only one vector is
    stored. Averaging removes the noise that a large learning rate and few steps between
    exchanges leave in the parameters, as decaying the learning rate would.

    The window "auto" grows with the run. With the factor :math:`5/(k + 4)`, the mean age is a
    sixth of the run so far, which is that of an unweighted average over its last third.

    A model that arrives between two rounds counts at the end of the next round. A worker that
    has lost its memory begins a new average, as does a worker whose parameters were unsound.
    Running statistics of normalization layers are averaged like parameters.

    Args:
        inner: Any algorithm that counts rounds.
        window: :math:`w`, at least 1, in rounds, or "auto". 1 uses the inner algorithm alone.
            Under `EdgeGossip`, a round visits only a share of the data, on average the mean
            keep ratio; for a window of one epoch, give the inverse of that ratio.

    Raises:
        ValueError: If `window` is out of range.

    References:
        Latest-weight averaging: Kaddour, "Stop Wasting My Time!", 2022, arXiv:2209.14981;
        Ajroldi et al., 2025, arXiv:2502.06761. Departures: an exponential average in place of
        stored checkpoints, of each worker's own estimates. "auto": polynomial-decay averaging
        with :math:`\eta = 4`, Shamir & Zhang, ICML 2013, arXiv:1212.1824.

    >>> import torch
    >>> from edgegossip.algorithms.gossip.alone import Alone
    >>> served = TrailingAverage(inner=Alone(num_rounds=9, local_steps=1), window=3)
    >>> state = served.init(0, torch.zeros(1))
    >>> for value in (2.0, 4.0, 6.0):
    ...     trained = Trained.skipped(torch.tensor([value]))
    ...     _ = served.handle(state, trained, now=0.0)
    >>> state.params.item(), state.estimate.item()
    (6.0, 4.5)
    """

    window: float | Literal["auto"]

    def __post_init__(self) -> None:
        check_ranges(self, window='at least 1 or "auto"')

    def init(self, rank: Rank, params: Tensor) -> TrailingState:
        inner = self.inner.init(rank, params)
        return TrailingState(rank=rank, params=inner.params, inner=inner)

    def handle(self, state: TrailingState, event: Event, now: Seconds) -> list[Effect]:
        effects = self.inner.handle(state.inner, event, now)
        # After the inner algorithm: the event may have completed a round, which counts.
        if isinstance(event, Trained) and event.has_gone_back:
            state.average, state.num_averaged = None, 0
        elif state.inner.round > state.round and self.window != 1:
            self._update(state)
        state.params, state.round = state.inner.params, state.inner.round
        return effects

    def _update(self, state: TrailingState) -> None:
        """Update the average in a new tensor; the old tensor may be in use elsewhere."""
        state.num_averaged += 1
        if self.window == "auto":
            weight = 5 / (state.num_averaged + 4)
        else:
            weight = max(1 / state.num_averaged, 2 / (self.window + 1))
        newest = state.inner.estimate
        if state.average is None or state.average.shape != newest.shape:
            state.average = newest
        else:
            state.average = state.average.lerp(newest, weight)
