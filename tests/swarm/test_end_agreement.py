"""Algorithms whose workers have one model end with one, whatever happened before."""

from __future__ import annotations

import pytest
from tests.end_agreement import (
    ALL,
    KINDS,
    NEAR,
    ONE_MEAN,
    ONE_MODEL,
    Kind,
    measure,
    with_mean,
)
from tests.tiers import by_name, thorough

HEALED: tuple[Kind, ...] = ("partition", "killed", "restarted", "cut")
on_each_algorithm = pytest.mark.parametrize(
    "name", by_name([*ONE_MODEL], ["epoch-gossip", "diloco"])
)


@pytest.mark.parametrize("kind", HEALED)
@on_each_algorithm
def test_workers_end_with_one_model(name: str, kind: Kind) -> None:
    require_one_model(name, 0, kind, left=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEALED)
@on_each_algorithm
def test_workers_end_with_one_model_however_many_rounds_are_left(name: str, kind: Kind) -> None:
    for seed in range(10):
        for left in (2, 8, 25):
            require_one_model(name, seed, kind, left)


def require_one_model(name: str, seed: int, kind: Kind, left: int) -> None:
    found = measure(ONE_MODEL[name], seed, kind, left)
    assert not found.unfinished
    assert found.distance < NEAR, (seed, left, found)


@on_each_algorithm
def test_halves_that_do_not_meet_again_end_with_different_models(name: str) -> None:
    found = measure(ONE_MODEL[name], 0, "to the end", left=8)
    assert len(found.groups) == 2
    assert found.distance > NEAR
    if name != "diloco-ring":  # the halves of a ring may have no edge within
        assert found.within < NEAR


@thorough
@pytest.mark.parametrize("name", ONE_MEAN)
def test_disturbed_workers_with_one_mean_come_to_their_end(name: str) -> None:
    for kind in KINDS[:-1]:
        found = measure(ONE_MEAN[name], 0, kind, left=25)
        assert not found.unfinished
        assert len(found.groups) == 1


@thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", by_name([*ALL], ["gosgd"]))
def test_the_last_mean_leaves_no_difference_unnamed(name: str, kind: Kind) -> None:
    for left in (1, 8):
        found = measure(ALL[name], 1, kind, left, with_mean)
        # One that waits for a server in vain ends with an error.
        assert all("ServerLostError" in each for each in found.unfinished.values())
        assert found.unnamed == []
        if kind != "to the end":
            assert found.within < NEAR
