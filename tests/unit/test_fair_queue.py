"""Whoever sends much delays nobody else."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.hosts import EPOCHS, make_host
from tests.parity import SETTINGS
from tests.worlds import NUM_PARAMS
from tests.zenoh_workers import wait_until

from edgegossip.contract.protocol import Event, Message, Seconds, WorkerLost
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.host.host import Host
from edgegossip.net.host.receiving import Appeared, Frame
from edgegossip.net.host.status import Phase
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.runtime import (
    BURST,
    REFUSED_COST,
    STATUS_COST,
    FairQueue,
    RealRuntime,
    TokenBucket,
)

EMPTY = memoryview(b"")


def test_each_sender_waits_for_one_frame_of_each_other() -> None:
    waiting = FairQueue()
    for number in range(1000):
        waiting.put(Frame(1, memoryview(bytes([number % 256]))))
    waiting.put(None)
    for rank in (2, 3):
        waiting.put(Frame(rank, EMPTY))
    first = [waiting.get() for _ in range(4)]
    assert [getattr(item, "sender", None) for item in first] == [1, None, 2, 3]
    rest = [waiting.get() for _ in range(waiting.qsize())]
    assert [item.data[0] for item in rest] == [number % 256 for number in range(1, 1000)]
    assert waiting.empty()


def test_what_is_of_one_sender_stays_in_order_whatever_it_is() -> None:
    waiting = FairQueue()
    items = [Appeared(1, 5), Frame(1, EMPTY), WorkerLost(1), Appeared(1, 6)]
    for item in items:
        waiting.put(item)
    assert [waiting.get() for _ in items] == items


def test_nothing_is_none_after_a_while_and_what_comes_meanwhile_is_taken() -> None:
    waiting = FairQueue()
    assert waiting.get(timeout=0.001) is None
    threading.Timer(0.01, waiting.put, ["late"]).start()
    assert waiting.get(timeout=10.0) == "late"


class Helped:
    """A queue whose items other threads may handle, and who handles which."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.handled: list[tuple[Any, str]] = []
        self.must_return = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.queue.let_help(self._handle)

    def _handle(self, item: Any) -> bool:  # noqa: ANN401
        self.handled.append((item, threading.current_thread().name))
        assert self.may_go_on.wait(10)
        return self.must_return

    def waiting(self) -> tuple[threading.Thread, list[Any]]:
        """A thread that takes one item, once it waits for it."""
        taken = list[Any]()

        def take() -> None:
            taken.append(self.queue.get(timeout=10))

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: not self.queue._handling.locked())
        return thread, taken


def helper(helped: Helped, *items: Any) -> threading.Thread:  # noqa: ANN401
    def help_with() -> None:
        for item in items:
            helped.queue.add(item)
            helped.queue.help()

    thread = threading.Thread(target=help_with, name="helper")
    thread.start()
    return thread


def test_while_nobody_handles_items_whoever_brings_one_does() -> None:
    helped = Helped()
    thread, taken = helped.waiting()
    helper(helped, "one", "two").join()
    assert helped.handled == [("one", "helper"), ("two", "helper")]
    assert taken == []
    helped.queue.put("three")
    thread.join()
    assert taken == ["three"]


def test_a_helper_can_have_the_queues_own_thread_return() -> None:
    helped = Helped()
    thread, taken = helped.waiting()
    helped.must_return = True
    helper(helped, "one").join()
    thread.join()
    assert helped.handled == [("one", "helper")]
    assert taken == [None]


def test_what_comes_while_an_item_is_handled_is_left_to_the_queues_own_thread() -> None:
    helped = Helped()
    thread, taken = helped.waiting()
    helped.may_go_on.clear()
    first = helper(helped, "one")
    wait_until(lambda: bool(helped.handled))
    helper(helped, "two").join()  # it does not wait for the first
    time.sleep(0.01)
    assert taken == []  # one thread at a time handles items
    helped.may_go_on.set()
    first.join()
    thread.join()
    assert (helped.handled, taken) == ([("one", "helper")], ["two"])


def test_a_helper_handles_one_item_and_none_once_nobody_may_help() -> None:
    helped = Helped()
    thread, taken = helped.waiting()
    helped.queue.add(WorkerLost(1))
    helped.queue.add(WorkerLost(1))
    helper(helped, WorkerLost(2)).join()
    thread.join()
    assert [item for item, _ in helped.handled] + taken == [WorkerLost(1), WorkerLost(2)]
    helped.queue.let_help(None)
    helper(helped, "late").join()
    assert len(helped.handled) == 1
    assert [helped.queue.get() for _ in range(2)] == [WorkerLost(1), "late"]


class Preempted:
    """A lock whose holder stands still, just after it has got it, until it may go on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        is_held = self.lock.acquire(blocking)
        if is_held and threading.current_thread().name == "helper":
            self.is_held.set()
            assert self.may_go_on.wait(10)
        return is_held

    def release(self) -> None:
        self.lock.release()


def test_nobody_helps_while_the_queues_own_thread_begins_to_share_it() -> None:
    waiting, handled, lock = FairQueue(), list[Any](), Preempted()
    waiting._handling = lock  # type: ignore[assignment]

    def help_with() -> None:
        waiting.add("trained")
        waiting.help()

    def handle(item: Any) -> bool:  # noqa: ANN401
        handled.append(item)
        return False

    early = threading.Thread(target=help_with, name="helper")
    early.start()
    lock.is_held.wait(0.05)
    waiting.let_help(handle)  # its own thread is at work
    lock.may_go_on.set()
    early.join()
    assert handled == []
    assert waiting.get(timeout=0) == "trained"


def test_a_bucket_lets_a_burst_pass_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=5)
    assert [bucket.take(0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    passed = sum(bucket.take(number / 1000) for number in range(1000))
    assert 9 <= passed <= 10
    assert not bucket.take(-5.0)  # a clock that goes back gives nothing


def test_what_is_sent_again_after_a_break_is_never_too_much() -> None:
    smallest = 1024  # what `SentLog` counts for a message without tensors
    assert SETTINGS.max_log_bytes / smallest < BURST


# At a host.


class StoppedClock(RealRuntime):
    def clock(self) -> Seconds:
        return 5.0


def flooded(num_frames: int, burst: int) -> Host[Any]:
    settings = replace(SETTINGS, runtime=StoppedClock())
    host: Host[Any] = make_host(EPOCHS, 0, MemoryNetwork(), settings=settings)
    host.receiving._buckets[1] = TokenBucket(rate=1.0, burst=burst)
    for _ in range(num_frames):
        host.receiving.received(1, memoryview(bytearray(8)))
    return host


def test_one_that_floods_is_heard_no_longer() -> None:
    host = flooded(1000, burst=100)
    assert host._inbox.qsize() == 101
    host.peers.begin()
    host.peers[1].is_lost = False
    events: list[Event] = []
    while (item := host._inbox.get(timeout=0.0)) is not None:
        events += host.receiving.take(item, 0, 0.0)
    assert host.refusals["worker 1: more than any honest worker sends"] == 900
    assert events == [WorkerLost(1, has_lied=True)]


def test_what_is_refused_and_accounts_of_oneself_cost_more() -> None:
    host = with_two_neighbors()
    for _ in range(10):
        host.receiving.take(Frame(1, memoryview(b"noise")), 0, 0.0)
    bucket = host.receiving._buckets[1]
    assert bucket._left == BURST - 10 * REFUSED_COST
    status = host.peers.status_for(1, Phase.RUNNING, 0.0).message()
    frame = b"".join(pack(Envelope(SETTINGS.run, 1, 7, 0, 0), status))
    host.receiving.take(Frame(1, memoryview(bytearray(frame))), 0, 0.0)
    assert bucket._left == BURST - 10 * REFUSED_COST - STATUS_COST


def message(host: Host[Any], sender: int, payload: dict[str, torch.Tensor]) -> memoryview:
    envelope = Envelope(SETTINGS.run, sender, 7, host.peers.life, 1)
    return memoryview(bytearray().join(pack(envelope, Message("params", 0, payload))))


def test_a_message_among_a_flood_is_taken_as_the_next_but_one() -> None:
    host = flooded(1000, burst=10_000)
    host.receiving.received(2, message(host, 2, {"params": torch.zeros(NUM_PARAMS)}))
    assert [host._inbox.get().sender for _ in range(2)] == [1, 2]


# Those who lie.


def with_two_neighbors() -> Host[Any]:
    host: Host[Any] = make_host(EPOCHS, 0, MemoryNetwork())
    for rank in (1, 2):
        host.peers.appeared(rank, 5)
        host.peers[rank].turn_to(7)
    host.peers.begin()
    for rank in (1, 2):
        host.peers[rank].known_life, host.peers[rank].is_lost = 7, False
    return host


def lie(host: Host[Any]) -> list[Event]:
    frame = Frame(1, message(host, 1, {"params": torch.full((NUM_PARAMS,), 3e38)}))
    return host.receiving.take(frame, 0, 0.0)


def test_nobody_waits_for_what_was_refused_and_a_liar_is_muted_at_its_third_lie() -> None:
    host = with_two_neighbors()
    assert lie(host) == [WorkerLost(1, has_lied=True)]
    assert host.peers[1].num_returns == 1
    good = Frame(1, message(host, 1, {"params": torch.zeros(NUM_PARAMS)}))
    names = [type(event).__name__ for event in host.receiving.take(good, 0, 0.0)]
    assert names == ["WorkerJoined", "Received"]
    assert host.peers[1].num_returns == 0
    assert [event for _ in range(2) for event in lie(host)] == 2 * [
        WorkerLost(1, has_lied=True)  # it may have sent more since it was lost
    ]
    again = message(host, 1, {"params": torch.zeros(NUM_PARAMS)})
    assert host.receiving.take(Frame(1, again), 0, 0.0) == []
    host.receiving.received(1, again)
    host.receiving.take(host._inbox.get(), 0, 0.0)
    assert host.refusals["worker 1: no longer heard"] == 1
    assert host.peers.active == [2]


def test_what_one_that_is_lost_has_sent_is_forgotten_when_it_lies() -> None:
    host = with_two_neighbors()
    good = message(host, 1, {"params": torch.zeros(NUM_PARAMS)})
    for event in host.receiving.take(Frame(1, good), 0, 0.0):
        host._algorithm.handle(host.state, event, 0.0)
    assert host.state.inbox[0].keys() == {1}
    host.peers.lose(1)
    for event in lie(host):
        host._algorithm.handle(host.state, event, 0.0)
    assert host.state.inbox[0] == {}


def test_before_the_beginning_nobody_is_lost_to_the_algorithm() -> None:
    host: Host[Any] = make_host(EPOCHS, 0, MemoryNetwork())
    host.peers.appeared(1, 5)
    host.peers[1].turn_to(7)
    assert lie(host) == []


def test_what_a_process_owes_its_successor_need_not_pay_but_not_again_and_again() -> None:
    host = with_two_neighbors()
    bucket = host.receiving._buckets[1]
    for incarnation, left in ((5, -BURST), (6, BURST), (7, -BURST)):
        bucket.charge(3 * BURST)
        host.receiving.take(Appeared(1, incarnation), 0, 0.0)
        assert bucket._left == left


@pytest.mark.parametrize(("incarnation", "is_heard"), [(5, False), (6, True)])
def test_one_that_is_muted_is_heard_again_as_another_process(
    incarnation: int, is_heard: bool
) -> None:
    host = with_two_neighbors()
    for _ in range(3):
        lie(host)
    host.receiving.take(Appeared(1, incarnation), 0, 0.0)
    good = Frame(1, message(host, 1, {"params": torch.zeros(NUM_PARAMS)}))
    assert bool(host.receiving.take(good, 0, 0.0)) == is_heard


def test_a_host_brings_a_lost_worker_back_by_itself() -> None:
    host = with_two_neighbors()
    peer = host.peers[1]
    peer.status = host.peers.status_for(1, Phase.RUNNING, 0.0)
    host.peers.lose(1)
    peer.return_at = host._runtime.clock() - 1.0
    assert host._wake_at() == pytest.approx(peer.return_at - host._clock.began_at)
    host._tick()
    assert not peer.is_lost


def test_what_honest_workers_cause_is_no_lie() -> None:
    host = with_two_neighbors()
    assert NUM_WORKERS > 2
    other_run = Envelope(b"run 0002", 1, 7, host.peers.life, 1)
    frames = [
        b"damaged",
        b"".join(pack(other_run, Message("params", 0))),
        b"".join(pack(Envelope(SETTINGS.run, 1, 7, 99, 1), params())),  # for an earlier life
        b"".join(pack(Envelope(SETTINGS.run, 1, 7, host.peers.life, 9), params())),  # 8 missing
    ]
    for frame in frames * 5:
        host.receiving.take(Frame(1, memoryview(bytearray(frame))), 0, 0.0)
    assert host.peers.active == [1, 2]


def params() -> Message:
    return Message("params", 0, {"params": torch.zeros(NUM_PARAMS)})
