"""Strikes for messages that no honest worker sends; a sender with too many is muted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from edgegossip.contract.codec import MAX_HEADER_BYTES, Buffer
from edgegossip.contract.protocol import Message, Payload, Rank
from edgegossip.contract.schema import MessageSpec, by_origin
from edgegossip.net.guard import envelope as envelopes
from edgegossip.net.guard.envelope import Envelope, unpack
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.guard.seals import Seals
from edgegossip.net.runtime import Life

IN_ANOTHERS_NAME = "in another's name"
IMPOSSIBLE_ROUND = "of an impossible round"
OTHER_FORM = "of another form"
BAD_VALUES = "with bad values"
TOO_LARGE = "with values far beyond what is usual"
FLOOD = "more than any honest worker sends"
LIES = frozenset({IN_ANOTHERS_NAME, IMPOSSIBLE_ROUND, OTHER_FORM, BAD_VALUES, TOO_LARGE})
"""Reasons for a rejection that only the sender can cause. They exclude messages that are lost,
damaged, beyond the memory limit, or from an earlier life or another run.
"""
_MOST = 3


class Strikes:
    """Counts each sender's lies; three mute it until another process of its rank appears.

    >>> strikes = Strikes()
    >>> [strikes.add(2) for _ in range(3)], strikes.muted
    ([False, False, True], {2})
    >>> strikes.forgive(2)
    >>> strikes.muted
    set()
    """

    def __init__(self) -> None:
        self._counts: Counter[Rank] = Counter()
        self.muted: set[Rank] = set()

    def add(self, rank: Rank) -> bool:
        """Count a lie; return whether it mutes `rank`."""
        self._counts[rank] += 1
        return self._counts[rank] >= _MOST and self.mute(rank)

    def mute(self, rank: Rank) -> bool:
        """Mute `rank`; return whether that is new."""
        is_new = rank not in self.muted
        self.muted.add(rank)
        return is_new

    def forgive(self, rank: Rank) -> None:
        """Clear the record of `rank`, which has a new process."""
        self._counts.pop(rank, None)
        self.muted.discard(rank)


# Validation of all input before an algorithm sees it.


_LOG = logging.getLogger("edgegossip.net")
# A peer that keeps inventing new reasons must fill neither memory nor log.
_MAX_REASONS = 1000
_Sizes: TypeAlias = Mapping[str, float | None]
"""The largest absolute value of each tensor, by name; see `TensorSpec.magnitude`."""


class Admission:
    """Admits only messages that match the algorithm's schema and come from this run's workers.

    Everything else is dropped, counted, and logged once for each worker and reason; no error is
    raised. Not thread-safe.

    Args:
        run: 8 bytes that identify this run.
        rank: Rank of this worker.
        num_workers: Number of workers in the run.
        schema: Description of the messages, by kind.
        max_bytes: Maximum size of a frame, in bytes; with None, the schema's largest message
            fits.
        plausibility: Finds values that are too large; None allows all values.
        seals: Verifies relayed parts; None if nothing is sealed.
        life_of: Returns the known life of a worker; 0 if unknown.

    Attributes:
        max_bytes: Maximum size of a frame, for the transport.
        offenders: Senders of messages that no honest worker sends, once per offense; the owner
            empties the list.
        undecided: Senders and frames whose values nobody can judge yet (`Excess`); the owner
            empties the list, and lets them be admitted again later.
        dropped: Number of dropped or missing messages, by sender and reason; a dropped message
            later also counts as missing. Input from outside this run has the sender None.
    """

    def __init__(
        self,
        *,
        run: bytes,
        rank: Rank,
        num_workers: int,
        schema: Mapping[str, MessageSpec],
        max_bytes: int | None = None,
        plausibility: Plausibility | None = None,
        seals: Seals | None = None,
        life_of: Callable[[Rank], Life] = lambda rank: 0,
    ) -> None:
        self.offenders: list[Rank] = []
        self.undecided: list[tuple[Rank, Buffer]] = []
        self._rank = rank
        self._plausibility = plausibility
        self._seals = seals
        self._life_of = life_of
        self.dropped: Counter[tuple[Rank | None, str]] = Counter()
        self._run = run
        self._others = {*range(num_workers)} - {rank}
        self._schema = schema
        largest = max((spec.max_num_bytes for spec in schema.values()), default=0)
        around = envelopes.NUM_BYTES + 8 + MAX_HEADER_BYTES
        self.max_bytes = largest + around if max_bytes is None else max_bytes

    def admit(
        self, sender: Rank, frame: Buffer, own_round: int
    ) -> tuple[Envelope, Message] | None:
        """Read a frame that the transport received from `sender`.

        None if it is dropped or undecided.

        The tensors are views of `frame`, which must not be changed afterwards.
        """
        try:
            return self._check(sender, frame, own_round)
        except _UndecidedError:
            self.undecided.append((sender, frame))
            return None
        except _AdmissionError as error:
            self.refused(sender, *error.args)
            if error.args[0] in LIES:
                self.offenders.append(sender)
            return None

    def refused(
        self, rank: Rank | None, reason: str, detail: str = "", number: int = 1
    ) -> None:
        """Count messages dropped here or in transit; log each new reason.

        Args:
            rank: Apparent sender, if any.
            reason: One of a few fixed texts.
            detail: For the log only.
            number: Number of messages.
        """
        key = (rank if rank in self._others else None, reason)
        if key not in self.dropped and len(self.dropped) >= _MAX_REASONS:
            key = (None, "anything else")
        is_new = key not in self.dropped
        self.dropped[key] += number
        if is_new:
            sender = "a stranger" if key[0] is None else f"worker {rank}"
            what = f"{key[1]} ({detail})" if detail else key[1]
            _LOG.warning("dropped input from %s: %s; more of it is only counted", sender, what)

    def _check(self, sender: Rank, frame: Buffer, own_round: int) -> tuple[Envelope, Message]:
        if sender not in self._others:
            raise _AdmissionError("not from another worker of this run")
        if len(frame) > self.max_bytes:
            raise _AdmissionError("too large", f"{len(frame)} bytes")
        try:
            envelope, message = unpack(frame)
        except ValueError as error:
            raise _AdmissionError("no message", str(error)) from None
        if envelope.run != self._run:
            raise _AdmissionError("of another run")
        if envelope.sender != sender:
            raise _AdmissionError(IN_ANOTHERS_NAME, f"worker {envelope.sender}")
        sizes = self._check_message(message, own_round)
        return envelope, self._check_values(sender, message, sizes)

    def _check_message(self, message: Message, own_round: int) -> _Sizes:
        """Validate a message against the schema; return the magnitudes of its values."""
        kind = repr(message.kind[:40])
        spec = self._schema.get(message.kind)
        if spec is None:
            raise _AdmissionError("of unknown kind", kind)
        latest = [] if spec.max_round is None else [spec.max_round]
        latest += [] if spec.max_ahead is None else [own_round + spec.max_ahead]
        if not 0 <= message.round <= min(latest, default=message.round):
            rounds = f"{kind} of round {message.round} while we are in round {own_round}"
            raise _AdmissionError(IMPOSSIBLE_ROUND, rounds)
        if mismatch := spec.mismatch(message.payload, message.numbers):
            raise _AdmissionError(OTHER_FORM, f"{kind}: {mismatch}")
        bad_values, sizes = spec.inspect(message.payload, message.numbers)
        if bad_values:
            raise _AdmissionError(BAD_VALUES, f"{kind}: {bad_values}")
        return sizes

    def _check_values(self, sender: Rank, message: Message, sizes: _Sizes) -> Message:
        """Compare the values with the usual ones; return the message for the algorithm."""
        if self._schema[message.kind].is_passed_on:
            return self._check_parts(sender, message, sizes)
        if excess := self._excess(sender, message.kind, sizes):
            raise _AdmissionError(TOO_LARGE, excess)
        return message

    def _check_parts(self, sender: Rank, message: Message, sizes: _Sizes) -> Message:
        """Check the values of a message with several authors, each judged by its own part.

        A worker that relays a part without a valid seal has forged it, because honest workers
        do not accept such a part. Any other flaw of a part is blamed on its origin.
        """
        payload: dict[str, Tensor] = {}
        for origin, part in by_origin(message.payload).items():
            if origin == self._rank or not self._counts(message, origin, part):
                continue  # a worker knows the parts that it has written
            is_own = origin == sender
            # Without seals any worker could vote in another's name.
            author = origin if is_own or self._seals is not None else None
            own_sizes = {name: sizes[f"{origin}.{name}"] for name in part}
            excess = self._excess(author, message.kind, own_sizes)
            if excess is None:
                payload.update({f"{origin}.{name}": x for name, x in part.items()})
            elif is_own:
                raise _AdmissionError(TOO_LARGE, excess)
            else:
                self.refused(sender if author is None else author, TOO_LARGE, excess)
                self.offenders += [] if author is None else [author]
        return replace(message, payload=payload)

    def _counts(self, message: Message, origin: Rank, part: Payload) -> bool:
        """Whether `origin` has written a part in its current life, with a valid certificate.

        No worker is blamed for a part with an expired or revoked certificate: the relaying
        worker may have accepted it earlier, or may not know about the revocation yet.
        """
        if self._seals is None:
            return True
        seal = self._seals.read(message, origin, part)
        if seal is None:
            raise _AdmissionError(IN_ANOTHERS_NAME, f"{message.kind!r} of {origin}")
        if seal.flaw is not None:
            self.refused(origin, "with a certificate that is no longer valid", seal.flaw)
        return seal.flaw is None and self._life_of(origin) in (0, seal.life)

    def _excess(self, author: Rank | None, kind: str, sizes: _Sizes) -> str | None:
        if self._plausibility is None:
            return None
        excess = self._plausibility.excess(author, kind, sizes)
        if excess is None:
            return None
        if not excess.is_lie:
            raise _UndecidedError
        return f"{kind!r}: {excess.text}"


class _AdmissionError(Exception):
    """A reason and a detail for the log; caught within this module."""


class _UndecidedError(Exception):
    """Nobody can judge the values yet; caught within this module."""
