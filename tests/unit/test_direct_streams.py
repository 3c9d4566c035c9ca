"""Direct streams beside a zenoh session: agreement, order, ends and ways back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.certified_machines import Machines, meet
from tests.parity import SETTINGS, SIZE
from tests.tiers import thorough
from tests.transports import End, OverZenoh, What
from tests.worlds import NUM_PARAMS, ManySamples
from tests.zenoh_workers import wait_until

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.protocol import Rank, Train
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.host.host import Host
from edgegossip.net.streams import Stream
from edgegossip.net.transport import Progress
from edgegossip.net.zenoh import direct, peer as module
from edgegossip.net.zenoh.direct import DirectStreams
from edgegossip.net.zenoh.links import Links, new_session_id
from edgegossip.net.zenoh.order import FIRST
from edgegossip.net.zenoh.peer import ZenohPeer
from edgegossip.net.zenoh.transport import ZenohTransport

LARGE = 100_000


@pytest.fixture
def network() -> Iterator[OverZenoh]:
    network = OverZenoh(2)
    yield network
    network.close()


def peer_of(end: End) -> ZenohPeer:
    """The other one of two ends."""
    [peer] = cast("ZenohTransport", end.transport)._peers.values()
    return peer


def begin_turn(peer: ZenohPeer) -> None:
    """Let one end notice that frames to the other one may be lost."""
    with peer._telling:
        peer._begin_turn()


def streams_of(end: End) -> DirectStreams:
    """The streams between an end and the other one."""
    streams = peer_of(end).direct
    assert streams is not None
    return streams


def frame(number: int, size: int = LARGE) -> bytes:
    return number.to_bytes(4, "little") + bytes(size)


def switch(a: End, b: End, numbers: Iterator[int]) -> None:
    """Let `a` send to `b` until a stream carries its frames; all must arrive in order."""
    receiver = 1 - cast("ZenohTransport", a.transport).rank
    deadline = time.monotonic() + 10
    while streams_of(a)._outgoing is None:
        assert time.monotonic() < deadline
        number = next(numbers)
        a.send(receiver, frame(number))
        assert b.events.next() == ("received", 1 - receiver, frame(number))
        time.sleep(0.005)
    number = next(numbers)
    a.send(receiver, frame(number))
    assert b.events.next() == ("received", 1 - receiver, frame(number))
    assert streams_of(b).incoming is not None


def test_order_is_kept_when_a_stream_takes_over(network: OverZenoh) -> None:
    a, b = network.open_all()
    sizes = itertools.cycle((0, 10, LARGE, 300_000, 1))
    sent: list[What] = []
    deadline = time.monotonic() + 20
    while streams_of(a)._outgoing is None or len(sent) < 200:
        assert time.monotonic() < deadline
        sent.append(("received", 0, frame(len(sent), next(sizes))))
        a.send(1, sent[-1][2])
    assert b.events.take(len(sent)) == sent
    b.send(0, b"hello")
    assert a.events.next() == ("received", 1, b"hello")


def test_both_ways_have_a_stream_of_their_own(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    switch(b, a, itertools.count())
    assert None not in {streams_of(end)._outgoing for end in (a, b)}


def test_what_a_stream_takes_at_once_keeps_its_place(network: OverZenoh) -> None:
    a, b = network.open_all()
    assert a.transport.begin(1, [frame(0)]) == Progress.NONE  # zenoh may have to wait
    switch(a, b, itertools.count())
    for number in range(5):
        assert a.transport.begin(1, [frame(number)]) == Progress.ALL
        a.send(1, b"next")
        assert b.events.take(2) == [("received", 0, frame(number)), ("received", 0, b"next")]


def test_a_short_frame_does_not_wait_for_what_is_left_of_a_long_one(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    large = frame(1, 5_000_000)
    assert a.transport.begin(1, [large]) == Progress.SOME
    a.send(1, b"short")
    assert b.events.next() == ("received", 0, b"short")
    a.transport.send_rest(1)
    a.send(1, b"after it")
    assert b.events.take(2) == [("received", 0, large), ("received", 0, b"after it")]


def test_a_stream_that_ends_under_a_frame_begins_a_turn(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    outgoing = streams_of(a)._outgoing
    assert outgoing is not None
    outgoing.close()
    a.transport.begin(1, [frame(1)])
    assert a.events.next()[0] == "interrupted"
    a.transport.send_rest(1)  # of nothing
    a.send(1, frame(2))
    assert b.events.next() == ("received", 0, frame(2))


def test_short_frames_take_a_stream_over_a_fast_path(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How fast this machine is at the moment is not what is tested.
    monkeypatch.setattr(module, "_FAST", 1)
    a, b = network.open_all()
    deadline, numbers = time.monotonic() + 10, itertools.count()
    while streams_of(a)._outgoing is None:
        assert time.monotonic() < deadline
        number = next(numbers)
        a.send(1, frame(number, 1000))
        assert b.events.next() == ("received", 0, frame(number, 1000))


def test_the_shortest_frames_open_no_stream(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FAST", 1)
    a, b = network.open_all()
    for number in range(50):
        a.send(1, frame(number, 400))
        assert b.events.next() == ("received", 0, frame(number, 400))
    assert streams_of(a)._outgoing is None
    assert streams_of(a)._connected is None
    assert streams_of(a)._offered is not None


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_the_end_of_a_stream_is_told_and_frames_find_a_way_again(
    network: OverZenoh, by: str
) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    switch(a, b, numbers)
    ended = streams_of(a)._outgoing if by == "sender" else streams_of(b).incoming
    assert ended is not None
    ended.close()
    assert a.events.next() == ("interrupted", 1, 101)
    switch(a, b, numbers)
    assert streams_of(a)._outgoing is not ended
    assert b.events.is_empty


def test_the_end_of_one_stream_leaves_the_other_way_alone(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    switch(b, a, itertools.count())
    outgoing, ended = streams_of(b)._outgoing, streams_of(a)._outgoing
    assert ended is not None
    ended.close()
    assert a.events.next() == ("interrupted", 1, 101)
    switch(a, b, itertools.count())
    b.send(0, frame(0))
    assert a.events.next() == ("received", 1, frame(0))
    assert streams_of(b)._outgoing is outgoing


def test_a_frame_that_is_cut_off_is_lost_whole(network: OverZenoh) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    switch(a, b, numbers)
    outgoing = streams_of(a)._outgoing
    assert outgoing is not None
    outgoing._write([memoryview((1000).to_bytes(8, "little") + b"part")])
    outgoing.close()
    assert a.events.next() == ("interrupted", 1, 101)
    a.send(1, b"later")
    assert b.events.next() == ("received", 0, b"later")


# Pieces that are lost without a word.


def lose(a: End, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lose the next pieces over zenoh."""
    peer, put, left = peer_of(a), peer_of(a).put, itertools.count(1)

    def put_some(piece: bytes, place: int = 0) -> None:
        if next(left) > number:
            put(piece, place)

    monkeypatch.setattr(peer, "put", put_some)


@pytest.mark.parametrize("size", [10, LARGE])
def test_nothing_counts_that_follows_lost_pieces(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    a, b = network.open_all()
    a.send(1, b"before")
    lose(a, monkeypatch, 1)
    a.send(1, frame(0, size))
    a.send(1, frame(1, size))
    assert a.events.next() == ("interrupted", 1, 101)
    a.send(1, frame(2, size))
    first, *between, _ = b.events.until(("received", 0, frame(2, size)))
    assert first == ("received", 0, b"before")
    # A long one takes so long that the next one may be of the next turn.
    assert between in ([], [("received", 0, frame(1, size))][: size == LARGE])
    assert a.events.is_empty


def test_the_first_piece_of_a_turn_may_be_lost_too(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = network.open_all()
    a.send(1, b"before")
    begin_turn(peer_of(a))
    lose(a, monkeypatch, 1)
    a.send(1, b"lost")
    assert a.events.take(2) == [("interrupted", 1, 101)] * 2
    a.send(1, b"after")
    assert b.events.take(2) == [("received", 0, b"before"), ("received", 0, b"after")]


def test_a_lost_request_is_repeated(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPEAT", 0.05)
    a, b = network.open_all()
    hear, asked = peer_of(a)._hear_gap, threading.Semaphore(0)
    monkeypatch.setattr(peer_of(a), "_hear_gap", lambda *_: asked.release())
    a.send(1, b"before")
    assert b.events.take(1) == [("received", 0, b"before")]
    lose(a, monkeypatch, 1)
    num_asked, deadline = 0, time.monotonic() + 10
    while num_asked < 2:
        assert time.monotonic() < deadline
        a.send(1, b"lost, or after a gap")
        num_asked += asked.acquire(timeout=0.06)
    monkeypatch.setattr(peer_of(a), "_hear_gap", hear)
    while a.events.is_empty:
        assert time.monotonic() < deadline
        a.send(1, b"lost, or after a gap")
        time.sleep(0.06)
    assert a.events.next() == ("interrupted", 1, 101)
    a.send(1, b"hello")
    assert b.events.until(("received", 0, b"hello"))


def test_one_request_begins_one_turn_and_those_of_others_none(network: OverZenoh) -> None:
    a, _ = network.open_all()
    peer = peer_of(a)
    a.send(1, b"hello")
    request = module._GAP.pack(b"g", peer._number)
    for process in (None, 7):
        peer._hear_gap(request, process)
    assert a.events.is_empty
    for _ in range(2):
        peer._hear_gap(request, 101)
    a.send(1, b"of the next turn")
    peer._hear_gap(request, 101)
    assert a.events.next() == ("interrupted", 1, 101)
    assert a.events.is_empty


def test_a_process_that_does_not_speak_breaks_no_order(network: OverZenoh) -> None:
    a, b = network.open_all()
    b.send(0, b"hello")
    peer_of(a).take(FIRST, new_session_id(1, 7), 1)
    peer_of(a).take(bytes(100), new_session_id(1, 7), 3)
    b.send(0, b"again")
    assert a.events.take(2) == [("received", 1, b"hello"), ("received", 1, b"again")]
    assert b.events.is_empty


def test_streams_that_end_again_and_again_are_given_up(
    network: OverZenoh, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    for _ in range(direct._MOST_ENDS):
        switch(a, b, numbers)
        stream = streams_of(a)._outgoing
        assert stream is not None
        stream.close()
        assert a.events.next() == ("interrupted", 1, 101)
    for _ in range(20):
        number = next(numbers)
        a.send(1, frame(number))
        assert b.events.next() == ("received", 0, frame(number))
        time.sleep(0.005)
    assert streams_of(a)._outgoing is None
    assert streams_of(a)._connected is None
    assert caplog.text.count("zenoh carries its messages from now on") == 1


# Other processes.


def test_a_restarted_receiver_gets_a_stream_of_its_own(network: OverZenoh) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    switch(a, b, numbers)
    b.transport.close()
    assert a.events.next() == ("disappeared", 1, 101)
    again = network.open(1, incarnation=7)
    assert a.events.next() == ("appeared", 1, 7)
    assert again.events.next() == ("appeared", 0, 100)
    switch(a, again, numbers)
    switch(again, a, numbers)


def test_a_restarted_sender_gets_a_stream_of_its_own(network: OverZenoh) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    switch(b, a, numbers)
    b.transport.close()
    assert a.events.next() == ("disappeared", 1, 101)
    again = network.open(1, incarnation=7)
    assert a.events.next() == ("appeared", 1, 7)
    assert again.events.next() == ("appeared", 0, 100)
    switch(again, a, numbers)


def test_a_process_whose_stream_ends_with_it_disappears_once(network: OverZenoh) -> None:
    # Its sockets close one after the other, as those of a killed process do.
    a, b = network.open_all()
    switch(b, a, itertools.count())
    outgoing = streams_of(b)._outgoing
    assert outgoing is not None
    outgoing.close()
    assert b.events.next() == ("interrupted", 0, 100)
    b.transport.close()
    assert a.events.next() == ("disappeared", 1, 101)
    again = network.open(1, incarnation=7)
    assert a.events.next() == ("appeared", 1, 7)
    assert again.events.next() == ("appeared", 0, 100)
    again.send(0, b"hello")
    assert a.events.next() == ("received", 1, b"hello")


def test_an_offer_of_an_earlier_process_is_not_used(network: OverZenoh) -> None:
    a, b = network.open_all()
    wait_until(lambda: streams_of(a)._offered is not None)
    earlier = streams_of(a)._offered
    b.transport.close()
    a.events.next()
    again = network.open(1, incarnation=7)
    assert a.events.next() == ("appeared", 1, 7)
    assert again.events.next() == ("appeared", 0, 100)
    wait_until(lambda: streams_of(a)._offered not in (None, earlier))
    streams_of(a)._offered = earlier
    for number in range(5):
        a.send(1, frame(number))
        assert again.events.next() == ("received", 0, frame(number))
    assert streams_of(a)._offered is earlier
    assert streams_of(a)._outgoing is None
    assert streams_of(a)._connected is None


def test_unknown_tokens_and_strange_pieces_change_nothing(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    of_b = streams_of(b)
    stream = of_b.incoming
    assert of_b.take_switch(direct._SWITCH.pack(b"s", bytes(16)))
    assert of_b.incoming is stream
    assert of_b.take_offer(direct._OFFER.pack(b"o", 1, bytes(16)), None)
    for piece in (b"s", b"o" * 40, b"x" + bytes(16), bytes(30)):
        assert not of_b.take_offer(piece, 100)
        assert not of_b.take_switch(piece)


# Ways back to zenoh.


def test_without_a_direct_link_zenoh_carries_everything(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Links, "host", lambda self, incarnation: None)
    check_zenoh_alone(*network.open_all())


def test_behind_a_firewall_zenoh_carries_everything(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An address at which nobody accepts the connection.
    monkeypatch.setattr(Links, "host", lambda self, incarnation: "127.0.0.2")
    a, b = network.open_all()
    wait_until(lambda: streams_of(a)._offered is not None)
    check_zenoh_alone(a, b)
    wait_until(lambda: streams_of(a)._offered is not None)
    offered = streams_of(a)._offered
    assert offered is not None
    assert offered.num_attempts == 1  # to be tried again, but not at once
    assert offered.not_before > time.monotonic() + 10


def check_zenoh_alone(a: End, b: End) -> None:
    for number in range(10):
        a.send(1, frame(number))
        b.send(0, frame(number))
        assert b.events.next() == ("received", 0, frame(number))
        assert a.events.next() == ("received", 1, frame(number))
        assert streams_of(a)._outgoing is streams_of(b)._outgoing is None


def test_a_machine_without_a_free_port_is_reached_over_zenoh(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(host: str) -> None:
        raise OSError("no port")

    monkeypatch.setattr("edgegossip.net.streams._listen", fail)
    check_zenoh_alone(*network.open_all())
    assert "no direct streams to this worker, at 127.0.0.1: no port" in caplog.text


# Leaving.


def test_what_was_sent_on_a_stream_arrives_before_the_end(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = network.open_all()
    numbers = itertools.count()
    switch(b, a, numbers)
    receive = Stream.receive

    def receive_slowly(
        self: Stream, max_bytes: int, too_large: Callable[[], None]
    ) -> memoryview | None:
        time.sleep(0.1)
        return receive(self, max_bytes, too_large)

    monkeypatch.setattr(Stream, "receive", receive_slowly)
    frames = [frame(next(numbers)) for _ in range(8)]  # the system's buffers hold them
    for each in frames:
        b.send(0, each)
    b.transport.close()
    assert a.events.take(8) == [("received", 1, each) for each in frames]
    assert a.events.next() == ("disappeared", 1, 101)


def test_leaving_waits_for_the_stream_in_use_and_for_no_earlier_one(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Earlier:
        """A stream that ends as soon as it is there."""

        def wait_for_end(self) -> None: ...
        def close(self) -> None: ...

    class Full:
        """A stream that takes nothing more."""

        def finish(self) -> None:
            closed.wait(10)
            raise ConnectionResetError

        def close(self) -> None:
            closed.set()

    closed = threading.Event()
    a, _ = network.open_all()
    streams = streams_of(a)
    wait_until(lambda: streams._offered is not None)
    offered = streams._offered
    assert offered is not None
    streams._outgoing = cast("Stream", Full())
    streams.finish()
    monkeypatch.setattr(streams._streams, "connect", lambda *_: Earlier())
    streams._follow(offered)
    began = time.monotonic()
    streams.await_reading(0.1)
    assert 0.1 <= time.monotonic() - began < 5
    streams.close()
    assert closed.is_set()


@thorough
def test_nothing_is_lost_or_used_twice_while_streams_end(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GoSGD's weights add up to one only if each push has its effect exactly once."""
    monkeypatch.setattr(direct, "_LEAST", 0)
    monkeypatch.setattr(module, "_FAST", 0)
    monkeypatch.setattr(direct, "_MOST_ENDS", 10**6)
    gosgd = GoSGD(
        topology=complete(NUM_WORKERS), num_rounds=400, exchange_probability=1.0, local_steps=1
    )

    class Slow(ManySamples):
        def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
            time.sleep(0.01)
            return super().train(request, progress)

    network = OverZenoh(NUM_WORKERS)
    transports = [network.transport(rank, 100 + rank) for rank in range(NUM_WORKERS)]
    hosts = [
        Host(
            gosgd,
            rank,
            NUM_WORKERS,
            torch.zeros(NUM_PARAMS),
            Slow(rank, 0.1, SIZE),
            transports[rank],
            settings=SETTINGS,
        )
        for rank in range(NUM_WORKERS)
    ]
    threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    num_ended = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        rounds = [host.state.round for host in hosts]
        if min(rounds) < 2 or max(rounds) > 300:
            continue  # so that they begin together, and all is sent again before they leave
        for transport in transports:
            for peer in cast("ZenohTransport", transport)._peers.values():
                stream = None if peer.direct is None else peer.direct._outgoing
                if num_ended % 3 == 2 and peer.incarnation is not None and num_ended < 30:
                    begin_turn(peer)
                elif stream is not None and num_ended < 30:
                    stream.close()
                else:
                    continue
                num_ended += 1
                break
    for thread in threads:
        thread.join()
    assert num_ended >= 5
    assert sum(host.state.weight for host in hosts) == pytest.approx(1.0, abs=1e-9)
    assert all(host.refusals == {} for host in hosts)


# With certificates.


def test_with_certificates_streams_are_tls_and_end_with_the_certificate(
    machines: Machines,
) -> None:
    first, second, third = members = machines.open_all()
    deadline = time.monotonic() + 10
    outgoing: dict[Rank, Stream] = {}
    while len(outgoing) < 2:
        assert time.monotonic() < deadline
        for sender in (second, third):
            sender.transport.send(0, [bytes(LARGE)])
            found = sender.transport._peers[0].direct
            if found is not None and found._outgoing is not None:
                outgoing[sender.rank] = found._outgoing
        time.sleep(0.01)
    assert all(stream._is_tls for stream in outgoing.values())
    machines.revoke(2, tell=[0, 1])
    third.settle()
    with pytest.raises(OSError):
        outgoing[2].send([bytes(LARGE)])
    meet(*members[:2])
    assert not first.hears(("received", 2, bytes(LARGE)), seconds=0.5)


def test_one_that_has_been_told_of_a_turn_begins_nothing_in_the_turn_before(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    peer, begun = peer_of(a), list[Progress]()
    host = threading.Thread(target=lambda: begun.append(peer.begin([b"introduction"])))

    def interrupted(rank: Rank, incarnation: int) -> None:
        host.start()
        host.join(0.2)  # it would have begun by then

    monkeypatch.setattr(peer._listener, "interrupted", interrupted)
    begin_turn(peer)
    host.join(10)
    assert begun == [Progress.NONE]


def test_nothing_is_begun_behind_the_last_frame(network: OverZenoh) -> None:
    a, b = network.open_all()
    switch(a, b, itertools.count())
    peer = peer_of(a)
    assert peer.leave(time.monotonic() + 5)
    assert peer.begin([b"behind the end"]) == Progress.NONE
