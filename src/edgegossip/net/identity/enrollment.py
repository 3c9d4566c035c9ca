"""The channel between a new machine and the signing service; members use it, too.

The service speaks first. It presents a short-lived certificate in TLS 1.3 and then names its
authority, whose fingerprint the invitation has. The new machine says nothing before it knows
that this authority signed the service's certificate. Then both sides prove that they know the
invitation's token. The proofs are bound to this connection (the fingerprint, the certificate
and a number drawn for it) and to what is asked and answered, so they are useless elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import SERVICE, common_name
from edgegossip.net.identity.invitation import Invitation, proof, token_id, token_key
from edgegossip.net.identity.tls import TLS, has_signed

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from edgegossip.contract.protocol import Rank, Seconds

VERSION = 1
MAX_BYTES = 2**20
"""Largest message, which may contain a recipe's file."""
PATIENCE: Seconds = 10.0
"""Time limit of a whole conversation."""
_CLAIM_BYTES = 200
Json: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["open", "undecided", "planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The training that a new machine is offered, and where it meets the others.

    Args:
        run: Name of the run.
        words: The recipe, its arguments, and options that all workers share, as on a command
            line.
        num_workers: Limit of the run.
        routers: Endpoints of routers, the preferred one first.
        version: Version of the package on the inviting machine.
        digest: SHA-256 of the recipe's file, in hex; None for a recipe of the package.
        code: Content of that file; None unless asked for.
        kind: "open" if machines begin when they come; "undecided" if they wait for a plan; or
            "planned" if a plan has chosen their number and all settings.
    """

    run: str
    words: tuple[str, ...]
    num_workers: int
    routers: tuple[str, ...]
    version: str
    digest: str | None = None
    code: str | None = None
    kind: Kind = "open"

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Offer:
        """Read an offer from JSON."""
        lists = {name: tuple(map(str, found[name])) for name in ("words", "routers")}
        return cls(**{**found, **lists})

    def as_json(self, *, with_code: bool) -> Json:
        """The offer for a machine that asks for code or does not."""
        return asdict(self if with_code else replace(self, code=None))


class Joined(NamedTuple):
    """Answer to a new machine.

    Attributes:
        rank: Its rank.
        name: Its name.
        certificate: Its certificate, in PEM.
        ca: The authority's certificate, in PEM.
        revoked: The authority's list of revoked certificates, in PEM; may be empty.
        is_direct: Whether the service could open a connection to this machine.
        offer: What to train.
    """

    rank: Rank
    name: str
    certificate: str
    ca: str
    revoked: str
    is_direct: bool
    offer: Offer


class RefusedError(NetworkError):
    """The signing service has answered, and says no."""


class Channel:
    """Messages of one line of JSON each, within a time limit for all of them."""

    def __init__(self, connection: ssl.SSLSocket, patience: Seconds = PATIENCE) -> None:
        self.connection = connection
        self._end = time.monotonic() + patience
        self._rest = b""

    def send(self, **message: object) -> None:
        """Send a message."""
        self.connection.settimeout(self._left)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, most: int = MAX_BYTES) -> Json:
        """Receive a message of at most `most` bytes.

        Raises:
            NetworkError: If the other end says something else, or nothing in time.
        """
        while b"\n" not in self._rest:
            self.connection.settimeout(self._left)
            piece = self.connection.recv(2**16)
            self._rest += piece
            if not piece or len(self._rest) > most:
                raise NetworkError("the other end closed the connection or speaks another way")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise NetworkError("the other end does not speak edgegossip's protocol")
        return message

    @property
    def _left(self) -> Seconds:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        return left


def fingerprint_of(authority: x509.Certificate) -> bytes:
    """SHA-256 of a certificate."""
    return authority.fingerprint(hashes.SHA256())


def transcript(fingerprint: bytes, service: bytes, nonce: str) -> bytes:
    """Describe all that makes a connection unique.

    Args:
        fingerprint: Of the authority, as this side believes it.
        service: Certificate that the service has presented, in DER.
        nonce: Number that the service has drawn for this connection, in hex.
    """
    return b"\0".join([fingerprint, hashlib.sha256(service).digest(), nonce.encode()])


def make_request(key: ec.EllipticCurvePrivateKey, name: str) -> str:
    """Sign a certificate request in PEM, which proves the possession of `key`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def parse_request(text: str) -> ec.EllipticCurvePublicKey:
    """Read the public key of a certificate request.

    Raises:
        NetworkError: If its signature or its kind of key is wrong.
    """
    try:
        request = x509.load_pem_x509_csr(text.encode())
        key = request.public_key()
        is_valid = request.is_signature_valid
    except Exception:  # a parser of a stranger's bytes, which has many errors
        raise NetworkError("the certificate request is damaged") from None
    if not is_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise NetworkError("the certificate request does not prove an elliptic-curve key")
    if not isinstance(key.curve, ec.SECP256R1):
        raise NetworkError(f"the key is of curve {key.curve.name}; it must be of secp256r1")
    return key


# The joining side.


def ask_to_join(
    invitation: Invitation,
    key: ec.EllipticCurvePrivateKey,
    name: str,
    *,
    is_chosen: bool,
    wants_code: bool,
    port: int | None = None,
    patience: Seconds = PATIENCE,
) -> Joined:
    """Spend an invitation: have `key` signed, and learn what to train.

    Args:
        invitation: The invitation.
        key: Key of this machine. Only its public half is sent.
        name: Name of this machine.
        is_chosen: Whether a person has chosen `name`.
        wants_code: Ask for the recipe's file, too.
        port: Port at which this machine listens, for the service to try; None for no trial.
        patience: Time limit.

    Raises:
        NetworkError: If the service cannot be reached, is not the invitation's, refuses, or
            cannot prove that it knows the token.
    """
    with _connected((invitation.host, invitation.port), None, patience) as connection:
        channel = Channel(connection, patience)
        authority, bound = _met(channel, invitation.fingerprint)
        token = token_key(invitation.token)
        body = json.dumps(
            {
                "name": name,
                "is_chosen": is_chosen,
                "request": make_request(key, name),
                "wants_code": wants_code,
                "address": connection.getsockname()[0],
                "port": port,
            }
        )
        channel.send(
            ask="join",
            id=token_id(invitation.token),
            body=body,
            proof=proof(token, "joining", bound, body),
        )
        answered = _answer(channel)
        text = str(answered.get("body", ""))
        own = proof(token, "signing", bound, text)
        if not hmac.compare_digest(own.encode(), str(answered.get("proof")).encode()):
            raise NetworkError(
                "the service does not know the invitation, so it is not the one that made it; "
                "nothing was accepted from it - somebody may have changed the invitation"
            )
    return _parse_answer(text, authority)


def ask_as_member(
    service: tuple[str, int],
    fingerprint: bytes,
    tls: TLS,
    question: str,
    said: Mapping[str, object] | None = None,
    patience: Seconds = PATIENCE,
) -> Json:
    """Ask the signing service something, as a member of the run.

    Args:
        service: Its host and port.
        fingerprint: SHA-256 of the authority's certificate.
        tls: Files of this machine.
        question: "members", "leave", "revoked", "renew", or "next" to take part in a plan.
        said: Further content of the question.
        patience: Time limit.

    Raises:
        NetworkError: If the service cannot be reached, is not the authority's, or refuses.
    """
    with _connected(service, tls, patience) as connection:
        channel = Channel(connection, patience)
        _met(channel, fingerprint)
        channel.send(ask=question, **(said or {}))
        return _answer(channel)


@contextmanager
def _connected(
    service: tuple[str, int], tls: TLS | None, patience: Seconds
) -> Iterator[ssl.SSLSocket]:
    host, port = service
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No public authority has signed the service's certificate. `_met` verifies it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        if tls is not None:
            context.load_cert_chain(tls.certificate, tls.key)
        with (
            socket.create_connection(service, patience) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            yield connection
    except socket.gaierror:
        raise NetworkError(f"there is no host {host!r}") from None
    except ConnectionRefusedError:
        raise NetworkError(
            f"no signing service listens at {host}:{port}; is `edgegossip invite` running?"
        ) from None
    except ssl.SSLError as error:
        raise NetworkError(f"{host}:{port} refuses TLS: {error.reason}") from None
    except TimeoutError:
        raise NetworkError(
            f"no answer from {host}:{port} within {patience:g} s; is there a firewall?"
        ) from None
    except OSError as error:
        raise NetworkError(f"cannot reach {host}:{port}: {error.strerror or error}") from None


def _met(channel: Channel, fingerprint: bytes) -> tuple[str, bytes]:
    """Verify the service before anything is said; return its authority and the transcript."""
    certificate = channel.connection.getpeercert(binary_form=True) or b""
    hello = channel.receive()
    if hello.get("edgegossip") != VERSION:
        raise NetworkError(
            f"the service speaks version {hello.get('edgegossip')!r:.20} of the protocol, and "
            f"this package version {VERSION}; install the same version on both machines"
        )
    text = str(hello.get("authority"))
    try:
        authority = x509.load_pem_x509_certificate(text.encode())
        service = x509.load_der_x509_certificate(certificate)
        seen = fingerprint_of(authority)
        # A member's certificate is signed by the authority as well, but must not be taken for
        # the service's.
        is_service = common_name(service.subject) == SERVICE and has_signed(authority, service)
        now = datetime.now(UTC)
        is_valid = service.not_valid_before_utc <= now <= service.not_valid_after_utc
    except Exception:  # a parser of a stranger's bytes, which has many errors
        raise NetworkError("the service's certificate is damaged") from None
    if not hmac.compare_digest(seen, fingerprint) or not is_service:
        raise NetworkError(
            "the machine that answers does not own the authority of this run: its fingerprint "
            f"is {seen.hex()[:16]}..., expected {fingerprint.hex()[:16]}...; nothing was sent "
            "to it. Somebody may be listening in on this network, or the invitation is old"
        )
    if not is_valid:
        raise NetworkError(
            "the service's certificate is not valid at this machine's time, "
            f"{now:%Y-%m-%d %H:%M} UTC; set the clock"
        )
    return text, transcript(fingerprint, certificate, str(hello.get("nonce")))


def _answer(channel: Channel) -> Json:
    answered = channel.receive()
    if "refused" in answered:
        raise RefusedError(f"refused: {str(answered['refused'])[:_CLAIM_BYTES]}")
    return answered


def _parse_answer(text: str, authority: str) -> Joined:
    try:
        found = json.loads(text)
        offer = Offer.parse(found["offer"])
        rank, name = int(found["rank"]), str(found["name"])
        certificate, revoked = str(found["certificate"]), str(found["revoked"])
        is_direct = bool(found["is_direct"])
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(f"the service's answer is incomplete: {error!r:.80}") from None
    return Joined(rank, name, certificate, authority, revoked, is_direct, offer)
