"""Workers on a network with data of their own: numbers travel, samples do not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.local_data import Files, local_run
from tests.parity import Steady
from tests.small_runs import events, summary, with_rounds
from tests.tiers import first, thorough
from tests.worker_threads import WITHIN, Crew

from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.cli.main import main
from edgegossip.contract.errors import DataError, NetworkError, RunFolderError
from edgegossip.contract.protocol import Rank
from edgegossip.real import worker as worker_module
from edgegossip.real.gather import (
    AVERAGED,
    MEASURED,
    gather,
    make_gathering,
    measure,
    measured_path,
)
from edgegossip.real.gathering import WORKERS
from edgegossip.real.launch import launch
from edgegossip.real.worker import WorkerSettings
from edgegossip.report.folder import read_folder
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.training.task import Workload

RANKS = range(4)


def finished(out: Path, experiment: Experiment | None = None) -> Path:
    """A folder in which all workers have come to their end."""
    assert Crew(out).all(experiment or local_run()) == ["finished"] * 4
    return out


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("run"))


@pytest.fixture
def out(ended: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    for path in sorted(ended.rglob("*")):
        there = tmp_path / path.relative_to(ended)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.write_bytes(path.read_bytes())
    return tmp_path


def measured_by_all(out: Path) -> Results:
    waited_for, _ = gather(local_run(), out)
    assert waited_for == [*RANKS]
    for rank in RANKS:
        assert measure(local_run(), rank, out) > 0
    results, left_out = gather(local_run(), out)
    assert isinstance(results, Results)
    assert left_out == []
    return results


@thorough
def test_real_workers_end_with_the_simulators_model_and_scores(
    out: Path, tmp_path: Path
) -> None:
    real = measured_by_all(out)
    simulated = run(local_run(), out=tmp_path / "simulated")
    assert all(torch.equal(real.params[name], each) for name, each in simulated.params.items())
    assert real.history[-1].metrics == simulated.history[-1].metrics
    assert real.history[-1].loss == simulated.history[-1].loss
    assert real.worker_values == simulated.worker_values
    assert events(out, "experiment")[0]["shard_sizes"] == [32, 8, 19, 13]
    assert events(out, "experiment")[0]["num_train"] == 72
    assert real.history[-1].epochs == pytest.approx(simulated.history[-1].epochs)
    assert len(read_folder(out).runs) == 1


@pytest.mark.slow
def test_stopped_workers_go_on_to_the_simulators_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = with_rounds(local_run(), 40)
    is_over = threading.Event()
    monkeypatch.setattr(worker_module, "_SHOW", 0.001)
    monkeypatch.setattr(worker_module, "is_running", lambda _: not is_over.is_set())
    crew = Crew(tmp_path / "real")
    crew.start(long, *RANKS, settings=replace(WITHIN, parent=1))
    while not (crew.folder(3) / "snapshots" / "000000.safetensors").exists():
        time.sleep(0.001)
    is_over.set()
    assert crew.join(*RANKS) == ["interrupted"] * 4
    assert crew.all(long) == ["finished"] * 4
    simulated = run(long, out=tmp_path / "simulated")
    assert gather(long, crew.out)[0] == [*RANKS]
    for rank in RANKS:
        measure(long, rank, crew.out)
    real, _ = gather(long, crew.out)
    assert isinstance(real, Results)
    assert all(torch.equal(real.params[name], each) for name, each in simulated.params.items())
    assert real.final_value == simulated.final_value


@thorough
def test_a_worker_reads_its_own_data_alone_and_measuring_that_of_its_machine(
    tmp_path: Path,
) -> None:
    crew = Crew(tmp_path)
    files = [Files() for _ in RANKS]
    experiments = [local_run(load=each.load) for each in files]
    for rank, experiment in enumerate(experiments):
        crew.start(experiment, rank)
    assert crew.join(*RANKS) == ["finished"] * 4
    assert [each.reads for each in files] == [[0], [1], [2], [3]]
    gatherer = Files()
    gather(local_run(load=gatherer.load), tmp_path)
    for rank in RANKS:
        local_files = Files()
        measure(local_run(load=local_files.load), rank, tmp_path)
        assert local_files.reads == [rank]
    results, _ = gather(local_run(load=gatherer.load), tmp_path)
    assert isinstance(results, Results)
    assert gatherer.reads == []


@thorough
def test_processes_may_not_even_ask_for_the_data_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Experiment.workload
    allowed: list[Any] = []

    def watched(self: Experiment, reads: Container[Rank] | None = None) -> Workload:
        allowed.append(reads)
        return prepare(self, reads)

    monkeypatch.setattr(Experiment, "workload", watched)
    finished(tmp_path)
    assert sorted(allowed) == [(0,), (1,), (2,), (3,)]
    gather(local_run(), tmp_path)
    measure(local_run(), 2, tmp_path)
    assert allowed[4:] == [(), (2,)]


@thorough
def test_only_sums_travel_back(out: Path) -> None:
    measured_by_all(out)
    told = json.loads(measured_path(out, 0).read_text())
    assert told
    for each in told.values():
        assert each["num_samples"] == 8
        assert set(each) == {"num_samples", "num_terms", "total_loss", "sums"}
        assert len(each["sums"]["accuracy"]) == 2


def test_models_are_measured_once(out: Path) -> None:
    gather(local_run(), out)
    number = measure(local_run(), 0, out)
    assert number == len([*(out / AVERAGED).glob("*.safetensors")])
    assert measure(local_run(), 0, out) == 0


def test_gathering_waits_for_every_worker_that_has_ended(out: Path) -> None:
    gather(local_run(), out)
    for rank in (0, 2, 3):
        measure(local_run(), rank, out)
    waited_for, _ = gather(local_run(), out)
    assert waited_for == [1]
    results, left_out = gather(local_run(), out, without=(1,))
    assert isinstance(results, Results)
    assert left_out == ["worker 1 has not measured: the results exclude its data"]


def test_nobody_waits_for_the_measurements_of_a_killed_worker(out: Path) -> None:
    (out / WORKERS / "2" / "summary.json").unlink()
    gather(local_run(), out)
    for rank in (0, 1, 3):
        measure(local_run(), rank, out)
    results, left_out = gather(local_run(), out)
    assert isinstance(results, Results)
    assert len(left_out) == 2
    assert "it was killed" in left_out[0]
    assert "worker 2 has not measured" in left_out[1]


def test_results_without_any_measurement_are_refused(out: Path) -> None:
    gathering = make_gathering(local_run(), out)
    assert gathering.average() == [*RANKS]
    gathering.leave_out(RANKS)
    with pytest.raises(RunFolderError, match="no worker has measured the averaged model"):
        gathering.finish()


def test_models_of_another_experiment_are_not_measured(out: Path) -> None:
    gather(local_run(), out)
    other = local_run(data={"classes": ("a", "b", "c")})
    with pytest.raises(RunFolderError, match=r"another experiment: its task.dataset.classes"):
        measure(other, 0, out)


def test_measuring_without_models_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no folder .*averaged.*copy it from"):
        measure(local_run(), 0, tmp_path)


@pytest.mark.parametrize("content", ['{"a": {}}', '{"a": 3}', '{"a": {"num_samples": 0}}', "["])
def test_damaged_numbers_are_one_line(out: Path, content: str) -> None:
    (out / MEASURED).mkdir()
    measured_path(out, 1).write_text(content)
    with pytest.raises(RunFolderError, match=r"1\.json"):
        gather(local_run(), out)


def test_numbers_that_are_not_finite_are_kept_as_such(out: Path) -> None:
    gather(local_run(), out)
    for rank in RANKS:
        measure(local_run(), rank, out)
        told = json.loads(measured_path(out, rank).read_text())
        for each in told.values():
            each["total_loss"] = None
        measured_path(out, rank).write_text(json.dumps(told))
    results, _ = gather(local_run(), out)
    assert isinstance(results, Results)
    assert summary(out)["reason"] == "finished"


# Workers that differ.


@thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    first(
        1,
        [
            ({"classes": ("dark", "gray", "white")}, "task.dataset.classes.2 "),
            ({"held_out": 0.3}, "task.dataset.held_out 0.3, this one 0.2"),
            ({"may_share": True}, "task.dataset.may_share true, this one false"),
            ({"mean": torch.zeros(1)}, "task.dataset.mean"),
        ],
    ),
)
def test_workers_whose_tasks_differ_say_in_what(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    crew = Crew(tmp_path)
    settings = WorkerSettings(meet_seconds=1.0)
    crew.start(local_run(), 0, settings=settings)
    crew.start(local_run(data=changes), 1, 2, 3, settings=settings)
    [end] = crew.join(0)
    assert isinstance(end, NetworkError)
    assert message in str(end)
    assert "\n" not in str(end)
    crew.join(1, 2, 3)


def test_a_worker_whose_data_is_missing_ends_with_one_line(tmp_path: Path) -> None:
    def missing(rank: int) -> Any:  # noqa: ANN401
        raise FileNotFoundError(2, "No such file or directory", f"photos/{rank}")

    crew = Crew(tmp_path)
    crew.start(local_run(load=missing), 2)
    [end] = crew.join(2)
    assert isinstance(end, DataError)
    assert str(end).startswith("data of worker 2: [Errno 2] No such file")


# Balanced, on the network.


@thorough
def test_balanced_workers_with_their_own_data_come_to_an_end(tmp_path: Path) -> None:
    experiment = local_run()
    balanced = replace(experiment, algorithm=EdgeGossip(inner=experiment.algorithm))
    crew = Crew(tmp_path, {rank: Steady(500.0) for rank in RANKS})
    assert crew.all(balanced) == ["finished"] * 4


@thorough
def test_a_real_server_evaluates_on_its_own_data_alone(tmp_path: Path) -> None:
    algorithm = ADSP(num_workers=3, num_rounds=40, window=0.2, min_interval=0.05)
    crew = Crew(tmp_path)
    files = [Files() for _ in RANKS]
    for rank in RANKS:
        own = replace(local_run(load=files[rank].load), algorithm=algorithm)
        crew.start(own, rank)
    assert crew.join(*RANKS) == ["finished"] * 4
    assert [each.reads for each in files] == [[0], [1], [2], [3]]
    assert any("loss" in note["numbers"] for note in events(crew.folder(0), "noted"))


def test_launch_needs_a_way_to_measure_local_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give launch a make_measure"):
        launch(local_run(), lambda *_: [], out=tmp_path)


def test_measure_is_for_local_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "quickstart", "--rank", "0", "--out", str(tmp_path)]) == 2
    assert "quickstart has no Local data" in capsys.readouterr().err
