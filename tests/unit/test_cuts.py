"""Links that are cut and come back while both ends live: nothing that was on them is lost."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.algorithms import NUM_WORKERS
from tests.hosts import LONG, Checkpoints, Running

from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.core.protocol import Rank
from edgegossip.core.topology import complete
from edgegossip.net.link_log import LinkLog
from edgegossip.net.memory import MemoryNetwork, MemoryTransport
from edgegossip.net.status import Phase

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


@pytest.mark.parametrize("keeps", [True, False], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize("algorithm", [LONG, ENDLESS_GOSGD], ids=["rounds", "gosgd"])
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
    assert all(host.post.refusals == {} for host in running.hosts.values())
    running.stop()


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
        "link with worker 1 is lost (it has failed, or the way to it is cut)",
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
    assert lines(caplog)[2].endswith("cut); so it was 99 times before")
