"""Revoked certificates: the authority's list, and its enforcement by TLS.

Zenoh 1.10 reads no revocation lists (eclipse-zenoh/zenoh#2749 would change that), and its
access control knows only common names, which a worker's old and new certificates share.
However, its TLS enforces the authorities' name constraints in both directions. Each certificate
therefore has a DNS name made from its serial number, and zenoh is given the authority with the
names of revoked certificates excluded. A handshake with such a certificate fails.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import (
    REVOKED,
    Holder,
    changing,
    common_name,
    holder_name,
    issued,
    load_authority,
    publish,
    read_file,
    serial_name,
    write_file,
)

_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)

# Zenoh's TLS rejects longer certificates; this holds about a thousand revoked ones.
_MOST_BYTES = 0xFFFF


@dataclass(frozen=True, slots=True)
class Revoked:
    """Revoked certificates of one authority.

    Args:
        number: Number of its list, which increases with each change; 0 without a list.
        serials: Serial numbers of the certificates.
    """

    number: int
    serials: frozenset[int]


Revocations: TypeAlias = Mapping[bytes, Revoked]
"""Revocations by authority id."""


def authority_id(authority: x509.Certificate) -> bytes:
    """Name and key of an authority, which are the same in all its certificates."""
    key = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return authority.subject.public_bytes() + key


def list_path(folder: Path) -> Path:
    """Path of the list of revoked certificates in `folder`."""
    return folder / REVOKED


def revoke(
    folder: Path,
    ranks: Sequence[Holder] = (),
    serials: Sequence[int] = (),
    holders: Iterable[Path] = (),
) -> list[int]:
    """Add certificates to the revocation list of the authority in `folder`.

    Expired certificates are removed from the list, because no one accepts them anyway.

    Args:
        folder: Folder of the authority.
        ranks: Workers, None for routers, or `OBSERVER`; all their certificates are revoked.
        serials: Serial numbers of individual certificates.
        holders: Folders of workers on this machine, which get the list too.

    Returns:
        The serial numbers that were added to the list.

    Raises:
        NetworkError: If `folder` has no authority, a damaged list, or no certificate of one
            of `ranks`; or if the list grows too long.
    """
    authority, key = load_authority(folder)
    # Read and written under one lock; else two commands at once would each lose the other's.
    with changing(folder):
        before = _on_list(folder, authority)
        known = issued(folder)
        new = {
            *serials,
            *(serial for rank in ranks for serial in _serials(folder, known, rank)),
        }
        now = datetime.now(UTC)
        expired = {each.serial_number for each in known if each.not_valid_after_utc < now}
        after = Revoked(before.number + 1, (before.serials | new) - expired)
        constrain(authority, after.serials)  # raises if it is too long for TLS
        write_file(list_path(folder), _sign(after, authority, key), mode=0o644)
        publish(folder, *holders)
    return sorted(after.serials - before.serials)


def revoked_serials(folder: Path) -> frozenset[int]:
    """Serial numbers that the authority in `folder` has revoked.

    Raises:
        NetworkError: If `folder` has no authority, or a damaged list.
    """
    return _on_list(folder, load_authority(folder)[0]).serials


def parse_lists(
    content: bytes,
    path: Path,
    authorities: Collection[x509.Certificate],
    in_force: Revocations | None = None,
) -> Revocations:
    """Read the lists in the PEM `content` of the file `path` and verify their signatures.

    Lists do not expire, because a revoked certificate must not become valid again.

    Args:
        content: Contents of the file; empty if the file is missing.
        path: Path of the file.
        authorities: Authorities that may have signed the lists.
        in_force: Current lists; new lists must not be older.

    Raises:
        NetworkError: If `content` has anything but lists signed by `authorities`, or if a list
            is missing from it or older than in `in_force`.
    """
    lists: dict[bytes, Revoked] = {}
    pieces = _LIST.findall(content)
    if content and len(pieces) != max(1, content.count(b"-----BEGIN")):
        raise NetworkError(
            f"{path} is not a list of revoked certificates in PEM; copy it again"
        )
    for piece in pieces:
        authority, revoked = _parse_list(piece, path, authorities)
        earlier = lists.get(authority)
        # A file may hold the former list, too, if somebody has appended the new one.
        if earlier is None or earlier.number < revoked.number:
            lists[authority] = revoked
    for authority, name in {
        authority_id(a): common_name(a.subject) for a in authorities
    }.items():
        # An older list would make a revoked certificate valid again.
        now, earlier = lists.get(authority), (in_force or {}).get(authority)
        if earlier is not None and (now is None or now.number < earlier.number):
            given = "no list" if now is None else f"list {now.number}"
            raise NetworkError(
                f"{path} has {given} of {name!r}, whose list {earlier.number} is in force; "
                "copy the newest one"
            )
    return lists


def constrain(authority: x509.Certificate, serials: Iterable[int]) -> x509.Certificate:
    """Return `authority` with a constraint that makes TLS reject these serial numbers.

    The name and key stay the same. TLS does not verify the signature of a trusted certificate,
    so a temporary key signs the result.

    Raises:
        NetworkError: If there are more `serials` than TLS supports.
    """
    excluded: list[x509.GeneralName] = [x509.DNSName(serial_name(each)) for each in serials]
    permitted = None
    if not excluded:
        return authority
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(authority.subject)
        .issuer_name(authority.subject)
        .public_key(authority.public_key())
        .serial_number(authority.serial_number)
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
    )
    for extension in authority.extensions:
        if isinstance(extension.value, x509.NameConstraints):
            permitted = extension.value.permitted_subtrees
            excluded += extension.value.excluded_subtrees or []
        else:
            builder = builder.add_extension(extension.value, extension.critical)
    constraints = x509.NameConstraints(permitted, excluded)
    constrained = builder.add_extension(constraints, critical=True).sign(key, hashes.SHA256())
    if len(constrained.public_bytes(Encoding.DER)) > _MOST_BYTES:
        raise NetworkError(
            f"{len(excluded)} certificates of {common_name(authority.subject)!r} are too many "
            "to revoke; make a new authority, and certificates for the remaining workers"
        )
    return constrained


def _on_list(folder: Path, authority: x509.Certificate) -> Revoked:
    path = list_path(folder)
    content = read_file(path) if path.exists() else b""
    lists = parse_lists(content, path, [authority])
    return lists.get(authority_id(authority), Revoked(0, frozenset()))


def _serials(folder: Path, known: Sequence[x509.Certificate], rank: Holder) -> Iterable[int]:
    whose = holder_name(rank)
    found = [
        each.serial_number
        for each in known
        # This includes certificates that are valid in some runs only.
        if common_name(each.subject).partition("@")[0] == whose
    ]
    if not found:
        raise NetworkError(
            f"{folder} lists no certificate of {whose!r}; give its --serial, which is in the "
            "certificate (edgegossip certs list)"
        )
    return found


def _sign(
    revoked: Revoked, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> bytes:
    now = datetime.now(UTC)
    key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(authority.not_valid_after_utc)  # X.509 requires one
        .add_extension(x509.CRLNumber(revoked.number), critical=False)
        .add_extension(key_id, critical=False)
    )
    for serial in sorted(revoked.serials):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _parse_list(
    piece: bytes, path: Path, authorities: Collection[x509.Certificate]
) -> tuple[bytes, Revoked]:
    try:
        parsed = x509.load_pem_x509_crl(piece)
        serials = frozenset(entry.serial_number for entry in parsed)
        numbers = [
            e.value.crl_number for e in parsed.extensions if isinstance(e.value, x509.CRLNumber)
        ]
        # X.509 marks lists that hold only a part with critical extensions.
        is_whole = not any(extension.critical for extension in parsed.extensions)
    except (ValueError, x509.DuplicateExtension) as error:
        raise NetworkError(
            f"{path} is damaged ({error}); copy the list of revoked certificates again"
        ) from None
    for authority in authorities:
        if _has_made(authority, parsed):
            break
    else:
        raise NetworkError(
            f"{path} has a list of {common_name(parsed.issuer)!r} that no authority in ca.pem "
            "has signed; copy the list that the authority made"
        )
    if not is_whole:
        raise NetworkError(
            f"{path} has a list of only part of the revoked certificates; give the whole list"
        )
    return authority_id(authority), Revoked(max(numbers, default=0), serials)


def _has_made(authority: x509.Certificate, revoked: x509.CertificateRevocationList) -> bool:
    key = authority.public_key()
    if authority.subject != revoked.issuer:
        return False
    try:
        return revoked.is_signature_valid(key)  # type: ignore[arg-type]  # others: TypeError
    except (InvalidSignature, TypeError, ValueError):
        return False
