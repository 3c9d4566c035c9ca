"""QGM: momentum that neighbors with other data have a part in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_WORKERS
from tests.trained import trained_event
from tests.worlds import INITIAL, TARGETS, UNEVEN, final_params, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.quasi_global_gossip import QuasiGlobalGossip
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import MetropolisHastings, mixing_matrix
from edgegossip.contract.protocol import Layout, Started, Trained
from edgegossip.contract.topology import Topology, complete, directed_ring, ring, star
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.platform import Platform

START = INITIAL[:NUM_WORKERS]
OPTIMA = TARGETS[:NUM_WORKERS]
ALONE = [Platform(throughput=1.0)]


def quasi_global(topology: Topology | None = None, **arguments: Any) -> QuasiGlobalGossip:  # noqa: ANN401
    return QuasiGlobalGossip(topology=topology or ring(5), **{"num_rounds": 8} | arguments)


def with_local_momentum(topology: Topology, num_rounds: int, lr: float, beta: float) -> Tensor:
    """D-PSGD with heavy-ball momentum of each worker's own gradients."""
    matrix = mixing_matrix(topology, MetropolisHastings()).float()
    x, m = torch.zeros_like(OPTIMA), torch.zeros_like(OPTIMA)
    for _ in range(num_rounds):
        m = beta * m + (x - OPTIMA)
        x = matrix @ (x - lr * m)
    return x


def by_the_paper(
    topology: Topology, num_rounds: int, lr: float, beta: float, mu: float
) -> Tensor:
    """Algorithm 1 (QG-DSGDm), all workers at once, in the paper's order and units."""
    x, m_hat = START.clone(), torch.zeros_like(START)
    for round in range(num_rounds):
        matrix = mixing_matrix(topology, MetropolisHastings(), round).float()
        m = beta * m_hat + (x - OPTIMA)
        mixed = matrix @ (x - lr * m)
        d = (x - mixed) / lr
        m_hat = mu * m_hat + (1 - mu) * d
        x = mixed
    return x


@pytest.mark.parametrize("topology", [ring(5), star(5), MATCHINGS], ids=repr)
@pytest.mark.parametrize(("beta", "mu"), [(0.9, None), (0.5, 0.8), (0.9, 0.0)])
def test_rounds_are_those_of_the_paper(
    topology: Topology, beta: float, mu: float | None
) -> None:
    algorithm = quasi_global(topology, momentum=beta, decay=mu)
    after = final_params(make_world(algorithm, initial=START, lr=0.05, platforms=UNEVEN))
    expected = by_the_paper(topology, 8, lr=0.05, beta=beta, mu=beta if mu is None else mu)
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("local_steps", [1, 3])
def test_without_momentum_it_is_gossip(local_steps: int) -> None:
    arguments: dict[str, Any] = {"topology": ring(5), "num_rounds": 6}
    arguments["local_steps"] = local_steps
    one = QuasiGlobalGossip(momentum=0.0, decay=0.0, **arguments)
    other = Gossip(**arguments)
    assert torch.equal(
        final_params(make_world(one, initial=START)),
        final_params(make_world(other, initial=START)),
    )


def test_one_worker_alone_has_quasi_hyperbolic_momentum() -> None:
    # Ma & Yarats, ICLR 2019: the step is (1 - nu) g + nu m with an average m of gradients.
    lr, beta, mu = 0.05, 0.6, 0.8
    algorithm = quasi_global(complete(1), momentum=beta, decay=mu, num_rounds=30)
    after = final_params(make_world(algorithm, platforms=ALONE, lr=lr))[0]
    decay = mu + (1 - mu) * beta
    x, m = torch.zeros_like(OPTIMA[0]), torch.zeros_like(OPTIMA[0])
    for _ in range(30):
        gradient = x - OPTIMA[0]
        x = x - lr * (gradient + beta * (1 - mu) / (1 - decay) * m)
        m = decay * m + (1 - decay) * gradient
    torch.testing.assert_close(after, x)


def test_mean_moves_as_one_worker_with_the_mean_of_the_steps() -> None:
    # For quadratics the mean of the gradients is the gradient at the mean.
    algorithm = quasi_global(star(5), num_rounds=20)
    world = make_world(algorithm, lr=0.05)
    after = final_params(world)
    x, velocity = torch.zeros(OPTIMA.shape[1]), torch.zeros(OPTIMA.shape[1])
    for _ in range(20):
        before = x
        x = x - 0.05 * (x - OPTIMA.mean(0)) - 0.9 * velocity
        velocity = 0.9 * velocity + 0.1 * (before - x)
    torch.testing.assert_close(after.mean(0), x)
    mean_velocity = torch.stack([state.velocity for state in world.states]).mean(0)
    torch.testing.assert_close(mean_velocity, velocity)


def test_unlike_local_momentum_it_drives_workers_no_further_apart_than_gossip() -> None:
    # Where nothing moves any more the velocity is 0, so it ends where gossip does; momentum of
    # local gradients, which never vanish, ends as far off as 1 / (1 - beta) times the step.
    lr, topology = 0.05, ring(5)
    after = final_params(make_world(quasi_global(topology, num_rounds=250), lr=lr))
    gossip = final_params(make_world(Gossip(topology=topology, num_rounds=250), lr=lr))
    local = with_local_momentum(topology, 250, lr, beta=0.9)
    torch.testing.assert_close(after, gossip, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(after.mean(0), OPTIMA.mean(0), atol=1e-3, rtol=1e-3)
    assert consensus_distance(local) > 3 * consensus_distance(after)


def test_running_statistics_have_no_momentum() -> None:
    """A variance that falls from 1 would be driven beyond 0."""
    algorithm = quasi_global(complete(1), momentum=0.9)
    state = algorithm.init(0, torch.tensor([0.0, 1.0]))
    algorithm.handle(state, Started(layout=Layout(num_trained=1)), 0.0)
    for _ in range(8):
        before = state.params
        after = torch.tensor([before[0] + 1.0, 0.9 * before[1] + 0.1 * 0.05])
        event = trained_event(after, before)
        algorithm.handle(state, event, 0.0)
        assert state.params[1] == after[1]
    assert state.params[0] > 8 * 1.0


def test_a_model_that_is_passed_on_untrained_is_not_moved_by_momentum() -> None:
    algorithm = quasi_global(complete(1), momentum=0.9)
    state = algorithm.init(0, torch.tensor([0.0, 1.0]))
    algorithm.handle(state, Started(layout=Layout(num_trained=1)), 0.0)
    for after in (torch.tensor([1.0, 0.1]), torch.tensor([2.0, 0.05])):
        event = trained_event(after, state.params)
        algorithm.handle(state, event, 0.0)
    before = state.params
    algorithm.handle(
        state,
        Trained.skipped(before),
        0.0,
    )
    assert torch.equal(state.params, before)


def test_one_that_had_to_go_back_begins_without_velocity() -> None:
    algorithm = quasi_global()
    state = algorithm.init(0, torch.zeros(2))
    state.velocity = torch.full((2,), 1e6)
    good = torch.ones(2)
    algorithm.handle(state, trained_event(good, good, num_steps=0, has_gone_back=True), 0.0)
    assert torch.equal(state.params, good)
    assert torch.equal(state.start, good)
    assert not state.velocity.any()


def test_it_is_faster_than_gossip() -> None:
    lr, num_rounds = 0.01, 60
    arguments: dict[str, Any] = {"topology": ring(5), "num_rounds": num_rounds}
    distances = [
        float((final_params(make_world(each, lr=lr)).mean(0) - OPTIMA.mean(0)).norm())
        for each in (QuasiGlobalGossip(**arguments), Gossip(**arguments))
    ]
    assert distances[0] < 0.5 * distances[1]


def test_worker_that_comes_back_begins_without_velocity() -> None:
    faults = Faults(script=(Crash(at=3.5, rank=1), Recover(at=4.5, rank=1)))
    world = make_world(quasi_global(num_rounds=20), faults=faults)
    world.run(until=4.75)
    assert world.states[1].round > 0
    assert not world.states[1].velocity.any()
    assert world.states[0].velocity.any()
    assert world.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": directed_ring(4)}, "QuasiGlobalGossip needs an undirected topology"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"decay": -0.1}, r"decay must be in \[0, 1\) or None, got -0.1"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuasiGlobalGossip(**{"topology": ring(4), "num_rounds": 1, **arguments})
