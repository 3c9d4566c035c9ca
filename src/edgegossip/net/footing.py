"""The last sound parameters, kept so that bad messages cannot end this worker's run."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from edgegossip.core.errors import TrainingError
from edgegossip.core.protocol import Seconds, Train, Trained

_LOG = logging.getLogger("edgegossip.net")
_MEMORY = 10
_CREDIT = 6
_SLACK = 0.1
"""Difference of losses that is always allowed, as a share of the first loss."""


class Footing:
    """Keeps the last sound parameters, to which a worker can go back.

    Training fails if a loss or parameters are not finite. If a sender can be blamed, the worker
    continues from the last parameters for which the mean of the last ten losses was at most
    twice the lowest such mean. The newest parameters are not safe, because bad values act for a
    while before they are fatal. One sender is blamed and muted. For the next five failures no
    sender is blamed, because the same values may have spread through other workers. A worker
    that fails because of its own learning rate or data therefore still fails, only later.

    Args:
        params: Initial parameters, [num_params].
        blame: Mutes the sender to blame; returns False if there is none.
        went_well: Called with the parameters after sound training.
    """

    def __init__(
        self,
        params: Tensor,
        blame: Callable[[], bool],
        went_well: Callable[[Tensor], None],
    ) -> None:
        self.params = params
        self._blame = blame
        self._went_well = went_well
        self._losses: deque[float] = deque(maxlen=_MEMORY)
        self._lowest = math.inf
        self._slack = 0.0
        self._credit = 0

    def whole(self, estimate: Tensor) -> Tensor:
        """Return `estimate`, or the last sound parameters if it is a slice, [num_params]."""
        return estimate if estimate.shape == self.params.shape else self.params

    def check(self, event: Trained) -> None:
        """Record the result of training.

        Raises:
            TrainingError: If the parameters are not finite.
        """
        if not math.isfinite(event.params.sum().item()) and not event.params.isfinite().all():
            raise TrainingError(
                "the parameters became infinite or NaN; try a smaller learning rate"
            )
        self._losses.append(event.loss)
        mean = sum(self._losses) / len(self._losses)
        if self._lowest == math.inf:
            self._slack = _SLACK * abs(mean)
        self._lowest = min(self._lowest, mean)
        if mean - self._lowest <= max(abs(self._lowest), self._slack):
            self.params = event.params
            self._went_well(event.params)

    def go_back(self, request: Train, seconds: Seconds, error: TrainingError) -> Trained:
        """Answer a failed `Train` with the last sound parameters.

        Raises:
            TrainingError: If no sender can be blamed; this is the given `error`.
        """
        # A stage's training inputs come from others, even where its parameters do not.
        if not request.inputs and torch.equal(request.params, self.params):
            raise error  # no other worker has influenced these
        if self._credit == 0 and not self._blame():
            raise error
        self._credit = (self._credit or _CREDIT) - 1
        _LOG.warning("%s: going back to the last sound parameters", error)
        self._losses.clear()
        return Trained(
            params=self.params,
            before=self.params,
            num_samples=0,
            num_steps=0,
            seconds=seconds,
            loss=self._lowest if math.isfinite(self._lowest) else 0.0,
            has_gone_back=True,
        )
