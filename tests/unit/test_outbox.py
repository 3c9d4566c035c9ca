"""What goes wrong while something is sent is over when it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank
from edgegossip.net.outbox import Outbox
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
