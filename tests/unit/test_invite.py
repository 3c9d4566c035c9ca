"""Machines join, leave and are banned, with processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgegossip.cli.doctor_command import doctor_command
from edgegossip.cli.invite_command import ban_command, members_command
from edgegossip.cli.join_command import join_command, leave_command
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.net.identity.certificates import authority_folder, make_authority
from edgegossip.net.identity.enrollment import Offer
from edgegossip.net.identity.joined import JoinedRun
from edgegossip.net.identity.members import Members
from edgegossip.net.identity.signing import SigningService
from edgegossip.real.launch import free_ports

RECIPE = """
from dataclasses import replace
from functools import partial

import edgegossip as eg
from edgegossip.recipes.quickstart import DEFAULTS, quickstart

def megabyte(num_workers: int = 4):
    "A model of one megabyte: (64 + 1 + 10) * 3500 parameters of 4 bytes."
    settings = replace(DEFAULTS, num_workers=num_workers, num_epochs=100_000)
    model = partial(eg.mlp, (1, 8, 8), 10, hidden=(3500,))
    made = quickstart(settings).experiments["gosgd"]
    return replace(made, task=replace(made.task, model=model))
"""
NUM_WORKERS = 3
ROUTER = free_ports(1)[0]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Machines:
    """Processes of `edgegossip`, each with what it prints in a file."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str, line: str = "", **env: str) -> None:
        with Path(f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "edgegossip", *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
            )
        assert process.stdin is not None
        with process.stdin as given:
            given.write(line.encode())
        self.started.append(process)

    def close(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(60)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with closing(Machines()) as found:
        yield found


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or failed(Path()):
            texts = [f"{path}:\n{path.read_text()}" for path in Path().glob("*.txt")]
            raise AssertionError("it did not happen\n" + "\n".join(texts))
        time.sleep(0.05)


def failed(folder: Path) -> bool:
    return any("Traceback" in path.read_text() for path in folder.glob("*.txt"))


def said(name: str, pattern: str) -> list[str]:
    path = Path(f"{name}.txt")
    return re.findall(pattern, path.read_text()) if path.exists() else []


def trained(folder: str) -> int:
    texts = [path.read_text() for path in Path(folder).glob("workers/*/events.jsonl")]
    return sum(text.count('"trained"') for text in texts)


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    members_command([])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    return {name: state for _, name, state, *_ in rows}


@pytest.mark.slow
def test_machines_join_are_listed_leave_and_are_banned(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(RECIPE)
    ports = free_ports(2)
    where = ["--host", "127.0.0.1", "--port", str(ports[0]), "--router-port", str(ports[1])]
    invite = ["invite", "own.py:megabyte", "--num-workers", str(NUM_WORKERS), *where]
    machines.start("invite", *invite)
    line = r"edgegossip join (\S+)"
    wait_until(lambda: said("invite", line))
    invitations = said("invite", line)
    for each in ("again", "once more"):
        machines.start(each, *invite)
        wait_until(partial(said, each, line))
        invitations += said(each, line)
    # The first by its arguments, the second by standard input, and the third by a variable.
    machines.start("a", "join", invitations[0], "--name", "a", "--out", "a")
    given = invitations[1] + "\n"
    machines.start("b", "join", "-", "--name", "b", "--out", "b", line=given)
    wait_until(lambda: trained("a") and trained("b"))
    variable = {"EDGEGOSSIP_INVITATION": invitations[2]}
    begun = time.time()
    options = ["--name", "c", "--out", "c", "--trust-code"]
    Path("own.py").rename("elsewhere.py")  # so that c needs the file that it fetches
    machines.start("c", "join", *options, **variable)
    wait_until(lambda: trained("c"))
    print(f"the first step of c: after {first_step('c') - begun:.1f} s")
    wait_until(lambda: {*table(capsys).values()} == {"present"})
    assert table(capsys).keys() == {"a", "b", "c"}
    no_secret_is_left(machines, invitations)
    Path("elsewhere.py").rename("own.py")
    leave_command(["--out", "c"])
    assert table(capsys)["c"] == "left"
    ban_command(["b"])
    wait_until(lambda: said("b", "banned from run 'megabyte'; this worker stops"))
    wait_until(lambda: machines.started[4].poll() is not None)
    with pytest.raises(NetworkError, match="banned"):
        JoinedRun.read(Path("b")).ask(Path("b"), "members")
    machines.start("further", *invite)
    wait_until(lambda: said("further", line))
    with pytest.raises(NetworkError, match="banned"):
        join_command([said("further", line)[0], "--out", "b", "--no-start"])
    assert machines.started[3].poll() is None  # a goes on
    assert table(capsys)["a"] == "present"


def first_step(folder: str) -> float:
    """The time of day of a worker's first step."""
    [path] = Path(folder).glob("workers/*/events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    start = path.with_name("experiment.json").stat().st_mtime
    steps = [float(each["time"]) for each in events if each["type"] == "trained"]
    return start + steps[0]


def no_secret_is_left(machines: Machines, invitations: list[str]) -> None:
    secrets = [each.rpartition("/")[2].encode() for each in invitations]
    for process in machines.started:
        if process.poll() is None:
            for what in ("cmdline", "environ"):
                seen = Path(f"/proc/{process.pid}/{what}").read_bytes()
                assert not any(secret in seen for secret in secrets)
    for folder in ("a", "b", "c", "certs"):
        for path in Path(folder).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not any(secret in content for secret in secrets), path
    for log in ("a", "b", "c"):
        assert not any(secret.decode() in Path(f"{log}.txt").read_text() for secret in secrets)


# The commands of a machine that joins, without training.


@pytest.fixture
def house() -> Iterator[tuple[Members, SigningService]]:
    folder = authority_folder(Path("certs"))
    make_authority(folder)
    members = Members(folder, "night")
    with ExitStack() as opened:
        yield members, opened.enter_context(service(members, ("quickstart", "--seed", "3")))


def service(members: Members, words: tuple[str, ...], **given: Any) -> SigningService:  # noqa: ANN401
    routers = (f"tls/127.0.0.1:{ROUTER}",)
    offer = Offer(
        run="night", words=words, num_workers=2, routers=routers, version="1", **given
    )
    return SigningService(members, offer, host="127.0.0.1")


def invitation(members: Members, service: SigningService) -> str:
    return str(service.invitation("127.0.0.1", token=members.invite()))


def test_joining_leaves_a_folder_that_belongs_to_one_run(
    house: tuple[Members, SigningService], capsys: pytest.CaptureFixture[str]
) -> None:
    join_command([invitation(*house), "--name", "a", "--no-start", "--relay"])
    assert "joined run night as a, worker 0; links are relayed" in capsys.readouterr().out
    folder = Path("runs/joined/night")
    run = JoinedRun.read(folder)
    assert (run.rank, run.listen) == (0, None)
    key = folder / "certs/worker-0/worker-0-key.pem"
    assert key.stat().st_mode & 0o077 == 0
    before = key.read_bytes()
    join_command([invitation(*house), "--no-start"])  # it comes back, by its key
    assert key.read_bytes() == before
    assert [each.name for each in house[0].rows()] == ["a"]
    leave_command(["--out", str(folder)])
    assert not key.exists()
    with pytest.raises(NetworkError, match="not the folder of a run"):
        leave_command(["--out", str(folder)])


def test_a_machine_that_can_be_called_gets_direct_links(
    house: tuple[Members, SigningService],
) -> None:
    [port] = free_ports(1)
    join_command([invitation(*house), "--name", "a", "--no-start", "--port", str(port)])
    assert JoinedRun.read(Path("runs/joined/night")).listen == f"tls/0.0.0.0:{port}"


def test_doctor_says_whether_links_are_direct(
    house: tuple[Members, SigningService], capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    for name, options in {"a": ["--relay"], "b": ["--port", str(port)]}.items():
        words = ["--name", name, "--out", name, "--no-start"]
        join_command([invitation(*house), *words, *options])
    capsys.readouterr()
    assert doctor_command(["--joined", "a"]) == 1  # there is no router
    said = " ".join(capsys.readouterr().out.split())
    assert "members: a, b" in said
    assert f"router failed tls/127.0.0.1:{ROUTER}" in said
    assert "links ok relayed by a router" in said
    doctor_command(["--joined", "b"])
    assert f"links ok direct, at tls/0.0.0.0:{port}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_joining_needs_an_invitation() -> None:
    with pytest.raises(UsageError, match="needs an invitation"):
        join_command([])


def test_an_invitation_sets_no_options_of_this_machine(
    house: tuple[Members, SigningService],
) -> None:
    members, _ = house
    with service(members, ("quickstart", "--telemetry", "elsewhere")) as evil:
        join_command([invitation(members, evil), "--no-start", "--out", "x"])
        with pytest.raises(SystemExit):
            join_command(["--out", "x"])


def test_an_invitation_names_no_file_of_this_machine(
    house: tuple[Members, SigningService],
) -> None:
    members, _ = house
    with service(members, ("/etc/own.py:f",)) as evil:
        join_command([invitation(members, evil), "--no-start", "--out", "x"])
        with pytest.raises(UsageError, match="no recipe"):
            join_command(["--out", "x"])


def test_code_is_fetched_only_if_trusted_and_its_digest_is_checked(
    house: tuple[Members, SigningService],
) -> None:
    members, _ = house
    digest = "6a1b1bd3c3a3d2d1b3e4d1c7e2cb0e3e2b8ad49d27e83b0a0ba8ba0c1a1f6b2e"
    with service(members, ("own.py:f",), digest=digest, code="f = 1") as offering:
        join_command([invitation(members, offering), "--no-start", "--out", "x", "--name", "a"])
        assert not Path("x/recipe").exists()
        Path("own.py").write_text("f = 1")
        with pytest.raises(UsageError, match="needs the recipe file own"):
            join_command(["--out", "x"])
        trusting = ["--no-start", "--out", "y", "--name", "b", "--trust-code"]
        with pytest.raises(NetworkError, match="damaged"):
            join_command([invitation(members, offering), *trusting])
        assert not Path("y/recipe").exists()


def test_banning_needs_a_run(house: tuple[Members, SigningService]) -> None:
    with pytest.raises(UsageError, match="say from which run"):
        ban_command(["a"])
    invitation(*house)
    with pytest.raises(UsageError, match="not the name of a machine"):
        ban_command(["a b"])
    ban_command(["a"])
    assert [each.state for each in house[0].rows()] == ["banned"]
