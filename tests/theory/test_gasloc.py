"""GASLoC against its theory: the mean moves like DiLoCo's model, and models agree faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_WORKERS
from tests.tiers import thorough
from tests.trained import trained_event
from tests.worlds import INITIAL, TARGETS, UNEVEN, final_params, make_world, mix_only
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.gasloc import GASLoC
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import MetropolisHastings, mixing_matrix
from edgegossip.contract.protocol import Layout, Started
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_ring,
    random_matching,
    ring,
    star,
)
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.platform import Platform

START = INITIAL[:NUM_WORKERS]
OPTIMA = TARGETS[:NUM_WORKERS]
PAIRS = random_matching(5, period=12, seed=0)
ALONE = [Platform(throughput=1.0)]
each_topology = pytest.mark.parametrize("topology", [ring(5), star(5), PAIRS], ids=repr)


def gasloc(topology: Topology | None = None, **arguments: Any) -> GASLoC:  # noqa: ANN401
    return GASLoC(topology=topology or PAIRS, **{"num_rounds": 8, "local_steps": 2} | arguments)


def by_the_paper(topology: Topology, eta: float, alpha: float, gamma: float) -> Tensor:
    """Eight rounds of two steps on all workers at once, in the paper's form."""
    theta, lr = START.double(), 0.1
    targets, previous = OPTIMA.double(), START.double()
    for round in range(8):
        end = targets + (1 - lr) ** 2 * (theta - targets)
        y = theta + eta * (end - theta)
        laplacian = torch.eye(5, dtype=torch.float64) - mixing_matrix(
            topology, MetropolisHastings(), round
        )
        theta = y - alpha * laplacian @ y + gamma * (y - previous)
        previous = y
    return theta.float()


@each_topology
@pytest.mark.parametrize(
    ("eta", "alpha", "gamma"), [(1.0, 0.5, 0.5), (0.7, 1.0, 0.6), (1.5, 0.3, 0.0)]
)
def test_rounds_are_those_of_the_paper(
    topology: Topology, eta: float, alpha: float, gamma: float
) -> None:
    algorithm = gasloc(topology, outer_lr=eta, consensus_step=alpha, outer_momentum=gamma)
    after = final_params(make_world(algorithm, initial=START, platforms=UNEVEN))
    torch.testing.assert_close(after, by_the_paper(topology, eta, alpha, gamma))


def test_one_worker_alone_is_diloco_alone() -> None:
    # theta + v with v = gamma v + eta g: Nesterov's momentum, as in SNOO and DiLoCo.
    arguments: dict[str, Any] = {"topology": complete(1), "num_rounds": 12, "local_steps": 3}
    arguments |= {"outer_lr": 0.8, "outer_momentum": 0.7}
    one, other = GASLoC(**arguments), DiLoCo(**arguments)
    torch.testing.assert_close(
        final_params(make_world(one, platforms=ALONE)),
        final_params(make_world(other, platforms=ALONE)),
    )


@each_topology
def test_mean_moves_like_the_model_of_diloco(topology: Topology) -> None:
    # For quadratics the mean of the gradients is the gradient at the mean.
    outer: dict[str, Any] = {"outer_lr": 0.9, "outer_momentum": 0.6}
    after = final_params(make_world(gasloc(topology, **outer)))
    diloco = DiLoCo(topology=complete(5), num_rounds=8, local_steps=2, **outer)
    expected = final_params(make_world(diloco))
    torch.testing.assert_close(after.mean(0), expected[0])


@pytest.mark.parametrize("topology", [PAIRS, MATCHINGS, ring(5)], ids=repr)
@pytest.mark.parametrize("local_steps", [1, 3])
def test_without_momentum_it_is_gossip_with_local_steps(
    topology: Topology, local_steps: int
) -> None:
    arguments: dict[str, Any] = {"topology": topology, "num_rounds": 6}
    arguments["local_steps"] = local_steps
    one = GASLoC(outer_momentum=0.0, outer_lr=1.0, consensus_step=1.0, **arguments)
    assert torch.equal(
        final_params(make_world(one, initial=START)),
        final_params(make_world(Gossip(**arguments), initial=START)),
    )


def test_mixing_keeps_the_mean_of_all() -> None:
    after = mix_only(gasloc(num_rounds=30), START)
    torch.testing.assert_close(after.mean(0), START.mean(0))
    assert consensus_distance(after) < 0.01 * consensus_distance(START)


def test_momentum_accelerates_agreement_by_the_root_of_the_gap() -> None:
    # The slowest mode follows y(t+1) = (1 - gap + gamma) y(t) - gamma y(t-1). Its rate is best
    # where both roots are equal: 1 - sqrt(gap) per round instead of 1 - gap.
    topology, num_rounds = ring(12), 30
    eigenvalues, eigenvectors = torch.linalg.eigh(mixing_matrix(topology, MetropolisHastings()))
    gap = 1 - float(eigenvalues[-2])
    slowest = eigenvectors[:, [-2]].float()
    gamma = (1 - gap**0.5) ** 2
    distances = [
        consensus_distance(
            mix_only(
                GASLoC(
                    topology=topology,
                    num_rounds=num_rounds,
                    outer_momentum=momentum,
                    consensus_step=1.0,
                ),
                slowest,
            )
        )
        / consensus_distance(slowest)
        for momentum in (0.0, gamma)
    ]
    assert distances[0] == pytest.approx((1 - gap) ** num_rounds, rel=1e-3)
    before, now = 1.0, 1.0  # the first round has no momentum
    for _ in range(num_rounds):
        before, now = now, (1 - gap + gamma) * now - gamma * before
    assert distances[1] == pytest.approx(abs(now), rel=1e-3)
    assert distances[1] < (num_rounds + 1) * (1 - gap**0.5) ** num_rounds
    assert distances[1] < 0.05 * distances[0]


@thorough
@pytest.mark.parametrize(
    ("alpha", "momentum", "shrinks"), [(0.5, 0.8, True), (1.0, 0.8, False)]
)
def test_too_much_momentum_drives_workers_apart(
    alpha: float, momentum: float, shrinks: bool
) -> None:
    algorithm = GASLoC(
        topology=random_matching(5, period=400, seed=0),
        num_rounds=400,
        outer_momentum=momentum,
        consensus_step=alpha,
    )
    left = consensus_distance(mix_only(algorithm, START)) / consensus_distance(START)
    assert left < 1e-3 if shrinks else left > 10


def test_training_comes_near_the_optimum_of_all() -> None:
    algorithm = gasloc(random_matching(5, period=60, seed=1), num_rounds=120, local_steps=1)
    after = final_params(make_world(algorithm, lr=0.02))
    torch.testing.assert_close(after.mean(0), OPTIMA.mean(0), atol=0.02, rtol=0.0)
    assert consensus_distance(after) < 0.3 * consensus_distance(OPTIMA)


def test_a_worker_waits_for_its_partner_only() -> None:
    # In a round of pairs the slow worker delays one other, and nobody else.
    platforms = [Platform(throughput=1.0)] * 4 + [Platform(throughput=0.1)]
    world = make_world(gasloc(MATCHINGS, num_rounds=2, local_steps=1), platforms=platforms)
    world.run(until=5.0)
    assert [state.round for state in world.states] == [2, 2, 2, 1, 0]


def test_running_statistics_have_no_momentum() -> None:
    """A variance that falls from 1 would be driven beyond 0."""
    algorithm = gasloc(complete(1), num_rounds=9, outer_momentum=0.9, outer_lr=2.0)
    state = algorithm.init(0, torch.tensor([0.0, 1.0]))
    algorithm.handle(state, Started(layout=Layout(num_trained=1)), 0.0)
    for _ in range(8):
        before = state.params
        after = torch.tensor([before[0] + 1.0, 0.9 * before[1] + 0.1 * 0.05])
        algorithm.handle(state, trained_event(after, before), 0.0)
        assert state.params[1] == after[1]
    assert state.params[0] > 2 * 8 * 1.0


def test_one_that_had_to_go_back_begins_without_momentum() -> None:
    algorithm = gasloc(complete(1), outer_momentum=0.9)
    state = algorithm.init(0, torch.zeros(2))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, trained_event(torch.full((2,), 1e6), torch.zeros(2)), 0.0)
    good = torch.ones(2)
    algorithm.handle(state, trained_event(good, good, num_steps=0, has_gone_back=True), 0.0)
    assert torch.equal(state.params, good)
    assert state.previous is None


def test_worker_that_comes_back_begins_without_momentum() -> None:
    faults = Faults(script=(Crash(at=3.5, rank=1), Recover(at=4.5, rank=1)))
    world = make_world(gasloc(ring(5), num_rounds=20, local_steps=1), faults=faults)
    world.run(until=4.75)
    assert world.states[1].round > 0
    assert world.states[1].previous is None
    assert world.states[0].previous is not None
    assert world.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": directed_ring(4)}, "GASLoC needs an undirected topology"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0, got 0.0"),
        ({"consensus_step": 1.5}, r"consensus_step must be in \(0, 1\], got 1.5"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GASLoC(**{"topology": ring(4), "num_rounds": 1, **arguments})
