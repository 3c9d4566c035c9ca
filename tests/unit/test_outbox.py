"""A failure to send ends once sending succeeds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank
from edgegossip.net.host.sending import Outbox
from edgegossip.net.runtime import RealRuntime
from edgegossip.net.transport import Transport


class Failing:
    """Has no memory for the first frame."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        if not self.sent:
            self.sent.append(b"lost")
            raise MemoryError
        self.sent.append(b"".join(frame))


class Busy:
    """Takes a frame only when it may."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(10)
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
