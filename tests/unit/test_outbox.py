"""A failure to send ends once sending succeeds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Message, Rank
from edgegossip.net.host.sending import Outbox
from edgegossip.net.runtime import RealRuntime
from edgegossip.net.transport import Progress, Transport

MESSAGE = Message("push", 0)


class Blocking:
    """Sends nothing at once."""

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        return Progress.NONE


class Failing(Blocking):
    """Has no memory for the first frame."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        if not self.sent:
            self.sent.append(b"lost")
            raise MemoryError
        self.sent.append(b"".join(frame))


class Busy(Blocking):
    """Takes a frame only when it may."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        self.sent.append(b"".join(frame))


class Slow(Busy):
    """Takes a model only when it may, and all else at once."""

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        if frame[0] == b"model":
            super().send(receiver, frame)
        else:
            self.sent.append(b"".join(frame))


def test_what_waits_for_a_link_that_ends_is_not_sent_over_the_next_one() -> None:
    transport = Busy()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    done: list[bytes] = []

    def put(receiver: Rank, frame: bytes) -> None:
        outbox.put(receiver, [frame], lambda: done.append(frame))

    put(1, b"under way")
    assert transport.has_begun.wait(10)
    put(1, b"waiting")
    put(2, b"to another")
    outbox.drop(1)
    outbox.drop(1)  # it was back for a moment
    put(1, b"by one that does not know")
    outbox.resume(1)
    put(1, b"by one that knows of the first")
    outbox.resume(1)
    put(1, b"next")
    transport.may_go_on.set()
    outbox.close(10.0)
    assert outbox.is_empty
    assert {*transport.sent} == {b"under way", b"to another", b"next"}
    assert len(done) == 6


def test_a_frame_that_cannot_be_sent_is_told_and_the_next_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Failing()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    has_left = threading.Event()
    outbox.put(1, [b"one"])
    outbox.put(1, [b"t", b"wo"], has_left.set)
    assert has_left.wait(10)
    assert transport.sent == [b"lost", b"two"]
    assert outbox.is_empty
    assert "could not send to 1" in caplog.text
    outbox.close(1.0)


def test_a_frame_that_has_not_begun_to_leave_is_replaced() -> None:
    transport = Busy()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    outbox.put(1, [b"first"], number=1)
    assert transport.has_begun.wait(10)
    outbox.put(1, [b"second"], number=2)
    outbox.put(1, [b"third"], number=3)
    assert not outbox.replace(1, 1, [b"too late"], MESSAGE)
    assert outbox.replace(1, 2, [b"longer than the second"], MESSAGE)
    assert not outbox.replace(1, 4, [b"not there"], MESSAGE)
    assert outbox.waiting == {1: len(b"firstlonger than the secondthird")}
    assert outbox.num_numbered(1) == 3
    outbox.drop(1)
    assert not outbox.replace(1, 3, [b"on a link that has ended"], MESSAGE)
    outbox.resume(1)
    assert not outbox.replace(1, 3, [b"on a link that has ended"], MESSAGE)
    transport.may_go_on.set()
    outbox.close(10.0)
    assert transport.sent == [b"first"]
    assert outbox.waiting == {1: 0}


def test_a_short_frame_overtakes_those_that_wait() -> None:
    transport = Slow()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    outbox.put(1, [b"sign of life"], overtakes=True)  # nothing is there to overtake
    outbox.put(1, [b"model"], number=1)
    assert transport.has_begun.wait(10)
    has_left = threading.Event()
    outbox.put(1, [b"another"], has_left.set, overtakes=True)
    assert has_left.wait(10)
    assert transport.sent == [b"sign of life", b"another"]
    assert outbox.num_numbered(1) == 1
    transport.may_go_on.set()
    outbox.close(10.0)
    assert transport.sent == [b"sign of life", b"another", b"model"]


def test_all_receivers_share_the_limit_beyond_what_each_may_have() -> None:
    transport = Busy()
    outbox = Outbox(cast("Transport", transport), 30, RealRuntime(), share=8)
    assert outbox.put(1, [bytes(20)])
    assert outbox.put(2, [bytes(4)])
    assert outbox.put(2, [bytes(4)])
    assert outbox.put(2, [bytes(2)])
    assert not outbox.put(2, [bytes(1)])
    assert outbox.put(3, [bytes(40)])  # one of any size
    assert outbox.waiting == {1: 20, 2: 10, 3: 40}
    transport.may_go_on.set()
    outbox.close(10.0)


class AtOnce(Busy):
    """Sends frames at once, in part or as a whole."""

    progress = Progress.ALL

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        self.threads.append(threading.current_thread())
        if self.progress == Progress.ALL:
            self.sent.append(b"".join(frame))
        return self.progress

    def send_rest(self, receiver: Rank) -> None:
        super().send(receiver, [b"rest"])


def test_a_frame_leaves_in_the_callers_thread_if_it_can() -> None:
    transport = AtOnce()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    done: list[threading.Thread] = []
    assert outbox.put(1, [b"on", b"e"], lambda: done.append(threading.current_thread()))
    assert transport.sent == [b"one"]
    assert transport.threads == done == [threading.current_thread()]
    assert outbox.is_empty
    assert outbox.sent == {1: 3}
    assert outbox.waiting == {1: 0}


def test_what_is_left_of_a_frame_leaves_in_the_background_and_before_the_next_one() -> None:
    transport = AtOnce()
    transport.progress = Progress.SOME
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    outbox.put(1, [b"first"], number=4)
    assert outbox.last_begun(1) == 4
    assert not outbox.replace(1, 4, [b"too late"], MESSAGE)
    outbox.put(1, [b"second"], number=5)  # it waits, and nobody tries to send it at once
    assert outbox.num_numbered(1) == 2
    assert len(transport.threads) == 1
    transport.may_go_on.set()
    outbox.close(10.0)
    assert transport.sent == [b"rest", b"second"]
    assert outbox.sent == {1: len(b"firstsecond")}


def test_nothing_leaves_at_once_over_a_link_that_has_ended() -> None:
    transport = AtOnce()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    outbox.drop(1)
    outbox.put(1, [b"by one that does not know"])
    outbox.close(10.0)
    assert not transport.sent
    assert not transport.threads
    outbox.resume(1)
    outbox.put(1, [b"next"])
    assert transport.sent == [b"next"]


def test_a_failure_to_begin_is_told_and_the_next_frame_is_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = AtOnce()
    outbox = Outbox(cast("Transport", transport), 100, RealRuntime())
    with monkeypatch.context() as patch:
        patch.setattr(transport, "begin", None)
        assert outbox.put(1, [b"lost"], number=7)
    assert outbox.last_begun(1) == 7  # it may have left
    assert "could not send to 1" in caplog.text
    assert outbox.is_empty
    outbox.put(1, [b"next"])
    assert transport.sent == [b"next"]
