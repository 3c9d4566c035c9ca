"""The fidelity benchmark reads run folders, and decides whether they agree."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import fidelity
from benchmarks.fidelity import PEERS, SERVED, Row
from benchmarks.lab_runs import Setting, run_simulated, time_limit
from lab.pace import follow, platform
from tests.tiers import thorough

from edgegossip.runs.results import Evaluation
from edgegossip.sim.platform import Platform

THROUGHPUTS = (1000.0, 800.0, 330.0, 250.0)
PLATFORMS = tuple(Platform(throughput=each) for each in THROUGHPUTS)


def _evaluation(time: float, accuracy: float) -> Evaluation:
    return Evaluation(
        time=time,
        epochs=time,
        metrics={"accuracy": accuracy},
        loss=0.0,
        consensus_distance=0.0,
        bytes_sent=0,
        samples_processed=0,
    )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    out = tmp_path_factory.mktemp("fidelity")
    return Setting(("quickstart", "--num-epochs", "3"), PEERS, 0.9, out, num_epochs=3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    out = tmp_path_factory.mktemp("served")
    return Setting(("adsp/quickstart", "--num-workers", "4"), SERVED, 0.9, out)


def test_accuracy_is_crossed_between_two_evaluations() -> None:
    history = [_evaluation(0.0, 0.1), _evaluation(2.0, 0.5), _evaluation(3.0, 0.4)]
    assert fidelity.crossing(history, 0.3) == pytest.approx(1.0)
    assert fidelity.crossing(history, 0.05) == 0.0
    assert fidelity.crossing(history, 0.6) is None


def test_rounds_count_when_the_last_worker_has_sent_them(setting: Setting) -> None:
    results = run_simulated(setting, "epoch-gossip", PLATFORMS, None)
    assert results.folder is not None
    found = fidelity.measure(results.folder, target=2.0)
    shard = len(setting.experiments["epoch-gossip"].task.dataset.train) / 4
    # The slowest trains all the time; sending takes next to none.
    assert found["seconds an epoch"] == pytest.approx(shard / 250, rel=0.01)
    assert found["bytes an epoch"] == results.history[-1].bytes_sent / 3
    assert found["seconds to target"] is None


@thorough
def test_without_rounds_an_epoch_is_as_many_samples_as_there_are(setting: Setting) -> None:
    results = run_simulated(setting, "gosgd", PLATFORMS, 2.0)
    assert results.folder is not None
    found = fidelity.measure(results.folder, target=2.0)
    num_train = len(setting.experiments["gosgd"].task.dataset.train)
    assert found["seconds an epoch"] == pytest.approx(num_train / sum(THROUGHPUTS), rel=0.1)


@thorough
@pytest.mark.parametrize("algorithm", fidelity.SERVERS)
def test_where_there_is_a_server_commits_count(algorithm: str, served: Setting) -> None:
    platforms = tuple(Platform(throughput=each) for each in (1000.0, *THROUGHPUTS))
    results = run_simulated(served, algorithm, platforms, 8.0)
    assert results.folder is not None
    found = fidelity.measure(results.folder, target=2.0)
    num_bytes, seconds = found["bytes a commit"], found["seconds a commit"]
    assert num_bytes is not None
    assert seconds is not None
    params = sum(each.numel() for each in results.params.values())
    assert num_bytes == pytest.approx(2 * 4 * params, rel=0.1)  # there and back
    num_commits = 8.0 / seconds
    assert results.history[-1].bytes_sent == pytest.approx(num_commits * num_bytes)
    assert "bytes an epoch" not in found


@thorough
def test_equal_runs_are_found_equal_and_others_are_not(
    setting: Setting, tmp_path: Path
) -> None:
    one, other = (
        run_simulated(
            replace(setting, out=tmp_path / str(speed)),
            "epoch-gossip",
            (Platform(throughput=speed),) * 4,
            None,
        )
        for speed in (1000.0, 500.0)
    )
    assert fidelity.are_equal(one, other)  # speed changes nothing but time
    torch.nn.init.zeros_(next(iter(other.params.values())).view(-1)[:1])
    assert not fidelity.are_equal(one, other)


def test_a_number_may_differ_as_much_as_is_allowed() -> None:
    names = ("seconds an epoch", "seconds to target", "bytes an epoch")
    measured = dict(zip(names, (10.0, 50.0, 1000.0), strict=True))
    simulated = dict(zip(names, (10.9, 44.0, 1011.0), strict=True))
    rows = fidelity.compare("gosgd", measured, simulated)
    assert [row.is_kept for row in rows] == [True, False, False]
    assert rows[0].error == pytest.approx(0.09)
    assert not Row("gosgd", "seconds to target", None, 3.0).is_kept


def test_slow_epochs_set_the_time_of_algorithms_without_an_end(setting: Setting) -> None:
    experiments = setting.experiments
    assert time_limit(experiments["epoch-gossip"], 3, THROUGHPUTS) is None
    shard = len(experiments["gosgd"].task.dataset.train) / 4
    limit = time_limit(experiments["gosgd"], 3, THROUGHPUTS)
    assert limit == pytest.approx(3 * shard / 250, abs=0.1)


def test_a_host_is_as_fast_as_its_core_lets_it_be() -> None:
    host = platform(8.0, [(0.0, 0.004), (1.0, 0.008), (2.0, 0.002)])
    assert host.duration(start=0.0, cost=2000) == pytest.approx(1.0)
    assert host.duration(start=1.0, cost=1000) == pytest.approx(1.0)
    assert host.duration(start=2.0, cost=4000) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_pace_of_a_core_is_followed() -> None:
    core = min(os.sched_getaffinity(0))
    with follow([core]) as pace:
        began = time.time()
        while time.time() < began + 30:
            time.sleep(0.1)
            with suppress(RuntimeError):
                assert pace.mean(core, began, time.time()) > 0
                break
        else:
            pytest.fail("nothing was measured")
        assert len(pace.trace(core, began, time.time(), window=60.0)) == 1
