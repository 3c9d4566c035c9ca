"""Authorities and workers' certificates."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import (
    CLOCK_TOLERANCE,
    authority_paths,
    common_name,
    holder_paths,
    is_pair,
    issue,
    issued,
    load_certificate,
    load_key,
    make_authority,
)

NOW = datetime.now(UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority."""
    make_authority(tmp_path / "certs")
    return tmp_path / "certs"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_worker_has_a_certificate_of_its_rank_that_the_authority_has_signed(
    folder: Path,
) -> None:
    [path] = issue(folder, [3])
    certificate, authority = load_certificate(path), load_certificate(folder / "ca.pem")
    assert common_name(certificate.subject) == "worker-3"
    certificate.verify_directly_issued_by(authority)
    assert is_pair(certificate, load_key(folder / "worker-3-key.pem"))
    assert not is_pair(authority, load_key(folder / "worker-3-key.pem"))


def test_a_worker_can_listen_and_connect_but_not_sign(folder: Path) -> None:
    extensions = load_certificate(issue(folder, [0])[0]).extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {*usages} == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    authority = load_certificate(folder / "ca.pem").extensions
    constraints = authority.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_names_and_addresses_of_the_machine_are_in_the_certificate(folder: Path) -> None:
    [path] = issue(folder, [1], ["pi.local", "10.0.0.3", "fe80::1", "bücher.example"])
    certificate = load_certificate(path)
    extension = certificate.extensions
    names = extension.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "worker-1",
        f"{certificate.serial_number:x}.edgegossip",
        "pi.local",
        "xn--bcher-kva.example",
    ]
    addresses = [ipaddress.ip_address("10.0.0.3"), ipaddress.ip_address("fe80::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses


def test_only_the_owner_can_read_keys(folder: Path) -> None:
    issue(folder, [0])
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes["ca-key.pem"] == modes["worker-0-key.pem"] == 0o600
    assert modes["ca.pem"] & 0o400


def test_a_certificate_counts_from_a_day_ago_for_clocks_that_are_behind(folder: Path) -> None:
    certificate = load_certificate(issue(folder, [0], days=30)[0])
    assert NOW - certificate.not_valid_before_utc > CLOCK_TOLERANCE - timedelta(hours=1)
    remaining = certificate.not_valid_after_utc - NOW
    assert abs(remaining - timedelta(days=30)) < timedelta(hours=1)


def test_a_certificate_does_not_outlast_its_authority(tmp_path: Path) -> None:
    authority = load_certificate(make_authority(tmp_path, days=10))
    certificate = load_certificate(issue(tmp_path, [0], days=365)[0])
    assert certificate.not_valid_after_utc == authority.not_valid_after_utc


def test_two_authorities_have_different_names(tmp_path: Path) -> None:
    names = {
        common_name(load_certificate(make_authority(tmp_path / str(i))).subject)
        for i in range(2)
    }
    assert len(names) == 2


def test_nothing_is_overwritten_and_nothing_made_by_halves(folder: Path) -> None:
    issue(folder, [1])
    before = contents(folder)
    with pytest.raises(NetworkError, match=r"ca\.pem exists and is left as it is"):
        make_authority(folder)
    with pytest.raises(NetworkError, match=r"worker-1\.pem exists .*; --replace it, or"):
        issue(folder, [0, 1])
    holder_paths(folder, 1)[0].unlink()
    with pytest.raises(NetworkError, match=r"worker-1-key\.pem exists"):
        issue(folder, [1])
    assert contents(folder) == {k: v for k, v in before.items() if k != "worker-1.pem"}


def test_a_certificate_takes_the_place_of_an_earlier_one_only_if_it_is_to(folder: Path) -> None:
    issue(folder, [1])
    first = load_certificate(folder / "worker-1.pem")
    issue(folder, [0, 1], replace=True)
    second = load_certificate(folder / "worker-1.pem")
    assert is_pair(second, load_key(folder / "worker-1-key.pem"))
    assert first.public_key() != second.public_key()
    assert [each.serial_number for each in issued(folder)][::2] == [
        first.serial_number,
        second.serial_number,
    ]


def test_a_certificate_can_be_bound_to_runs_of_a_name(folder: Path) -> None:
    issue(folder, [1], run_name="night")
    issue(folder, [None], run_name="n" * 40)
    names = [
        common_name(load_certificate(folder / name).subject)
        for name in ("worker-1.pem", "router.pem")
    ]
    assert names == ["worker-1@night", "edgegossip-router@" + "n" * 40]


@pytest.mark.parametrize("name", ["", "a b", "a@b", "a/b", "a:b", "*", "n" * 41])
def test_names_of_runs_that_keys_and_certificates_cannot_have_are_refused(
    folder: Path, name: str
) -> None:
    with pytest.raises(ValueError, match="run must have 1 to 40 letters, digits"):
        issue(folder, [1], run_name=name)


def test_without_an_authority_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"has no authority.*certs init --out"):
        issue(tmp_path, [0])
    assert list(tmp_path.iterdir()) == []


def test_an_expired_authority_issues_nothing(tmp_path: Path) -> None:
    make_authority(tmp_path, days=10, begin=NOW - timedelta(days=20))
    with pytest.raises(NetworkError, match=r"expired on .*make another in a new folder"):
        issue(tmp_path, [0])


def test_an_authority_with_another_ones_key_issues_nothing(
    folder: Path, tmp_path: Path
) -> None:
    make_authority(tmp_path / "other")
    authority_paths(tmp_path / "other")[1].replace(authority_paths(folder)[1])
    with pytest.raises(NetworkError, match="is not the key of"):
        issue(folder, [0])


@pytest.mark.parametrize("ranks", [[], [-1], [0, 0]], ids=str)
def test_ranks_are_different_and_not_negative(folder: Path, ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="ranks must be different and at least 0"):
        issue(folder, ranks)


# TLS refuses certificates with the last five once it compares names: when one is revoked.
@pytest.mark.parametrize(
    "host",
    ["", "tls/pi:7447", "pi:7447", "my pi", "10.0.0.1/8", "pi.", "-pi", "pi-", "1.2.3", "p..i"],
)
def test_a_host_is_a_name_or_an_address(folder: Path, host: str) -> None:
    with pytest.raises(ValueError, match="host must be a name or an IP address"):
        issue(folder, [0], [host])


@pytest.mark.parametrize("days", [0, -3, 10**7])
def test_days_are_positive_and_end_before_the_calendar(folder: Path, days: int) -> None:
    with pytest.raises(ValueError, match=r"days must be in 1 \.\. "):
        issue(folder, [0], days=days)


def test_a_folder_that_cannot_be_written_to_is_a_network_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NetworkError, match=r"cannot write to .*file/certs: Not a directory"):
        make_authority(tmp_path / "file" / "certs")


def test_what_is_no_certificate_or_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("hello")
    with pytest.raises(NetworkError, match=r"x\.pem is not a certificate in PEM"):
        load_certificate(tmp_path / "x.pem")
    with pytest.raises(NetworkError, match=r"x\.pem is not a private key in PEM"):
        load_key(tmp_path / "x.pem")
    with pytest.raises(NetworkError, match=r"cannot read .*y\.pem: No such file"):
        load_key(tmp_path / "y.pem")
