"""The project's own certificates: of the authority, workers, routers and observers."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgegossip.contract.errors import NetworkError
from edgegossip.machine.files import locked_file, write_whole

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from edgegossip.contract.protocol import Rank

_LOG = logging.getLogger("edgegossip.net")

# Validity starts a day early: a machine without a clock battery boots with an old time.
CLOCK_TOLERANCE = timedelta(days=1)

# Every worker listens and connects.
_PURPOSES = x509.ExtendedKeyUsage(
    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
)

RUN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""Names of runs that a certificate can be bound to; a common name has at most 64 characters."""

_LABEL = r"[A-Za-z0-9_](?:[\w-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*(?!\d+$){_LABEL}", re.ASCII)
SERVICE = "edgegossip-enrollment"
"""The common name of the signing service, which no access control knows."""
_AUTHORITY = "authority"
_ISSUED = "issued.pem"
REVOKED = "revoked.pem"
"""Name of the file with the list of revoked certificates."""

Lifetime: TypeAlias = tuple[datetime, datetime]
OBSERVER: Final = "observer"
"""The holder of a certificate that may read what workers say about themselves."""
Holder: TypeAlias = "Rank | Literal['observer'] | None"
"""The holder of a certificate: a worker, an observer, or None for a router."""


def holder_name(holder: Holder, run_name: str | None = None) -> str:
    """The common name of a certificate, which access control uses.

    >>> holder_name(3), holder_name(None), holder_name(OBSERVER)
    ('worker-3', 'edgegossip-router', 'edgegossip-observer')
    >>> holder_name(3, "night")  # valid only in runs of this name
    'worker-3@night'
    """
    # Reserved names: no authority gives them to a machine.
    name = f"worker-{holder}" if isinstance(holder, int) else f"edgegossip-{_kind(holder)}"
    return name if run_name is None else f"{name}@{run_name}"


def _kind(holder: Literal["observer"] | None) -> str:
    return "router" if holder is None else holder


def holder_option(holder: Holder) -> str:
    """The option of the `certs` commands for a holder.

    >>> holder_option(3), holder_option(None)
    ('--rank 3', '--router')
    """
    return f"--rank {holder}" if isinstance(holder, int) else f"--{_kind(holder)}"


def serial_name(serial: int) -> str:
    """A DNS name that is unique among the certificates of an authority.

    TLS compares it with the authority's excluded names; see `revocation`.

    >>> serial_name(0xBEEF)
    'beef.edgegossip'
    """
    return f"{serial:x}.edgegossip"


def parse_serial(text: str) -> int:
    """Parse a serial number in hex, as `edgegossip certs list` and openssl write it.

    >>> parse_serial("BE:EF")
    48879

    Raises:
        ValueError: If `text` is malformed.
    """
    digits = text.replace(":", "")
    if not re.fullmatch(r"[0-9A-Fa-f]{1,40}", digits):
        raise ValueError(
            f"a serial number has 1 to 40 hexadecimal digits, got {text!r}; see: edgegossip "
            "certs list, or openssl x509 -noout -serial -in CERTIFICATE"
        )
    return int(digits, 16)


def authority_paths(folder: Path) -> tuple[Path, Path]:
    """Paths in `folder` of the authority's certificate (which all workers need) and key."""
    return folder / "ca.pem", folder / "ca-key.pem"


def holder_paths(folder: Path, holder: Holder) -> tuple[Path, Path]:
    """Paths in `folder` of the certificate and key of a holder."""
    name = holder_folder(folder, holder).name
    return folder / f"{name}.pem", folder / f"{name}-key.pem"


def authority_folder(folder: Path) -> Path:
    """The authority's own folder in the folder of the `certs` commands.

    In an older form, all files were in `folder` itself, which still works.
    """
    is_flat = authority_paths(folder)[1].exists()
    return folder if is_flat else folder / _AUTHORITY


def holder_folder(folder: Path, holder: Holder) -> Path:
    """The folder of a holder, with all that belongs on its machine."""
    return folder / (holder_name(holder) if isinstance(holder, int) else _kind(holder))


def make_authority(folder: Path, *, days: int = 3650, begin: datetime | None = None) -> Path:
    """Make the authority that signs all workers' certificates.

    The holder of its key can impersonate any worker, so the key should not leave this machine.

    Args:
        folder: Folder for the certificate and the key, made if missing.
        days: Validity in days, at least 1.
        begin: Time from which `days` count; by default now.

    Returns:
        Path of the authority's certificate.

    Raises:
        NetworkError: If `folder` already has an authority or cannot be written to.
    """
    lifetime = _lifetime(days, begin)
    paths = authority_paths(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    # Each authority has its own name, so that an error can tell two of them apart.
    name = _name(f"edgegossip authority {secrets.token_hex(4)}")
    certificate = (
        _builder(name, name, key.public_key(), key.public_key(), lifetime)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    with changing(folder):
        _refuse_to_overwrite(paths, "delete it first")
        _write_pair(paths, certificate, key)
    return paths[0]


def issue(
    folder: Path,
    ranks: Sequence[Holder],
    hosts: Sequence[str] = (),
    *,
    run_name: str | None = None,
    replace: bool = False,
    days: int = 365,
    begin: datetime | None = None,
    out: Path | None = None,
) -> list[Path]:
    """Make a key and a certificate for each worker in `ranks`, for routers, or for observers.

    Args:
        folder: Folder of the authority.
        ranks: At least one worker; None for routers, which can speak for any worker, and
            `OBSERVER` for observers, which can only read.
        hosts: Names and addresses of their machines, for programs that check them; workers
            check ranks.
        run_name: Name of the runs in which the certificates are valid; None for all runs.
        replace: Replace earlier files; the old certificates stay valid until they expire or are
            revoked.
        days: Validity of a certificate in days, at least 1; limited by the authority's.
        begin: Time from which `days` count; by default now.
        out: Folder for one folder per worker, with all files that it needs; None puts the new
            files beside the authority's.

    Returns:
        Paths of the certificates.

    Raises:
        NetworkError: If `folder` has no authority; if, without `replace`, it already has one of
            the files; or if it cannot be written to. All files are checked before any is
            written.
        ValueError: If an argument is out of range.
    """
    if (
        not ranks
        or len(set(ranks)) < len(ranks)
        or any(isinstance(r, int) and r < 0 for r in ranks)
    ):
        raise ValueError(f"ranks must be different and at least 0, got {list(ranks)}")
    if run_name is not None and not RUN_NAME.fullmatch(run_name):
        raise ValueError(
            f"run must have 1 to 40 letters, digits and '_.-', which access control can "
            f"compare, got {run_name!r}"
        )
    begin, end = _lifetime(days, begin)
    names = [_alternative_name(host) for host in hosts]
    places = [folder if out is None else holder_folder(out, rank) for rank in ranks]
    paths = [holder_paths(place, rank) for place, rank in zip(places, ranks, strict=True)]
    authority, authority_key = load_authority(folder)
    # A certificate that outlives its authority would only look valid.
    lifetime = begin, min(end, authority.not_valid_after_utc)
    with changing(folder):
        # All of them first, so that a mistake leaves nothing half done.
        if not replace:
            _refuse_to_overwrite((path for pair in paths for path in pair), "--replace it")
        for rank, pair in zip(ranks, paths, strict=True):
            key = ec.generate_private_key(ec.SECP256R1())
            holder = holder_name(rank, run_name)
            signed = _sign(holder, key.public_key(), names, lifetime, authority, authority_key)
            _record(folder, signed)
            publish(folder, pair[0].parent)
            _write_pair(pair, signed, key)
    return [certificate for certificate, _ in paths]


def issue_for(
    folder: Path,
    rank: Rank,
    key: ec.EllipticCurvePublicKey,
    *,
    run_name: str,
    days: int = 365,
    begin: datetime | None = None,
) -> x509.Certificate:
    """Sign a certificate of worker `rank` for a key that was made on another machine.

    Args:
        folder: Folder of the authority.
        rank: The worker.
        key: Public key of its machine, which has proved that it owns the private one.
        run_name: Name of the runs in which the certificate is valid.
        days: Validity in days; limited by the authority's.
        begin: Time from which `days` count; by default now.

    Raises:
        NetworkError: If `folder` has no authority, or cannot be written to.
        ValueError: If `days` is out of range.
    """
    begin, end = _lifetime(days, begin)
    authority, authority_key = load_authority(folder)
    lifetime = begin, min(end, authority.not_valid_after_utc)
    holder = holder_name(rank, run_name)
    with changing(folder):
        signed = _sign(holder, key, (), lifetime, authority, authority_key)
        _record(folder, signed)
    return signed


def make_service_identity(folder: Path, *, days: int = 2) -> tuple[bytes, bytes]:
    """Make a certificate and a key of the signing service, in PEM, without writing them.

    No link accepts the certificate, because its name is neither a worker's nor a router's.

    Raises:
        NetworkError: If `folder` has no authority.
    """
    authority, authority_key = load_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    lifetime = _lifetime(days, None)
    signed = _sign(SERVICE, key.public_key(), (), lifetime, authority, authority_key)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return signed.public_bytes(Encoding.PEM), pem


def _record(folder: Path, certificate: x509.Certificate) -> None:
    # Before the certificate is handed out, so that the authority knows of every one in use.
    path = folder / _ISSUED
    known = read_file(path) if path.exists() else b""
    write_file(path, known + certificate.public_bytes(Encoding.PEM), mode=0o644)


def _sign(
    holder: str,
    key: ec.EllipticCurvePublicKey,
    names: Iterable[x509.GeneralName],
    lifetime: Lifetime,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    serial = x509.random_serial_number()
    own_names = [holder.partition("@")[0], serial_name(serial)]
    builder = (
        _builder(_name(holder), authority.subject, key, authority_key.public_key(), lifetime)
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
    )
    all_names = x509.SubjectAlternativeName([*map(x509.DNSName, own_names), *names])
    for extension in (_PURPOSES, all_names):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority_key, hashes.SHA256())


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Let one process at a time change the files of an authority; the others wait.

    Raises:
        NetworkError: If `folder` cannot be written to.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            problem = stack.enter_context(locked_file(folder / ".lock", wait=True))
        except OSError as error:
            raise NetworkError(f"cannot write to {folder}: {error.strerror}") from error
        if problem is not None:
            _LOG.warning("%s", problem)
        yield


def publish(folder: Path, *holders: Path) -> None:
    """Copy the public files of the authority in `folder` to the folders of workers.

    Raises:
        NetworkError: If a file cannot be read or written.
    """
    for holder in holders:
        for name in (authority_paths(folder)[0].name, REVOKED):
            source, target = folder / name, holder / name
            content = read_file(source) if source.exists() else b""
            # A worker may trust further authorities during a change.
            is_known = target.exists() and content in read_file(target)
            if content and not is_known:
                write_file(target, content, mode=0o644)


def issued(folder: Path) -> list[x509.Certificate]:
    """All certificates that the authority in `folder` has issued, the oldest first.

    Raises:
        NetworkError: If the list file is damaged.
    """
    path = folder / _ISSUED
    return load_certificates(path) if path.exists() else []


def load_certificate(path: Path) -> x509.Certificate:
    """Read the first certificate in a PEM file; see `load_certificates`."""
    return load_certificates(path)[0]


def load_certificates(path: Path) -> list[x509.Certificate]:
    """Read one or more certificates from a PEM file.

    Raises:
        NetworkError: If the file is missing or has no certificate.
    """
    return parse_certificates(read_file(path), path)


def parse_certificates(content: bytes, path: Path) -> list[x509.Certificate]:
    """Read one or more certificates from the PEM `content` of the file `path`.

    Raises:
        NetworkError: If `content` has no certificate.
    """
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise NetworkError(f"{path} is not a certificate in PEM; make it again") from None


def common_name(name: x509.Name) -> str:
    """Common name in a subject or an issuer; empty if there is none."""
    names = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def load_key(path: Path) -> PrivateKeyTypes:
    """Read a private key in PEM.

    Raises:
        NetworkError: If the file is missing, is not a key, or needs a password.
    """
    return parse_key(read_file(path), path)


def parse_key(content: bytes, path: Path) -> PrivateKeyTypes:
    """Read the private key in the PEM `content` of the file `path`.

    Raises:
        NetworkError: If `content` is not a key or needs a password.
    """
    try:
        return load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise NetworkError(
            f"{path} is not a private key in PEM without a password; make it again"
        ) from None


def is_pair(certificate: x509.Certificate, key: PrivateKeyTypes) -> bool:
    """Whether the private `key` belongs to `certificate`."""
    public, certified = (
        each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for each in (key.public_key(), certificate.public_key())
    )
    return public == certified


def load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the certificate and the key of the authority in `folder`.

    Raises:
        NetworkError: If `folder` has no authority, or its authority has expired.
    """
    certificate_path, key_path = authority_paths(folder)
    if not (certificate_path.exists() and key_path.exists()):
        out = folder.parent if folder.name == _AUTHORITY else folder
        raise NetworkError(
            f"{folder} has no authority ({certificate_path.name} and {key_path.name}); make "
            f"one with: edgegossip certs init --out {out}"
        )
    certificate, key = load_certificate(certificate_path), load_key(key_path)
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and is_pair(certificate, key)):
        raise NetworkError(f"{key_path} is not the key of {certificate_path}; make both again")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise NetworkError(
            f"the authority in {folder} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; "
            "make another in a new folder, and new certificates for all workers"
        )
    return certificate, key


def _lifetime(days: int, begin: datetime | None) -> Lifetime:
    begin = datetime.now(UTC) if begin is None else begin
    # X.509 needs whole seconds, and cannot represent the year 10000.
    last = (datetime(9999, 12, 31, tzinfo=UTC) - begin).days
    if not 1 <= days <= last:
        raise ValueError(f"days must be in 1 .. {last}, got {days}")
    begin = begin.replace(microsecond=0)
    return begin - CLOCK_TOLERANCE, begin + timedelta(days=days)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    with suppress(UnicodeError):
        name = host.encode("idna").decode()
        # TLS requires this: once a name is revoked, it rejects certificates with any other
        # form.
        if _HOST.fullmatch(name):
            return x509.DNSName(name)
    raise ValueError(f"host must be a name or an IP address, without a port, got {host!r}")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    own: ec.EllipticCurvePublicKey,
    above: ec.EllipticCurvePublicKey,
    lifetime: Lifetime,
) -> x509.CertificateBuilder:
    above_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(above)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own)
        .not_valid_before(lifetime[0])
        .not_valid_after(lifetime[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(above_id, critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _refuse_to_overwrite(paths: Iterable[Path], remedy: str) -> None:
    for path in paths:
        if path.exists():
            raise NetworkError(
                f"{path} exists and is left as it is; {remedy}, or choose another --out"
            )


def _write_pair(
    paths: tuple[Path, Path], certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    certificate_path, key_path = paths
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # The key comes first, so that a process that finds the certificate also finds its key.
    write_file(key_path, pem, mode=0o600)
    write_file(certificate_path, certificate.public_bytes(Encoding.PEM), mode=0o644)


def write_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write `path` atomically.

    Raises:
        NetworkError: If `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, mode=mode)
    except OSError as error:
        raise NetworkError(f"cannot write {path}: {error.strerror}") from error


def read_file(path: Path) -> bytes:
    """Read `path`.

    Raises:
        NetworkError: If `path` cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise NetworkError(f"cannot read {path}: {error.strerror}") from error
