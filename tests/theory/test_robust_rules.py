"""Robust rules: known breakdown points, fixed points, and what they keep without liars."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import edgegossip as eg
from edgegossip.contract.mixing import MetropolisHastings
from edgegossip.contract.randomness import generator
from edgegossip.contract.robust import RobustRule, distances

NUM_PARAMS = 6
RULES: dict[str, RobustRule] = {
    "nna": eg.NearestNeighbors(num_liars=2),
    "scc": eg.SelfCenteredClipping(num_liars=2),
    "scc-fixed": eg.SelfCenteredClipping(radius_at=2.0),
    "cs+": eg.ClippedSum(num_liars=2),
    "norm-bound": eg.NormBound(),
    "trimmed-mean": eg.TrimmedMean(num_liars=2),
    "median": eg.CoordinateMedian(),
    "geometric-median": eg.GeometricMedian(),
    "krum": eg.Krum(num_liars=2),
    "multi-krum": eg.Krum(num_liars=2, num_chosen=4),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def vectors(num: int, scale: float = 1.0) -> dict[int, Tensor]:
    """Random vectors around ones."""
    noise = torch.randn(num, NUM_PARAMS, generator=generator(7, "vectors"))
    return {j: 1 + scale * noise[j] for j in range(num)}


def evenly(others: dict[int, Tensor], own: bool = True) -> dict[int, float]:
    return dict.fromkeys(others, 1 / (len(others) + own))


@each_rule
@pytest.mark.parametrize("has_own", [True, False])
def test_equal_vectors_stay_as_they_are_to_the_bit(rule: RobustRule, has_own: bool) -> None:
    same = torch.rand(NUM_PARAMS, generator=generator(1, "same"))
    others = {j: same.clone() for j in range(6)}
    own = same if has_own else torch.zeros_like(same)
    mix = rule.combine(own, others, evenly(others, has_own))
    # A server's updates may be longer than a fixed radius.
    if has_own or rule != RULES["scc-fixed"] or same.norm() <= 2:
        torch.testing.assert_close(mix.params, same, rtol=0 if has_own else 1e-6, atol=0)


@each_rule
def test_a_worker_alone_keeps_its_model(rule: RobustRule) -> None:
    own = vectors(1)[0]
    mix = rule.combine(own, {}, {})
    assert torch.equal(mix.params, own)
    assert mix.shares == {}


@each_rule
@pytest.mark.parametrize("size", [1e3, 1e9, 3e38])
def test_a_minority_however_far_away_moves_the_result_little(
    rule: RobustRule, size: float
) -> None:
    # Seven honest ones and two liars, who are together or on both sides.
    honest = vectors(7, scale=0.1)
    own, others = honest.pop(0), honest
    for signs in ((1, 1), (1, -1)):
        lies = {7 + k: sign * torch.full((NUM_PARAMS,), size) for k, sign in enumerate(signs)}
        mix = rule.combine(own, others | lies, evenly(others | lies))
        far = max(distances(own, others).values())
        # The fixed radius is 2 for each of two liars of weight 1/9.
        assert float((mix.params - 1).norm()) <= 3 * far
        honest_share = sum(mix.shares[j] for j in others) / len(others)
        assert max(mix.shares[j] for j in lies) <= honest_share


@each_rule
def test_a_majority_of_liars_carries_all_but_clipping_away(rule: RobustRule) -> None:
    own, others = torch.ones(NUM_PARAMS), {0: torch.ones(NUM_PARAMS)}
    lies = {j: torch.full((NUM_PARAMS,), 1e6) for j in range(1, 8)}
    mix = rule.combine(own, others | lies, evenly(others | lies))
    # A fixed radius holds whatever comes, and liars who are all equally far are within the
    # radius that any other rule derives from distances.
    holds = rule == RULES["scc-fixed"]
    assert (float(mix.params.norm()) > 1e3) != holds


def test_rules_without_liars_and_with_room_are_plain_mixing() -> None:
    honest = vectors(6)
    own, others = honest.pop(0), honest
    weights = evenly(others)
    mean = own + sum((other - own) * weights[j] for j, other in others.items())
    for rule in (eg.SelfCenteredClipping(radius_at=1e6), eg.NormBound(factor=1e6)):
        mix = rule.combine(own, others, weights)
        torch.testing.assert_close(mix.params, mean)
        assert set(mix.shares.values()) == {1.0}


def test_a_fixed_radius_keeps_the_mean_of_all() -> None:
    topology, rule = eg.ring(5), eg.SelfCenteredClipping(radius_at=0.5)
    models = vectors(5)
    after = []
    for rank in range(5):
        row = dict(MetropolisHastings().weights(topology, rank, 0))
        row.pop(rank)
        mix = rule.combine(models[rank], {j: models[j] for j in row}, row)
        assert min(mix.shares.values()) < 1  # something is clipped
        after.append(mix.params)
    torch.testing.assert_close(
        torch.stack(after).mean(0), torch.stack([*models.values()]).mean(0)
    )


def test_cs_plus_does_not_mix_at_its_breakdown_point() -> None:
    # One of two neighbors with a third of the weight each: twice the liar's weight is all that
    # is not the worker's own.
    own = torch.zeros(NUM_PARAMS)
    others = {1: torch.ones(NUM_PARAMS), 2: 2 * torch.ones(NUM_PARAMS)}
    mix = eg.ClippedSum().combine(own, others, evenly(others))
    assert torch.equal(mix.params, own)
    # With four neighbors, the two that are nearer are taken as they are.
    others = {j: float(j) * torch.ones(NUM_PARAMS) for j in range(1, 5)}
    mix = eg.ClippedSum().combine(own, others, evenly(others))
    assert mix.shares == pytest.approx({1: 1.0, 2: 1.0, 3: 2 / 3, 4: 1 / 2})


def test_the_computed_radius_of_clipping_is_that_of_the_theory() -> None:
    own = torch.zeros(1)
    others = {j: torch.tensor([float(j)]) for j in (1, 2, 30)}
    mix = eg.SelfCenteredClipping().combine(own, others, evenly(others))
    # sqrt((1 / 0.25) * 0.25 * (1 + 4)), without the farthest.
    assert mix.shares[30] == pytest.approx(5**0.5 / 30)
    assert mix.shares[1] == mix.shares[2] == 1.0


def test_nearest_neighbors_average_the_rest() -> None:
    own, others = torch.zeros(1), {j: torch.tensor([float(j)]) for j in (1, 2, 30)}
    mix = eg.NearestNeighbors().combine(own, others, evenly(others))
    assert mix.params.item() == pytest.approx(1.0)
    assert mix.shares == {1: 1.0, 2: 1.0, 30: 0.0}


def test_the_trimmed_mean_leaves_out_as_many_at_each_end() -> None:
    own = torch.tensor([0.0, 5.0])
    values = [(1, 1), (2, 2), (3, 3), (100, -100)]
    others = {j: torch.tensor(pair, dtype=torch.float32) for j, pair in enumerate(values)}
    mix = eg.TrimmedMean().combine(own, others, evenly(others))
    assert mix.params.tolist() == [2.0, 2.0]
    assert mix.shares[3] == 0.0
    assert eg.CoordinateMedian().combine(own, others, evenly(others)).params.tolist() == [2, 2]


def test_krum_chooses_a_vector_of_the_crowd() -> None:
    others = {0: torch.tensor([9.0]), **{j: torch.tensor([1 + j / 10]) for j in range(1, 6)}}
    mix = eg.Krum().combine(torch.zeros(1), others, evenly(others, own=False))
    assert mix.params.item() == pytest.approx(1.2)  # the first of those amid the crowd
    assert sum(mix.shares.values()) == 1


def test_the_geometric_median_of_a_line_is_the_median() -> None:
    others = {j: torch.tensor([x]) for j, x in enumerate((0.0, 1.0, 2.0, 50.0, 70.0))}
    rule = replace(eg.GeometricMedian(), num_steps=200)
    mix = rule.combine(torch.zeros(1), others, evenly(others, own=False))
    assert mix.params.item() == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: eg.NearestNeighbors(num_liars=0), "num_liars must be at least 1, got 0"),
        (lambda: eg.TrimmedMean(num_liars=1.5), "num_liars must be a whole number"),  # type: ignore[arg-type]
        (lambda: eg.SelfCenteredClipping(radius_at=0.0), "radius_at must be above 0"),
        (lambda: eg.NormBound(factor=0.0), "factor must be above 0"),
        (lambda: eg.Krum(num_chosen=0), "num_chosen must be at least 1"),
        (lambda: eg.GeometricMedian(num_steps=0), "num_steps must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
