"""Links that are cut and come back while both ends live: nothing that was on them is lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.host_checks import check
from tests.host_runs import Run
from tests.host_worlds import Disturbance, World
from tests.hosts import LONG, Checkpoints, Running, make_host
from tests.parity import SETTINGS, SIZE
from tests.tiers import by_name, first, thorough
from tests.virtual_network import Wire
from tests.worlds import NUM_PARAMS, ManySamples

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Event, Message, Rank, Received, Seconds
from edgegossip.contract.topology import complete
from edgegossip.net.guard.envelope import Envelope, pack, unpack
from edgegossip.net.host.host import Host
from edgegossip.net.host.link_log import LinkLog
from edgegossip.net.host.peers import PLACEHOLDER, SentLog
from edgegossip.net.host.receiving import Appeared, Disappeared, Frame
from edgegossip.net.host.sending import Outbox, Sending
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.net.memory import MemoryNetwork, MemoryTransport
from edgegossip.net.runtime import Background, RealRuntime

PUSHING = GoSGD(
    topology=complete(NUM_WORKERS), num_rounds=200, exchange_probability=1.0, local_steps=1
)
ENDLESS_GOSGD = replace(PUSHING, num_rounds=1_000_000)


class SlowToNotice(MemoryNetwork):
    """Loses what is sent for a while before a cut is noticed, as a link that is silent does."""

    def __init__(self) -> None:
        super().__init__()
        self.swallows: frozenset[Rank] = frozenset()
        self.num_swallowed = 0

    def carry(self, sender: MemoryTransport, receiver: Rank, frame: bytearray) -> None:
        if {sender.rank, receiver} == self.swallows:
            self.num_swallowed += 1
        else:
            super().carry(sender, receiver, frame)


@thorough
def test_what_was_on_a_link_that_was_cut_is_sent_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.hosts.MemoryNetwork", SlowToNotice)
    running = Running(PUSHING)
    network = running.network
    assert isinstance(network, SlowToNotice)
    running.wait_for_round(20, 0, 1)
    for _ in range(3):
        network.swallows = frozenset((0, 1))
        before = network.num_swallowed
        while network.num_swallowed < before + 4:
            time.sleep(0.001)
        network.cut(0, 1)
        network.swallows = frozenset()
        network.mend(0, 1)
    for thread in running.threads.values():
        thread.join(20)
    assert set(running.reasons.values()) == {"finished"}
    states = [host.state for host in running.hosts.values()]
    assert sum(state.weight for state in states) == pytest.approx(1.0, abs=1e-9)
    assert all(host.refusals == {} for host in running.hosts.values())


@thorough
@pytest.mark.parametrize("keeps", [True, False], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize(
    "algorithm", by_name({"rounds": LONG, "gosgd": ENDLESS_GOSGD}, ["rounds"])
)
def test_one_that_leaves_and_is_back_at_once_takes_part_again(
    algorithm: Any,  # noqa: ANN401
    keeps: bool,
) -> None:
    kept = Checkpoints()
    options: dict[str, Any] = {"save": kept.save} if keeps else {}
    running = Running(algorithm, **options)
    running.wait_for_round(5, *range(NUM_WORKERS))
    for _ in range(2):
        running.hosts[1].stop()
        running.threads[1].join(20)
        time.sleep(0.02)  # while the others do not miss it yet
        if keeps:
            running.options = {**options, "checkpoint": kept[1]}
        running.start(1)
        running.options = options
        began_at = time.monotonic()
        goal = max(host.state.round for host in running.hosts.values()) + 10
        running.wait_for_round(goal, *range(NUM_WORKERS))
        assert time.monotonic() < began_at + 2.5
    assert all(host.refusals == {} for host in running.hosts.values())
    running.stop()


SLOW = World(
    seed=0,
    name="gosgd",
    algorithm=PUSHING,
    step_seconds=(0.05,) * NUM_WORKERS,
    start_at=(0.0,) * NUM_WORKERS,
    wire=Wire(bandwidth=2000.0),  # about ten pushes a second, so that some wait
    disturbances=(Disturbance(kind="cut", at=3.0, ranks=(0, 1), seconds=4.0),),
    meet_seconds=2.5,
    checkpoint_seconds=math.inf,
)


@thorough
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_what_waits_for_a_link_that_is_cut_arrives_in_order_when_it_is_back(seed: int) -> None:
    run = check(replace(SLOW, seed=seed))
    hosts = [run.processes[rank].host for rank in range(NUM_WORKERS)]
    assert [host.refusals for host in hosts] == [{}] * NUM_WORKERS
    assert sum(host.state.weight for host in hosts) == pytest.approx(1.0, abs=1e-9)
    assert all(a.peers[b.rank].sent == b.peers[a.rank].received for a, b in pairs(hosts))


def pairs(hosts: list[Host[Any]]) -> list[tuple[Host[Any], Host[Any]]]:
    return [(a, b) for a in hosts for b in hosts if a is not b]


class AtOnce(RealRuntime):
    """Has no threads: what would be done beside the caller is done by it."""

    def background(self, name: str) -> Background:
        return cast("Background", self)

    def submit(self, job: Callable[[], Any], done: Callable[[Any], object]) -> None:
        done(job())

    def close(self, seconds: Seconds) -> None:
        pass


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(EpochGossip(topology=complete(3), num_rounds=2), id="epoch-gossip"),
        pytest.param(DiLoCo(topology=complete(3), num_rounds=2, local_steps=4), id="diloco"),
    ],
)
def test_models_are_equal_after_a_cut_in_the_last_exchange(algorithm: Algorithm[Any]) -> None:
    """Both ends of the link wait for a third worker; one lacks the other's model, which has
    mixed its own."""
    cut = Disturbance(kind="one way cut", at=6.25, ranks=(0, 1), seconds=3.2)
    calm = replace(SLOW, wire=Wire(bandwidth=1e5), start_at=(0.0,) * 3, meet_seconds=2.0)
    world = replace(
        calm, algorithm=algorithm, step_seconds=(0.1, 0.1, 1.5), disturbances=(cut,)
    )
    run = Run(world)
    assert run.to_the_end()
    first, *others = [process.host.state.params for process in run.processes.values()]
    for params in others:
        torch.testing.assert_close(params, first)


def test_one_whose_round_waits_for_its_links_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has neither messages nor news, and a full link may be as slow as this."""
    algorithm = EpochGossip(topology=complete(3), num_rounds=40)
    calm = replace(SLOW, wire=Wire(bandwidth=1e5), start_at=(0.0,) * 3, disturbances=())
    world = replace(calm, algorithm=algorithm, step_seconds=(0.1,) * 3)
    run, seconds = Run(world), set[int]()

    def is_congested(sending: Sending) -> bool:
        is_full = sending._peers.rank == 0 and 10 < run.time.now < 35
        seconds.update([int(run.time.now)] if is_full else [])
        return is_full

    monkeypatch.setattr(Sending, "is_congested", property(is_congested))
    assert run.to_the_end()
    assert len(seconds) > 20
    assert not [line for line in lines(caplog) if "going on" in line]


@pytest.mark.parametrize("has_restarted", [False, True])
def test_one_that_is_back_gets_nothing_new_before_what_it_lacks(has_restarted: bool) -> None:
    """It may know only an earlier life of this worker, and has then got nothing of this one."""
    host = make_host(PUSHING, 0, MemoryNetwork(), settings=replace(SETTINGS, runtime=AtOnce()))
    sending, receiving, peers = host.sending, host.receiving, host.peers
    sent, reported = list[int](), list[int]()
    running = replace(peers.status_for(1, Phase.RUNNING, 0.0), life=7, begun_with=peers.life)

    def note(receiver: Rank, frame: Any) -> None:  # noqa: ANN401
        sent.append(unpack(b"".join(frame))[0].number)

    host._transport.send = note  # type: ignore[method-assign]

    def say(status: WorkerStatus, earlier: int = 0) -> None:
        frame = pack(Envelope(SETTINGS.run, 1, 7, peers.life + earlier, 0), status.message())
        receiving.take(Frame(1, memoryview(bytearray().join(frame))), 0, 1.0)
        sending.release(1.0)

    def push() -> None:
        number = peers[1].sent + 1
        message = Message("push", 0, {"params": torch.zeros(NUM_PARAMS)}, {"weight": 0.1})
        assert sending.send(1, message, lambda: reported.append(number))

    receiving.take(Appeared(1, 5), 0, 0.0)
    say(running)
    peers.begin()
    say(running)
    for _ in range(3):
        push()
    receiving.disappeared(1, 5)
    receiving.take(Disappeared(1, 5), 0, 1.0)
    receiving.take(Appeared(1, 5), 0, 1.0)
    push()
    say(replace(running, received=(1, *running.received[1:])), earlier=int(has_restarted))
    push()
    again = [1, 2, 3, 4] if has_restarted else [2, 3, 4]
    assert [number for number in sent if number] == [1, 2, 3, *again, 5]  # 0 are accounts
    assert reported == [1, 2, 3, 4, 5]


def test_a_placeholder_counts_as_its_message_and_is_not_handed_over() -> None:
    host = make_host(PUSHING, 0, MemoryNetwork(), settings=SETTINGS)
    receiving, peers = host.receiving, host.peers

    def receive(number: int, message: Message) -> list[Event]:
        frame = pack(Envelope(SETTINGS.run, 1, 7, peers.life, number), message)
        return receiving.take(Frame(1, memoryview(bytearray().join(frame))), 0, 1.0)

    receiving.take(Appeared(1, 5), 0, 0.0)
    running = replace(peers.status_for(1, Phase.RUNNING, 0.0), life=7, begun_with=peers.life)
    # Of what this worker has sent before it resumed, four messages have arrived.
    told = replace(running, received=(4, *running.received[1:]))
    receive(0, told.message())
    peers.begin()
    receive(0, told.message())
    peers.is_resumed = True
    peers[1].sent = 2
    push = Message("push", 0, {"params": torch.zeros(NUM_PARAMS)}, {"weight": 0.1})
    assert receive(1, PLACEHOLDER) == receive(1, push) == []  # it has come already
    assert peers[1].sent == 4  # what it does from now on differs from what it did before
    [event] = receive(2, push)
    assert isinstance(event, Received)
    assert not peers[1].has_lost_some
    assert not host.refusals


@pytest.mark.parametrize("by", ["message", "status"])
def test_one_that_is_found_is_told_so(by: str) -> None:
    """Each may have lost the other, and have nothing more to send."""
    host = make_host(PUSHING, 0, MemoryNetwork(), settings=replace(SETTINGS, runtime=AtOnce()))
    receiving, peers = host.receiving, host.peers
    told = list[Message]()

    def note(receiver: Rank, frame: Any) -> None:  # noqa: ANN401
        told.append(unpack(b"".join(frame))[1])

    host._transport.send = note  # type: ignore[method-assign]
    running = replace(peers.status_for(1, Phase.RUNNING, 0.0), life=7, begun_with=peers.life)

    def take(message: Message, number: int = 0) -> None:
        frame = pack(Envelope(SETTINGS.run, 1, 7, peers.life, number), message)
        receiving.take(Frame(1, memoryview(bytearray().join(frame))), 0, 1.0)

    receiving.take(Appeared(1, 5), 0, 0.0)
    take(running.message())
    peers.begin()
    take(running.message())
    host.sending.tell(1)
    peers.lose(1)
    told.clear()
    if by == "message":
        push = Message("push", 0, {"params": torch.zeros(NUM_PARAMS)}, {"weight": 0.1})
        take(push, number=1)
    else:
        take(running.message())
    assert not peers[1].is_lost
    (status,) = told
    assert WorkerStatus.parse(status).received[1] == (by == "message")


class Clocked(AtOnce):
    """Its clock shows what it is told to."""

    now = 0.0

    def clock(self) -> Seconds:
        return self.now


def test_mail_is_held_for_three_seconds_at_most_though_nothing_else_happens() -> None:
    runtime, sent = Clocked(), list[int]()
    settings = replace(SETTINGS, runtime=runtime)
    host = make_host(PUSHING, 0, MemoryNetwork(), ManySamples(0, 0.1, SIZE), settings=settings)
    waiting = replace(host.peers.status_for(1, Phase.WAITING, 0.0), life=7)
    coroutine = host.coroutine()
    coroutine.send(None)
    coroutine.send(Appeared(1, 5))
    frame = pack(Envelope(SETTINGS.run, 1, 7, host.peers.life, 0), waiting.message())
    coroutine.send(Frame(1, memoryview(bytearray().join(frame))))
    runtime.now = settings.meet_seconds
    coroutine.send(None)  # it begins without the others, and trains from now on

    def note(receiver: Rank, frame: Any) -> None:  # noqa: ANN401
        sent.append(unpack(b"".join(frame))[0].number)

    host._transport.send = note  # type: ignore[method-assign]
    host.receiving.disappeared(1, 5)
    coroutine.send(Disappeared(1, 5))
    coroutine.send(Appeared(1, 5))
    message = Message("push", 0, {"params": torch.zeros(NUM_PARAMS)}, {"weight": 0.1})
    assert host.sending.send(1, message)
    held_until = coroutine.send(None)
    assert 1 not in sent
    assert held_until == runtime.now + 3.0
    runtime.now = held_until
    assert coroutine.send(None) > held_until
    assert sent.count(1) == 1
    coroutine.close()


def test_a_message_too_large_to_be_kept_is_sent_at_once() -> None:
    log = SentLog(max_bytes=2000)
    for number, numel in ((1, 10), (2, 1000)):
        log.add(number, Message("push", 0, {"params": torch.zeros(numel)}))
        assert log.has(number) == (numel == 10)


# What the log says.


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_link_that_is_lost_and_comes_back_makes_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = LinkLog()
    log.found(1, 5, now=0.0)
    log.lost(1, 5, Phase.RUNNING, now=20.0)
    log.found(1, 5, now=22.5)
    log.lost(1, 5, Phase.LEAVING, now=40.0)
    log.found(1, 6, now=50.0)
    log.lost(1, 5, Phase.RUNNING, now=70.0)  # of the process before
    assert lines(caplog) == [
        "link with worker 1 is up",
        "link with worker 1 is lost (it has failed, or the path to it is cut)",
        "link with worker 1 is back after 2.5 s",
        "link with worker 1 is lost (it was stopped, and keeps a checkpoint)",
        "link with worker 1, which was started again, is back after 10.0 s",
    ]


def test_a_link_that_comes_and_goes_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    log = LinkLog()
    for tenth in range(1000):
        log.found(1, 5, now=tenth / 10)
        log.lost(1, 5, Phase.RUNNING, now=tenth / 10 + 0.05)
    assert len(lines(caplog)) == 20
    assert lines(caplog)[2].endswith("cut); also 99 times before")


def test_a_lost_link_has_a_reason_and_so_has_its_return() -> None:
    log = LinkLog()
    assert log.found(1, 5, now=0.0) == "it has come for the first time"
    assert log.lost(1, 5, Phase.RUNNING, now=20.0) == (
        "it has failed, or the path to it is cut"
    )
    assert log.found(1, 5, now=22.5) == "it is the same process"
    assert log.lost(1, 5, Phase.GONE, now=23.0) == "it has left the run"
    assert log.found(1, 6, now=50.0) == "it was started again"
    assert log.lost(1, 5, Phase.RUNNING, now=70.0) is None  # of the process before
    assert log.lost(1, 6, Phase.FINISHED, now=71.0) is None
    assert log.found(1, 6, now=72.0) is None


def test_a_link_that_comes_and_goes_is_told_in_pairs_and_seldom() -> None:
    log, told = LinkLog(), []
    for tenth in range(1000):
        told.append(log.found(1, 5, now=tenth / 10))
        told.append(log.lost(1, 5, Phase.RUNNING, now=tenth / 10 + 0.05))
    losses, returns = told[1::2], told[2::2]
    assert [each is None for each in losses[:-1]] == [each is None for each in returns]
    assert losses[:20].count(None) == 0
    assert 1000 - losses.count(None) == 20 + 10


@thorough
@pytest.mark.parametrize("name", ["epoch-gossip", "double-squeeze"])
def test_rounds_do_not_run_away_from_messages_on_a_slow_link_that_is_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a link is cut, workers go on alone, and many rounds take as long as a message."""
    most, put = [0], Outbox.put

    def watched(outbox: Outbox, receiver: Rank, *given: Any, **named: Any) -> bool:  # noqa: ANN401
        is_queued = put(outbox, receiver, *given, **named)
        most.append(outbox.num_numbered(receiver))
        return is_queued

    monkeypatch.setattr(Outbox, "put", watched)
    graph = complete(NUM_WORKERS)
    algorithms: dict[str, Algorithm[Any]] = {
        "epoch-gossip": EpochGossip(topology=graph, num_rounds=150),
        "double-squeeze": DoubleSqueeze(topology=graph, num_rounds=150, local_steps=1),
    }
    fast = (0.005,) * NUM_WORKERS
    alone = (Disturbance(kind="partition", at=1.0, ranks=(0,), seconds=3.0),)
    world = replace(SLOW, name=name, algorithm=algorithms[name], step_seconds=fast)
    Run(replace(world, disturbances=alone)).to_the_end()
    assert max(most) <= 8
