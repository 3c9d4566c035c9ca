"""Machines that have joined wait, measure when asked to, and start what was planned."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tests.small_tasks import regression, regression_data

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.cli.join_command import join_command
from edgegossip.cli.live import member
from edgegossip.cli.main import main
from edgegossip.contract.errors import DataError, NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import Dataset
from edgegossip.data.local import Local
from edgegossip.net.identity.certificates import authority_folder, issue_for, make_authority
from edgegossip.net.identity.enrollment import Json, Offer
from edgegossip.net.identity.joined import JoinedRun
from edgegossip.net.identity.members import Member, Members
from edgegossip.net.identity.signing import SigningService
from edgegossip.net.link_meter import LinkSpeed
from edgegossip.plan.machines import read_machines
from edgegossip.real.join import Connection
from edgegossip.real.launch import free_ports
from edgegossip.real.worker import WorkerSettings
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import uneven

EDGEGOSSIP = [sys.executable, "-m", "edgegossip"]
PLAN = ["plan", "quickstart", "--live", "--host", "127.0.0.1", "--num-workers"]
QUICK = ["--only", "gosgd", "--seeds", "0", "--max-seconds", "2", "--budget", "1runs"]
START: Json = {"do": "start", "words": ["quickstart", "--lr", "0.5"], "num_workers": 2}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ports() -> list[str]:
    service, router = free_ports(2)
    return ["--port", str(service), "--router-port", str(router)]


# The machine that plans.


def test_a_plan_that_nobody_can_agree_to_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, "2"]) == 2
    assert "standard input is no terminal; add --yes" in capsys.readouterr().err
    assert not Path("certs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wait", "0"], "wait must be above 0"),
        (["--work-seconds", "0.1"], "work_seconds must be in"),
        (["--measure", "3"], "leave it out with --live"),
        (["--resume", "--out", "x"], "cannot be resumed"),
        (["--only", "gosdg"], "did you mean 'gosgd'"),
    ],
)
def test_wrong_options_are_found_before_anybody_is_invited(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "2", "--yes", "--wait", "0.1", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("certs").exists()


def test_nobody_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "2", "--yes", "--wait", "0.3", *ports()]) == 1
    said = capsys.readouterr()
    assert said.out.count("edgegossip join edgegossip://127.0.0.1:") == 2
    assert "no machine has joined within 0.3 s" in said.err


def test_one_plan_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({}):
        lock = ExitStack()
        from edgegossip.cli.invite_command import has_service_lock

        assert has_service_lock(Members(authority_folder(Path("certs")), "quickstart"), lock)
        with lock:
            assert main([*PLAN, "2", "--yes", *ports()]) == 1
    assert "has a signing service already" in capsys.readouterr().err


# A machine that waits.


class serving:  # noqa: N801
    """A signing service whose members get these instructions, one after the other."""

    def __init__(self, *answers: Json, digest: str | None = None) -> None:
        self.answers = list(answers)
        self.said: list[Json] = []
        folder = authority_folder(Path("certs"))
        make_authority(folder)
        self.members = Members(folder, "night")
        offer = Offer(
            run="night",
            words=("quickstart", "--num-workers", "2"),
            num_workers=2,
            routers=(f"tls/127.0.0.1:{free_ports(1)[0]}",),
            version="1",
            digest=digest,
            kind="undecided",
        )
        self.service = SigningService(self.members, offer, host="127.0.0.1", plans=self.answer)

    def answer(self, member: Member, asked: Json) -> Json:
        self.said.append(asked)
        if len(self.answers) > 1:
            return self.answers.pop(0)
        return self.answers[0]

    def join(self, folder: str = "a") -> None:
        invitation = self.service.invitation("127.0.0.1", token=self.members.invite())
        join_command([str(invitation), "--out", folder, "--name", folder, "--no-start"])

    def __enter__(self) -> serving:
        return self

    def __exit__(self, *error: object) -> None:
        self.service.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of workers, which are not carried out; nothing is measured."""
    commands: list[list[str]] = []

    def worker_command(words: list[str]) -> int:
        commands.append(words)
        return 0

    class NoLinks:
        def __init__(self, *given: object) -> None:
            self.is_open = True

        def __enter__(self) -> NoLinks:
            return self

        def __exit__(self, *error: object) -> None:
            self.is_open = False

        def measure(self, other: int) -> LinkSpeed:
            assert self.is_open
            if other == 7:
                raise NetworkError("worker 7 did not answer")
            return LinkSpeed((0.02,) * 5, (1e6,), (2e6,))

    monkeypatch.setattr("edgegossip.cli.worker_command.worker_command", worker_command)

    def no_rehearsal(
        *given: object, settings: WorkerSettings, connection: Connection, **others: object
    ) -> str:
        raise NetworkError(
            f"no rehearsal: {settings.threads}, {settings.ended}, {connection.upload_limit}"
        )

    monkeypatch.setattr(member, "LinkMeter", NoLinks)
    monkeypatch.setattr(member, "join", no_rehearsal)
    monkeypatch.setattr(member, "_POLL", 0.01)
    return commands


def test_a_machine_measures_when_asked_and_starts_what_was_chosen(
    started: list[list[str]],
) -> None:
    tasks: list[Json] = [
        {"do": "wait"},
        {"do": "link", "id": 5, "to": 1},
        {"do": "link", "id": 6, "to": 7},
        {"do": "dance", "id": 7},
        {"do": "work", "id": 8, "seconds": 0.1, "rate": 1e6, "present": [0]},
        {"do": "link", "id": 9, "to": 1},  # the desk has been restarted
        {**START, "rank": 0},
    ]
    with serving(*tasks) as desk:
        desk.join()
        options = ["--threads", "1", "--upload-limit", "5mbit"]
        assert join_command(["--out", "a", "--", *options]) == 0
    assert desk.said[2]["link"] == {
        "round_trips": [0.02] * 5,
        "sent": [1e6],
        "received": [2e6],
    }
    assert desk.said[3]["failed"] == "worker 7 did not answer"
    assert "does not know 'dance'" in desk.said[4]["failed"]
    assert desk.said[5]["failed"] == "no rehearsal: 1, (1,), 5mbit"
    assert desk.said[6]["link"] == desk.said[2]["link"]
    [command] = started
    assert command[:3] == ["quickstart", "--lr", "0.5"]
    assert "--open" not in command
    assert command[-4:] == options
    run = JoinedRun.read(Path("a"))
    assert (run.kind, run.num_workers, run.words) == ("planned", 2, tuple(START["words"]))
    # From now on it goes on without a question.
    number = len(desk.said)
    join_command(["--out", "a"])
    assert (len(started), len(desk.said)) == (2, number)


def test_a_machine_that_is_stopped_in_the_rehearsal_says_so(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "join", lambda *given, **settings: "interrupted")
    task: Json = {"do": "work", "id": 5, "seconds": 0.1, "rate": 1e6, "present": [0]}
    with serving(task) as desk:
        desk.join()
        with pytest.raises(KeyboardInterrupt):
            join_command(["--out", "a"])
    assert [said.get("failed") for said in desk.said] == [None, "it was stopped"]
    assert started == []


def test_a_machine_reads_its_own_data_alone() -> None:
    def load(rank: Rank) -> Dataset:
        if rank != 1:
            raise DataError(f"the data of worker {rank} is not here")
        return regression_data()

    experiment = Experiment(
        task=regression(dataset=Local("mine", load=load, input_shape=(4,))),
        algorithm=GoSGD(topology=complete(2), num_rounds=1),
        platforms=uneven(2),
    )
    assert member._model_bytes(experiment, 1) == 4 * 49


def test_a_machine_that_moves_up_gets_a_certificate_for_its_new_rank(
    started: list[list[str]],
) -> None:
    with serving({**START, "rank": 0, "num_workers": 1}) as desk:
        desk.join("a")
        desk.join("b")
        desk.members.renumber({1: 0})
        join_command(["--out", "b"])
        run = JoinedRun.read(Path("b"))
        assert run.rank == 0
        run.tls(Path("b")).check(0, ["night"])
        assert [each["name"] for each in run.ask(Path("b"), "members")["members"]] == ["b", "a"]
        assert not [*Path("b").rglob("worker-1-key.pem")]
        # The one that was left out is no member any more, and starts nothing.
        with pytest.raises(NetworkError, match="is left from run"):
            join_command(["--out", "a"])
    [command] = started
    assert command[command.index("--rank") + 1] == "0"


def test_a_person_who_says_no_starts_nothing(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving({"do": "end", "reason": "the answer was no"}) as desk:
        desk.join()
        assert join_command(["--out", "a"]) == 0
    assert started == []
    assert "nothing is started: the answer was no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"words": ["other"]}, "the plan is for recipe 'other'"),
        ({"words": []}, "the plan is for recipe ''"),
        ({"num_workers": "x"}, "incomplete"),
    ],
)
def test_a_start_of_something_else_is_refused(
    start: Json, said: str, started: list[list[str]]
) -> None:
    with serving({**START, "rank": 0, **start}) as desk:
        desk.join()
        with pytest.raises(NetworkError, match=said):
            join_command(["--out", "a"])
    assert started == []
    assert JoinedRun.read(Path("a")).kind == "undecided"


def test_a_start_sets_no_options_of_this_machine(started: list[list[str]]) -> None:
    words = ["quickstart", "--telemetry", "elsewhere"]
    with serving({**START, "rank": 0, "words": words}) as desk:
        desk.join()
        with pytest.raises(SystemExit):
            join_command(["--out", "a"])
    assert started == []


@pytest.mark.parametrize("impostor", ["another authority", "a member"])
def test_only_the_authority_can_start_a_machine(
    impostor: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serving({"do": "wait"}) as desk:
        desk.join()
        port = desk.service.port
    monkeypatch.setattr(member, "_PATIENCE", 0.0)
    # An attacker would not mind whose certificate the machine presents.
    monkeypatch.setattr("edgegossip.net.identity.signing.ssl.CERT_OPTIONAL", ssl.CERT_NONE)
    if impostor == "a member":
        # It has a certificate of the right authority, but not the service's.
        def own_identity(folder: Path) -> tuple[bytes, bytes]:
            key = ec.generate_private_key(ec.SECP256R1())
            from cryptography.hazmat.primitives.serialization import (
                Encoding,
                NoEncryption,
                PrivateFormat,
            )

            signed = issue_for(folder, 1, key.public_key(), run_name="night")
            pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            return signed.public_bytes(Encoding.PEM), pem

        monkeypatch.setattr(
            "edgegossip.net.identity.signing.make_service_identity", own_identity
        )
        folder = authority_folder(Path("certs"))
    else:
        folder = authority_folder(tmp_path / "evil")
        make_authority(folder)
    offer = Offer(run="night", words=("quickstart",), num_workers=2, routers=(), version="1")
    said: list[Json] = []

    def start(member: Member, asked: Json) -> Json:
        said.append(asked)
        return {**START, "rank": 0}

    with (
        SigningService(
            Members(folder, "night"), offer, host="127.0.0.1", port=port, plans=start
        ),
        pytest.raises(NetworkError, match="does not own the authority of this run"),
    ):
        join_command(["--out", "a"])
    assert (started, said) == ([], [])
    assert JoinedRun.read(Path("a")).kind == "undecided"


def test_a_machine_waits_for_a_service_that_comes_back(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({"do": "wait"}) as desk:
        desk.join()
        port, offer = desk.service.port, desk.service.offer
    thread = threading.Thread(target=join_command, args=(["--out", "a"],))
    monkeypatch.setattr("edgegossip.cli.join_command.RevocationNews", NoNews)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive()
    with SigningService(
        desk.members,
        offer,
        host="127.0.0.1",
        port=port,
        plans=lambda member, asked: {**START, "rank": 0},
    ):
        thread.join(60.0)
    assert len(started) == 1


class NoNews:
    def __init__(self, *given: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


# All of it, in processes of their own.


class Machines:
    """Processes of `edgegossip`, each with what it prints in a file."""

    def __init__(self) -> None:
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        with Path(f"{name}.txt").open("wb") as output:
            self.started[name] = subprocess.Popen(
                [*EDGEGOSSIP, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        for process in self.started.values():
            process.terminate()
        for process in self.started.values():
            process.wait(60)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with closing(Machines()) as found:
        yield found


def text(name: str) -> str:
    path = Path(f"{name}.txt")
    return path.read_text() if path.exists() else ""


def wait_until(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        texts = [f"{path}:\n{path.read_text()}" for path in Path().glob("*.txt")]
        if time.monotonic() > deadline or any("Traceback" in each for each in texts):
            raise AssertionError("it did not happen\n" + "\n".join(texts))
        time.sleep(0.1)


@pytest.mark.slow
def test_three_machines_are_measured_planned_for_and_started(machines: Machines) -> None:
    machines.start("plan", *PLAN, "3", "--yes", "--work-seconds", "1", *QUICK, *ports())
    wait_until(lambda: text("plan").count("edgegossip join") == 3)
    for name, line in zip("abc", re.findall(r"join (\S+)", text("plan")), strict=True):
        machines.start(name, "join", line, "--name", name, "--out", name)
    wait_until(lambda: all(any(Path(x).glob("workers/*/summary.json")) for x in "abc"))
    found = read_machines(Path("quickstart.toml"))
    assert sorted(each.name for each in found) == ["a", "b", "c"]
    for each in found:
        assert 10 < (each.samples_per_second or 0) < 1e6
        assert 1 < each.mbits < 1e6
        assert 0 <= each.latency_ms < 1000
        assert 0 < each.ms_per_training < 1000
        assert 0 <= each.ms_per_message < 1000
        assert 0 <= each.ms_per_mb < 10_000
    assert "best: gosgd" in text("plan")
    assert "started: gosgd" in text("plan")
    for name in "abc":
        run = JoinedRun.read(Path(name))
        assert run.kind == "planned"
        assert run.words[:3] == ("quickstart", "--num-workers", "3")
        [folder] = Path(name).glob("workers/*")
        experiment = json.loads((folder / "experiment.json").read_text())
        assert (experiment["name"], experiment["num_workers"]) == ("gosgd", 3)
        assert json.loads((folder / "summary.json").read_text())["seconds"] >= 1.9


@pytest.mark.slow
def test_a_machine_that_is_killed_while_it_measures_is_left_out(machines: Machines) -> None:
    machines.start("plan", *PLAN, "3", "--yes", "--work-seconds", "20", *QUICK, *ports())
    wait_until(lambda: text("plan").count("edgegossip join") == 3)
    lines = re.findall(r"join (\S+)", text("plan"))
    for rank, (name, line) in enumerate(zip("abc", lines, strict=True)):
        machines.start(name, "join", line, "--name", name, "--out", name)
        wait_until(lambda rank=rank: f"as worker {rank}" in text("plan"))  # type: ignore[misc]
    wait_until(lambda: "measuring work of 3 machines" in text("plan"))
    machines.started["a"].send_signal(signal.SIGKILL)
    wait_until(lambda: all(any(Path(x).glob("workers/*/summary.json")) for x in "bc"))
    assert "a is lost: nothing was heard from it" in text("plan")
    assert [each.name for each in read_machines(Path("quickstart.toml"))] == ["b", "c"]
    for rank, name in enumerate("bc"):
        run = JoinedRun.read(Path(name))
        assert (run.rank, run.num_workers) == (rank, 2)
        assert Path(name, "workers", str(rank), "summary.json").exists()
