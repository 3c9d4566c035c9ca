"""Promises of Decoupled DiLoCo: limit cases, quorum, grace window, weights, no lost time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import EVEN, NUM_PARAMS, TARGETS, UNEVEN, Watched, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.methods import FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    TimerFired,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.topology import complete
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM = NUM_WORKERS - 1
LINKS = Links(default=Link(latency=0.25))
WAITING: dict[str, Any] = {"quorum": NUM, "speeds": "equal", "waits_for_answer": True}


def final_model(algorithm: ParameterServer, **options: Any) -> Tensor:  # noqa: ANN401
    world = make_world(algorithm, links=LINKS, **options)
    assert world.run()
    params: Tensor = world.states[0].params
    return params


def commit(
    update: float, *, num_samples: int = 4, num_steps: int = 4, number: int = 1
) -> Message:
    numbers = {
        "number": number,
        "num_steps": num_steps,
        "num_trained": 1,
        "version": 0,
        "pace": 2.0,
        "num_samples": num_samples,
    }
    return Message("commit", 0, {"update": torch.tensor([update])}, numbers)


def receivers(effects: list[Effect]) -> list[Rank]:
    return [each.receiver for each in effects if isinstance(each, Send)]


def test_with_a_barrier_and_without_momentum_it_is_fixed_adacomm() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "num_rounds": 6}
    ours = DecoupledDiLoCo(**settings, **WAITING, local_steps=3, outer_momentum=0.0)
    expected = final_model(FixedADACOMM(**settings, tau=3), platforms=UNEVEN)
    torch.testing.assert_close(final_model(ours, platforms=UNEVEN), expected)


def test_with_a_barrier_it_is_diloco() -> None:
    settings: dict[str, Any] = {"local_steps": 3, "outer_momentum": 0.6, "outer_lr": 0.8}
    ours = DecoupledDiLoCo(num_workers=NUM, num_rounds=6, **WAITING, **settings)
    diloco: Simulator[Any] = Simulator(
        DiLoCo(topology=complete(NUM), num_rounds=6, **settings),
        EVEN[:NUM],
        torch.zeros(NUM_PARAMS),
        # Our rank 0 is the server, which has no target.
        lambda rank, incarnation: QuadraticTrainer(TARGETS[rank + 1], 0.1),
    )
    assert diloco.run()
    torch.testing.assert_close(final_model(ours), diloco.states[0].params)


def test_commits_weigh_by_samples_and_samples_of_a_step() -> None:
    algorithm = DecoupledDiLoCo(num_workers=2, num_rounds=9, quorum=2, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(1))
    algorithm.handle(state, Received(1, commit(1.0, num_samples=8, num_steps=4)), 1.0)
    algorithm.handle(state, Received(2, commit(-2.0, num_samples=4, num_steps=4)), 1.0)
    # Weights 8 * 8 / 4 = 16 and 4 * 4 / 4 = 4.
    torch.testing.assert_close(state.params, torch.tensor([(16 - 2 * 4) / 20]))


def test_commits_without_samples_count_alike() -> None:
    algorithm = DecoupledDiLoCo(num_workers=2, num_rounds=9, quorum=2, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(1))
    for rank, update in ((1, 1.0), (2, 2.0)):
        algorithm.handle(state, Received(rank, commit(update, num_samples=0, num_steps=0)), 1.0)
    assert state.params.tolist() == [1.5]


def waiting_server(**settings: Any) -> tuple[DecoupledDiLoCo, Any, list[Effect]]:  # noqa: ANN401
    """A server of three with a quorum of two, to which two have committed; the last effects."""
    kept: dict[str, Any] = {"local_steps": 8, "grace": 0.25, **settings}
    algorithm = DecoupledDiLoCo(num_workers=3, num_rounds=9, quorum=2, **kept)
    state = algorithm.init(0, torch.zeros(1))
    assert algorithm.handle(state, Received(1, commit(1.0)), 1.0) == []
    return algorithm, state, algorithm.handle(state, Received(2, commit(1.0)), 5.0)


def test_a_quorum_waits_for_others_for_a_share_of_a_block() -> None:
    algorithm, state, effects = waiting_server()
    # A quarter of 8 steps at 2 steps per second.
    (timer,) = effects
    assert isinstance(timer, SetTimer)
    assert timer.at == 6.0
    assert receivers(algorithm.handle(state, TimerFired("window"), 6.0)) == [1, 2]


def test_one_that_comes_within_the_grace_window_closes_it() -> None:
    algorithm, state, _ = waiting_server()
    assert receivers(algorithm.handle(state, Received(3, commit(1.0)), 5.5)) == [1, 2, 3]
    # Nor does what is left of the window hurry the next quorum.
    algorithm.handle(state, Received(1, commit(1.0, number=2)), 5.6)
    assert algorithm.handle(state, TimerFired("window"), 6.0) == []


def test_one_that_comes_too_late_takes_part_in_the_next_merge() -> None:
    algorithm, state, _ = waiting_server()
    algorithm.handle(state, TimerFired("window"), 6.0)
    assert algorithm.handle(state, Received(3, commit(1.0)), 6.5) == []
    algorithm.handle(state, Received(1, commit(1.0, number=2)), 7.0)
    assert receivers(algorithm.handle(state, TimerFired("window"), 8.0)) == [1, 3]


def test_without_grace_a_quorum_is_merged_at_once() -> None:
    _, _, effects = waiting_server(grace=0.0)
    assert receivers(effects) == [1, 2]


def test_lost_workers_are_not_waited_for() -> None:
    algorithm = DecoupledDiLoCo(num_workers=3, num_rounds=9, quorum=3)
    state = algorithm.init(0, torch.zeros(1))
    for rank in (1, 2):
        assert algorithm.handle(state, Received(rank, commit(1.0)), 1.0) == []
    assert receivers(algorithm.handle(state, WorkerLost(3), 2.0)) == [1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_no_worker_stands_still_however_slow_the_network_is(waits: bool) -> None:
    busy: Counter[Rank] = Counter()

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(event, Trained):
            busy[state.rank] += event.seconds  # type: ignore[assignment]

    algorithm = DecoupledDiLoCo(
        num_workers=NUM, num_rounds=999, local_steps=4, waits_for_answer=waits
    )
    links = Links(default=Link(latency=3.0))
    world = make_world(Watched(algorithm, after=look), links=links, platforms=EVEN)
    world.run(until=100.0)
    # A block of four steps is under way at the end.
    if waits:
        assert max(busy.values()) < 50
    else:
        assert min(busy.values()) >= 96
    assert {*busy} == {1, 2, 3, 4}


def test_a_slow_worker_makes_nobody_wait() -> None:
    platforms = [EVEN[0], *EVEN[:3], Platform(throughput=0.05)]
    algorithm = DecoupledDiLoCo(
        num_workers=NUM, num_rounds=999, local_steps=4, speeds="equal", quorum=3
    )
    world = make_world(algorithm, links=LINKS, platforms=platforms)
    world.run(until=101.0)
    commits = world.states[0].num_commits
    # With a barrier, one of 80 seconds would have passed.
    assert commits[4] == 1
    assert min(commits[1], commits[2], commits[3]) >= math.floor(101 / (4 + 2 + 0.5))


def test_the_quorum_is_a_number_of_workers() -> None:
    with pytest.raises(ValueError, match="got 5 of 4"):
        DecoupledDiLoCo(num_workers=4, num_rounds=9, quorum=5)
    assert DecoupledDiLoCo(num_workers=5, num_rounds=9).num_needed == 3
