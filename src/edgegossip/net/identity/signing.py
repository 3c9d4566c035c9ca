"""The signing service: admits new machines to a run, and answers its members."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.certificates import (
    issue_for,
    load_authority,
    make_service_identity,
    read_file,
)
from edgegossip.net.identity.enrollment import (
    PATIENCE,
    VERSION,
    Channel,
    Json,
    Offer,
    fingerprint_of,
    parse_request,
    transcript,
)
from edgegossip.net.identity.invitation import Invitation, proof
from edgegossip.net.identity.members import NAME, Member, Members
from edgegossip.net.identity.revocation import list_path

_LOG = logging.getLogger("edgegossip.net")
_MOST_AT_ONCE = 16
_MOST_OF_AN_ADDRESS = 4
_MOST_BYTES_ASKED = 2**14
_RENEWED: Seconds = 86_400.0
_LOOK: Seconds = 3.0
_DIAL: Seconds = 2.0


class Guesses:
    """Refuses addresses from which too many attempts have failed.

    Args:
        most: Failures of one address within `seconds`.
        seconds: Time after which a failure is forgotten.
        clock: Returns seconds.
        most_addresses: Addresses to remember; the one without failures for longest goes first.
    """

    def __init__(
        self,
        most: int = 5,
        seconds: Seconds = 60.0,
        clock: Callable[[], Seconds] = time.monotonic,
        most_addresses: int = 10_000,
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._most_addresses = most_addresses
        self._failures: OrderedDict[str, deque[Seconds]] = OrderedDict()
        self._lock = threading.Lock()

    def failed(self, address: str) -> None:
        """Note a failed attempt."""
        with self._lock:
            self._failures.setdefault(address, deque(maxlen=self._most)).append(self._clock())
            self._failures.move_to_end(address)
            while len(self._failures) > self._most_addresses:
                self._failures.popitem(last=False)

    def is_refused(self, address: str) -> bool:
        """Whether `address` has to wait."""
        with self._lock:
            times = self._failures.get(address, ())
            recent = [at for at in times if self._clock() - at < self._seconds]
        return len(recent) >= self._most


class SigningService:
    """Listens for new machines and members, in threads of its own, until it is closed.

    Strangers cost little: at most 16 conversations are open at once, four of them with one
    address, each for at most ten seconds. After five failed attempts within a minute, an
    address is refused before the handshake.

    Args:
        members: The run's members and invitations.
        offer: What new machines train.
        host: Address to listen at; empty for all addresses of IPv4.
        port: Port to listen at; 0 chooses a free one.
        days: Validity of certificates.
        present: Returns the ranks that are present.
        guesses: Counts failed attempts.
        plans: Answers a member's question "next", from the member and all that it said; None if
            nothing is planned.

    Attributes:
        offer: What new machines train; may be replaced.

    Raises:
        NetworkError: If there is no authority, or the port cannot be used.
    """

    def __init__(
        self,
        members: Members,
        offer: Offer,
        *,
        host: str = "",
        port: int = 0,
        days: int = 365,
        present: Callable[[], Collection[Rank]] = tuple,
        guesses: Guesses | None = None,
        plans: Callable[[Member, Json], Json] | None = None,
    ) -> None:
        self.offer = offer
        self._members = members
        self._plans = plans
        self._days = days
        self._present = present
        self._guesses = Guesses() if guesses is None else guesses
        self._authority = load_authority(members.folder)[0]
        self._fingerprint = fingerprint_of(self._authority)
        self._renew()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise NetworkError(
                f"the signing service cannot listen at port {port}: {error.strerror}; give "
                "another --port"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "signing")
        for work in (self._accept, self._look):
            threading.Thread(target=work, name="signing service", daemon=True).start()

    def __enter__(self) -> SigningService:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; conversations end by themselves."""
        self._is_over.set()
        # Closing alone would leave the thread in `accept`.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def invitation(self, host: str, port: int | None = None, *, token: bytes) -> Invitation:
        """The invitation with a token, for machines that reach this one as `host`."""
        port = self.port if port is None else port
        return Invitation(host, port, self._members.run, self._fingerprint, token)

    # Connections.

    def _renew(self) -> None:
        certificate, key = make_service_identity(self._members.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # each connection proves anew that it is this service's
        # Members present their certificates; new machines have none.
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(
            cadata=self._authority.public_bytes(Encoding.PEM).decode()
        )
        # Python reads keys from files only.
        with tempfile.TemporaryDirectory(dir=self._members.folder) as folder:
            path = Path(folder, "service.pem")
            path.touch(mode=0o600)
            path.write_bytes(certificate + key)
            context.load_cert_chain(path)
        served = x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)
        self._identity, self._renewed = (context, served), time.monotonic()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError:
                # Too many open files, for example: the next attempt may succeed.
                self._is_over.wait(0.1)
                continue
            address = _network_of(peer[0])
            if not self._may_speak(address):
                connection.close()
                continue
            try:
                self._pool.submit(self._serve, connection, address, peer[0])
            except RuntimeError:  # closed meanwhile
                connection.close()

    def _may_speak(self, address: str) -> bool:
        if self._guesses.is_refused(address):
            return False
        with self._lock:
            if (
                self._open[address] >= _MOST_OF_AN_ADDRESS
                or self._open.total() >= _MOST_AT_ONCE
            ):
                return False
            self._open[address] += 1
        return True

    def _serve(self, plain: socket.socket, address: str, peer: str) -> None:
        try:
            plain.settimeout(PATIENCE)
            # Both at once, because they are renewed together.
            context, certificate = self._identity
            with plain, context.wrap_socket(plain, server_side=True) as connection:
                self._converse(Channel(connection), certificate, address, peer)
        except (OSError, NetworkError):
            # TLS with a foreign or expired certificate, silence, or another protocol. Nobody
            # would read a line for each of a scanner's connections.
            self._guesses.failed(address)
        except Exception:
            _LOG.exception("the signing service could not answer %s", peer)
        finally:
            with self._lock:
                self._open[address] -= 1
                self._open += Counter()  # forget addresses without connections

    def _converse(self, channel: Channel, certificate: bytes, address: str, peer: str) -> None:
        nonce = secrets.token_hex(16)
        authority = self._authority.public_bytes(Encoding.PEM).decode()
        channel.send(edgegossip=VERSION, authority=authority, nonce=nonce)
        asked = channel.receive(_MOST_BYTES_ASKED)
        try:
            if asked.get("ask") == "join":
                bound = transcript(self._fingerprint, certificate, nonce)
                answer = self._join(asked, bound, peer)
            else:
                answer = self._answer_member(channel.connection, asked)
        except NetworkError as error:
            self._guesses.failed(address)
            _LOG.warning("refused %s: %s", peer, error)
            channel.send(refused=str(error))
            return
        channel.send(**answer)

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK):
            if time.monotonic() - self._renewed > _RENEWED:
                self._renew()
            try:
                if ranks := self._present():
                    self._members.saw(ranks)
            except (NetworkError, OSError) as error:
                _LOG.warning("cannot tell who is present: %s", error)

    # Answers.

    def _join(self, asked: Json, bound: bytes, peer: str) -> Json:
        """Answer a new machine.

        Raises:
            NetworkError: If it is refused.
        """
        id, body = str(asked.get("id")), str(asked.get("body"))
        key = self._members.key_of(id)
        expected = proof(key, "joining", bound, body)
        if not hmac.compare_digest(expected.encode(), str(asked.get("proof")).encode()):
            # The same words as for an unknown id: a stranger learns nothing about ids.
            raise NetworkError("this invitation is unknown; ask for a new one")
        try:
            wanted = json.loads(body)
            name, port = str(wanted["name"]), wanted["port"]
            is_chosen, wants_code = bool(wanted["is_chosen"]), bool(wanted["wants_code"])
            request, address = str(wanted["request"]), str(wanted["address"])
        except (ValueError, KeyError, TypeError):
            raise NetworkError("the request is incomplete; use the same version") from None
        if not NAME.fullmatch(name):
            raise NetworkError("a name has 1 to 40 letters, digits and '_.-'; choose --name")
        member, certificate = self._admit(id, name, request, is_chosen=is_chosen)
        _LOG.info("%s joined from %s, as worker %d", member.name, peer, member.rank)
        answer = {
            "rank": member.rank,
            "name": member.name,
            "certificate": certificate,
            "revoked": self._revoked(),
            # Behind network address translation the two addresses differ.
            "is_direct": address == peer and _is_open(peer, port),
            "offer": self.offer.as_json(with_code=wants_code),
        }
        text = json.dumps(answer)
        return {"body": text, "proof": proof(key, "signing", bound, text)}

    def _admit(
        self, id: str, name: str, request: str, *, is_chosen: bool
    ) -> tuple[Member, str]:
        public = parse_request(request)
        sign, signed = self._signing(public)
        digest = key_digest(
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        )
        limit = self.offer.num_workers
        member = self._members.admit(id, name, digest, limit, sign, is_chosen=is_chosen)
        return member, signed[0]

    def _signing(
        self, public: ec.EllipticCurvePublicKey
    ) -> tuple[Callable[[Rank], str], list[str]]:
        """A function that signs a certificate for a key, and the list of those in PEM."""
        signed: list[str] = []

        def sign(rank: Rank) -> str:
            certificate = issue_for(
                self._members.folder,
                rank,
                public,
                run_name=self._members.run,
                days=self._days,
            )
            signed.append(certificate.public_bytes(Encoding.PEM).decode())
            return f"{certificate.serial_number:x}"

        return sign, signed

    def _renewed_for(self, member: Member, certificate: x509.Certificate) -> Json:
        """A new certificate for the key of a member, which TLS has verified."""
        public = certificate.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)  # no other key was signed
        sign, signed = self._signing(public)
        self._members.renew(member.name, sign)
        return {"certificate": signed[0], "revoked": self._revoked()}

    def _answer_member(self, connection: ssl.SSLSocket, asked: Json) -> Json:
        """Answer a member, which TLS has verified except for revocation.

        Raises:
            NetworkError: If it is refused.
        """
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:
            raise NetworkError("only members of the run may ask this")
        serial = x509.load_der_x509_certificate(certificate).serial_number
        member = self._members.holder(serial)
        if member is None or member.state != "member":
            state = "no member of" if member is None else f"{member.state} from"
            raise NetworkError(f"this machine is {state} run {self._members.run!r}")
        match question := str(asked.get("ask")):
            case "next":
                if self._plans is None:
                    raise NetworkError(
                        "no plan is being made for this run; on the machine that invites, "
                        "start: edgegossip plan RECIPE --live"
                    )
                return self._plans(member, asked)
            case "renew":
                return self._renewed_for(member, x509.load_der_x509_certificate(certificate))
            case "revoked":
                return {"revoked": self._revoked()}
            case "members":
                rows = [asdict(each) for each in self._members.rows()]
                return {"members": rows, "now": self._members.clock()}
            case "leave":
                self._members.remove(member.name, "left")
                _LOG.info("%s has left; rank %d is free", member.name, member.rank)
                return {"left": member.name}
        raise NetworkError(f"unknown question {question!r:.40}")

    def _revoked(self) -> str:
        path = list_path(self._members.folder)
        return read_file(path).decode() if path.exists() else ""


def key_digest(public: bytes) -> str:
    """SHA-256 of a public key in DER, in hex."""
    return hashlib.sha256(public).hexdigest()


def _network_of(address: str) -> str:
    """The addresses that one attacker has: one of IPv4, 2**64 of IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _is_open(address: str, port: object) -> bool:
    """Whether a new machine, which has proved its invitation, can be called."""
    if not isinstance(port, int) or not 1024 <= port < 2**16:
        return False
    try:
        with socket.create_connection((address, port), _DIAL):
            return True
    except OSError:
        return False
