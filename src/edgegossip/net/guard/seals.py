"""Seals: signatures of relayed parts, so that no worker can impersonate another."""

from __future__ import annotations

import hashlib
import logging
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
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Message, Payload, Rank
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.net.identity.certificates import common_name
from edgegossip.net.identity.tls import Credentials, IdentityFiles
from edgegossip.net.runtime import Life

SEAL = "seal"
_LOG = logging.getLogger("edgegossip.net")
_MAX_NUM_BYTES = 4096
_SPEC = TensorSpec(torch.uint8, (None,), max_numel=_MAX_NUM_BYTES)
_PLACE = struct.Struct("<16s8sQQ")  # purpose, run, origin, its life
_HEAD = struct.Struct("<QH")  # life, bytes of the signature
_PREHASHED = ec.ECDSA(Prehashed(hashes.SHA256()))
_WHAT = b"edgegossip seal1"


def with_seals(schema: Mapping[str, MessageSpec], num_workers: int) -> dict[str, MessageSpec]:
    """Add a seal for each part to the descriptions of relayed messages."""
    seals = {f"{rank}.{SEAL}": _SPEC for rank in range(num_workers)}
    return {
        kind: replace(spec, optional={**spec.optional, **seals}) if spec.is_passed_on else spec
        for kind, spec in schema.items()
    }


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal made by the holder of a certificate.

    Attributes:
        life: The origin's life when it wrote the part.
        flaw: Reason why the certificate is invalid now; None if it is valid.
    """

    life: Life
    flaw: str | None


@dataclass(frozen=True, slots=True)
class _Signer:
    """A key and its certificate in DER."""

    key: ec.EllipticCurvePrivateKey
    certificate: bytes


class Seals:
    """Seals this worker's parts with its certificate's key and verifies other workers' parts.

    A seal is the origin's certificate and a signature (ECDSA on SHA-256) over run, origin, its
    life, kind, round and every byte of the part. A seal is therefore valid for no other part,
    round or run. The certificate adds about 700 bytes to each seal and lets every receiver
    verify the part.

    Args:
        credentials: Returns the current credentials of this worker.
        rank: Rank of this worker.
        run: 8 bytes that identify this run.

    Raises:
        NetworkError: If the key does not support ECDSA. A later key without ECDSA is not used.
    """

    def __init__(self, credentials: Callable[[], Credentials], rank: Rank, run: bytes) -> None:
        self._credentials = credentials
        self._rank = rank
        self._run = run
        self._identity = credentials().identity
        self._signer = _signer(self._identity)
        self._holder = _holders(credentials())
        self._last: tuple[tuple[str, int, Life], Payload, Tensor] | None = None

    def sealed(self, message: Message, life: Life) -> Message:
        """Add a seal to this worker's part of `message`, in its current life."""
        own = f"{self._rank}."
        part = {n.removeprefix(own): x for n, x in message.payload.items() if n.startswith(own)}
        if not part:
            return message
        # Certificates may have been renewed since the last message.
        self._renew()
        seal = self._seal((message.kind, message.round, life), part)
        return replace(message, payload={**message.payload, own + SEAL: seal})

    def read(self, message: Message, origin: Rank, part: Payload) -> Seal | None:
        """Read the seal of the part by `origin` in `message`; None if missing or invalid."""
        credentials = self._renew()
        try:
            data = part[SEAL].numpy().tobytes()
            # First who made it, then whether it is true: a signature by a key that no authority
            # knows means nothing. The life is covered by the signature.
            life, length = _HEAD.unpack_from(data)
            signature, encoded = data[_HEAD.size :][:length], data[_HEAD.size + length :]
            certificate, public = self._holder(origin, encoded)
            content = {name: x for name, x in part.items() if name != SEAL}
            where = message.kind, message.round, life
            public.verify(signature, self._digest(origin, where, content), _PREHASHED)
        except (KeyError, ValueError, struct.error, InvalidSignature):
            return None  # no seal, or a bad one
        return Seal(int(life), credentials.flaw(certificate, datetime.now(UTC)))

    def _renew(self) -> Credentials:
        """Return the current credentials; if they are new, use them from now on."""
        credentials = self._credentials()
        if credentials.identity != self._identity:
            # Certificates that were read with the former authorities must be read again.
            self._identity = credentials.identity
            self._holder = _holders(credentials)
            try:
                self._signer, self._last = _signer(self._identity), None
            except NetworkError as error:
                _LOG.error("messages are still sealed with the previous certificate: %s", error)
        return credentials

    def _seal(self, where: tuple[str, int, Life], part: Payload) -> Tensor:
        if self._last is not None:
            last_where, last_part, seal = self._last
            is_same = last_where == where and last_part.keys() == part.keys()
            # The same part for another receiver, or in another exchange of the round. The same
            # tensors, because sent tensors never change, and comparing values takes longer.
            if is_same and all(last_part[name] is part[name] for name in part):
                return seal
        signature = self._signer.key.sign(self._digest(self._rank, where, part), _PREHASHED)
        data = _HEAD.pack(where[2], len(signature)) + signature + self._signer.certificate
        seal = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self._last = where, part, seal
        return seal

    def _digest(self, origin: Rank, where: tuple[str, int, Life], part: Payload) -> bytes:
        kind, round, life = where
        # Where it belongs comes first, so that a part cannot be moved to another run or origin.
        digest = hashlib.sha256(_PLACE.pack(_WHAT, self._run, origin, life))
        # The header has kind, round, names, dtypes and shapes, in a fixed order.
        for buffer in codec.encode(Message(kind, round, dict(sorted(part.items())))):
            digest.update(buffer)
        return digest.digest()


def _signer(identity: IdentityFiles) -> _Signer:
    key = load_pem_private_key(identity.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise NetworkError(
            f"the key of {common_name(identity.holder.subject)} is not an "
            "elliptic-curve key, which signs messages that other workers relay; "
            "make keys with: edgegossip certs issue"
        )
    return _Signer(key, identity.holder.public_bytes(Encoding.DER))


def _holders(
    credentials: Credentials,
) -> Callable[[Rank, bytes], tuple[x509.Certificate, ec.EllipticCurvePublicKey]]:
    @lru_cache(maxsize=256)
    def holder(rank: Rank, data: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePublicKey]:
        """Read a certificate that an authority issued for worker `rank`, with its public key.

        Raises:
            ValueError: If `data` is malformed or not such a certificate.
        """
        try:
            certificate = x509.load_der_x509_certificate(data)
            is_own = credentials.is_of(rank, certificate)
        except Exception as error:  # a parser may raise anything on untrusted bytes
            raise ValueError("no certificate") from error
        # A certificate with an authority's signature is readable.
        public = certificate.public_key() if is_own else None
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError(f"no certificate of worker {rank}")
        return certificate, public

    return holder
