"""Observers read the logs of workers over real sessions, and can do nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import zenoh
from tests.certificate_folders import give
from tests.tiers import thorough
from tests.transports import Recorder
from tests.zenoh_workers import RUN, Worker, wait_until

from edgegossip.cli.main import main
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import OBSERVER, Holder, issue, make_authority
from edgegossip.net.identity.tls import TLS
from edgegossip.net.zenoh.observer import Observer
from edgegossip.net.zenoh.router import Router
from edgegossip.net.zenoh.shown_log import HISTORY, ShownLog
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real import mirror
from edgegossip.real.launch import free_ports
from edgegossip.real.mirror import Mirror


class Lines:
    """Keeps the lines that an observer reads, by worker."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Rank], bytes] = defaultdict(bytes)

    def read(self, run: str, rank: Rank, lines: bytes, *, is_first: bool) -> None:
        self.found[run, rank] = (b"" if is_first else self.found[run, rank]) + lines

    def __getitem__(self, rank: Rank) -> bytes:
        return self.found[RUN, rank]


class Mesh:
    """Workers with certificates of one authority, each with a log; and observers of them."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder, self._opened = folder, opened
        make_authority(folder / "authority")
        issue(folder / "authority", [0, 1, None, OBSERVER])
        self.endpoints = [f"tls/127.0.0.1:{port}" for port in free_ports(3)]
        self.logs = [folder / f"{rank}.jsonl" for rank in (0, 1)]

    def tls(self, holder: Holder) -> TLS:
        return TLS.from_folder(
            give(self.folder / "authority", self.folder / f"{holder}", holder), holder
        )

    def worker(self, rank: Rank, *connect: str, listens: bool = True) -> ZenohTransport:
        listen = (self.endpoints[rank],) if listens else ()
        transport = ZenohTransport(
            run=RUN,
            rank=rank,
            num_workers=2,
            address=Address(listen=listen, connect=connect),
            security=self.tls(rank),
            shown=self.logs[rank],
        )
        self._opened.callback(transport.close)
        transport.open(Recorder())
        return transport

    def observer(
        self, endpoint: str, lines: Lines, is_wanted: Callable[[], bool] = lambda: True
    ) -> Observer:
        address = Address(connect=(endpoint,))
        return self._opened.enter_context(
            Observer(address, lines, security=self.tls(OBSERVER), is_wanted=is_wanted)
        )


@pytest.fixture
def mesh(tmp_path: Path, opened: ExitStack) -> Mesh:
    return Mesh(tmp_path, opened)


@thorough
def test_an_observer_reads_all_workers_over_one_and_only_while_somebody_wants_to_know(
    mesh: Mesh,
) -> None:
    mesh.worker(0)
    mesh.worker(1, mesh.endpoints[0])
    mesh.logs[0].write_bytes(b'{"type":"worker"}\n')
    lines, is_wanted = Lines(), threading.Event()
    mesh.observer(mesh.endpoints[0], lines, is_wanted.is_set)
    time.sleep(2.0)
    assert not lines.found
    is_wanted.set()
    wait_until(lambda: lines[0] == b'{"type":"worker"}\n', 10.0)
    mesh.logs[1].write_bytes(b"one\ntwo\nthr")  # a log that comes later
    wait_until(lambda: lines[1] == b"one\ntwo\n")
    with mesh.logs[1].open("ab") as log:
        log.write(b"ee\n")
    wait_until(lambda: lines[1] == b"one\ntwo\nthree\n")
    again = Lines()  # as after a restart
    mesh.observer(mesh.endpoints[0], again)
    wait_until(lambda: again[1] == lines[1] and again[0] == lines[0], 10.0)


def test_an_observer_reads_over_a_router(mesh: Mesh, opened: ExitStack) -> None:
    router = mesh.endpoints[2]
    opened.enter_context(Router(Address(listen=(router,)), security=mesh.tls(None)))
    for rank in (0, 1):
        mesh.logs[rank].write_bytes(b"%d\n" % rank)
        mesh.worker(rank, router, listens=False)
    lines = Lines()
    mesh.observer(router, lines)
    wait_until(lambda: [lines[0], lines[1]] == [b"0\n", b"1\n"], 10.0)


@thorough
def test_a_worker_answers_only_for_itself(mesh: Mesh, opened: ExitStack) -> None:
    mesh.worker(0)
    mesh.logs[0].write_bytes(b"true\n")
    liar = Worker(give_folder(mesh, 1), 1, mesh.endpoints[0], is_careful=False)
    opened.callback(liar.session.close)
    answer_as(liar, "0", "1")
    lines = Lines()
    mesh.observer(mesh.endpoints[0], lines)
    wait_until(lambda: lines[0] and lines[1], 10.0)
    time.sleep(1.5)
    assert [lines[0], lines[1]] == [b"true\n", b"false\n"]


def give_folder(mesh: Mesh, holder: Holder) -> Path:
    return mesh.tls(holder).certificate.parent


def answer_as(liar: Worker, *ranks: str) -> None:
    """Answer all questions about the status of `ranks` with a line."""
    head = json.dumps({"file": 666, "size": 6, "from": 0, "to": 6}).encode()

    def answer(query: zenoh.Query, key: str) -> None:
        asked = query.payload
        has_question = asked is not None and asked.to_bytes()
        query.reply(key, head + b"\nfalse\n" if has_question else head)

    for rank in ranks:
        key = f"{liar.prefix}/status/{rank}"
        liar.session.declare_queryable(key, partial(answer, key=key))


@pytest.fixture
def impostor(mesh: Mesh, opened: ExitStack) -> tuple[Worker, Worker, Worker]:
    """Two honest workers, and an observer that keeps no rules, linked with both."""
    first = Worker(give_folder(mesh, 0), 0)
    opened.callback(first.session.close)
    second = Worker(give_folder(mesh, 1), 1, first.endpoint)
    opened.callback(second.session.close)
    wait_until(lambda: first.sees(1) and second.sees(0), 20.0)
    ends = (first.endpoint, second.endpoint)
    observer = Worker(give_folder(mesh, OBSERVER), OBSERVER, *ends, is_careful=False)
    opened.callback(observer.session.close)
    wait_until(lambda: len(observer.session.info.peers_zid()) == 2, 20.0)
    return first, second, observer


def test_an_observer_can_send_no_model_and_no_status_and_has_no_part(
    impostor: tuple[Worker, Worker, Worker],
) -> None:
    first, second, observer = impostor
    session, prefix = observer.session, observer.prefix
    asked: list[str] = []
    for worker in (first, second):
        worker.watch(f"{worker.prefix}/status/*")
        session.declare_queryable(
            f"{prefix}/status/{worker.rank}", lambda query: asked.append(str(query.key_expr))
        )
    for keys in ("data/0/1", "data/0/observer", "data/**", "status/1", "status/observer", "**"):
        session.put(f"{prefix}/{keys}", b"forged")
        session.delete(f"{prefix}/{keys}")
    tokens = [
        session.liveliness().declare_token(f"{prefix}/alive/{rank}/8")
        for rank in ("0", "1", "*", "observer")
    ]
    for keys in ("**", f"{prefix}/**", f"{prefix}/data/1/*"):
        observer.watch(keys)
    first.session.get(f"{prefix}/status/1", lambda reply: asked.append("an answer"))
    time.sleep(0.5)
    first.send(1, b"still")
    second.send(0, b"here")
    wait_until(lambda: second.received and first.received)
    time.sleep(0.5)
    assert first.received == [("/data/0/1", b"here")]
    assert second.received == [("/data/1/0", b"still")]
    for worker in (first, second):
        assert {*worker.alive} == {"/alive/0/7", "/alive/1/7"}
    assert {payload for _, payload in observer.received} <= {b"forged", b""}  # its own
    assert {"/alive/0/7", "/alive/1/7"}.isdisjoint(observer.alive)
    assert asked == []
    assert len(tokens) == 4


@thorough
def test_an_observer_of_another_run_or_authority_learns_nothing(
    mesh: Mesh, tmp_path: Path
) -> None:
    mesh.worker(0)
    mesh.logs[0].write_bytes(b"secret\n")
    issue(mesh.folder / "authority", [OBSERVER], run_name="night", replace=True)
    lines, lost = Lines(), Lines()
    night = mesh.tls(OBSERVER)
    with pytest.raises(NetworkError, match="valid only in runs named 'night'"):
        Observer(Address(connect=(mesh.endpoints[0],)), lines, security=night)
    address = Address(connect=(mesh.endpoints[0],))
    with Observer(address, lines, security=night, run_names=["night"]):
        time.sleep(3.0)
    make_authority(tmp_path / "other")
    issue(tmp_path / "other", [OBSERVER])
    strange = TLS.from_folder(tmp_path / "other", OBSERVER)
    with Observer(address, lost, security=strange):
        time.sleep(2.0)
    assert not lines.found
    assert not lost.found


def test_an_observer_is_no_worker_and_a_worker_no_observer(mesh: Mesh) -> None:
    folder, tls = give_folder(mesh, OBSERVER), mesh.tls(OBSERVER)
    posing = TLS(tls.ca, tls.certificate, tls.key)
    with pytest.raises(NetworkError, match="is for 'edgegossip-observer', not for 'worker-1'"):
        posing.check(1)
    with pytest.raises(NetworkError, match="certs issue --rank 1"):
        TLS.from_folder(folder, 1).check(1)
    worker = mesh.tls(0)
    with pytest.raises(NetworkError, match="not for 'edgegossip-observer'"):
        worker.check(OBSERVER)


# The worker's side.


def asked(log: ShownLog, file: int = 0, position: int = 0) -> tuple[dict[str, int], bytes]:
    answer = log.answer(f"{file} {position}".encode())
    assert answer is not None
    head, _, lines = answer.partition(b"\n")
    return json.loads(head), lines


def test_a_long_log_is_shown_from_its_first_line_and_its_last_bytes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = ShownLog(path)
    assert log.answer(b"") is None
    path.write_bytes(b"first\n" + b"".join(b"%07d\n" % i for i in range(2**20)))
    head, lines = asked(log)
    assert lines == b"first\n"
    assert 0 <= head["to"] - (head["size"] - HISTORY) <= 8
    found, position = b"", head["to"]
    while position < head["size"]:
        about, lines = asked(log, head["file"], position)
        assert about["from"] == position
        found, position = found + lines, about["to"]
    assert len(found) >= HISTORY - 8
    assert found.endswith(b"%07d\n" % (2**20 - 1))
    assert asked(log, head["file"], head["size"])[1] == b""


def test_a_line_that_no_message_can_hold_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 2**20 + b"\nnext\n")
    log = ShownLog(path)
    head, lines = asked(log)
    assert lines == b""
    assert asked(log, head["file"], head["to"])[1] == b"next\n"


def test_questions_are_limited_and_malformed_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"line\n")
    log = ShownLog(path)
    for question in (b"-1", b"one two", b"1 -1", b"1 2 3", b"\xff"):
        with pytest.raises(ValueError, match=r"at least 0|int|unpack"):
            log.answer(question)
    answers = [log.answer(b"0 0") for _ in range(100)]
    assert 60 <= len(answers) - answers.count(None) <= 70


# The copies.


def test_copies_are_a_run_folder_and_nobody_speaks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Mirror(tmp_path)
    first, own = b'{"type":"worker","rank":3}\n', b'{"type":"trained","rank":3}\n'
    copies.read("night:run", 3, first, is_first=True)
    copies.read("night:run", 3, own + b'{"type":"ended","rank":2}\nno JSON\n', is_first=False)
    path = tmp_path / "night-run" / "workers" / "3" / "events.jsonl"
    assert path.read_bytes() == first + own
    monkeypatch.setattr(mirror, "_MAX_BYTES", len(first + own))
    for _ in range(2):
        copies.read("night:run", 3, own, is_first=False)
    assert path.read_bytes() == first + own
    assert [each.getMessage().partition(" is ")[2] for each in caplog.records] == [
        "full; what follows of worker 3 is left out"
    ]
    copies.read("night:run", 3, own, is_first=True)  # it was started again
    assert path.read_bytes() == own


def test_watch_wants_a_folder_or_an_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], [str(tmp_path), "--connect", "tcp/127.0.0.1:1"]):
        assert main(["watch", *arguments]) == 2
        assert "the FOLDER of a run, or --connect ENDPOINT" in capsys.readouterr().err
    assert main(["watch", "--connect", "tcp/192.0.2.1:7447"]) == 1
    assert "reaches beyond this machine" in capsys.readouterr().err
