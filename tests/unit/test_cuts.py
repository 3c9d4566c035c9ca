"""Links that are cut and come back while both ends live: nothing that was on them is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.hosts import Running

from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank
from edgegossip.core.topology import complete
from edgegossip.net.link_log import LinkLog
from edgegossip.net.memory import MemoryNetwork, MemoryTransport
from edgegossip.net.status import Phase

PUSHING = GoSGD(
    topology=complete(NUM_WORKERS), num_rounds=200, exchange_probability=1.0, local_steps=1
)


class SlowToNotice(MemoryNetwork):
    """Loses what is sent for a while before a cut is noticed, as a link that is silent does."""

    def __init__(self) -> None:
        super().__init__()
        self.swallows: frozenset[Rank] = frozenset()
        self.num_swallowed = 0

    def carry(self, sender: MemoryTransport, receiver: Rank, piece: bytes) -> None:
        if {sender.rank, receiver} == self.swallows:
            self.num_swallowed += 1
        else:
            super().carry(sender, receiver, piece)


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
    assert all(host.post.refusals == {} for host in running.hosts.values())
