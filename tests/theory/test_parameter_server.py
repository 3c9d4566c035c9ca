"""Promises of parameter servers: limit cases, level commits, slack, a server that restarts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS, PARAMETER_SERVERS
from tests.tiers import thorough
from tests.trials import trials
from tests.worlds import EVEN, TARGETS, UNEVEN, Watched, make_world

from edgegossip.algorithms.server.adacomm import ADACOMM, ADACOMMServerState
from edgegossip.algorithms.server.adsp import ADSP, ADSPPlus, TimedCommitterState
from edgegossip.algorithms.server.methods import BSP, SSP, FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ParameterServer, ServerState
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import opened
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Layout,
    Message,
    Received,
    Seconds,
    Started,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.sim.fault import Arrival, Crash, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

NUM = NUM_WORKERS - 1
LINKS = Links(default=Link(latency=0.25))
BACK_SOON = Faults(script=(Crash(at=9.3, rank=0), Recover(at=9.9, rank=0)), detection_time=0.2)

each_server = pytest.mark.parametrize(
    "algorithm", PARAMETER_SERVERS.values(), ids=PARAMETER_SERVERS
)


def server(algorithm: ParameterServer, **options: Any) -> ServerState:  # noqa: ANN401
    """Run a world to its end; give the state of the server."""
    world = make_world(algorithm, links=LINKS, **options)
    assert world.run()
    state = world.states[0]
    assert isinstance(state, ServerState)
    return state


def test_bsp_is_gradient_descent_on_the_mean_of_the_losses() -> None:
    state = server(BSP(num_workers=NUM, num_rounds=9), lr=0.1)
    expected = (1 - 0.9**9) * TARGETS[1 : NUM + 1].mean(0)
    torch.testing.assert_close(state.params, expected)


@pytest.mark.parametrize("name", [*PARAMETER_SERVERS])
def test_an_open_run_divides_by_the_workers_that_are_present(name: str) -> None:
    """A limit that nobody reaches changes nothing."""
    algorithm: Any = PARAMETER_SERVERS[name]
    few = replace(algorithm, num_workers=2)
    absent = tuple(Arrival(at=math.inf, rank=rank) for rank in range(3, NUM + 1))
    expected = server(few, platforms=EVEN[:3])
    many: Any = opened(algorithm)
    found = server(many, platforms=EVEN[: NUM + 1], faults=Faults(script=absent))
    torch.testing.assert_close(found.params, expected.params)


@each_server
def test_workers_train_as_the_algorithm_asks(algorithm: ParameterServer) -> None:
    asking = replace(algorithm, rate_ratio=0.5, momentum=0.3)
    state = asking.init_worker(1, torch.zeros(2))
    trains = [e for e in asking.handle(state, Started(), 0.0) if isinstance(e, Train)]
    assert [(train.rate_ratio, train.momentum) for train in trains] == [(0.5, 0.3)]


@pytest.mark.parametrize("name", ["bsp", "fixed-adacomm"])
def test_speeds_change_times_but_no_bit_of_barrier_methods(name: str) -> None:
    algorithm = PARAMETER_SERVERS[name]
    even, uneven = (server(algorithm, platforms=each) for each in (EVEN, UNEVEN))
    assert torch.equal(even.params, uneven.params)


def test_one_local_step_makes_fixed_adacomm_bsp() -> None:
    one = server(FixedADACOMM(num_workers=NUM, num_rounds=6, tau=1), platforms=UNEVEN)
    other = server(BSP(num_workers=NUM, num_rounds=6), platforms=UNEVEN)
    assert torch.equal(one.params, other.params)


@pytest.mark.parametrize("slack", [1, 3])
def test_nobody_is_further_ahead_than_the_slack(slack: int) -> None:
    leads = []

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(state, ServerState):
            rounds = state.rounds.values()
            leads.append(max(rounds) - min(rounds))

    platforms = [EVEN[0], *(Platform(throughput=8.0**i) for i in range(-1, NUM - 1))]
    algorithm = SSP(num_workers=NUM, num_rounds=12, slack=slack)
    assert make_world(Watched(algorithm, after=look), platforms=platforms).run()
    assert max(leads) == slack


@thorough
def test_commits_stay_level_on_platforms_that_are_64_times_apart() -> None:
    platforms = [EVEN[0], *(Platform(throughput=0.5 * 4.0**i) for i in range(NUM))]
    algorithm = ADSPPlus(num_workers=NUM, num_rounds=60, window=30.0, min_interval=1.0, rate=3)
    world = make_world(algorithm, platforms=platforms, links=LINKS)
    world.run(until=300.0)
    state = world.states[0]
    assert isinstance(state, ServerState)
    assert max(state.rounds.values()) - min(state.rounds.values()) <= 1
    assert min(state.rounds.values()) >= 27
    steps = state.num_steps
    assert steps[4] > 50 * steps[1], "and nobody trains less for it"


def test_adsp_tries_more_commits_while_that_helps() -> None:
    algorithm = ADSP(num_workers=NUM, num_rounds=100, window=10.0, min_interval=1.0)
    world = make_world(algorithm, platforms=UNEVEN, links=LINKS, lr=0.05)
    assert world.run()
    tried = trials(world.states[0])
    searched = [each for each in tried if each.reward is not None]
    assert [each.rate for each in searched[:2]] == [1, 2]
    assert all(each.rate <= algorithm.max_rate for each in tried)
    assert all(0 <= each.implicit_momentum < 1 for each in tried if each.implicit_momentum)


def test_adacomm_takes_fewer_steps_as_the_loss_falls() -> None:
    algorithm = ADACOMM(num_workers=NUM, num_rounds=30, tau=16, window=20.0)
    world = make_world(algorithm, links=LINKS, lr=0.02)
    world.run(until=5.0)
    state = world.states[0]
    assert isinstance(state, ADACOMMServerState)
    assert state.tau == 16
    assert world.run()
    assert state.tau < 16


@each_server
def test_server_that_restarts_goes_on_with_the_newest_model(algorithm: ParameterServer) -> None:
    longer = replace(algorithm, num_rounds=20)
    merged: list[int] = []

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(state, ServerState) and not state.is_new:
            merged.append(sum(state.num_commits.values()))

    world = make_world(
        Watched(longer, after=look), platforms=UNEVEN, links=LINKS, faults=BACK_SOON
    )
    assert world.run()
    state = world.states[0]
    # No more than the last commit of each worker was under way, and those come again.
    falls = [before - after for before, after in itertools.pairwise(merged)]
    assert max(falls) <= NUM
    assert set(state.rounds.values()) == {20}


@each_server
def test_workers_give_up_on_a_server_that_does_not_come_back(
    algorithm: ParameterServer,
) -> None:
    longer = replace(algorithm, num_rounds=500, patience=30.0)
    faults = Faults(script=(Crash(at=5.0, rank=0),), detection_time=0.5)
    world = make_world(longer, faults=faults)
    with pytest.raises(ServerLostError, match="waited 30 s for the server, rank 0"):
        world.run()
    assert world.now == pytest.approx(35.5, abs=1.0)


@each_server
def test_worker_that_was_cut_off_makes_nobody_wait_for_what_it_missed(
    algorithm: ParameterServer,
) -> None:
    longer = replace(algorithm, num_rounds=30)
    cut = Faults(script=(Partition(start=5.0, end=40.0, group=(2,)),), detection_time=0.5)
    world = make_world(longer, links=LINKS, faults=cut)
    undisturbed = make_world(longer, links=LINKS)
    assert world.run()
    assert undisturbed.run()
    assert world.now < undisturbed.now + 45
    state = world.states[0]
    assert state.num_commits[2] < 30
    assert set(state.rounds.values()) == {30}


def test_statistics_are_never_extrapolated_by_a_worker_that_trains_on() -> None:
    algorithm = ADSPPlus(num_workers=NUM, num_rounds=5, min_interval=1.0)
    state = algorithm.init(1, torch.tensor([1.0, 1.0]))
    assert isinstance(state, TimedCommitterState)
    algorithm.handle(state, Started(layout=Layout(num_trained=1)), 0.0)

    def train(*params: float) -> list[Effect]:
        before, after = state.params, torch.tensor(params)
        event = Trained(
            params=after, before=before, num_samples=1, num_steps=1, seconds=1.0, loss=0.0
        )
        return algorithm.handle(state, event, 1.0)

    state.is_due = True
    train(2.0, 1.0)
    train(3.0, 0.5)
    model = {"params": torch.tensor([1.5, 0.1]), "counts": torch.tensor([1, 0, 0, 0])}
    algorithm.handle(state, Received(0, Message("params", 1, model)), 2.0)
    assert state.params.tolist() == [2.5, 0.5]


def test_one_that_says_its_update_is_measured_changes_no_more_than_its_share() -> None:
    algorithm = BSP(num_workers=2, num_rounds=5)
    state = algorithm.init(0, torch.full((3,), 5.0))
    for rank, num_trained in ((1, 3), (2, 0)):
        numbers = {"number": 1, "num_steps": 1, "num_trained": num_trained, "version": 0}
        commit = Message("commit", 0, {"update": torch.full((3,), 0.5)}, numbers)
        algorithm.handle(state, Received(rank, commit), 1.0)
    # (5.5 + 0.5) / 2, and not the mean of both updates.
    assert state.params.tolist() == [3.0] * 3


def test_a_worker_that_is_one_commit_ahead_does_not_raise_the_rate() -> None:
    algorithm = ADSPPlus(num_workers=NUM, num_rounds=99, window=10.0, min_interval=0.5, rate=2)
    world = make_world(algorithm, links=LINKS, platforms=UNEVEN)
    world.run(until=300.0)
    commits = [*world.states[0].num_commits.values()]
    assert max(commits) <= 300 / 10 * 2 + 1
    assert min(commits) >= 300 / 10 * 2 - 2


@pytest.mark.parametrize(("latency", "waits"), [(0.05, True), (4.0, False)])
def test_a_worker_trains_on_only_where_answers_take_longer_than_a_step(
    latency: float, waits: bool
) -> None:
    servers = {}
    for choice in (None, True, False):
        algorithm = ADSPPlus(
            num_workers=NUM, num_rounds=99, window=12.0, rate=2, waits_for_answer=choice
        )
        links = Links(default=Link(latency=latency))
        world = make_world(algorithm, links=links, platforms=EVEN)
        world.run(until=120.0)
        servers[choice] = world.states[0]
    if waits:
        assert torch.equal(servers[None].params, servers[True].params)
        assert not torch.equal(servers[None].params, servers[False].params)
    else:  # the first answer had to be waited for
        steps = {choice: min(each.num_steps.values()) for choice, each in servers.items()}
        assert steps[True] < steps[False] - 20 <= steps[None]


def test_with_shares_by_speed_a_barrier_waits_for_nobody() -> None:
    plain = FixedADACOMM(num_workers=NUM, num_rounds=5, tau=20)
    ends = []
    for algorithm in (plain, EdgeGossip(inner=plain)):
        world = make_world(algorithm, platforms=UNEVEN, links=Links(default=Link(latency=0.01)))
        assert world.run()
        ends.append(world.now)
    # The slowest takes 5 of the 20 steps, in the time in which the fastest takes all.
    assert ends[1] < 0.3 * ends[0]
