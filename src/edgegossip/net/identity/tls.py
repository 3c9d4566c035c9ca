"""Files for mutual TLS, which identify a worker and its peers; they may change during a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from edgegossip.contract.errors import NetworkError
from edgegossip.machine.system import others_may_read
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import (
    Holder,
    authority_paths,
    common_name,
    holder_folder,
    holder_name,
    holder_option,
    holder_paths,
    is_pair,
    parse_certificates,
    parse_key,
    parse_serial,
    read_file,
)
from edgegossip.net.identity.revocation import (
    Revocations,
    authority_id,
    constrain,
    list_path,
    parse_lists,
)

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from edgegossip.contract.protocol import Rank, Seconds

_LOG = logging.getLogger("edgegossip.net")
_SOON = timedelta(days=7)
_COMPLAIN = 3
_EARLY: Seconds = 1.0
"""Seconds before the end of the own certificate at which links are closed. Sent frames still
arrive, and no link is reopened in the last second; see `ExpiredLinks`.
"""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """Validated contents of a worker's or router's files.

    Args:
        ca: Certificates of the authorities, in PEM.
        certificate: The worker's certificate, in PEM.
        key: The worker's private key, in PEM.
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def authorities(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates(self.ca)

    @property
    def holder(self) -> x509.Certificate:
        return x509.load_pem_x509_certificates(self.certificate)[0]

    @property
    def end(self) -> datetime:
        """End of the certificate's validity."""
        return self.holder.not_valid_after_utc


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a worker or router, and the invalid certificates that it knows about.

    Args:
        identity: Contents of the files.
        revocations: Certificates revoked by the authorities.
        banned: Serial numbers of further certificates that this machine rejects.
        run_names: Names of runs whose bound certificates are valid; unbound certificates
            always are.
    """

    identity: IdentityFiles
    revocations: Revocations
    banned: frozenset[int] = frozenset()
    run_names: frozenset[str] = frozenset()

    @property
    def is_revoked(self) -> bool:
        """Whether this worker's own certificate is revoked."""
        return self._revokes(self.identity.holder)

    def is_of(self, rank: Rank, certificate: x509.Certificate) -> bool:
        """Whether `certificate` was issued by an authority for worker `rank` of this run."""
        # Name and signature: an authority may also have issued certificates for other purposes.
        names = (holder_name(rank, name) for name in (None, *self.run_names))
        return common_name(certificate.subject) in names and any(
            has_signed(authority, certificate) for authority in self.identity.authorities
        )

    def flaw(self, certificate: x509.Certificate, now: datetime) -> str | None:
        """The reason why an issued certificate is invalid at `now`; None if it is valid."""
        # Also for a certificate in a seal, which no handshake has checked.
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begin <= now <= end:
            return f"valid from {_moment(begin)} to {_moment(end)}"
        is_out = certificate.serial_number in self.banned or self._revokes(certificate)
        return "revoked" if is_out else None

    def _revokes(self, certificate: x509.Certificate) -> bool:
        # Serial numbers are unique only within one authority.
        return any(
            certificate.serial_number in self._revoked(authority)
            and has_signed(authority, certificate)
            for authority in self.identity.authorities
        )

    def _revoked(self, authority: x509.Certificate) -> frozenset[int]:
        revoked = self.revocations.get(authority_id(authority))
        return revoked.serials if revoked else frozenset()

    def anchors(self) -> bytes:
        """The authorities in PEM, constrained so that TLS rejects revoked certificates.

        Raises:
            NetworkError: If there are more revocations than TLS supports.
        """
        anchors = []
        for authority in self.identity.authorities:
            constrained = constrain(authority, self.banned | self._revoked(authority))
            anchors.append(constrained.public_bytes(Encoding.PEM))
        return b"".join(anchors)


@dataclass(frozen=True, slots=True)
class TLS:
    """The files that identify a worker, router or observer and its peers; all in PEM.

    Any authority works if it signs workers' certificates directly, with ``worker-R`` as common
    name and an elliptic-curve key. A holder of the name ``edgegossip-router`` can impersonate
    any worker. A revocable certificate needs the DNS name ``SERIAL.edgegossip``, with its
    serial number in hex. All its DNS names must be well-formed. Revocation lists must be
    complete, not delta or partitioned.

    Args:
        ca: Certificate of the authority, or of both authorities during a change.
        certificate: Certificate of the worker or router.
        key: Private key, without a password.
        revoked: The authorities' lists of revoked certificates, if the file exists.
        banned: Serial numbers of further certificates to reject.
    """

    ca: Path
    certificate: Path
    key: Path
    revoked: Path | None = None
    banned: frozenset[int] = frozenset()

    @classmethod
    def from_folder(cls, folder: Path | str, rank: Holder, banned: Iterable[int] = ()) -> TLS:
        """The files of worker `rank`, or of routers, as `edgegossip certs` names them.

        They are in `folder` itself, or in its own folder there (``worker-R`` or ``router``).

        >>> TLS.from_folder("certs", 2).certificate.as_posix()
        'certs/worker-2.pem'
        """
        folder = Path(folder)
        if (own := holder_folder(folder, rank)).is_dir():
            folder = own
        return cls(
            authority_paths(folder)[0],
            *holder_paths(folder, rank),
            list_path(folder),
            frozenset(banned),
        )

    def check(self, rank: Holder, run_names: Collection[str] | None = None) -> Credentials:
        """Validate the files before the start; with an invalid file, links would never open.

        A key that other users can read, or a certificate that expires soon, causes a warning.

        Args:
            rank: Worker that the certificate must be for; None for routers, `OBSERVER` for
                observers.
            run_names: Names of runs that the certificate may be bound to; None for any run.

        Raises:
            NetworkError: If a file is missing or damaged; if the certificate is not for
                worker `rank` (or routers), is bound to other runs, is revoked, is not valid
                now, is not signed by an authority in `ca`, or does not match `key`; or if the
                revocation list is not from an authority in `ca`.
        """
        # First the identity: revocations are read with its authorities.
        identity = self.identity(rank, run_names)
        self.warn(identity)
        revocations, names = self.revocations(identity), frozenset(run_names or ())
        credentials = Credentials(identity, revocations, self.banned, names)
        if credentials.is_revoked:
            raise NetworkError(
                f"{self.certificate} has been revoked, and no other worker accepts it; issue "
                "a new one"
            )
        credentials.anchors()  # raises if there are too many revocations for TLS
        return credentials

    def contents(self) -> list[bytes | None]:
        """Contents of the files, valid or not; None for a file that cannot be read."""
        contents: list[bytes | None] = []
        for path in (self.ca, self.certificate, self.key, self.revoked):
            # A file that is just being replaced may be missing for a moment.
            try:
                contents.append(None if path is None else path.read_bytes())
            except OSError:
                contents.append(None)
        return contents

    def identity(self, rank: Holder, run_names: Collection[str] | None) -> IdentityFiles:
        """Read the identity; see `check`.

        Raises:
            NetworkError: See `check`.
        """
        for path in (self.ca, self.certificate, self.key):
            if not path.exists():
                raise NetworkError(
                    f"{path} is missing; make it where the authority is (edgegossip certs "
                    f"issue {holder_option(rank)}) and copy its folder to this machine"
                )
        identity = IdentityFiles(
            *(read_file(path) for path in (self.ca, self.certificate, self.key))
        )
        certificate = parse_certificates(identity.certificate, self.certificate)[0]
        self._check_name(certificate, rank, run_names)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        now = datetime.now(UTC)
        if not begin <= now <= end:
            raise NetworkError(
                f"{self.certificate} is valid from {_moment(begin)} to {_moment(end)}, and it "
                f"is {_moment(now)} here; set the clock, or issue another"
            )
        # The signature comes before the key, because its error names the more likely mistake.
        self._check_signature(certificate, parse_certificates(identity.ca, self.ca))
        if not is_pair(certificate, parse_key(identity.key, self.key)):
            raise NetworkError(
                f"{self.key} is not the key of {self.certificate}; copy both from one place"
            )
        return identity

    def revocations(
        self, identity: IdentityFiles, in_force: Revocations | None = None
    ) -> Revocations:
        """Read the authorities' revocations; see `parse_lists`.

        Raises:
            NetworkError: See `check`.
        """
        # A missing file is no error, as most authorities have revoked nothing. `parse_lists`
        # refuses it once a list has been in force.
        if self.revoked is None:
            return {}
        content = read_file(self.revoked) if self.revoked.exists() else b""
        return parse_lists(content, self.revoked, identity.authorities, in_force)

    def _check_name(
        self,
        certificate: x509.Certificate,
        rank: Holder,
        run_names: Collection[str] | None,
    ) -> None:
        name = common_name(certificate.subject)
        holder, _, run_name = name.partition("@")
        if holder != holder_name(rank):
            raise NetworkError(
                f"{self.certificate} is for {name!r}, not for {holder_name(rank)!r}; give "
                "its own certificate, or another --rank"
            )
        if run_name and run_names is not None and run_name not in run_names:
            option = "--name" if isinstance(rank, int) else "--run"
            raise NetworkError(
                f"{self.certificate} is valid only in runs named {run_name!r}; give {option} "
                f"{run_name}, or give another certificate"
            )

    def _check_signature(
        self, certificate: x509.Certificate, authorities: Sequence[x509.Certificate]
    ) -> None:
        if not any(has_signed(authority, certificate) for authority in authorities):
            names = " or ".join(repr(common_name(each.subject)) for each in authorities)
            raise NetworkError(
                f"{self.certificate} is signed by {common_name(certificate.issuer)!r} and not "
                f"by the authority in {self.ca}, {names}; all workers need certificates of "
                "one authority"
            )

    def warn(self, identity: IdentityFiles) -> None:
        """Log warnings about the identity; see `check`."""
        if others_may_read(self.key):
            _LOG.warning(
                "other users of this machine can read %s, and then impersonate its owner; "
                "use: chmod 600 %s",
                self.key,
                self.key,
            )
        if identity.end - datetime.now(UTC) < _SOON:
            _LOG.warning(
                "%s expires on %s, and links close then; replace it before",
                self.certificate,
                _moment(identity.end),
            )


class CertificateWatch:
    """Watches the files of a worker or router for valid changes.

    Damaged or untrusted files change nothing: the last valid certificates and revocation lists
    stay in use, and a line is logged.

    Args:
        tls: The files.
        rank: Worker that owns the files; None for routers, `OBSERVER` for observers.
        run_names: Names of runs that the certificate may be bound to.

    Raises:
        NetworkError: If the files are invalid now; see `TLS.check`.
    """

    def __init__(self, tls: TLS, rank: Holder, run_names: Collection[str]) -> None:
        self.tls = tls
        self._rank = rank
        self._run_names = run_names
        self._contents = tls.contents()
        self.current = tls.check(rank, run_names)
        # Number of failures in a row of the same contents, by outcome.
        self._failures: Counter[str] = Counter()

    @property
    def seconds_left(self) -> Seconds:
        """Seconds until links must be closed, because the current certificate expires."""
        return (self.current.identity.end - datetime.now(UTC)).total_seconds() - _EARLY

    def complain_of_expiry(self) -> None:
        """Log that the current certificate expires now, and what to do."""
        _LOG.error(
            "%s expires at %s, so all links are closed and nothing can be exchanged; make a "
            "new one where the authority is (edgegossip certs issue %s --replace) and copy it "
            "and its key to this machine, where they take effect within seconds",
            self.tls.certificate,
            f"{self.current.identity.end:%Y-%m-%d %H:%M:%S} UTC",
            holder_option(self._rank),
        )

    def poll(self) -> Credentials | None:
        """Read the files if they have changed; return new credentials, if any."""
        contents = self.tls.contents()
        if contents != self._contents:
            self._failures.clear()
        elif not self._failures:
            return None
        # Failed files are read again although they have not changed: a certificate that is not
        # valid yet becomes valid, and the clock of this machine may have been set.
        self._contents = contents
        before = self.current
        # Two steps, so that a damaged list does not keep a new certificate from being used, nor
        # a damaged certificate new revocations.
        identity = self._try(
            "the current certificates stay in use",
            lambda: self.tls.identity(self._rank, self._run_names),
            before.identity,
        )
        after = self._try(
            "the earlier revocations stay in force, without new ones",
            lambda: self._with_revocations(replace(before, identity=identity)),
            replace(before, identity=identity),
        )
        if after == before:
            return None
        self.current = after
        if after.identity != before.identity:
            self.tls.warn(after.identity)
        if after.is_revoked:
            _LOG.error("%s is revoked; other workers close their links", self.tls.certificate)
        return after

    def _with_revocations(self, credentials: Credentials) -> Credentials:
        revocations = self.tls.revocations(credentials.identity, credentials.revocations)
        credentials = replace(credentials, revocations=revocations)
        credentials.anchors()  # raises if there are too many
        return credentials

    def _try(self, consequence: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            result = read()
        except (NetworkError, OSError, ValueError, UnsupportedAlgorithm) as error:
            self._failures[consequence] += 1
            # Wait: the administrator may be replacing one file after the other.
            if self._failures[consequence] == _COMPLAIN:
                _LOG.error("%s: %s", consequence, error)
            return otherwise
        del self._failures[consequence]
        return result


def has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether `authority` has issued `certificate` directly."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def load_tls(
    folder: Path | str | None,
    rank: Holder,
    run_names: Collection[str] = (),
    ban: Iterable[str] = (),
) -> TLS | None:
    """Find and validate the files of worker `rank`, or of routers; see `require_tls`.

    Args:
        folder: Folder of the files; None if there are none.
        rank: The worker; None for a router, `OBSERVER` for an observer.
        run_names: Names of runs that its certificate may be bound to.
        ban: Serial numbers, in hex, of certificates to reject.

    Raises:
        NetworkError: See `TLS.check`; also if `ban` is given without `folder`.
        ValueError: If a serial number in `ban` is malformed.
    """
    banned = [parse_serial(each) for each in ban]
    if folder is None:
        if banned:
            raise NetworkError("--ban rejects certificates, so it needs --tls FOLDER")
        return None
    tls = TLS.from_folder(folder, rank, banned)
    tls.check(rank, run_names)
    return tls


def require_tls(address: Address, tls: TLS | None, *, insecure: bool) -> None:
    """Refuse to start if strangers could eavesdrop or take part.

    Args:
        address: Endpoints at which this worker listens, and to which it connects.
        tls: Its certificates, if any.
        insecure: Whether the user has allowed plain connections.

    Raises:
        NetworkError: If `address` reaches beyond this machine with neither `tls` nor
            `insecure`, or has endpoints that do not match `tls`.
    """
    endpoints = (*address.listen, *address.connect)
    encrypted = [endpoint for endpoint in endpoints if endpoint.startswith("tls/")]
    if tls is None and encrypted:
        raise NetworkError(
            f"{encrypted[0]} needs certificates; make them with: edgegossip certs init"
        )
    # One plain endpoint would be a way around the certificates of all others.
    if tls is not None and len(encrypted) < len(endpoints):
        plain = next(endpoint for endpoint in endpoints if endpoint not in encrypted)
        raise NetworkError(
            f"{plain} is not encrypted; with certificates, every endpoint is tls/HOST:PORT"
        )
    if tls is not None or (address.is_loopback and not address.multicast):
        return
    where = "multicast discovery" if address.multicast else ", ".join(endpoints)
    if not insecure:
        raise NetworkError(
            f"{where} reaches beyond this machine, where anyone could read and send; make "
            "certificates (edgegossip certs init), or give --insecure in a network that you "
            "trust"
        )
    _LOG.warning("nothing is encrypted, and no peer has to prove who it is: %s", where)
