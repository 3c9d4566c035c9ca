"""Promises of every transport, checked on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.transports import NETWORKS, Network

from edgegossip.net.transport import Listener
from edgegossip.net.zenoh.session import CHUNK_BYTES


@pytest.fixture(params=NETWORKS, ids=lambda network: network.__name__)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    make: Callable[[], Network] = request.param
    network = make()
    yield network
    network.close()


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def test_frames_of_all_sizes_arrive_whole_and_in_order(network: Network) -> None:
    a, b, _ = network.open_all()
    sizes = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 0, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 7]
    frames = [noise(size, seed) for seed, size in enumerate(sizes)]
    for frame in frames:
        a.send(1, frame)
    assert b.events.take(len(sizes)) == [("received", 0, frame) for frame in frames]


def test_20_megabytes_arrive_whole(network: Network) -> None:
    a, b, _ = network.open_all()
    frame = noise(20_000_000)
    a.send(1, frame)
    assert b.events.next() == ("received", 0, frame)


def test_parts_of_a_frame_are_joined(network: Network) -> None:
    a, b, _ = network.open_all()
    numbers = np.arange(100_000, dtype=np.float32)
    a.send(1, b"one", bytearray(b""), bytearray(b"two"), numbers.data, b"three")
    assert b.events.next() == ("received", 0, b"onetwo" + numbers.tobytes() + b"three")


def test_a_received_frame_may_be_written_to(network: Network) -> None:
    a, _, _ = network.open_all()
    frames: list[memoryview] = []
    has_received = threading.Event()

    class Keeper(Listener):
        def received(self, sender: int, frame: memoryview) -> None:
            frames.append(frame)
            has_received.set()

        def appeared(self, rank: int, incarnation: int) -> None: ...

        def disappeared(self, rank: int, incarnation: int) -> None: ...

        def interrupted(self, rank: int, incarnation: int) -> None: ...

        def refused(self, rank: int | None, reason: str) -> None: ...

    network.opened[1].close()
    a.events.next()
    transport = network.transport(1, 7)
    network.opened.append(transport)
    transport.open(Keeper())
    assert a.events.next() == ("appeared", 1, 7)
    a.send(1, b"abc")
    assert has_received.wait(10.0)
    frames[0][0] = ord("x")
    assert bytes(frames[0]) == b"xbc"


def test_those_who_come_later_are_announced_and_hear_of_those_before(network: Network) -> None:
    a = network.open(0)
    b = network.open(1)
    assert a.events.next() == ("appeared", 1, 101)
    assert b.events.next() == ("appeared", 0, 100)
    c = network.open(2)
    assert a.events.next() == b.events.next() == ("appeared", 2, 102)
    assert sorted(c.events.take(2)) == [("appeared", 0, 100), ("appeared", 1, 101)]


def test_whoever_closes_disappears(network: Network) -> None:
    a, b, c = network.open_all()
    b.transport.close()
    assert a.events.next() == c.events.next() == ("disappeared", 1, 101)
    assert b.events.is_empty


def test_a_restarted_worker_appears_with_another_incarnation(network: Network) -> None:
    a, b, _ = network.open_all()
    b.transport.close()
    again = network.open(1, incarnation=7)
    assert a.events.take(2) == [("disappeared", 1, 101), ("appeared", 1, 7)]
    assert sorted(again.events.take(2)) == [("appeared", 0, 100), ("appeared", 2, 102)]
    a.send(1, b"hello")
    again.send(0, b"again")
    assert again.events.next() == ("received", 0, b"hello")
    assert a.events.next() == ("received", 1, b"again")


def test_frames_of_many_senders_keep_their_order(network: Network) -> None:
    a, *others = network.open_all()
    sizes = [0, 10, 400_000] * 5

    def send(rank: int) -> None:
        for number, size in enumerate(sizes):
            others[rank - 1].send(0, bytes([rank, number]), bytes(size))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    events = a.events.take(2 * len(sizes))
    for thread in threads:
        thread.join()
    for rank in (1, 2):
        of_rank = [frame for _, sender, frame in events if sender == rank]
        assert of_rank == [
            bytes([rank, number]) + bytes(size) for number, size in enumerate(sizes)
        ]


def test_what_was_sent_before_closing_arrives_before_the_end(network: Network) -> None:
    a, b, _ = network.open_all()
    frames = [noise(size) for size in (2_000_000, 5, 700_000)]
    for frame in frames:
        b.send(0, frame)
    b.transport.close()
    expected = [("received", 1, frame) for frame in frames]
    assert a.events.take(4) == [*expected, ("disappeared", 1, 101)]


def test_what_was_sent_arrives_even_if_the_other_side_sends_too(network: Network) -> None:
    # A socket that is closed while something in it is unread takes with it what was sent.
    a, b, _ = network.open_all()
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            a.send(1, bytes(500_000))

    thread = threading.Thread(target=flood)
    thread.start()
    b.events.next()
    for number in range(5):
        b.send(0, bytes([number]) * 1_000_000)
    b.transport.close()
    events = a.events.take(6)
    is_over.set()
    thread.join()
    expected = [("received", 1, bytes([number]) * 1_000_000) for number in range(5)]
    assert events == [*expected, ("disappeared", 1, 101)]


def test_closing_while_another_thread_sends_leaves_no_half_frame(network: Network) -> None:
    a, b, _ = network.open_all()
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            b.send(0, bytes(1_500_000))

    thread = threading.Thread(target=flood)
    thread.start()
    a.events.take(2)
    b.transport.close()
    *frames, _ = a.events.until(("disappeared", 1, 101))
    is_over.set()
    thread.join()
    assert all(frame == ("received", 1, bytes(1_500_000)) for frame in frames)
    assert a.events.is_empty


def test_two_may_close_at_once(network: Network) -> None:
    a, b, c = network.open_all()
    threads = [threading.Thread(target=end.transport.close) for end in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(c.events.take(2)) == [("disappeared", 0, 100), ("disappeared", 1, 101)]


def test_closing_twice_and_sending_afterwards_do_nothing(network: Network) -> None:
    a, b, _ = network.open_all()
    b.transport.close()
    b.transport.close()
    b.send(0, b"late")
    assert a.events.next() == ("disappeared", 1, 101)
    assert a.events.is_empty


def test_what_is_sent_to_one_that_is_not_there_is_lost(network: Network) -> None:
    a = network.open(0)
    a.send(1, b"early")
    b = network.open(1)
    a.events.next()
    a.send(1, b"hello")
    assert b.events.take(2) == [("appeared", 0, 100), ("received", 0, b"hello")]


def test_a_frame_beyond_the_limit_is_refused_and_the_next_one_is_not(network: Network) -> None:
    a = network.open(0)
    b = network.open(1, max_bytes=300_000)
    a.events.next(), b.events.next()
    a.send(1, bytes(300_001))
    a.send(1, bytes(300_000))
    assert b.events.take(2) == [
        ("refused", 0, "a frame that is too large"),
        ("received", 0, bytes(300_000)),
    ]
