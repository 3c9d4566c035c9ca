"""Lines in a worker's log that say how it gets on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker_folders import EXPERIMENT

from edgegossip.real.progress_lines import EVERY, ProgressLines


def peer(*, is_reachable: bool) -> SimpleNamespace:
    return SimpleNamespace(is_reachable=is_reachable, is_lost=not is_reachable)


class Peers(dict[int, Any]):
    has_begun = False


def test_lines_tell_what_has_happened_since_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "edgegossip.real")
    peers = Peers({1: peer(is_reachable=True), 2: peer(is_reachable=True)})
    trainings = SimpleNamespace(num_samples=5000)
    host: Any = SimpleNamespace(
        peers=peers, trainings=trainings, waiting_seconds=4.0, state=SimpleNamespace(round=0)
    )
    lines = ProgressLines(host, replace(EXPERIMENT, max_seconds=1000.0))
    assert lines.due(0.0) == 1.0  # nobody was met yet
    peers.has_begun = True
    assert lines.due(100.0) == 100.0 + EVERY
    assert not caplog.messages

    trainings.num_samples, host.waiting_seconds = 5300, 19.0
    lines.due(130.0)
    trainings.num_samples = 8300  # fast, and no more waiting
    peers[2] = peer(is_reachable=False)
    lines.due(160.0)

    slow, fast = caplog.messages
    assert "10 samples/s, 50% waiting, 2 of 2 peers in reach" in slow
    assert "lost" not in slow
    assert "100 samples/s, 0% waiting, 1 of 2 peers in reach, 1 lost" in fast
    assert "16% done" in fast
    assert fast.endswith("about 840 s left")
