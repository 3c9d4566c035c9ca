"""Plausibility: limits on values in messages, based on values of this and other workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypeAlias

from torch import Tensor

from edgegossip.contract.protocol import Message, Rank
from edgegossip.contract.schema import MessageSpec, TensorSpec

FACTOR = 1000.0
"""Limit of a value relative to the usual one."""
MOST = 1e30
"""Limit of all values. The sum and the mean of some such values are finite floats."""
_STANDS_OUT = 2.0
"""Ratio to the usual value at which a sender is suspect after failed training."""
_MEMORY = 1000
"""Pieces of training for which a sender stays suspect; its messages may be used much later.
"""
_Place: TypeAlias = tuple[str, str]
"""Kind of a message and name of a tensor; for relayed tensors, without the rank."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A value of a message that is not admitted.

    Attributes:
        text: The value and its limit, for the log.
        is_lie: Whether the sender is to blame; otherwise this is undecided.
    """

    text: str
    is_lie: bool


class Plausibility:
    """Compares the largest absolute values of tensors with the usual ones.

    The usual value is the largest of five: 1, the largest initial parameter, the largest of
    this worker's own sound parameters, the largest value in its own last messages, and the
    median of the *other* senders' last values in the same place, accepted or not, without zeros
    that are a sender's first. So a liar has no influence on its own limit, even for its first
    message. If honest values exceed any that a worker has seen, for example when it returns,
    their senders confirm each other.

    The limit is `FACTOR` times the usual value, far above the differences among workers that
    have trained. Before it has trained, a worker cannot know what is usual, so a value beyond
    the limit is then a lie only if something contradicts it; see `_judge`.

    `LastSoundParameters` judges what is admitted: after failed training the worker goes back to
    them and asks which sender stood out. Training may fail to notice values far below 1e19,
    whose squares are finite.

    Args:
        schema: Description of the messages, by kind.
        params: Initial parameters, [num_params].
        rank: Rank of this worker.
        present: Returns the other workers that are present and not ignored.
        senders: Returns those of them that may send to this worker.
        role: Returns the name of a rank's role.

    Attributes:
        num_changes: Number of changes after which an undecided value may be decided.
    """

    def __init__(
        self,
        schema: Mapping[str, MessageSpec],
        params: Tensor,
        rank: Rank,
        *,
        present: Callable[[], Collection[Rank]],
        senders: Callable[[], Collection[Rank]],
        role: Callable[[Rank], str],
    ) -> None:
        self.num_changes = 0
        self._present = present
        self._senders = senders
        self._role = role
        self._sound = params
        self._sound_size: float | None = None  # computed when a value is in question
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
        self._began: set[tuple[str, str, Rank | None]] = set()
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
            # A weak reference: this must not keep memory that the algorithm has freed. The same
            # tensor for another receiver need not be read again.
            if known is None or known[0]() is not tensor:
                size = self._specs[kind, name].magnitude(tensor) or 0.0
                self._own[kind, name] = weakref.ref(tensor), size
        self._usual = max([self._least, *(size for _, size in self._own.values())])

    def excess(
        self, sender: Rank | None, kind: str, sizes: Mapping[str, float | None]
    ) -> Excess | None:
        """Describe an excessive value in a message; None if the message is admitted.

        Args:
            sender: Author of the message; None if this is uncertain.
            kind: Kind of the message.
            sizes: The largest absolute value of each tensor; see `TensorSpec.magnitude`.
        """
        found = None
        for name, size in sizes.items():
            if size is None:  # no floats, or the schema has its own limits
                continue
            # One that has not trained yet sends zeros once, which say nothing of what is usual.
            is_first = (kind, name, sender) not in self._began
            self._began.add((kind, name, sender))
            if is_first and not size:
                continue
            # Not the sender's own earlier values, so nobody can raise its own limit step by
            # step.
            heard = self._heard.setdefault((kind, name), {})
            others = [each for rank, each in heard.items() if rank != sender]
            usual = max(self._usual, median_low(others)) if others else self._usual
            # Reading all own parameters takes time, so they are asked only if in doubt.
            if size > FACTOR * usual:
                if self._sound_size is None:
                    self._sound_size = (
                        TensorSpec.like(self._sound).magnitude(self._sound) or 0.0
                    )
                usual = max(usual, self._sound_size)
            excess = None
            if size > FACTOR * usual:
                text = f"tensor {name!r} has {size:.3g} where {usual:.3g} is usual"
                excess = self._judge(sender, size, text, has_others=bool(others))
                if excess is not None and (found is None or excess.is_lie):
                    found = excess
            # Refused values count, too: workers whose large values confirm each other are
            # honest.
            if sender is not None:
                self.num_changes += sender not in heard
                heard[sender] = size
                if excess is None:
                    self._note(sender, size / usual)
        return found

    def _judge(
        self, sender: Rank | None, size: float, text: str, *, has_others: bool
    ) -> Excess | None:
        """Decide about a value beyond the limit; see the class."""
        # Other senders contradict it. A part of uncertain origin gets no benefit of the doubt,
        # because any worker could have written it.
        if size > MOST or has_others or sender is None:
            return Excess(text, is_lie=True)
        # Nobody can say which of only two workers is unusual.
        others = [rank for rank in self._present() if rank != sender]
        if not others:
            return None
        # Once this worker has trained, its own parameters show what is usual. Before, honest
        # values may be large: the variance of pixels from 0 to 255, which batch normalization
        # keeps, is 10,000.
        if self._num_trained:
            return Excess(text, is_lie=True)
        # Another worker of the same role will confirm or contradict the value, so it waits. It
        # would wait in vain if no other one sends such values to this worker: they are a
        # server's, or this worker has one neighbor left in a sparse graph.
        role = self._role(sender)
        if any(self._role(rank) == role for rank in self._senders() if rank != sender):
            return Excess(text, is_lie=False)
        return None

    def _note(self, sender: Rank, ratio: float) -> None:
        # Damage may show long after the message, but not for ever.
        largest, at = self._ratios.get(sender, (0.0, 0))
        if ratio >= largest or self._num_trained - at >= _MEMORY:
            self._ratios[sender] = ratio, self._num_trained

    def went_well(self, params: Tensor) -> None:
        """Count training that ended with the sound parameters `params`, [num_params]."""
        self._num_trained += 1
        self.num_changes += 1
        self._sound, self._sound_size = params, None

    def suspect(self) -> Rank | None:
        """The sender whose accepted values stood out most before training failed, if any."""
        since = self._num_trained - _MEMORY
        ratios = {r: ratio for r, (ratio, at) in self._ratios.items() if at > since}
        # The lowest rank among equals, so that equal runs blame the same worker.
        worst = max(ratios, key=lambda rank: (ratios[rank], -rank), default=None)
        return None if worst is None or ratios[worst] < _STANDS_OUT else worst

    def acquit(self, rank: Rank) -> None:
        """Forget the messages of `rank`, which is muted or has a new process."""
        self._ratios.pop(rank, None)
        self._began = {each for each in self._began if each[2] != rank}
        for votes in self._heard.values():
            votes.pop(rank, None)
