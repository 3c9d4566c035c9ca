"""Certificates and lists that change while a worker runs: what it takes, what it refuses."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.certificate_folders import give, put, tell_revoked

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import issue, issued, make_authority
from edgegossip.net.identity.revocation import list_path, revoke
from edgegossip.net.identity.tls import TLS, CertificateWatch

NOW = datetime.now(UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A folder with an authority and the files of workers 0 and 1."""
    make_authority(tmp_path / "authority")
    issue(tmp_path / "authority", [0, 1])
    return tmp_path / "authority"


@pytest.fixture
def folder(authority: Path, tmp_path: Path) -> Path:
    """The machine of worker 1."""
    return give(authority, tmp_path / "one", 1)


def watch(folder: Path) -> CertificateWatch:
    return CertificateWatch(TLS.from_folder(folder, 1), 1, ["night"])


def looks(watch: CertificateWatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages in the log after several looks, which find nothing to use."""
    assert [watch.poll() for _ in range(6)] == [None] * 6
    return caplog.messages


def test_nothing_changes_while_the_files_stay(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(folder)
    put(folder / "worker-1.pem", folder / "worker-1.pem")  # written again
    assert looks(watching, caplog) == []


def test_a_new_certificate_is_used_once_its_key_is_there(
    authority: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(folder)
    issue(authority, [1], replace=True)
    put(authority / "worker-1-key.pem", folder / "worker-1-key.pem")
    assert watching.poll() is None
    put(authority / "worker-1.pem", folder / "worker-1.pem")
    after = watching.poll()
    assert after is watching.current is not None
    assert after.identity.holder == issued(authority)[-1]
    assert caplog.messages == []


def test_a_certificate_that_is_not_good_is_complained_of_once_and_not_used(
    authority: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(folder)
    before = watching.current
    put(authority / "worker-0.pem", folder / "worker-1.pem")
    [message] = looks(watching, caplog)
    assert message.startswith("the current certificates stay in use: ")
    assert "is for 'worker-0', not for 'worker-1'" in message
    (folder / "worker-1.pem").unlink()
    assert len(looks(watching, caplog)) == 2
    assert watching.current is before
    put(authority / "worker-1.pem", folder / "worker-1.pem")
    assert len(looks(watching, caplog)) == 2  # as in the beginning


def test_a_certificate_is_used_when_its_time_has_come(
    authority: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(authority, [1], replace=True, begin=NOW + timedelta(days=2))
    watching = watch(folder)
    give(authority, folder, 1)
    assert watching.poll() is None

    later = SimpleNamespace(now=lambda _: NOW + timedelta(days=2))
    monkeypatch.setattr("edgegossip.net.identity.tls.datetime", later)
    after = watching.poll()
    assert after is not None
    assert after.identity.holder == issued(authority)[-1]


def test_a_list_is_in_force_when_it_appears_and_grows(authority: Path, folder: Path) -> None:
    watching = watch(folder)
    for rank, number in ((0, 1), (2, 2)):
        issue(authority, [2], replace=True)
        revoke(authority, [rank])
        tell_revoked(authority, folder)
        after = watching.poll()
        assert after is not None
        assert [revoked.number for revoked in after.revocations.values()] == [number]
        assert watching.poll() is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("damaged"), "is not a list of revoked certificates"),
        (lambda path: path.write_bytes(path.read_bytes()[:-60]), "is not a list of revoked"),
        (lambda path: path.unlink(), "has no list of"),
    ],
    ids=["damaged", "cut", "deleted"],
)
def test_the_last_good_list_stays_in_force(
    authority: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    damage: object,
    reason: str,
) -> None:
    revoke(authority, [0])
    tell_revoked(authority, folder)
    watching = watch(folder)
    before = watching.current
    assert callable(damage)
    damage(list_path(folder))
    [message] = looks(watching, caplog)
    assert message.startswith("the earlier revocations stay in force, without new ones: ")
    assert reason in message
    assert watching.current is before


def test_warnings_are_not_repeated_while_a_list_is_damaged(
    authority: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(folder)
    (folder / "worker-1-key.pem").chmod(0o640)
    list_path(folder).write_text("damaged")
    assert len(looks(watching, caplog)) == 1
    issue(authority, [1], days=3, replace=True)
    give(authority, folder, 1)
    assert watching.poll() is not None
    assert "expires on" in caplog.messages[-1]


def test_a_new_certificate_is_used_beside_a_damaged_list_and_a_list_beside_a_damaged_one(
    authority: Path, folder: Path
) -> None:
    revoke(authority, [0])
    tell_revoked(authority, folder)
    watching = watch(folder)
    list_path(folder).write_text("damaged")
    issue(authority, [1], replace=True)
    give(authority, folder, 1)
    after = watching.poll()
    assert after is not None
    assert after.identity.holder == issued(authority)[-1]
    assert [revoked.number for revoked in after.revocations.values()] == [1]
    (folder / "worker-1.pem").write_text("damaged")
    revoke(authority, serials=[7])
    tell_revoked(authority, folder)
    last = watching.poll()
    assert last is not None
    assert last.identity == after.identity
    assert [revoked.number for revoked in last.revocations.values()] == [2]


def test_a_worker_that_is_revoked_says_so(
    authority: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = watch(folder)
    revoke(authority, [1])
    tell_revoked(authority, folder)
    assert watching.poll() is not None
    assert caplog.messages == [
        f"{folder / 'worker-1.pem'} is revoked; other workers close their links"
    ]


def test_another_authority_is_trusted_beside_the_first(
    authority: Path, folder: Path, tmp_path: Path
) -> None:
    revoke(authority, [0])
    tell_revoked(authority, folder)
    watching = watch(folder)
    make_authority(tmp_path / "new")
    both = (tmp_path / "new" / "ca.pem").read_text() + (authority / "ca.pem").read_text()
    (folder / "ca.pem").write_text(both)
    after = watching.poll()
    assert after is not None
    assert len(after.identity.authorities) == 2
    assert [revoked.number for revoked in after.revocations.values()] == [1]


def test_a_certificate_of_the_same_authority_renewed_revokes_the_same(
    authority: Path, folder: Path
) -> None:
    revoke(authority, [0])
    tell_revoked(authority, folder)
    credentials = watch(folder).current
    twice = (folder / "ca.pem").read_bytes() * 2
    (folder / "ca.pem").write_bytes(twice)
    again = watch(folder).current
    assert again.revocations == credentials.revocations
    assert again.anchors().count(b"BEGIN") == 2
    assert (folder / "ca.pem").read_bytes() not in again.anchors()


# The start.


def test_at_the_start_a_bad_list_is_an_error(authority: Path, folder: Path) -> None:
    list_path(folder).write_text("damaged")
    with pytest.raises(NetworkError, match="is not a list of revoked certificates"):
        watch(folder)


def test_at_the_start_a_revoked_certificate_is_an_error(authority: Path, folder: Path) -> None:
    revoke(authority, [1])
    tell_revoked(authority, folder)
    with pytest.raises(NetworkError, match=r"worker-1\.pem has been revoked"):
        watch(folder)


def test_a_certificate_is_good_in_runs_of_its_name(authority: Path, tmp_path: Path) -> None:
    issue(authority, [1], run_name="night", replace=True)
    bound = give(authority, tmp_path / "bound", 1)
    assert watch(bound).current.identity.holder == issued(authority)[-1]
    TLS.from_folder(bound, 1).check(1)
    with pytest.raises(
        NetworkError, match=r"valid only in runs named 'night'; give --name night"
    ):
        TLS.from_folder(bound, 1).check(1, ["day"])


def test_a_list_beside_no_certificates_is_not_looked_for(folder: Path) -> None:
    tls = TLS(folder / "ca.pem", folder / "worker-1.pem", folder / "worker-1-key.pem")
    shutil.copy(folder / "ca.pem", list_path(folder))
    assert tls.check(1).revocations == {}
