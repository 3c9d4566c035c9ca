"""An experiment warns before it begins, and its profiles reach the forecasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import NUM_WORKERS, small_model, small_run, small_task, with_rounds
from tests.tiers import thorough

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.topology import directed_ring
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Drop, Faults
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD


def test_momentum_besides_quasi_global_momentum_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"the optimizer also has 0\.9"):
        small_run("quasi-global-gossip", task=small_task(optimizer=SGD(momentum=0.9)))


def test_push_sum_that_would_lose_its_mass_is_warned_of() -> None:
    lossy = Faults(script=(Drop(probability=0.1),))
    topology = directed_ring(NUM_WORKERS)
    careless = StochasticGradientPush(topology=topology, num_rounds=3, timeout=1.0)
    with pytest.warns(UserWarning, match="all mass is lost; set resend_after"):
        replace(small_run(faults=lossy), algorithm=careless)
    replace(small_run(faults=lossy), algorithm=replace(careless, resend_after=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": GoSGD}, "algorithm must be an instance of .*, got the class GoSGD"),
        ({"task": small_model}, r"task must be an instance of Task, such as Task\("),
    ],
)
def test_arguments_of_another_kind_are_refused_at_once(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small_run(), **changes)


@thorough
def test_forecasts_of_a_run_go_by_the_profiles(tmp_path: Path) -> None:
    """The two slowest have those of machines ten times as fast, and share work otherwise."""
    inner = with_rounds(small_run("epoch-gossip"), 2).algorithm
    plain = replace(small_run(), algorithm=EdgeGossip(inner=inner, block_share=1))
    fast = profile(Platform(throughput=4000.0), noise=0.0)
    profiled = replace(plain, profiles={2: fast, 3: fast})
    without = run(plain, out=tmp_path / "plain", num_threads=0).history[-1]
    by_them = run(profiled, out=tmp_path / "profiled", num_threads=0).history[-1]
    assert by_them.samples_processed != without.samples_processed
