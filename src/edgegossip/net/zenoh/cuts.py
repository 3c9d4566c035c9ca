"""Agreement of two workers on a cut, so that both know which pieces are of before it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import Enum, auto

from edgegossip.net.transport import Incarnation

# The number of a cut, and of the last one that was heard of. It is shorter than the header of
# any piece of a frame.
_CUT = struct.Struct("<cQQ")
_KIND = b"c"


class Next(Enum):
    """Next step of a worker that has heard of a cut."""

    NOTHING = auto()
    ANSWER = auto()  # the other one has not heard of this worker's cut
    BEGIN = auto()  # it did not know of the cut
    RETURN = auto()  # all that comes from now on was sent after the cut


@dataclass(slots=True)
class Cuts:
    """Cuts of the link with one other worker; not thread-safe.

    After a cut that a worker has noticed or heard of, it says that there was one. Its pieces
    before this word were sent before the cut, and are dropped; those after it were sent after
    it. Links keep the order of pieces, but may lose the word, so it has a number, and is
    repeated until there is an answer.

    Attributes:
        process: The process at the other end of the cut, until both have said so.
        is_waiting: Whether the other worker has not said so.
        told: Number of this worker's last cut.

    >>> here, there = Cuts(), Cuts()
    >>> here.begin(7)
    >>> there.hear(here.word(7), 5).name
    'BEGIN'
    >>> there.begin(5, is_waiting=False)
    >>> here.hear(there.word(5), 7).name, here.is_waiting
    ('RETURN', False)
    >>> here.hear(there.word(5), 7).name
    'NOTHING'
    """

    process: Incarnation | None = None
    is_waiting: bool = False
    told: int = 0
    _heard: tuple[Incarnation | None, int] = field(default=(None, 0))

    def begin(self, process: Incarnation, *, is_waiting: bool = True) -> None:
        """Begin a cut of the link with `process`."""
        self.process, self.is_waiting = process, is_waiting
        self.told += 1

    def end(self) -> None:
        """Take the process for present again."""
        self.process, self.is_waiting = None, False

    def is_before(self, process: Incarnation | None) -> bool:
        """Whether a piece that comes from `process` now was sent before the cut."""
        return self.is_waiting and process == self.process

    def word(self, process: Incarnation) -> bytes:
        """The piece that tells `process` of the last cut."""
        known, number = self._heard
        return _CUT.pack(_KIND, self.told, number if process == known else 0)

    def hear(self, piece: bytes, process: Incarnation) -> Next:
        """Take note of the word of `process`."""
        _, number, heard = _CUT.unpack(piece)
        known, last = self._heard
        if process != known or number > last:
            self._heard = process, number
            if not self.is_waiting:
                return Next.BEGIN
            self.is_waiting = False
            return Next.RETURN
        return Next.ANSWER if heard < self.told else Next.NOTHING


def is_word(piece: bytes) -> bool:
    """Whether a piece tells of a cut."""
    return len(piece) == _CUT.size and piece[:1] == _KIND
