"""Lists of revoked certificates: who made them, and what comes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import (
    issue,
    issued,
    load_authority,
    load_certificate,
    make_authority,
    serial_name,
)
from edgegossip.net.identity.revocation import (
    Revocations,
    authority_id,
    constrain,
    list_path,
    parse_lists,
    revoke,
    revoked_serials,
)

NOW = datetime.now(UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority and the files of workers 0 and 1."""
    make_authority(tmp_path / "certs")
    issue(tmp_path / "certs", [0, 1])
    return tmp_path / "certs"


def serial(folder: Path, rank: int) -> int:
    return load_certificate(folder / f"worker-{rank}.pem").serial_number


def read(folder: Path, *others: Path, in_force: Revocations | None = None) -> Revocations:
    """The list in `folder`, for somebody who trusts its authority and those of `others`."""
    path = list_path(folder)
    authorities = [load_certificate(each / "ca.pem") for each in (folder, *others)]
    return parse_lists(path.read_bytes() if path.exists() else b"", path, authorities, in_force)


# The authority's side.


def test_all_certificates_of_a_worker_so_far_are_revoked_and_no_others(folder: Path) -> None:
    first = serial(folder, 1)
    issue(folder, [1], run_name="night", replace=True)
    second = serial(folder, 1)
    assert revoke(folder, [1]) == sorted([first, second])
    issue(folder, [1], replace=True)
    assert revoked_serials(folder) == {first, second}
    [revoked] = read(folder).values()
    assert revoked.serials == {first, second}


def test_single_certificates_and_those_of_routers_are_revoked(folder: Path) -> None:
    issue(folder, [None])
    router = load_certificate(folder / "router.pem").serial_number
    revoke(folder, serials=[serial(folder, 0)])
    assert revoke(folder, [None]) == [router]
    assert revoke(folder, [None]) == []
    assert revoked_serials(folder) == {serial(folder, 0), router}


def test_each_list_has_a_higher_number(folder: Path) -> None:
    for number in (1, 2, 3):
        revoke(folder, serials=[number])
        [revoked] = read(folder).values()
        assert revoked.number == number
    assert revoked.serials == {1, 2, 3}


def test_a_list_is_what_other_programs_read_too(folder: Path) -> None:
    revoke(folder, [1])
    parsed = x509.load_pem_x509_crl(list_path(folder).read_bytes())
    authority = load_certificate(folder / "ca.pem")
    assert parsed.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    assert parsed.get_revoked_certificate_by_serial_number(serial(folder, 1)) is not None
    assert parsed.next_update_utc == authority.not_valid_after_utc


def test_what_has_expired_is_taken_off_the_list(folder: Path) -> None:
    issue(folder, [2], days=1, begin=NOW - timedelta(days=5))
    issue(folder, [3], days=1)
    revoke(folder, [2, 3])
    assert revoked_serials(folder) == {serial(folder, 3)}


def test_a_worker_without_a_certificate_cannot_be_revoked(folder: Path) -> None:
    with pytest.raises(NetworkError, match="lists no certificate of 'worker-7'"):
        revoke(folder, [0, 7])
    assert not list_path(folder).exists()


def test_too_many_are_refused_before_they_are_on_the_list(folder: Path) -> None:
    revoke(folder, serials=[2**158 + n for n in range(1000)])
    with pytest.raises(NetworkError, match=r"1200 certificates .* are too many to revoke"):
        revoke(folder, serials=[2**157 + n for n in range(200)])
    assert len(revoked_serials(folder)) == 1000


def test_without_the_authority_nothing_is_revoked(folder: Path) -> None:
    (folder / "ca-key.pem").unlink()
    with pytest.raises(NetworkError, match="has no authority"):
        revoke(folder, [0])


def test_a_damaged_list_is_not_overwritten(folder: Path) -> None:
    list_path(folder).write_text("damaged")
    with pytest.raises(NetworkError, match="is not a list of revoked certificates"):
        revoke(folder, [0])
    assert list_path(folder).read_text() == "damaged"


def test_the_authority_remembers_what_it_has_issued(folder: Path) -> None:
    issue(folder, [1], run_name="night", replace=True)
    names = [each.subject.rfc4514_string() for each in issued(folder)]
    assert names == ["CN=worker-0", "CN=worker-1", "CN=worker-1@night"]
    (folder / "issued.pem").write_text("damaged")
    with pytest.raises(NetworkError, match="is not a certificate in PEM"):
        revoke(folder, [1])


# The workers' side.


def test_no_list_revokes_nothing(folder: Path) -> None:
    assert read(folder) == {}


def test_a_list_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    revoke(tmp_path / "other", serials=[1])
    list_path(folder).write_bytes(list_path(tmp_path / "other").read_bytes())
    with pytest.raises(NetworkError, match=r"that no authority in ca\.pem has signed"):
        read(folder)


def test_a_list_that_somebody_else_has_signed_is_refused(folder: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    authority, _ = load_authority(folder)
    _, key = load_authority(tmp_path / "other")
    forged = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(NOW)
        .next_update(NOW + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    list_path(folder).write_bytes(forged.public_bytes(Encoding.PEM))
    with pytest.raises(NetworkError, match=r"that no authority in ca\.pem has signed"):
        read(folder)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_a_list_of_which_a_piece_is_missing_is_refused(folder: Path, keep: float) -> None:
    revoke(folder, [0])
    whole = list_path(folder).read_bytes()
    list_path(folder).write_bytes(whole + whole[: int(keep * len(whole))])
    with pytest.raises(NetworkError, match="is not a list of revoked certificates"):
        read(folder)


def test_a_list_in_which_a_letter_is_changed_is_refused(folder: Path) -> None:
    revoke(folder, [0])
    whole = list_path(folder).read_text()
    for place in range(60, len(whole) - 40, 37):
        letter = "A" if whole[place] != "A" else "B"
        list_path(folder).write_text(whole[:place] + letter + whole[place + 1 :])
        with pytest.raises(NetworkError):
            read(folder)


def test_other_things_than_lists_are_refused(folder: Path) -> None:
    for content in ("x", (folder / "ca.pem").read_text()):
        list_path(folder).write_text(content)
        with pytest.raises(NetworkError, match="is not a list of revoked certificates"):
            read(folder)


def test_a_list_of_changes_only_is_refused(folder: Path) -> None:
    authority, key = load_authority(folder)
    delta = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(NOW)
        .next_update(NOW + timedelta(days=1))
        .add_extension(x509.DeltaCRLIndicator(1), critical=True)
        .sign(key, hashes.SHA256())
    )
    list_path(folder).write_bytes(delta.public_bytes(Encoding.PEM))
    with pytest.raises(NetworkError, match="give the whole list"):
        read(folder)


def test_the_newest_list_of_each_authority_counts(folder: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    revoke(tmp_path / "other", serials=[7])
    revoke(folder, [0])
    old = list_path(folder).read_bytes()
    revoke(folder, [1])
    lists = [list_path(folder).read_bytes(), list_path(tmp_path / "other").read_bytes(), old]
    list_path(folder).write_bytes(b"".join(lists))
    ids = [authority_id(load_authority(each)[0]) for each in (folder, tmp_path / "other")]
    read_all = read(folder, tmp_path / "other")
    assert {key: each.serials for key, each in read_all.items()} == {
        ids[0]: {serial(folder, 0), serial(folder, 1)},
        ids[1]: {7},
    }


def test_an_older_list_or_none_is_refused_once_a_newer_is_in_force(folder: Path) -> None:
    revoke(folder, [0])
    old = list_path(folder).read_bytes()
    revoke(folder, [1])
    in_force = read(folder)
    assert read(folder, in_force=in_force) == in_force
    list_path(folder).write_bytes(old)
    with pytest.raises(NetworkError, match=r"has list 1 of .* whose list 2 is in force"):
        read(folder, in_force=in_force)
    list_path(folder).unlink()
    with pytest.raises(NetworkError, match=r"has no list of .* whose list 2 is in force"):
        read(folder, in_force=in_force)


# What TLS is told.


def test_an_authority_is_told_to_tls_without_the_names_of_the_revoked(folder: Path) -> None:
    authority = load_certificate(folder / "ca.pem")
    assert constrain(authority, []) is authority
    told = constrain(authority, [0xBEEF])
    constraints = told.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert constraints.value.permitted_subtrees is None
    assert constraints.value.excluded_subtrees == [x509.DNSName("beef.edgegossip")]
    assert authority_id(told) == authority_id(authority)
    load_certificate(folder / "worker-0.pem").verify_directly_issued_by(told)


def test_what_an_authority_may_not_vouch_for_anyway_stays_so(folder: Path) -> None:
    authority, key = load_authority(folder)
    own = x509.NameConstraints([x509.DNSName("pi.local")], [x509.DNSName("x.pi.local")])
    limited = (
        x509.CertificateBuilder()
        .subject_name(authority.subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(own, critical=True)
        .sign(key, hashes.SHA256())
    )
    told = constrain(limited, [5]).extensions.get_extension_for_class(x509.NameConstraints)
    assert told.value == x509.NameConstraints(
        own.permitted_subtrees, [x509.DNSName(serial_name(5)), x509.DNSName("x.pi.local")]
    )


def test_every_certificate_has_the_name_by_which_it_is_revoked(folder: Path) -> None:
    certificate = load_certificate(folder / "worker-0.pem")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert serial_name(certificate.serial_number) in names.get_values_for_type(x509.DNSName)
