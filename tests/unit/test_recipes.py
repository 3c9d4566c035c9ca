"""Our recipes compare what can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.data.readers import digits
from edgegossip.models import mlp
from edgegossip.recipes.baselines import compare_baselines
from edgegossip.recipes.quickstart import DEFAULTS, quickstart
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.runner import run
from edgegossip.sim.platform import uneven
from edgegossip.training.task import Workload


@pytest.mark.parametrize("throughput", [1000.0, 1e6])
def test_everyone_gets_the_time_that_epoch_gossip_takes(
    tmp_path: Path, throughput: float
) -> None:
    # At a million samples a second, sending takes longer than training.
    comparison = quickstart(replace(DEFAULTS, num_epochs=2, throughput=throughput))
    results = run(comparison.experiments["epoch-gossip"], out=tmp_path, num_threads=0)
    limits = {
        e.max_seconds for name, e in comparison.experiments.items() if name != "epoch-gossip"
    }
    assert limits == {results.virtual_seconds}


def test_edge_gossip_chooses_its_samples_and_the_baselines_do_not() -> None:
    platforms = uneven(4)
    experiments = compare_baselines(digits(), mlp, platforms, DEFAULTS).experiments
    assert list(experiments)[:3] == ["epoch-gossip", "edge-gossip", "edge-squeeze"]
    chosen = {name: e.task.accuracy_aware for name, e in experiments.items()}
    assert chosen.pop("edge-gossip") is ACCURACY_AWARE
    assert not any(each.selection.needs_losses for each in chosen.values())


def test_getting_ready_takes_no_worker_of_the_quickstart_a_tenth_of_the_run() -> None:
    for experiment in quickstart().experiments.values():
        workload = Workload(experiment.task, range(4), experiment.seed)
        for rank, platform in enumerate(experiment.platforms):
            seconds = platform.duration(0.0, workload.make_trainer(rank).setup_cost)
            assert seconds < 0.1 * (experiment.max_seconds or 1.0)


def test_all_models_are_averaged_over_as_many_samples() -> None:
    averaged = quickstart(replace(DEFAULTS, window=2.0)).experiments
    plain = quickstart(replace(DEFAULTS, window=None)).experiments
    windows = {}
    for name, experiment in averaged.items():
        algorithm = experiment.algorithm
        assert isinstance(algorithm, TrailingAverage)
        assert algorithm.inner == plain[name].algorithm
        windows[name] = algorithm.window
    steps = len(plain["gosgd"].task.dataset.train) / 4 / DEFAULTS.batch_size
    shares = (1 + 0.8 + 0.33 + 0.25) / 4
    assert windows.pop("epoch-gossip") == 2
    assert windows.pop("edge-gossip") == pytest.approx(2 / shares)
    of_fastest = steps / shares
    assert windows.pop("edge-squeeze") == pytest.approx(2 * of_fastest / DEFAULTS.local_steps)
    assert set(windows.values()) == {2 * steps}


def test_control_variates_take_the_place_of_edge_gossips_correction() -> None:
    experiments = quickstart(replace(DEFAULTS, control=0.5, window=None)).experiments
    plain = quickstart(replace(DEFAULTS, control=0.0, window=None)).experiments
    assert list(experiments) == list(plain)
    balanced = plain["edge-gossip"].algorithm
    assert isinstance(balanced, EdgeGossip)
    for name in plain:
        wanted = plain[name].algorithm
        if name == "edge-gossip":
            wanted = ControlVariates(inner=replace(balanced, correction=0.0), weight=0.5)
        assert experiments[name].algorithm == wanted
