"""Hosts that wait for each other: whom they give up, and whom not."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.hosts import EPOCHS, LONG, Slow, make_host
from tests.parity import SETTINGS, run_all
from tests.tiers import thorough
from tests.worlds import NUM_PARAMS

from edgegossip.contract.protocol import Evaluate, Rank, TimerFired
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.host.receiving import Frame
from edgegossip.net.host.status import STATUS, Phase
from edgegossip.net.host.timing import Patience
from edgegossip.net.memory import MemoryNetwork


@thorough
def test_one_that_says_nothing_is_given_up_and_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "edgegossip.net.host.host.Patience", lambda: Patience(slack=0.2, first=0.2)
    )
    network, is_stuck = MemoryNetwork(), threading.Event()

    def get_stuck() -> None:
        if hosts[1].state.round == 2 and not is_stuck.is_set():
            is_stuck.set()
            deadline = time.monotonic() + 10
            while hosts[0].state.round < 5 and time.monotonic() < deadline:
                time.sleep(0.01)

    trainers = [Slow(rank, before=get_stuck if rank == 1 else None) for rank in range(5)]
    algorithm = replace(EPOCHS, num_rounds=12)
    hosts = [make_host(algorithm, rank, network, trainers[rank]) for rank in range(5)]
    assert run_all(hosts) == ["finished"] * 5
    assert is_stuck.is_set()


@thorough
def test_those_who_wait_for_the_same_silent_one_do_not_give_each_other_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "edgegossip.net.host.host.Patience", lambda: Patience(slack=2.0, first=20.0)
    )
    network, may_go_on = MemoryNetwork(), threading.Event()
    trainers = [Slow(rank, 0.005 + 0.02 * rank) for rank in range(NUM_WORKERS - 1)]

    def get_stuck() -> None:
        if hosts[4].state.round >= 2:
            may_go_on.wait(20)

    stuck = Slow(4, before=get_stuck)
    hosts = [
        make_host(LONG, rank, network, trainer)
        for rank, trainer in enumerate([*trainers, stuck])
    ]
    threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 15
    while min(host.state.round for host in hosts[:4]) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert min(host.state.round for host in hosts[:4]) >= 8
    assert [host.peers.active for host in hosts[:4]] == [
        [other for other in range(4) if other != rank] for rank in range(4)
    ]
    assert caplog.text.count("nothing was heard for") == 4
    may_go_on.set()
    for host in hosts:
        host.stop()
    for thread in threads:
        thread.join(20)


@thorough
def test_a_lost_message_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgegossip.net.host.host.Patience", lambda: Patience(slack=0.5, first=0.5)
    )
    network = MemoryNetwork()
    hosts = [make_host(EPOCHS, rank, network) for rank in range(NUM_WORKERS)]
    transport, left = hosts[0]._transport, iter(range(1000))
    carry = transport.send

    def lose_one(receiver: Rank, frame: Any) -> None:  # noqa: ANN401
        is_model = STATUS.encode() not in b"".join(frame)
        if not (receiver == 1 and is_model and next(left) == 1):
            carry(receiver, frame)

    transport.send = lose_one  # type: ignore[method-assign]
    begun_at = time.monotonic()
    assert run_all(hosts) == ["finished"] * NUM_WORKERS
    assert time.monotonic() < begun_at + 10


def test_one_that_has_finished_answers_those_who_wait_and_no_one_else_does() -> None:
    host = make_host(EPOCHS, 0, MemoryNetwork())
    sending, told = host.sending, list[tuple[Rank, bool]]()
    sending.tell = lambda rank, *, again=False: told.append((rank, again))  # type: ignore[method-assign]
    host.peers.appeared(1, 5)
    status = replace(host.peers.status_for(1, Phase.RUNNING, 0.0), life=7)
    frame = pack(Envelope(SETTINGS.run, 1, 7, 0, 0), status.message())
    for sending.phase in (Phase.RUNNING, Phase.FINISHED):
        host.receiving.take(Frame(1, memoryview(bytearray().join(frame))), 0, 3.0)
    assert told == [(1, True)]
    assert host.receiving.spoke_at[1] == 3.0


def test_a_life_that_is_one_too_many_is_not_answered() -> None:
    host = make_host(EPOCHS, 0, MemoryNetwork())
    sending, told = host.sending, list[Rank]()
    sending.tell = lambda rank, *, again=False: told.append(rank)  # type: ignore[method-assign]
    sending.phase = Phase.RUNNING
    host.peers.appeared(1, 5)
    waiting = host.peers.status_for(1, Phase.WAITING, 0.0)
    for life in (7, 8, 9):
        frame = pack(
            Envelope(SETTINGS.run, 1, life, 0, 0), replace(waiting, life=life).message()
        )
        host.receiving.take(Frame(1, memoryview(bytearray().join(frame))), 0, float(life))
    assert told == [1, 1]
    assert host.receiving.spoke_at[1] == 8.0


def test_who_asks_its_own_machine_does_not_wait_for_others() -> None:
    host = make_host(EPOCHS, 0, MemoryNetwork(), evaluate=lambda params: (0.0, 1.0))
    host.sending.phase = Phase.RUNNING
    host._work.ask(Evaluate(torch.zeros(NUM_PARAMS)))
    host._watch_for_waiting()
    assert host._patience.check_at == math.inf
    host._work.take(host._inbox.get(), 0.0)
    host._watch_for_waiting()
    assert host._patience.check_at < math.inf


@pytest.mark.parametrize("is_pending", [False, True], ids=["timer", "pending result"])
def test_an_idle_worker_with_a_timer_announces_itself_and_gives_up_nobody(
    is_pending: bool,
) -> None:
    # A stage whose last timer is minutes away: one that has lost it would not find it before.
    host = make_host(EPOCHS, 0, MemoryNetwork())
    told = list[bool]()
    host.sending.tell_all = lambda *, again=False: told.append(again)  # type: ignore[method-assign]
    host.sending.phase = Phase.RUNNING
    host.peers.has_begun = True
    if is_pending:  # its links are full
        host._pending = [TimerFired("of a result")]
    else:
        host._alarms.set("left alone", 600.0)
    host._watch_for_waiting()
    assert host._patience.check_at < math.inf
    host.peers[1].has_lost_some = True
    host._lose_patience()
    assert (told, host.peers[1].is_lost) == ([True], False)
    host._alarms.set("left alone", math.inf)
    host._pending = []
    host._watch_for_waiting()
    host._lose_patience()
    assert (told, host.peers[1].is_lost) == ([True, True], True)


@thorough
def test_the_slowest_too_learns_how_long_rounds_take() -> None:
    network = MemoryNetwork()
    trainers = [Slow(rank, 0.05 if rank == 2 else 0.001) for rank in range(NUM_WORKERS)]
    hosts = [make_host(EPOCHS, rank, network, trainers[rank]) for rank in range(NUM_WORKERS)]
    assert run_all(hosts) == ["finished"] * NUM_WORKERS
    assert all(10.0 < host._patience.deadline < 20.0 for host in hosts)
