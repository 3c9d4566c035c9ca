"""Which files and addresses a worker starts with."""

from __future__ import annotations

import base64
import logging
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgegossip.contract.errors import NetworkError
from edgegossip.net.address import Address
from edgegossip.net.identity.access import zenoh_security
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.tls import TLS, load_tls, require_tls

NOW = datetime.now(UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority and the files of workers 0 and 1."""
    make_authority(tmp_path / "certs")
    issue(tmp_path / "certs", [0, 1])
    return tmp_path / "certs"


def copy_of_authority(folder: Path, name: str) -> Path:
    """Another folder, in which certificates of the same authority can be made."""
    other = folder.with_name(name)
    other.mkdir()
    for file in ("ca.pem", "ca-key.pem"):
        shutil.copy(folder / file, other / file)
    return other


# The files.


def test_files_of_the_right_worker_are_accepted_without_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = TLS.from_folder(folder, 1).check(1).identity.end
    assert abs(end - NOW - timedelta(days=365)) < timedelta(hours=1)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["ca.pem", "worker-1.pem", "worker-1-key.pem"])
def test_a_missing_file_is_named_with_a_way_to_get_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(NetworkError, match=rf"{name} is missing; .*certs issue --rank 1"):
        TLS.from_folder(folder, 1).check(1)


def test_a_certificate_of_another_rank_is_refused(folder: Path) -> None:
    tls = TLS.from_folder(folder, 1)
    with pytest.raises(NetworkError, match=r"is for 'worker-1', not for 'worker-0'"):
        tls.check(0)


@pytest.mark.parametrize(("begin", "days"), [(-10, 5), (5, 10)], ids=["expired", "not yet"])
def test_a_certificate_must_be_valid_now(folder: Path, begin: int, days: int) -> None:
    other = copy_of_authority(folder, "other")
    issue(other, [1], days=days, begin=NOW + timedelta(days=begin))
    with pytest.raises(NetworkError, match=r"is valid from .*it is .* here; set the clock, or"):
        TLS.from_folder(other, 1).check(1)


def test_a_certificate_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    tls = replace(TLS.from_folder(folder, 1), ca=tmp_path / "other" / "ca.pem")
    with pytest.raises(NetworkError, match="all workers need certificates of one authority"):
        tls.check(1)


def test_a_key_of_another_certificate_is_refused(folder: Path) -> None:
    tls = replace(TLS.from_folder(folder, 1), key=folder / "worker-0-key.pem")
    with pytest.raises(
        NetworkError, match=r"worker-0-key.pem is not the key of .*worker-1.pem"
    ):
        tls.check(1)


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder / "worker-1.pem").write_text("-----BEGIN CERTIFICATE-----\nx\n")
    with pytest.raises(NetworkError, match="is not a certificate in PEM"):
        TLS.from_folder(folder, 1).check(1)


def test_a_key_that_others_can_read_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "worker-1-key.pem").chmod(0o640)
    TLS.from_folder(folder, 1).check(1)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "chmod 600" in record.getMessage()


def test_a_certificate_that_soon_expires_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = copy_of_authority(folder, "other")
    issue(other, [1], days=3)
    TLS.from_folder(other, 1).check(1)
    assert [record.message.count("expires on") for record in caplog.records] == [1]


# The addresses.


LOCAL = Address(listen=("tcp/127.0.0.1:7447",))
OPEN = Address(listen=("tcp/0.0.0.0:7447",))
ENCRYPTED = Address(listen=("tls/0.0.0.0:7447",), connect=("tls/10.0.0.3:7447",))
FILES = TLS(Path("ca"), Path("certificate"), Path("key"))


@pytest.mark.parametrize(
    ("address", "tls"), [(LOCAL, None), (ENCRYPTED, FILES)], ids=["loopback", "encrypted"]
)
def test_loopback_and_encrypted_addresses_are_accepted_without_a_word(
    address: Address, tls: TLS | None, caplog: pytest.LogCaptureFixture
) -> None:
    require_tls(address, tls, insecure=False)
    assert caplog.records == []


@pytest.mark.parametrize(
    "address",
    [
        OPEN,
        Address(listen=("tcp/10.0.0.3:7447",)),
        Address(listen=("tcp/127.0.0.1:7447",), connect=("tcp/pi.local:7447",)),
        replace(LOCAL, multicast=True),
    ],
    ids=str,
)
def test_beyond_loopback_a_worker_needs_tls_or_to_be_told(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NetworkError, match=r"reaches beyond this machine.*--insecure"):
        require_tls(address, None, insecure=False)
    assert caplog.records == []
    require_tls(address, None, insecure=True)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "nothing is encrypted" in record.message


def test_with_certificates_every_endpoint_is_encrypted() -> None:
    mixed = replace(ENCRYPTED, connect=("tcp/10.0.0.3:7447",))
    for insecure in (False, True):
        with pytest.raises(NetworkError, match=r"tcp/10\.0\.0\.3:7447 is not encrypted"):
            require_tls(mixed, FILES, insecure=insecure)


def test_without_certificates_no_endpoint_can_be_encrypted() -> None:
    with pytest.raises(NetworkError, match=r"tls/0\.0\.0\.0:7447 needs certificates"):
        require_tls(ENCRYPTED, None, insecure=True)


def test_files_are_looked_at_before_anything_is_opened(folder: Path) -> None:
    assert load_tls(folder, 1) == load_tls(str(folder), 1) == TLS.from_folder(folder, 1)
    assert load_tls(None, 1) is None
    assert load_tls(folder, 1, ban=["be:ef"]) == TLS.from_folder(folder, 1, [0xBEEF])
    with pytest.raises(NetworkError, match=r"worker-7\.pem is missing.*issue --rank 7"):
        load_tls(folder, 7)


def test_a_ban_needs_certificates_and_a_number(folder: Path) -> None:
    with pytest.raises(NetworkError, match=r"--ban rejects certificates, so it needs --tls"):
        load_tls(None, 1, ban=["beef"])
    with pytest.raises(ValueError, match="a serial number has 1 to 40 hexadecimal digits"):
        load_tls(folder, 1, ban=["worker-2"])


# What zenoh is told.


def test_zenoh_is_given_what_was_checked_though_files_change(folder: Path) -> None:
    tls = TLS.from_folder(folder, 1)
    credentials, banning = tls.check(1), replace(tls, banned=frozenset([7])).check(1)
    files = [(folder / name).read_bytes() for name in ("worker-1.pem", "worker-1-key.pem")]
    for path in folder.iterdir():
        path.write_text("damaged")
    settings = zenoh_security(credentials, "r", 2)["transport/link/tls"]
    assert isinstance(settings, dict)
    given = {
        base64.b64decode(value) for key, value in settings.items() if key.endswith("_base64")
    }
    assert given == {credentials.identity.ca, *files}
    assert banning.anchors() != credentials.anchors() == credentials.identity.ca


def test_a_key_is_in_no_message(folder: Path) -> None:
    credentials = TLS.from_folder(folder, 1).check(1)
    assert "PRIVATE" not in repr(credentials)
