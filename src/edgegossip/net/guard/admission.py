"""Admission: the one way from a frame of the network to a message for the algorithm."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from edgegossip.contract.codec import MAX_HEADER_BYTES, Buffer
from edgegossip.contract.protocol import Message, Rank
from edgegossip.contract.schema import MessageSpec, by_origin
from edgegossip.net.guard import envelope as envelopes
from edgegossip.net.guard.envelope import Envelope, unpack
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.guard.seals import Seals
from edgegossip.net.runtime import Life

_LOG = logging.getLogger("edgegossip.net")
# A peer that keeps inventing new reasons must fill neither memory nor log.
_MAX_REASONS = 1000
_MOST_LIES = 3

MUTED = "no longer heard"
FLOOD = "more than any honest worker sends"
IN_ANOTHERS_NAME = "in another's name"
IMPOSSIBLE_ROUND = "of an impossible round"
OTHER_FORM = "of another form"
BAD_VALUES = "with bad values"
TOO_LARGE = "with values far beyond what is usual"
INVALID_CERTIFICATE = "with a certificate that is no longer valid"


@dataclass(frozen=True, slots=True)
class Refused:
    """Input that no algorithm gets to see.

    Attributes:
        rank: Apparent author, if any.
        reason: One of a few fixed texts.
        detail: For the log only.
        is_lie: Whether only the author can have caused this. Input that is damaged,
            beyond a limit, or from another run is no lie.
    """

    rank: Rank | None
    reason: str
    detail: str = ""
    is_lie: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A message for the algorithm.

    Attributes:
        envelope: Its sender, lives and number.
        message: The message; its tensors are views of the frame.
        left_out: Relayed parts that the message no longer has.
    """

    envelope: Envelope
    message: Message
    left_out: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nobody can judge the values of this frame yet; it can be admitted again later."""


Verdict: TypeAlias = Admitted | Refused | Undecided
_Sizes: TypeAlias = Mapping[str, float | None]
"""The largest absolute value of each tensor, by name; see `TensorSpec.magnitude`."""


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
        if self._counts[rank] < _MOST_LIES or rank in self.muted:
            return False
        self.muted.add(rank)
        return True

    def forgive(self, rank: Rank) -> None:
        """Clear the record of `rank`, which has a new process."""
        self._counts.pop(rank, None)
        self.muted.discard(rank)


class Refusals:
    """Counts refused input, and logs each new reason once per author.

    Attributes:
        counts: Number of refused or missing messages, by author and reason; a refused message
            later also counts as missing. Input from outside this run has the author None.
    """

    def __init__(self, others: set[Rank]) -> None:
        self._others = others
        self.counts: Counter[tuple[Rank | None, str]] = Counter()

    def add(self, refused: Refused, number: int = 1) -> None:
        """Count `number` equal refusals."""
        key = (refused.rank if refused.rank in self._others else None, refused.reason)
        if key not in self.counts and len(self.counts) >= _MAX_REASONS:
            key = (None, "anything else")
        is_new = key not in self.counts
        self.counts[key] += number
        if is_new:
            sender = "a stranger" if key[0] is None else f"worker {refused.rank}"
            what = f"{key[1]} ({refused.detail})" if refused.detail else key[1]
            _LOG.warning("dropped input from %s: %s; more of it is only counted", sender, what)


class Admission:
    """Admits only messages that match the algorithm's schema and come from this run's workers.

    `admit` is a function of its arguments and of what was learned from earlier frames: it does
    no I/O, counts nothing and punishes nobody. Its caller acts on the verdict. Not thread-safe.

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
        schema: As given.
        seals: As given.
        strikes: Lies by sender, and the muted workers.
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
        self.schema = schema
        self._plausibility = plausibility
        self.seals = seals
        self.strikes = Strikes()
        self._run = run
        self._rank = rank
        self._others = {*range(num_workers)} - {rank}
        self._life_of = life_of
        largest = max((spec.max_num_bytes for spec in schema.values()), default=0)
        around = envelopes.NUM_BYTES + MAX_HEADER_BYTES + 8
        self.max_bytes = largest + around if max_bytes is None else max_bytes

    def admit(self, sender: Rank, frame: Buffer, own_round: int) -> Verdict:
        """Judge a frame that the transport received from `sender`.

        Each check trusts what the earlier ones have established. The tensors are views of
        `frame`, which must not be changed afterwards.
        """
        # Sender and size: what costs nothing comes first.
        if sender in self.strikes.muted:
            return Refused(sender, MUTED)
        if sender not in self._others:
            return Refused(sender, "not from another worker of this run")
        if len(frame) > self.max_bytes:
            return Refused(sender, "too large", f"{len(frame)} bytes")

        # Envelope and codec. The checksum is verified first, so damage in transit is never
        # mistaken for a lie, and neither is a worker of another run that uses the same network.
        try:
            envelope, message = unpack(frame)
        except ValueError as error:
            return Refused(sender, "no message", str(error))
        if envelope.run != self._run:
            return Refused(sender, "of another run")
        if envelope.sender != sender:
            # The transport knows the sender from its link, and with certificates for sure.
            return _lie(sender, IN_ANOTHERS_NAME, f"worker {envelope.sender}")

        # Schema and round. A liar may choose the kind, so the log gets a short one. An unknown
        # kind is no lie: the sender's version may be newer.
        kind = repr(message.kind[:40])
        spec = self.schema.get(message.kind)
        if spec is None:
            return Refused(sender, "of unknown kind", kind)
        if not 0 <= message.round <= _last_round(spec, own_round, message.round):
            rounds = f"{kind} of round {message.round} while we are in round {own_round}"
            return _lie(sender, IMPOSSIBLE_ROUND, rounds)
        if mismatch := spec.mismatch(message.payload, message.numbers):
            return _lie(sender, OTHER_FORM, f"{kind}: {mismatch}")
        # Values are read only now that their number and type are known to be as described.
        bad_values, sizes = spec.inspect(message.payload, message.numbers)
        if bad_values:
            return _lie(sender, BAD_VALUES, f"{kind}: {bad_values}")

        # Seals and plausibility: a relayed message has several authors.
        if spec.is_passed_on:
            return self._admit_parts(envelope, message, sizes)
        return self._excess(sender, message, sizes) or Admitted(envelope, message)

    def _admit_parts(self, envelope: Envelope, message: Message, sizes: _Sizes) -> Verdict:
        """Judge each part of a relayed message by its author.

        A worker that relays a part without a valid seal has forged it, because honest workers
        do not accept such a part. Any other flaw of a part is blamed on its origin.
        """
        sender, parts, left_out = envelope.sender, dict[Rank, dict[str, Tensor]](), []
        for origin, part in by_origin(message.payload).items():
            if origin == self._rank:
                continue  # a worker knows the parts that it has written
            if self.seals is not None:
                seal = self.seals.read(message, origin, part)
                if seal is None:
                    return _lie(sender, IN_ANOTHERS_NAME, f"{message.kind!r} of {origin}")
                if seal.flaw is not None:
                    # Nobody is to blame: the sender may have accepted the part while the
                    # certificate was valid, or not know of its revocation yet.
                    left_out.append(Refused(origin, INVALID_CERTIFICATE, seal.flaw))
                    continue
                if self._life_of(origin) not in (0, seal.life):
                    continue  # written before its origin was restarted
            parts[origin] = dict(part)
        payload: dict[str, Tensor] = {}
        for origin, part in parts.items():
            # Without seals any worker could vote in another's name, and nobody is to blame.
            author = origin if origin == sender or self.seals is not None else None
            own_sizes = {name: sizes[f"{origin}.{name}"] for name in part}
            refused = self._excess(author, message, own_sizes)
            if isinstance(refused, Undecided) or (refused and origin == sender):
                return refused  # the whole frame waits, or its sender has lied
            if refused:
                left_out.append(
                    refused if author is not None else replace(refused, rank=sender)
                )
            else:
                payload.update({f"{origin}.{name}": x for name, x in part.items()})
        return Admitted(envelope, replace(message, payload=payload), tuple(left_out))

    def _excess(
        self, author: Rank | None, message: Message, sizes: _Sizes
    ) -> Refused | Undecided | None:
        """Compare values with the usual ones; None if they are admitted."""
        if self._plausibility is None:
            return None
        excess = self._plausibility.excess(author, message.kind, sizes)
        if excess is None:
            return None
        if not excess.is_lie:
            return Undecided()
        detail = f"{message.kind!r}: {excess.text}"
        return Refused(author, TOO_LARGE, detail, is_lie=author is not None)


def _lie(sender: Rank, reason: str, detail: str) -> Refused:
    return Refused(sender, reason, detail, is_lie=True)


def _last_round(spec: MessageSpec, own_round: int, otherwise: int) -> int:
    """The last round that an honest worker can be in; `otherwise` if there is no limit."""
    latest = [] if spec.max_round is None else [spec.max_round]
    latest += [] if spec.max_ahead is None else [own_round + spec.max_ahead]
    return min(latest, default=otherwise)
