"""Promises of HeLoCo: each case of its correction, its box, limit cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import UNEVEN, make_world
from torch import Tensor

from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.contract.protocol import Message, Received
from edgegossip.contract.randomness import generator
from edgegossip.sim.link import Link, Links

NUM = NUM_WORKERS - 1
EAST = torch.tensor([1.0, 0.0])


def corrected(change: list[float], momentum: Tensor = 2 * EAST, **settings: float) -> Tensor:
    """Return the change as a server merges it whose only layer has this momentum."""
    kept: Any = {"outer_momentum": 0.0, "outer_lr": 1.0, **settings}
    algorithm = HeLoCo(num_workers=1, num_rounds=9, **kept)
    state: Any = algorithm.init(0, torch.zeros(2))
    state.velocity = momentum
    commit(algorithm, state, torch.tensor(change))
    params: Tensor = state.params
    return params


def commit(algorithm: ParameterServer, state: Any, update: Tensor, number: int = 1) -> None:  # noqa: ANN401
    numbers = {
        "number": number,
        "num_steps": 1,
        "num_trained": len(update),
        "version": 0,
        "pace": 1.0,
    }
    message = Message("commit", 0, {"update": update}, numbers)
    algorithm.handle(state, Received(1, message), 1.0)


def test_an_aligned_change_stays_as_it_is() -> None:
    assert corrected([3.0, 1.0], aligned=0.9).tolist() == [3.0, 1.0]


def test_without_momentum_nothing_is_corrected() -> None:
    assert corrected([-3.0, 1.0], torch.zeros(2)).tolist() == [-3.0, 1.0]


@pytest.mark.parametrize(
    ("change", "length", "cosine"), [([0.0, 4.0], 4.0, 0.0), ([3.0, 4.0], 5.0, 0.6)]
)
def test_a_change_that_points_elsewhere_is_turned_at_the_same_length(
    change: list[float], length: float, cosine: float
) -> None:
    share = 0.9 * (1 - cosine) * length / (length + 2)
    w = (1 - share) * torch.tensor(change) / length + share * EAST
    found = corrected(change, turn=0.9, aligned=0.7)
    torch.testing.assert_close(found, length * w / w.norm())
    torch.testing.assert_close(found.norm(), torch.tensor(length))


def test_a_change_is_turned_no_further_than_to_the_momentum() -> None:
    torch.testing.assert_close(corrected([0.0, 4.0], turn=99.0), 4 * EAST)


@pytest.mark.parametrize(("max_shrink", "share"), [(1.0, 0.8 * 0.6 * 5 / 7), (0.25, 0.25)])
def test_a_change_against_the_momentum_loses_a_share_of_that_component(
    max_shrink: float, share: float
) -> None:
    # Length 5, cosine -0.6, confidence 5 / (5 + 2).
    found = corrected([-3.0, 4.0], shrink=0.8, max_shrink=max_shrink)
    torch.testing.assert_close(found, torch.tensor([-3.0 * (1 - share), 4.0]))


def test_a_long_momentum_softens_corrections() -> None:
    soft, hard = (corrected([-3.0, 4.0], damping=damping)[0] for damping in (9.0, 0.0))
    assert -3 < soft < hard


def test_large_changes_stay_finite() -> None:
    found = corrected([0.0, 1e30], turn=0.5)
    torch.testing.assert_close(
        found.norm(dtype=torch.float64).item(), 1e30, rtol=1e-5, atol=0.0
    )


def test_each_layer_is_corrected_by_itself() -> None:
    settings: dict[str, Any] = {"num_workers": 1, "num_rounds": 9, "outer_momentum": 0.4}
    start, updates = torch.zeros(5), torch.randn(6, 5, generator=generator(3, "layers"))
    both = HeLoCo(**settings, sizes=(2, 3))
    whole: Any = both.init(0, start)
    parts: list[Any] = [
        HeLoCo(**settings).init(0, start[:2]),
        HeLoCo(**settings).init(0, start[2:]),
    ]
    for number, update in enumerate(updates, 1):
        commit(both, whole, update, number)
        for state, part in zip(parts, (update[:2], update[2:]), strict=True):
            commit(HeLoCo(**settings), state, part, number)
    assert torch.equal(whole.params, torch.cat([each.params for each in parts]))
    one: Any = HeLoCo(**settings).init(0, start)
    for number, update in enumerate(updates, 1):
        commit(HeLoCo(**settings), one, update, number)
    assert not torch.allclose(one.params, whole.params)


def test_the_server_follows_the_box_of_the_paper() -> None:
    mu, alpha = 0.7, 0.9
    algorithm = HeLoCo(
        num_workers=2, num_rounds=99, outer_lr=alpha, outer_momentum=mu, aligned=0.0, shrink=0.0
    )
    state: Any = algorithm.init(0, torch.ones(3))
    theta, momentum = torch.ones(3), torch.zeros(3)
    for number, update in enumerate(torch.randn(5, 3, generator=generator(0, "box")), 1):
        momentum = mu * momentum + (1 - mu) * -update
        theta = theta - alpha / 2 * (-update + mu * momentum)
        commit(algorithm, state, update, number)
        torch.testing.assert_close(state.params, theta)


def test_a_commit_moves_the_model_by_its_change_and_momentum_times_as_much() -> None:
    algorithm = HeLoCo(num_workers=2, num_rounds=99, outer_momentum=0.7)
    state = algorithm.init(0, torch.zeros(2))
    commit(algorithm, state, EAST)
    for number in range(2, 99):
        commit(algorithm, state, torch.zeros(2), number)
    torch.testing.assert_close(state.params, 1.7 * EAST / 2)


def test_without_momentum_and_corrections_it_is_asp() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "num_rounds": 9}
    ours = HeLoCo(**settings, local_steps=1, outer_momentum=0.0, aligned=0.0, max_shrink=0.0)
    models = []
    for algorithm in (ours, ASP(**settings)):
        world = make_world(algorithm, links=Links(default=Link(latency=0.25)), platforms=UNEVEN)
        assert world.run()
        models.append(world.states[0].params)
    assert torch.equal(*models)


def test_sizes_must_fit_the_model() -> None:
    algorithm = HeLoCo(num_workers=2, num_rounds=9, sizes=(2, 3))
    with pytest.raises(ValueError, match="2 layers add up to 5, but the model has 7 entries"):
        algorithm.init(0, torch.zeros(7))


def test_slices_that_cut_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="got HeLoCo, which needs whole layers"):
        Shards(inner=HeLoCo(num_workers=2, num_rounds=9), num_servers=2)
