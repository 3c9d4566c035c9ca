"""How long a worker waits for messages before it takes the silent ones for lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edgegossip.core.protocol import Seconds

_MEMORY = 10


@dataclass(slots=True, kw_only=True)
class Patience:
    """A deadline that is learnt from how long past waits and past training took.

    The deadline is `factor` times the longest of the last ten of each, and `slack` besides.
    Lost machines are mostly noticed long before, by the transport; this is for those that are
    there and say nothing, and for messages that were lost.

    Args:
        factor: At least 1.
        slack: Seconds, at least 0.
        first: Seconds to wait while nothing has been learnt.

    >>> patience = Patience(factor=3.0, slack=1.0)
    >>> patience.waited(2.0)
    >>> patience.deadline
    7.0
    """

    factor: float = 3.0
    slack: Seconds = 10.0
    first: Seconds = 600.0
    _waits: deque[Seconds] = field(default_factory=lambda: deque(maxlen=_MEMORY), init=False)
    _work: deque[Seconds] = field(default_factory=lambda: deque(maxlen=_MEMORY), init=False)

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and self.slack >= 0 and self.first > 0):
            raise ValueError(f"factor must be >= 1, slack >= 0, first > 0, got {self}")

    def waited(self, seconds: Seconds) -> None:
        """A wait for messages ended well after `seconds`."""
        self._waits.append(seconds)

    def worked(self, seconds: Seconds) -> None:
        """A piece of training took `seconds`."""
        self._work.append(seconds)

    @property
    def deadline(self) -> Seconds:
        """How long the next wait may take."""
        if not self._waits:
            return self.first
        return self.factor * max(*self._waits, *self._work, 0.0) + self.slack
