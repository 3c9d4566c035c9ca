"""A server and its workers as a real run: their folders, what is gathered, what is said."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.small_runs import NUM_WORKERS, events, small_run, summary, tensors
from tests.tiers import thorough
from tests.worker_threads import Crew

from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.cli.worker_command import _say_what_came_out
from edgegossip.contract.errors import RunFolderError
from edgegossip.data.hold_out import hold_out
from edgegossip.real.gathering import Gathering
from edgegossip.real.launch import _gather
from edgegossip.real.overview import Overview
from edgegossip.report.folder import read_folder
from edgegossip.report.servers import windows
from edgegossip.runs.experiment import Experiment

NUM_ROUNDS = 10


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    small = small_run(evaluation_interval=None)
    return replace(
        small,
        task=replace(small.task, dataset=hold_out(small.task.dataset, 0.25, seed=0)),
        algorithm=ADSP(
            num_workers=NUM_WORKERS - 1,
            num_rounds=NUM_ROUNDS,
            window=0.1,
            min_interval=0.01,
        ),
    )


@pytest.fixture(scope="module")
def ended(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the folders of those who have ended; tests only read it."""
    crew = Crew(tmp_path_factory.mktemp("run") / "run")
    assert crew.all(experiment) == ["finished"] * NUM_WORKERS
    return crew.out


@pytest.fixture
def out(ended: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(ended, tmp_path / "run")


@thorough
def test_each_says_its_role_and_how_many_commits_it_has_seen(ended: Path) -> None:
    found = [summary(ended / "workers" / str(rank)) for rank in range(NUM_WORKERS)]
    assert [each["role"] for each in found] == ["server", *["worker"] * (NUM_WORKERS - 1)]
    own = [each["commits"] for each in found[1:]]
    assert own == [NUM_ROUNDS] * (NUM_WORKERS - 1)
    assert found[0]["commits"] == sum(own)
    assert events(ended / "workers" / "0", "trained") == []
    assert not list((ended / "workers" / "1" / "snapshots").iterdir())


def test_the_result_is_the_servers_model(experiment: Experiment, out: Path) -> None:
    results = Gathering(experiment, out).finish()
    servers = load_file(out / "workers" / "0" / "params.safetensors")["params"]
    expected = experiment.workload().named_parameters(servers)
    assert all(torch.equal(x, expected[name]) for name, x in results.params.items())
    assert len(results.worker_accuracies) == 1
    assert tensors(out).keys() == results.params.keys()


def test_roles_and_notes_are_gathered(experiment: Experiment, out: Path) -> None:
    Gathering(experiment, out).finish()
    first = events(out)[0]
    assert first["roles"] == ["server", "worker", "worker", "worker"]
    assert first["evaluated"] == [0]
    assert first["shard_sizes"][0] == 0
    assert [each["name"] for each in first["platforms"]][:2] == ["server", "worker 1"]
    assert events(out, "noted") == events(out / "workers" / "0", "noted") != []
    run = read_folder(out).runs[0]
    assert len(windows(run)) == len(events(out, "noted"))
    assert [len(worker.commits) for worker in run.log.workers] == [0, *[NUM_ROUNDS] * 3]


def test_without_the_server_there_is_no_model(experiment: Experiment, out: Path) -> None:
    shutil.rmtree(out / "workers" / "0")
    gathering = Gathering(experiment, out)
    assert "copy the folder of the server there" in gathering.left_out[0]
    with pytest.raises(RunFolderError, match=r"no server in .* has finished"):
        gathering.finish()


def test_who_failed_is_said_also_where_no_model_is_left(
    experiment: Experiment, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = out / "workers" / "0"
    failed = {**summary(path), "reason": "failed"}
    (path / "summary.json").write_text(json.dumps(failed))
    with pytest.raises(RunFolderError):
        _gather(Gathering(experiment, out), {0: "failed: edgegossip: the disk is full"})
    assert "the server failed: edgegossip: the disk is full" in caplog.text


def test_a_worker_that_is_missing_takes_no_model_with_it(
    experiment: Experiment, out: Path
) -> None:
    shutil.rmtree(out / "workers" / "2")
    gathering = Gathering(experiment, out)
    gathering.finish()
    [line] = gathering.left_out
    assert line.endswith("folder of worker 2 there. The results do not include its end")


def test_a_launch_shows_roles_and_commits(experiment: Experiment, ended: Path) -> None:
    status = Overview(experiment, Gathering(experiment, ended)).status(1.0)
    assert status.commits == NUM_ROUNDS * (NUM_WORKERS - 1)
    assert status.roles == "server: rank 0, worker: ranks 1 to 3"


@thorough
def test_a_worker_says_its_role_and_its_commits(
    experiment: Experiment,
    ended: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _say_what_came_out(ended / "workers" / "0", ["gather", "mine"])
    assert f", {NUM_ROUNDS * (NUM_WORKERS - 1)} commits, " in capsys.readouterr().out
    short = replace(experiment, algorithm=replace(experiment.algorithm, num_rounds=1))  # type: ignore[type-var]
    with caplog.at_level(logging.INFO, logger="edgegossip.real"):
        Crew(tmp_path / "run").all(short)
    assert "rank 0 takes part as server; server: rank 0, worker: ranks 1 to 3" in caplog.text
