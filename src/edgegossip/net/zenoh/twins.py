"""Twins: two processes of one rank, one of which has to end."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.transport import TWIN, Incarnation

_LOG = logging.getLogger("edgegossip.net")
_CLAIM = re.compile(r"([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,15})")
_MAX_CLAIMS = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """A process states that it lives, and how long it had been there when it saw another one.

    Args:
        process: The process that makes the claim.
        other: Another process of the same rank.
        age: Milliseconds for which `process` had been there.

    >>> Claim.parse("17-4-2000")
    Claim(process=17, other=4, age=2000)
    >>> str(Claim(17, 4, 2000)), Claim.parse("17")
    ('17-4-2000', None)
    """

    process: Incarnation
    other: Incarnation
    age: int

    @classmethod
    def parse(cls, text: str) -> Claim | None:
        """Read the last part of a token; None if it is not a claim."""
        match = _CLAIM.fullmatch(text)
        return match and cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.process}-{self.other}-{self.age}"

    @property
    def age_of_process(self) -> tuple[int, Incarnation]:
        """Orders the processes of two claims against each other; no two are equal."""
        # Of two that started in the same millisecond, the one with the lower number is younger.
        return self.age, self.process


class Claims:
    """The claims of all processes of one rank, as another worker hears them."""

    def __init__(self) -> None:
        self._claims: dict[tuple[Incarnation, Incarnation], Claim] = {}

    def add(self, claim: Claim) -> None:
        """Remember a claim."""
        # No honest worker has that many processes; a liar must not fill this memory.
        if len(self._claims) >= _MAX_CLAIMS**2:
            self._claims.clear()
        self._claims[claim.process, claim.other] = claim

    def is_beaten(self, process: Incarnation, others: Iterable[Incarnation]) -> bool:
        """Whether one of `others` and `process` know each other, and `process` came later."""
        for other in others:
            own, theirs = self._claims.get((process, other)), self._claims.get((other, process))
            if own and theirs and own.age_of_process < theirs.age_of_process:
                return True
        return False


class Twins:
    """Decides which of two processes of one rank ends: the one that came later.

    The liveliness token of a process that was killed remains until its lease ends, so a token
    of the own rank may be of a former process. A process that sees one therefore answers with
    a *claim*, a token that names both processes and how long its own has been in the run. Only
    a process that lives can name one that started later. Both compare the same two claims,
    so exactly one ends, whatever their clocks.

    Args:
        rank: Rank of this worker.
        incarnation: Incarnation of this process.
        refused: Called with `TWIN`, once, if this process has to end.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        refused: Callable[[Rank, str], None],
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._refused = refused
        self._clock = clock
        self._began = clock()
        self._declare: Callable[[str], object] = lambda claim: None
        self._lock = threading.Lock()
        self._claims: dict[Incarnation, Claim] = {}
        self._known: set[Incarnation] = set()
        self._has_ended = False

    def enter(self, declare: Callable[[str], object]) -> None:
        """Begin a session, in which `declare` declares a token of this rank."""
        with self._lock:
            self._declare, self._claims = declare, {}

    def leave(self) -> None:
        """Claim nothing more: a process that is about to end makes room for its successor."""
        self.enter(lambda claim: None)
        self._has_ended = True

    def saw(self, other: Incarnation) -> Claim | None:
        """Answer the token of another process; return the claim against it, if there is one."""
        if other == self._incarnation:
            return None
        with self._lock:
            claim = self._claims.get(other)
            if claim is not None or len(self._claims) >= _MAX_CLAIMS:
                return claim  # the first one stays, because both must compare the same ones
            age = round(1e3 * (self._clock() - self._began))
            self._claims[other] = claim = Claim(self._incarnation, other, age)
            # Not from this thread, which reads a link of zenoh.
            threading.Thread(target=self._declare, args=(str(claim),), daemon=True).start()
        return claim

    def heard(self, claim: Claim) -> None:
        """Compare the claim of another process of this rank with the own one."""
        if claim.other != self._incarnation:
            return
        own = self.saw(claim.process)
        # Without a claim of its own, this process would not know which claim the other
        # compares.
        if own is None or self._has_ended:
            return
        if own.age_of_process < claim.age_of_process:
            self._has_ended = True
            self._refused(self._rank, TWIN)
        elif claim.process not in self._known:
            self._known.add(claim.process)
            _LOG.warning(
                "another process is worker %d too; it was started later, so it has to end, and "
                "this one goes on",
                self._rank,
            )
