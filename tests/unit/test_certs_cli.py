"""`edgegossip certs`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgegossip.cli.certs_command import certs_command
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.net.identity.certificates import OBSERVER, issue, make_authority
from edgegossip.net.identity.tls import TLS


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_commands_make_all_that_workers_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert certs_command(["init"]) == 0
    issuing = [
        "issue",
        "--rank",
        "0",
        "--rank",
        "1",
        "--host",
        "pi.local",
        "--host",
        "10.0.0.3",
    ]
    assert certs_command([*issuing, "--router", "--observer"]) == 0
    for rank in (0, 1, None, OBSERVER):
        TLS.from_folder(Path("certs"), rank).check(rank)
    printed = capsys.readouterr().out
    assert "ca-key.pem: stays here" in printed
    assert "certs/worker-1: copy this folder to the machine of worker 1, for --tls" in printed
    assert "certs/observer: copy this folder to the machine of observers, for" in printed
    assert "certs/router: copy this folder to the machine of routers, for --tls" in printed


def test_folder_and_days_can_be_chosen() -> None:
    assert certs_command(["init", "--out", "x", "--days", "20"]) == 0
    assert certs_command(["issue", "--rank", "0", "--out", "x", "--days", "9"]) == 0
    authority, worker = files(Path("x/authority")), files(Path("x/worker-0"))
    assert authority == {"ca.pem", "ca-key.pem", "issued.pem"}
    assert worker == {"ca.pem", "worker-0.pem", "worker-0-key.pem"}
    assert files(Path("x")) == {"authority", "worker-0"}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_of_a_worker_is_all_that_its_machine_needs_and_has_no_other_key(
    tmp_path: Path,
) -> None:
    certs_command(["init"])
    certs_command(["issue", "--rank", "0", "--rank", "1"])
    certs_command(["revoke", "--rank", "0"])
    certs_command(["issue", "--rank", "0", "--rank", "2", "--replace"])
    shutil.copytree("certs/worker-1", tmp_path / "machine" / "certs")
    tls = TLS.from_folder(tmp_path / "machine" / "certs", 1)
    assert len(tls.check(1).revocations) == 1  # worker 1 was issued before the revocation
    assert len(TLS.from_folder("certs", 2).check(2).revocations) == 1
    assert files(tmp_path / "machine" / "certs") == {
        "ca.pem",
        "worker-1.pem",
        "worker-1-key.pem",
        "revoked.pem",
    }


def test_further_authorities_that_a_worker_trusts_stay(tmp_path: Path) -> None:
    certs_command(["init"])
    certs_command(["issue", "--rank", "0"])
    certs_command(["init", "--out", "new"])
    ca = Path("certs/worker-0/ca.pem")
    both = Path("new/authority/ca.pem").read_text() + ca.read_text()
    ca.write_text(both)
    certs_command(["issue", "--rank", "0", "--replace"])
    assert ca.read_text() == both


def test_a_folder_of_the_older_form_is_used_on(capsys: pytest.CaptureFixture[str]) -> None:
    make_authority(Path("certs"))
    issue(Path("certs"), [0])
    assert certs_command(["issue", "--rank", "1"]) == 0
    printed = capsys.readouterr().out
    assert "worker-1-key.pem: for the machine of worker 1, with ca.pem" in printed
    certs_command(["revoke", "--rank", "0"])
    certs_command(["issue", "--rank", "0", "--replace"])
    certs_command(["list"])
    for rank in (0, 1):
        assert len(TLS.from_folder("certs", rank).check(rank).revocations) == 1
    assert files(Path("certs")) == {
        "ca.pem",
        "ca-key.pem",
        "issued.pem",
        "revoked.pem",
        *(f"worker-{rank}{end}" for rank in (0, 1) for end in (".pem", "-key.pem")),
    }
    with pytest.raises(NetworkError, match=r"certs/ca\.pem exists"):
        certs_command(["init"])


def test_certificates_are_taken_back_and_others_put_in_their_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    certs_command(["init"])
    certs_command(["issue", "--rank", "0", "--rank", "1", "--router"])
    certs_command(["revoke", "--rank", "1", "--router"])
    certs_command(["issue", "--rank", "1", "--run", "night", "--replace"])
    TLS.from_folder(Path("certs"), 1).check(1, ["night"])
    capsys.readouterr()
    assert certs_command(["list"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [(name, state) for name, _, state, *_ in table]
    assert names == [
        ("worker-0", "until"),
        ("worker-1", "revoked"),
        ("edgegossip-router", "revoked"),
        ("worker-1@night", "until"),
    ]
    serial = table[-1][1]
    assert certs_command(["revoke", "--serial", serial.upper()]) == 0
    printed = capsys.readouterr().out
    assert f"{serial}: revoked\n" in printed
    assert "not issued here" not in printed
    assert "revoked.pem: for every machine" in printed


def test_a_certificate_that_was_not_issued_here_is_revoked_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    certs_command(["init"])
    certs_command(["revoke", "--serial", "BE:EF"])
    printed = capsys.readouterr().out
    assert "not issued here, so rejected only if it has the name beef.edgegossip" in printed


def test_what_exists_is_a_failure() -> None:
    certs_command(["init"])
    with pytest.raises(NetworkError, match=r"ca\.pem exists and is left as it is"):
        certs_command(["init"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "certs needs one of: init, issue, revoke, list"),
        (["--out", "x"], "certs needs one of: init, issue, revoke, list"),
        (["isseu"], "unknown command of certs 'isseu'.*did you mean 'issue'"),
        (["init", "--days", "0"], "days must be in 1"),
        (["issue"], "certs issue needs a worker: --rank R"),
        (["issue", "--rank", "-1"], "ranks must be different and at least 0"),
        (["issue", "--rank", "0", "--run", "a b"], "run must have 1 to 40 letters, digits"),
        (["revoke"], "certs revoke needs --rank R, --router, --observer or --serial NUMBER"),
        (
            ["revoke", "--serial", "x"],
            "a serial number has 1 to 40 hexadecimal digits, got 'x'",
        ),
        (["issue", "--rank", "0", "--host", "tls/pi:1"], "host must be a name or"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_explained_and_makes_nothing(
    working_folder: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        certs_command(arguments)
    assert list(working_folder.iterdir()) == []


def test_help_names_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert certs_command(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "certs init" in printed
    assert "certs issue --rank R" in printed


def test_a_missing_authority_is_made_with_the_folder_that_was_given() -> None:
    with pytest.raises(NetworkError, match=r"make one with: edgegossip certs init --out x$"):
        certs_command(["issue", "--rank", "0", "--out", "x"])
    assert not Path("x").exists()
