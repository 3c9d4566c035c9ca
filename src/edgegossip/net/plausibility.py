"""Plausibility: limits on values in messages, based on values of this and other workers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from statistics import median_low
from typing import TypeAlias

from torch import Tensor

from edgegossip.core.protocol import Message, Rank
from edgegossip.core.schema import MessageSpec, TensorSpec

FACTOR = 1000.0
"""Limit of a value relative to the usual one."""
_STANDS_OUT = 2.0
"""Ratio to the usual value at which a sender is suspect after failed training."""
_MEMORY = 1000
"""Pieces of training for which a sender stays suspect; its messages may be used much later.
"""
_Place: TypeAlias = tuple[str, str]
"""Kind of a message and name of a tensor; for relayed tensors, without the rank."""


class Plausibility:
    """Compares the largest absolute values of tensors with the usual ones.

    The usual value is the largest of four: 1, the largest initial parameter, the largest value
    in this worker's own last messages, and the median of the *other* senders' last values in
    the same place, accepted or not. A liar therefore has no influence on its own limit, even
    for its first message. If honest values exceed any that a worker has seen, for
    example when it returns, their senders confirm each other.

    The limit is `FACTOR` times the usual value. This is far above the differences among honest
    workers, and rejects values that break arithmetic. `Footing` handles smaller lies: after
    failed training it goes back and asks which sender stood out.

    Args:
        schema: Description of the messages, by kind.
        params: Initial parameters, [num_params].
        rank: Rank of this worker.
    """

    def __init__(self, schema: Mapping[str, MessageSpec], params: Tensor, rank: Rank) -> None:
        self._own_prefix = f"{rank}."
        self._is_passed_on = {kind for kind, spec in schema.items() if spec.is_passed_on}
        self._specs = {
            (kind, name.partition(".")[2] if spec.is_passed_on else name): each
            for kind, spec in schema.items()
            for name, each in spec.specs.items()
        }
        initial = TensorSpec.like(params).magnitude(params)
        self._own: dict[_Place, tuple[weakref.ref[Tensor], float]] = {}
        self._usual = self._least = max(1.0, initial or 0.0)
        self._heard: dict[_Place, dict[Rank, float]] = {}
        # By sender: the largest ratio to the usual value, and the amount of training by then.
        self._ratios: dict[Rank, tuple[float, int]] = {}
        self._num_trained = 0

    def sent(self, message: Message) -> None:
        """Record this worker's own message."""
        kind, payload = message.kind, message.payload
        if kind in self._is_passed_on:  # other workers have written the rest
            own = self._own_prefix
            payload = {n.removeprefix(own): x for n, x in payload.items() if n.startswith(own)}
        for name, tensor in payload.items():
            known = self._own.get((kind, name))
            if known is None or known[0]() is not tensor:  # else sent to another receiver
                size = self._specs[kind, name].magnitude(tensor) or 0.0
                self._own[kind, name] = weakref.ref(tensor), size
        self._usual = max([self._least, *(size for _, size in self._own.values())])

    def excess(
        self, sender: Rank | None, kind: str, sizes: Mapping[str, float | None]
    ) -> str | None:
        """Describe an excessive value in a message; None if there is none.

        Args:
            sender: Author of the message; None if this is uncertain.
            kind: Kind of the message.
            sizes: The largest absolute value of each tensor; see `TensorSpec.magnitude`.
        """
        excess = None
        for name, size in sizes.items():
            if size is None:
                continue
            heard = self._heard.setdefault((kind, name), {})
            others = [each for rank, each in heard.items() if rank != sender]
            usual = max(self._usual, median_low(others)) if others else self._usual
            if size > FACTOR * usual:
                excess = f"tensor {name!r} has {size:.3g} where {usual:.3g} is usual"
            if sender is not None:
                heard[sender] = size
                if size <= FACTOR * usual:
                    self._note(sender, size / usual)
        return excess

    def _note(self, sender: Rank, ratio: float) -> None:
        largest, at = self._ratios.get(sender, (0.0, 0))
        if ratio >= largest or self._num_trained - at >= _MEMORY:
            self._ratios[sender] = ratio, self._num_trained

    def went_well(self) -> None:
        """Count training that ended with sound parameters."""
        self._num_trained += 1

    def suspect(self) -> Rank | None:
        """The sender whose accepted values stood out most before training failed, if any."""
        since = self._num_trained - _MEMORY
        ratios = {r: ratio for r, (ratio, at) in self._ratios.items() if at > since}
        worst = max(ratios, key=lambda rank: (ratios[rank], -rank), default=None)
        return None if worst is None or ratios[worst] < _STANDS_OUT else worst

    def acquit(self, rank: Rank) -> None:
        """Forget the messages of `rank`, which is muted or has a new process."""
        self._ratios.pop(rank, None)
        for votes in self._heard.values():
            votes.pop(rank, None)
