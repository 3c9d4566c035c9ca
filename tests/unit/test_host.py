"""Hosts in one process: what they survive, and that they go on to the last bit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.hosts import EPOCHS, LONG, Checkpoints, Running, Slow, make_host
from tests.parity import SETTINGS, run_all
from tests.tiers import thorough
from tests.worlds import NUM_PARAMS

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Message, Rank, Received, Train, WorkerLost
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.host.receiving import Frame
from edgegossip.net.host.status import STATUS
from edgegossip.net.memory import MemoryNetwork, MemoryTransport

# Failures.


def test_the_others_go_on_without_one_that_is_gone() -> None:
    running = Running(LONG)
    running.wait_for_round(2, *range(NUM_WORKERS))
    running.kill(1)
    others = [rank for rank in range(NUM_WORKERS) if rank != 1]
    running.wait_for_round(running.hosts[0].state.round + 3, *others)
    running.stop()


def test_one_goes_on_when_all_others_are_gone() -> None:
    running = Running(LONG)
    running.wait_for_round(2, *range(NUM_WORKERS))
    for rank in range(1, NUM_WORKERS):
        running.kill(rank)
    running.wait_for_round(running.hosts[0].state.round + 3, 0)
    running.stop()


def test_one_that_comes_back_takes_a_neighbors_round_and_goes_on() -> None:
    running = Running(LONG)
    running.wait_for_round(3, *range(NUM_WORKERS))
    running.kill(1)
    running.wait_for_round(running.hosts[0].state.round + 2, 0, 2)
    round_when_back = running.hosts[0].state.round
    running.start(1)
    running.wait_for_round(round_when_back + 3, *range(NUM_WORKERS))
    running.wait_until_in_step()  # before they stop, one after the other
    running.stop()


@thorough
def test_one_that_comes_back_with_a_checkpoint_hears_all_that_it_is_told_since() -> None:
    checkpoints = Checkpoints()
    settings = replace(SETTINGS, checkpoint_seconds=0.1)
    running = Running(LONG, save=checkpoints.save, settings=settings)
    running.wait_for_round(10, *range(NUM_WORKERS))
    running.kill(1)
    running.threads[1].join(20)
    running.wait_for_round(running.hosts[0].state.round + 2, 0, 2)
    round_when_back = running.hosts[0].state.round
    running.options["checkpoint"] = checkpoints[1]
    running.start(1)
    running.wait_for_round(round_when_back + 3, *range(NUM_WORKERS))
    running.stop()


def stopped() -> tuple[Running, Checkpoints]:
    """A run that all have left, and their checkpoints."""
    checkpoints = Checkpoints()
    running = Running(LONG, save=checkpoints.save)
    running.wait_for_round(3, *range(NUM_WORKERS))
    running.stop()
    return running, checkpoints


@thorough
def test_waiting_for_those_who_go_on_later_is_not_part_of_the_run() -> None:
    running, checkpoints = stopped()
    kept_at, round_when_kept = checkpoints[0]["now"], checkpoints[0]["state"].round
    wait = 0.5
    running.options["settings"] = replace(SETTINGS, max_seconds=kept_at + wait)
    for rank in range(NUM_WORKERS):
        running.options["checkpoint"] = checkpoints[rank]
        running.start(rank)
        if rank == 0:
            time.sleep(2 * wait)
    running.threads[0].join(20)
    assert running.reasons[0] == "time limit"
    assert running.hosts[0].state.round > round_when_kept + 1
    running.stop()


@thorough
def test_one_that_is_stopping_does_not_give_up_those_who_stopped_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains on for longer than it would wait for one that has left."""
    monkeypatch.setattr("edgegossip.net.host.peers._GRACE", 0.2)
    may_end = threading.Event()
    running = Running(LONG, save=lambda content: True)
    running.wait_for_round(2, *range(NUM_WORKERS))
    slow = running.hosts[0]
    train = slow._work._trainer.train

    def train_for_long(*arguments: Any) -> TrainingResult:  # noqa: ANN401
        assert may_end.wait(20)
        return train(*arguments)

    slow._work._trainer.train = train_for_long  # type: ignore[assignment,method-assign]
    running.hosts[1].stop()
    running.threads[1].join(20)
    deadline = time.monotonic() + 20
    while slow.peers.due_at == float("inf") and time.monotonic() < deadline:
        time.sleep(0.002)
    slow.stop()
    time.sleep(max(0.0, slow.peers.due_at - SETTINGS.runtime.clock()) + 0.1)
    may_end.set()
    running.threads[0].join(20)
    assert not slow.peers[1].is_lost
    running.stop()


@thorough
def test_a_run_begins_without_one_that_never_comes_and_takes_it_in_later() -> None:
    settings = replace(SETTINGS, meet_seconds=0.1)
    network = MemoryNetwork()
    hosts = [make_host(LONG, rank, network, settings=settings) for rank in range(NUM_WORKERS)]
    threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 20
    while hosts[1].state.round < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    threads[0].start()
    while hosts[0].state.round < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hosts[0].state.round >= 8
    assert all(host.peers.active == [r for r in range(5) if r != host.rank] for host in hosts)
    for host in hosts:
        host.stop()
    for thread in threads:
        thread.join(20)


@thorough
def test_a_cut_heals() -> None:
    running = Running(LONG)
    running.wait_for_round(2, *range(NUM_WORKERS))
    for a in (0, 1):
        for b in (2, 3, 4):
            running.network.cut(a, b)
    running.wait_for_round(running.hosts[0].state.round + 3, *range(NUM_WORKERS))
    assert running.hosts[0].peers.active == [1]
    for a in (0, 1):
        for b in (2, 3, 4):
            running.network.mend(a, b)
    running.wait_for_round(
        max(host.state.round for host in running.hosts.values()) + 3, *range(NUM_WORKERS)
    )
    assert running.hosts[0].peers.active == [1, 2, 3, 4]
    running.stop()


@thorough
def test_no_weight_is_lost_where_nothing_else_is() -> None:
    gosgd = GoSGD(
        topology=complete(NUM_WORKERS), num_rounds=30, exchange_probability=0.5, local_steps=2
    )
    network = MemoryNetwork()
    hosts = [make_host(gosgd, rank, network, Slow(rank, 0.001)) for rank in range(5)]
    assert run_all(hosts) == ["finished"] * 5
    assert sum(host.state.weight for host in hosts) == pytest.approx(1.0, abs=1e-12)


# The end.


@thorough
def test_a_run_ends_at_its_time_limit() -> None:
    settings = replace(SETTINGS, max_seconds=0.2)
    network = MemoryNetwork()
    hosts = [make_host(LONG, rank, network, settings=settings) for rank in range(5)]
    assert run_all(hosts) == ["time limit"] * 5


def test_what_training_raises_ends_the_host() -> None:
    def fail() -> None:
        raise TrainingError("the loss became nan")

    alone = replace(EPOCHS, topology=complete(NUM_WORKERS))
    settings = replace(SETTINGS, meet_seconds=0.01)
    host = make_host(alone, 0, MemoryNetwork(), Slow(0, before=fail), settings=settings)
    with pytest.raises(TrainingError, match="became nan"):
        run_all([host])


def test_an_algorithm_without_a_schema_is_told_so() -> None:
    class Silent(Algorithm[Any]):
        init = EPOCHS.init
        role = EPOCHS.role
        handle = EPOCHS.handle

    with pytest.raises(LocalProtocolError, match="`schema`"):
        make_host(Silent(), 0, MemoryNetwork())


@thorough
def test_what_never_arrives_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    gosgd = GoSGD(topology=complete(NUM_WORKERS), num_rounds=30, exchange_probability=1.0)
    network = MemoryNetwork()
    hosts = [make_host(gosgd, rank, network, Slow(rank, 0.001)) for rank in range(NUM_WORKERS)]
    transport, num_lost = hosts[0]._transport, 3
    carry, left = transport.send, iter(range(1000))

    def lose_some(receiver: Rank, frame: Any) -> None:  # noqa: ANN401
        is_model = STATUS.encode() not in b"".join(frame)
        if not (receiver == 1 and is_model and next(left) in range(1, 1 + num_lost)):
            carry(receiver, frame)

    transport.send = lose_some  # type: ignore[method-assign]
    assert run_all(hosts) == ["finished"] * NUM_WORKERS
    assert hosts[1].refusals == {"worker 0: missing": num_lost}
    assert [host.refusals for host in hosts[2:]] == [{}] * 3
    assert caplog.text.count("never arrived") == 1


@pytest.mark.parametrize("size", [0, 100])
def test_what_floods_a_host_is_refused_and_counted(size: int) -> None:
    settings = replace(SETTINGS, max_waiting_bytes=100_000)
    host = make_host(EPOCHS, 0, MemoryNetwork(), settings=settings)
    for _ in range(2):
        for _ in range(1000):
            host.receiving.received(1, memoryview(bytearray(size)))
        num_items = host._inbox.qsize()
        assert 100 <= num_items <= 200
        for _ in range(num_items):
            host.receiving.take(host._inbox.get(), 0, 0.0)
    refusals = host.refusals
    assert refusals["worker 1: more than can be held"] == 2 * (1001 - num_items)
    assert refusals["worker 1: no message"] == 2 * (num_items - 1)


def test_what_the_algorithm_holds_counts_too() -> None:
    gosgd = GoSGD(topology=complete(NUM_WORKERS), num_rounds=30)
    network = MemoryNetwork()
    host = make_host(gosgd, 0, network, settings=replace(SETTINGS, max_waiting_bytes=100_000))
    push = Message("push", 0, {"params": torch.zeros(NUM_PARAMS)}, {"weight": 0.1})
    host.peers[1].turn_to(7)
    host.peers.has_begun = True
    for number in range(1, 1001):
        envelope = Envelope(SETTINGS.run, 1, 7, host.peers.life, number)
        host.receiving.received(1, memoryview(bytearray().join(pack(envelope, push))))
        if not host._inbox.empty():
            for event in host.receiving.take(host._inbox.get(), 0, 0.0):
                gosgd.handle(host.state, event, 0.0)
    assert 50 <= len(host.state.queue) <= 200


@thorough
@pytest.mark.parametrize("seconds_to_send", [0.0, 0.05])
def test_a_limit_never_stops_those_who_wait_for_each_other(
    seconds_to_send: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = MemoryTransport.send

    def send_slowly(*arguments: Any) -> None:  # noqa: ANN401
        time.sleep(seconds_to_send)
        send(*arguments)

    monkeypatch.setattr(MemoryTransport, "send", send_slowly)
    settings = replace(SETTINGS, max_waiting_bytes=1)
    network = MemoryNetwork()
    hosts = [
        make_host(EPOCHS, rank, network, Slow(rank, 0.01 * rank), settings=settings)
        for rank in range(NUM_WORKERS)
    ]
    assert run_all(hosts) == ["finished"] * NUM_WORKERS
    assert [host.refusals for host in hosts] == [{}] * NUM_WORKERS


def test_a_late_frame_of_one_that_cannot_be_reached_does_not_bring_it_back() -> None:
    host = make_host(EPOCHS, 0, MemoryNetwork(), settings=SETTINGS)
    peers = host.peers
    peers.appeared(1, 5)
    peers[1].turn_to(7)
    peers.begin()
    peers[1].known_life, peers[1].is_lost = 7, False
    assert [type(event) for event in peers.disappeared(1, 5, 0.0)] == [WorkerLost]
    envelope = Envelope(SETTINGS.run, 1, sender_life=7, receiver_life=peers.life, number=1)
    params = Message("params", 0, {"params": torch.zeros(NUM_PARAMS)})
    late = memoryview(bytearray().join(pack(envelope, params)))
    assert [type(event) for event in host.receiving.take(Frame(1, late), 0, 1.0)] == [Received]
    assert peers[1].is_lost


def test_work_under_way_at_the_time_limit_is_cancelled_and_over_when_the_run_is() -> None:
    class Endless(Slow):
        is_cancelled = is_over = False

        def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
            while not self.is_cancelled:
                time.sleep(0.001)
            self.is_over = True
            return super().train(request, progress)

        def cancel(self) -> None:
            self.is_cancelled = True

    trainer = Endless(0)
    settings = replace(SETTINGS, max_seconds=0.05, meet_seconds=0.01)
    host = make_host(EPOCHS, 0, MemoryNetwork(), trainer, settings=settings)
    assert host.run() == "time limit"
    assert trainer.is_over
