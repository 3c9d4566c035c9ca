"""Signatures of what workers write and others pass on: nobody speaks for another."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
import torch
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.serialization import Encoding
from torch import Tensor

from edgegossip.core import codec
from edgegossip.core.errors import NetworkError
from edgegossip.core.protocol import Message, Payload, Rank
from edgegossip.core.schema import MessageSpec, TensorSpec
from edgegossip.net.certificates import (
    common_name,
    holder_name,
    load_certificate,
    load_certificates,
    load_key,
)
from edgegossip.net.runtime import Life
from edgegossip.net.tls import TLS, has_signed

SEAL = "seal"
_MAX_NUM_BYTES = 4096
_SPEC = TensorSpec(torch.uint8, (None,), max_numel=_MAX_NUM_BYTES)
_PLACE = struct.Struct("<16s8sQQ")  # what it is, run, origin, its life
_HEAD = struct.Struct("<QH")  # life, bytes of the signature
_PREHASHED = ec.ECDSA(Prehashed(hashes.SHA256()))
_WHAT = b"edgegossip seal1"


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has written of a message that is passed on.

    Attributes:
        origin: Who has written it.
        payload: Without the rank in the names; with its seal, if it has one.
    """

    origin: Rank
    payload: Payload


def parts_of(payload: Payload) -> list[Part]:
    """The parts of a message whose names are ``RANK.name``.

    >>> [part.origin for part in parts_of({"2.x": torch.zeros(1), "10.x": torch.zeros(1)})]
    [2, 10]
    """
    parts: dict[Rank, dict[str, Tensor]] = {}
    for key, tensor in payload.items():
        rank, _, name = key.partition(".")
        parts.setdefault(int(rank), {})[name] = tensor
    return [Part(rank, part) for rank, part in sorted(parts.items())]


def with_seals(schema: Mapping[str, MessageSpec], num_workers: int) -> dict[str, MessageSpec]:
    """Let each part of a message that is passed on have a seal."""
    seals = {f"{rank}.{SEAL}": _SPEC for rank in range(num_workers)}
    return {
        kind: replace(spec, optional={**spec.optional, **seals}) if spec.is_passed_on else spec
        for kind, spec in schema.items()
    }


class Seals:
    """Seals what this worker writes with the key of its certificate, and checks others'.

    A seal is a signature (ECDSA on SHA-256) of run, origin, its life, kind, round and every
    byte of the part, and the origin's certificate. So a part counts nowhere but where it was
    written for. That each seal has its certificate with it costs some 700 bytes, and makes
    sure that everybody who gets a part can check it, whomever they reach.

    Args:
        tls: The files of this worker.
        rank: Its own.
        run: 8 bytes that tell this run from others.

    Raises:
        NetworkError: If the key is none for ECDSA.
    """

    def __init__(self, tls: TLS, rank: Rank, run: bytes) -> None:
        key, certificate = load_key(tls.key), load_certificate(tls.certificate)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise NetworkError(
                f"{tls.key} is no elliptic-curve key, which messages that others pass on are "
                "signed with; make keys with: edgegossip certs issue"
            )
        self._key = key
        self._certificate = certificate.public_bytes(Encoding.DER)
        self._rank = rank
        self._run = run
        self._holder = lru_cache(maxsize=256)(_holders(load_certificates(tls.ca)))
        self._last: tuple[tuple[str, int, Life], Payload, Tensor] | None = None

    def sealed(self, message: Message, life: Life) -> Message:
        """Add a seal to what this worker has written of `message`, in its present life."""
        own = f"{self._rank}."
        part = {n.removeprefix(own): x for n, x in message.payload.items() if n.startswith(own)}
        if not part:
            return message
        seal = self._seal((message.kind, message.round, life), part)
        return replace(message, payload={**message.payload, own + SEAL: seal})

    def is_genuine(self, message: Message, part: Part) -> Life | None:
        """The life in which `part.origin` has written it; None if it has not."""
        try:
            data = part.payload[SEAL].numpy().tobytes()
            life, length = _HEAD.unpack_from(data)
            signature, certificate = data[_HEAD.size :][:length], data[_HEAD.size + length :]
            public = self._holder(part.origin, certificate, datetime.now(UTC).date())
            content = {name: x for name, x in part.payload.items() if name != SEAL}
            where = message.kind, message.round, life
            public.verify(signature, self._digest(part.origin, where, content), _PREHASHED)
        except (KeyError, ValueError, struct.error, InvalidSignature):
            return None  # no seal, or a bad one
        return int(life)

    def _seal(self, where: tuple[str, int, Life], part: Payload) -> Tensor:
        if self._last is not None and self._last[0] == where and _is_same(self._last[1], part):
            return self._last[2]  # for another receiver, or another exchange of the round
        signature = self._key.sign(self._digest(self._rank, where, part), _PREHASHED)
        data = _HEAD.pack(where[2], len(signature)) + signature + self._certificate
        seal = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self._last = where, part, seal
        return seal

    def _digest(self, origin: Rank, where: tuple[str, int, Life], part: Payload) -> bytes:
        kind, round, life = where
        digest = hashlib.sha256(_PLACE.pack(_WHAT, self._run, origin, life))
        # The header has kind, round, names, dtypes and shapes. In one order, however it came.
        for buffer in codec.encode(Message(kind, round, dict(sorted(part.items())))):
            digest.update(buffer)
        return digest.digest()


def _is_same(a: Payload, b: Payload) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _holders(
    authorities: list[x509.Certificate],
) -> Callable[[Rank, bytes, object], ec.EllipticCurvePublicKey]:
    def holder(rank: Rank, data: bytes, today: object) -> ec.EllipticCurvePublicKey:
        """The public key in a certificate of worker `rank` that is good today.

        Raises:
            ValueError: If it is not one.
        """
        try:
            certificate = x509.load_der_x509_certificate(data)
            is_signed = any(has_signed(authority, certificate) for authority in authorities)
        except Exception as error:  # whatever a parser raises of bytes that anybody may send
            raise ValueError("no certificate") from error
        # What an authority has signed can be read.
        now = datetime.now(UTC)
        if (
            is_signed
            and common_name(certificate.subject) == holder_name(rank)
            and certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
            and isinstance(public := certificate.public_key(), ec.EllipticCurvePublicKey)
        ):
            return public
        raise ValueError(f"no certificate of worker {rank}")

    return holder
