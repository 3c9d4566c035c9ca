"""The EdgeGossip paper's system as one setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tests.tiers import thorough

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import PlatformError
from edgegossip.contract.topology import complete
from edgegossip.recipes.baselines import edge_gossip
from edgegossip.recipes.call import RecipeCall
from edgegossip.recipes.published import READINGS, Reading, as_published
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import uneven
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.aggregation import aggregator
from edgegossip.training.sampling.selection import RankedPerClass, RankedShuffled

RECIPES = ("quickstart", "systems/quickstart")


def gossip(**changes: object) -> Experiment:
    """EpochGossip on four uneven platforms."""
    made = RecipeCall("quickstart", {"num_epochs": 1}).experiment("epoch-gossip")
    return replace(made, **changes)  # type: ignore[arg-type]


def test_all_parts_of_the_system_are_the_papers() -> None:
    made = as_published(gossip(), ratio=20)
    assert made.algorithm == EdgeGossip(
        inner=gossip().algorithm, block_share=1, correction=0, on_failure="halt"
    )
    aware = made.task.accuracy_aware
    assert aware.selection == RankedShuffled()
    assert aware.look_share is None
    assert aware.aggregator == aggregator("hash-kmeans", 20)
    assert [*made.profiles] == [0, 1, 2, 3]


def test_our_defaults_are_under_one_name_too() -> None:
    made = edge_gossip(gossip(), control=0.5, block_share=0.25)
    balanced = EdgeGossip(inner=gossip().algorithm, correction=0, block_share=0.25)
    assert made.algorithm == ControlVariates(inner=balanced, weight=0.5)
    assert made.task.accuracy_aware == AccuracyAware()
    assert edge_gossip(gossip()).algorithm == ControlVariates(
        inner=EdgeGossip(inner=gossip().algorithm, correction=0), weight="auto"
    )
    assert edge_gossip(gossip(), control=0).algorithm == EdgeGossip(inner=gossip().algorithm)


def test_measured_profiles_are_kept() -> None:
    own = profile(uneven(1)[0], seed=9)
    made = as_published(gossip(profiles={2: own}))
    assert made.profiles[2] is own
    assert len(made.profiles) == 4


def test_each_reading_is_a_selection_of_its_own() -> None:
    assert get_args(Reading) == tuple(READINGS)
    chosen = {as_published(gossip(), each).task.accuracy_aware.selection for each in READINGS}
    assert len(chosen) == 4


def test_what_is_no_reading_or_balanced_already_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown reading 'per-clas'.*'per-class'"):
        as_published(gossip(), "per-clas")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"EdgeGossip\(.* is balanced already; give the"):
        as_published(as_published(gossip()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_the_system_under_the_name_of_edge_gossip(recipe: str) -> None:
    call = RecipeCall(recipe, {"as_published": "per-class"})
    made, ours = (each.make() for each in (call, RecipeCall(recipe)))
    assert not isinstance(made, Experiment)
    assert not isinstance(ours, Experiment)
    published = made.experiments["edge-gossip"]
    assert isinstance(published.algorithm, EdgeGossip)
    inner = replace(
        published,
        algorithm=published.algorithm.inner,
        task=made.experiments[made.baseline].task,
        profiles={},
    )
    again = as_published(inner, "per-class")
    assert again.algorithm == published.algorithm
    assert published.task.accuracy_aware.selection == RankedPerClass()
    assert published.name == "edge-gossip"
    assert {*made.experiments} == {*ours.experiments}
    assert not made.tunable.get("edge-gossip")


def test_control_variates_are_not_the_papers() -> None:
    call = RecipeCall("quickstart", {"as_published": "shuffled", "control": 0.5})
    with pytest.raises(Exception, match=r"leave out control=0\.5 or as_published='shuffled'"):
        call.make()


@thorough
def test_more_than_a_tenth_of_failed_platforms_halt_the_run(tmp_path: Path) -> None:
    endless = EpochGossip(topology=complete(4), num_rounds=20)
    crash = Faults(script=(Crash(rank=3, at=1.0),))
    with pytest.raises(PlatformError):
        run(as_published(gossip(algorithm=endless, faults=crash)), out=tmp_path / "run")
