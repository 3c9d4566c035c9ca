"""`edgegossip certs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgegossip.cli.certs_command import certs_command
from edgegossip.core.errors import NetworkError, UsageError
from edgegossip.net.tls import TLS


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_commands_make_all_that_workers_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert certs_command(["init"]) == 0
    issue = ["issue", "--rank", "0", "--rank", "1", "--host", "pi.local", "--host", "10.0.0.3"]
    assert certs_command([*issue, "--router"]) == 0
    for rank in (0, 1, None):
        TLS.from_folder(Path("certs"), rank).check(rank)
    printed = capsys.readouterr().out
    assert "ca-key.pem: stays here" in printed
    assert "worker-1-key.pem: for the machine of worker 1, with ca.pem" in printed
    assert "router-key.pem: for the machine of routers, with ca.pem" in printed


def test_folder_and_days_can_be_chosen() -> None:
    assert certs_command(["init", "--out", "x", "--days", "20"]) == 0
    assert certs_command(["issue", "--rank", "0", "--out", "x", "--days", "9"]) == 0
    assert {path.name for path in Path("x").iterdir()} == {
        "ca.pem",
        "ca-key.pem",
        "worker-0.pem",
        "worker-0-key.pem",
        "issued.pem",
    }


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
        (["revoke"], "certs revoke needs --rank R, --router or --serial NUMBER"),
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
