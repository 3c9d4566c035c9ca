"""How long real hosts wait for each other's final models: bounds that no worker can lift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.host_runs import Run
from tests.host_worlds import World
from tests.tiers import thorough
from tests.virtual_network import Wire

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Message, Rank, Seconds
from edgegossip.contract.topology import complete
from edgegossip.net.host.host import Host
from edgegossip.net.host.status import Phase
from edgegossip.real.agreement import agreement_of
from edgegossip.runs.final_average import FinalAverage

EPOCHS = EpochGossip(topology=complete(3), num_rounds=20)
Change = Callable[[Run, Host[Any]], None]


def run_with(
    ends_at: Seconds, *, lost: float = 0.0, change: Change | None = None, until: float = 2e4
) -> Run:
    """Three workers; `change` alters worker 2 when it has started."""
    algorithm: Algorithm[Any] = FinalAverage(inner=EPOCHS, num_workers=3, ends_at=ends_at)
    world = World(
        seed=1,
        name="waits",
        algorithm=algorithm,
        step_seconds=(0.1,) * 3,
        start_at=(0.0,) * 3,
        wire=Wire(lost=lost),
        disturbances=(),
        meet_seconds=20.0,
        checkpoint_seconds=math.inf,
    )
    run = Run(world)
    if change is not None:
        run.time.at(1e-9, lambda: change(run, run.processes[2].host))
    run.time.run(until, lambda: not run.num_due and not run.network.num_running)
    return run


def ended_at(run: Run, *ranks: Rank) -> Seconds:
    assert all(run.processes[rank].reason == "finished" for rank in ranks)
    return max(run.watcher.moments[rank][-1] for rank in ranks)


@pytest.mark.parametrize("ends_at", [math.inf, 3600.0])
def test_a_time_limit_turns_off_no_wait_for_lost_messages(ends_at: Seconds) -> None:
    run = run_with(ends_at, lost=0.02)
    assert ended_at(run, 0, 1, 2) < 300.0
    assert {process.host.state.round for process in run.processes.values()} == {20}


def chatter(run: Run, host: Host[Any]) -> None:
    """Say that it has finished, and go on sending final models, each another one."""
    host._ending.is_over = lambda now: False  # type: ignore[method-assign]

    def say() -> None:
        if host.sending.phase == Phase.FINISHED:
            model = torch.full_like(host.state.estimate, run.time.now % 7)
            for rank in (0, 1):
                host.sending.send(
                    rank, Message("final average", 0, {"params": model}, {"cut": 0})
                )
        run.time.at(run.time.now + 0.5, say)

    say()


@thorough
@pytest.mark.parametrize("ends_at", [math.inf, 50.0])
def test_one_that_goes_on_sending_after_its_end_holds_nobody(ends_at: Seconds) -> None:
    run = run_with(ends_at, change=chatter, until=3000.0)
    assert not run.processes[0].is_running
    assert not run.processes[1].is_running
    models = [run.processes[rank].host.state.estimate for rank in (0, 1)]
    assert torch.equal(*models)


def withhold(run: Run, host: Host[Any]) -> None:
    """Never send a final model, nor finish."""
    send = host.sending.send
    host._finish = lambda: None  # type: ignore[method-assign]
    host.sending.send = lambda receiver, message, report=None: (  # type: ignore[method-assign]
        message.kind == "final average" or send(receiver, message, report)
    )


@pytest.mark.parametrize("ends_at", [math.inf, 50.0])
def test_two_waits_for_one_worker_are_not_added_up(ends_at: Seconds) -> None:
    run = run_with(ends_at, change=withhold, until=250.0)
    honest = [run.processes[rank] for rank in (0, 1)]
    assert [each.reason for each in honest] == ["finished"] * 2
    trained = max(run.watcher.trained_at[0])
    assert run.watcher.moments[0][-1] < min(11 * trained + 70.0, 2 * ends_at + 70.0)
    found = [agreement_of(run.world.algorithm, each.host) for each in honest]
    assert [each and each.silent for each in found] == [(2,), (2,)]
