"""A server tells its host by a timer that it waits for living workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from edgegossip.algorithms.server.methods import ASP, BSP, SSP
from edgegossip.algorithms.server.parameter_server import ParameterServer, ServerState
from edgegossip.contract.protocol import (
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
    WorkerLost,
)

COUNTS: dict[str, Any] = {"num_workers": 2, "num_rounds": 3}


class Server:
    """A server of two workers, and the time at which its timer fires."""

    def __init__(self, algorithm: ParameterServer) -> None:
        self.algorithm, self.quiet_at = algorithm, math.inf
        state = algorithm.init(0, torch.zeros(3))
        assert isinstance(state, ServerState)
        self.state = state
        self.hear(Started(), 0.0)

    def hear(self, event: Event, now: Seconds) -> None:
        for effect in self.algorithm.handle(self.state, event, now):
            if isinstance(effect, SetTimer) and effect.name == "quiet":
                self.quiet_at = effect.at

    def commit(self, rank: Rank, number: int, now: Seconds) -> None:
        numbers = {"number": number, "num_steps": 1, "num_trained": 3, "version": 0}
        update = {"update": torch.ones(3)}
        self.hear(Received(rank, Message("commit", number - 1, update, numbers)), now)


def test_a_server_without_a_barrier_waits_for_its_patience_and_ten_times_the_run() -> None:
    server = Server(ASP(**COUNTS, patience=50.0))
    assert server.quiet_at == 50.0
    server.commit(1, 1, 20.0)
    assert server.quiet_at == 50.0  # set again only when it fires
    server.hear(TimerFired("quiet"), 50.0)
    assert server.quiet_at == 220.0
    server.hear(TimerFired("quiet"), 220.0)
    assert server.quiet_at == 220.0  # nobody commits any more, which the host may end
    server.hear(WorkerLost(1), 230.0)
    assert server.quiet_at == 220.0
    server.commit(2, 1, 240.0)
    assert server.quiet_at == 2640.0


@pytest.mark.parametrize("algorithm", [BSP(**COUNTS), SSP(**COUNTS, slack=1)])
def test_behind_a_barrier_the_host_gives_up_silent_workers(algorithm: ParameterServer) -> None:
    server = Server(algorithm)
    assert server.quiet_at == math.inf
    server.commit(1, 1, 1.0)
    assert server.quiet_at == math.inf
    server.hear(WorkerLost(1), 2.0)  # so the other one waits for nobody
    assert server.quiet_at == 601.0
