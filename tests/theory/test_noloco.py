"""NoLoCo against its theory: what the mean does, and when pairs keep workers together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_WORKERS
from tests.trained import trained_event
from tests.worlds import INITIAL, TARGETS, UNEVEN, final_params, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.noloco import NoLoCo
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import Layout, Started
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_ring,
    random_matching,
    ring,
)
from edgegossip.sim.fault import Crash, Faults, Recover

START = INITIAL[:NUM_WORKERS]
OPTIMA = TARGETS[:NUM_WORKERS]
PAIRS = random_matching(NUM_WORKERS, period=8, seed=0)


def noloco(topology: Topology = PAIRS, **arguments: Any) -> NoLoCo:  # noqa: ANN401
    return NoLoCo(topology=topology, **{"num_rounds": 8} | arguments)


def by_the_paper(algorithm: NoLoCo, lr: float) -> Tensor:
    """The rule in the paper's order: the means over each pair, then the step of each worker."""
    phi, delta = START.clone(), torch.zeros_like(START)
    alpha, beta, gamma = algorithm.outer_momentum, algorithm.outer_lr, algorithm.pull
    for round in range(algorithm.num_rounds):
        progress = ((1 - lr) ** algorithm.local_steps - 1) * (phi - OPTIMA)
        new_phi = phi.clone()
        for rank in range(NUM_WORKERS):
            group = [rank, *algorithm.topology.out_neighbors(rank, round)]
            apart = phi[rank] - phi[group].mean(0)
            delta[rank] = alpha * delta[rank] + beta * progress[group].mean(0) - gamma * apart
            new_phi[rank] = phi[rank] + delta[rank]
        phi = new_phi
    return phi


@pytest.mark.parametrize(
    "arguments",
    [{}, {"local_steps": 3}, {"outer_momentum": 0.3, "outer_lr": 0.9, "pull": 1.2}],
)
def test_rounds_are_those_of_the_paper(arguments: dict[str, Any]) -> None:
    algorithm = noloco(**arguments)
    after = final_params(make_world(algorithm, initial=START, lr=0.05, platforms=UNEVEN))
    torch.testing.assert_close(after, by_the_paper(algorithm, lr=0.05))


@pytest.mark.parametrize("topology", [PAIRS, MATCHINGS, ring(NUM_WORKERS)], ids=repr)
def test_without_momentum_it_is_gossip(topology: Topology) -> None:
    one = noloco(topology, local_steps=2, outer_momentum=0.0, outer_lr=1.0, pull=1.0)
    other = Gossip(topology=topology, num_rounds=8, local_steps=2)
    torch.testing.assert_close(
        final_params(make_world(one, initial=START)),
        final_params(make_world(other, initial=START)),
    )


def test_among_all_workers_and_without_momentum_it_is_diloco() -> None:
    arguments: dict[str, Any] = {"topology": complete(NUM_WORKERS), "num_rounds": 8}
    arguments |= {"local_steps": 2, "outer_momentum": 0.0, "outer_lr": 0.7}
    torch.testing.assert_close(
        final_params(make_world(NoLoCo(**arguments))),
        final_params(make_world(DiLoCo(**arguments))),
    )


@pytest.mark.parametrize("pull", [0.4, 1.2])
def test_the_mean_moves_as_one_worker_whatever_the_pairs(pull: float) -> None:
    # For quadratics the mean of the gradients is the gradient at the mean.
    after = final_params(make_world(noloco(num_rounds=20, pull=pull), lr=0.05))
    x, velocity = torch.zeros(OPTIMA.shape[1]), torch.zeros(OPTIMA.shape[1])
    for _ in range(20):
        velocity = 0.5 * velocity - 0.7 * 0.05 * (x - OPTIMA.mean(0))
        x = x + velocity
    torch.testing.assert_close(after.mean(0), x)


def mixed(algorithm: NoLoCo, params: Tensor) -> Tensor:
    """All workers' parameters ([num_workers, num_params]) after rounds without progress."""
    states = [algorithm.init(rank, row) for rank, row in enumerate(params)]
    for round in range(algorithm.num_rounds):
        sent = [algorithm.outgoing(state, 0) for state in states]
        for state in states:
            state.round = state.exchange = round
            pair = algorithm.topology.in_neighbors(state.rank, round)
            algorithm.mix(state, {j: sent[j] for j in pair})
    return torch.stack([state.params for state in states])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.7])
def test_workers_stay_together_below_the_bound_on_the_pull_and_part_above(
    momentum: float,
) -> None:
    bound = 2 * (1 - momentum**2)
    pairs = random_matching(40, period=40, seed=0)
    start = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    after = [
        consensus_distance(
            mixed(
                noloco(pairs, num_rounds=40, outer_momentum=momentum, pull=share * bound), start
            )
        )
        for share in (0.8, 1.25)
        if share * bound < 2
    ]
    before = consensus_distance(start)
    assert after[0] < 0.5 * before
    assert all(distance > 2 * before for distance in after[1:])


def test_running_statistics_have_no_momentum_and_are_averaged() -> None:
    """A variance that falls from 1 would be driven beyond 0."""
    algorithm = noloco(complete(2), outer_momentum=0.9)
    states = [algorithm.init(rank, torch.tensor([0.0, 1.0])) for rank in range(2)]
    for state in states:
        algorithm.handle(state, Started(layout=Layout(num_trained=1)), 0.0)
    for round in range(8):
        before = [state.params for state in states]
        ends = [torch.stack([x[0] + 1, x[1] * (0.1 + 0.4 * k)]) for k, x in enumerate(before)]
        for state, start, end in zip(states, before, ends, strict=True):
            algorithm.learn(state, trained_event(end, start))
        sent = [algorithm.outgoing(state, 0) for state in states]
        for state in states:
            state.round = state.exchange = round
            algorithm.mix(state, {1 - state.rank: sent[1 - state.rank]})
            expected = (ends[0][1] + ends[1][1]) / 2
            torch.testing.assert_close(state.params[1], expected)
    assert states[0].params[0] > 2 * 0.7 * 8


def test_one_that_had_to_go_back_begins_without_velocity() -> None:
    algorithm = noloco()
    state = algorithm.init(0, torch.zeros(2))
    state.velocity = torch.full((2,), 1e6)
    good = torch.ones(2)
    algorithm.learn(state, trained_event(good, good, num_steps=0, has_gone_back=True))
    algorithm.mix(state, {})
    assert torch.equal(state.params, good)


def test_a_worker_that_skips_rounds_begins_without_velocity() -> None:
    algorithm = noloco()
    state = algorithm.init(0, torch.zeros(2))
    state.velocity = torch.full((2,), 1e6)
    algorithm.catch_up_with(state, {"params": torch.ones(2)})
    assert not state.velocity.any()


def test_a_worker_that_comes_back_agrees_with_the_others_again() -> None:
    faults = Faults(script=(Crash(at=3.5, rank=1), Recover(at=6.5, rank=1)))
    after = final_params(make_world(noloco(num_rounds=60), faults=faults))
    without = final_params(make_world(noloco(num_rounds=60)))
    torch.testing.assert_close(after, without, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": directed_ring(4)}, "NoLoCo needs an undirected topology"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0, got 0.0"),
        ({"pull": 2.0}, r"pull must be in \(0, 2\), got 2.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noloco(**arguments)
