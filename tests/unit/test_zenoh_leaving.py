"""Transports that leave at the same time."""

from __future__ import annotations

import time
from typing import cast

import pytest
import zenoh
from tests.transports import Recorder

from edgegossip.net.zenoh.links import Links
from edgegossip.net.zenoh.peer import _FAREWELL, ZenohPeer


class Publisher:
    """Keeps what is put."""

    id = None

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def put(self, piece: bytes, source_info: object) -> None:
        self.pieces.append(piece)


def test_two_that_leave_at_once_do_not_wait_for_each_others_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zenoh.SourceInfo", lambda *parts: parts)
    peer = ZenohPeer(1, Recorder(), 1000, Links(), settle=1.0)
    publisher, began = Publisher(), time.monotonic()
    peer.publisher = cast("zenoh.Publisher", publisher)
    peer.appear(7)
    assert peer.leave(began + 5)
    peer.disappear(7)
    peer.await_farewell(began + 5)
    assert publisher.pieces == [_FAREWELL]
    assert time.monotonic() < began + 4
