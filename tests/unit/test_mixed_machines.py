"""Workers of one run on different devices, as a machine with a GPU and small boards are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.small_runs import small_run
from tests.tiers import thorough
from torch import Tensor

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.contract.topology import complete
from edgegossip.net.address import Address
from edgegossip.net.host.introduction import Introductions
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.gather import gather
from edgegossip.real.gathering import Gathering
from edgegossip.real.introduction import introduce, run_key
from edgegossip.real.launch import free_ports
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.real.worker_folder import has_ended
from edgegossip.runs.describe import header
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import write_json
from edgegossip.runs.results import Results
from edgegossip.sim.platform import Platform
from edgegossip.training.step import TrainingStep

NUM_WORKERS = 3
EXPERIMENT = replace(
    small_run(),
    algorithm=EpochGossip(topology=complete(NUM_WORKERS), num_rounds=4),
    platforms=(Platform(throughput=100.0),) * NUM_WORKERS,
    evaluation_interval=None,
)
MACHINES: list[dict[str, Any]] = [
    {"torch_device": "cpu"},
    {"torch_device": "cpu:0", "step": TrainingStep(micro_batch_size=4)},
    {"step": TrainingStep(autocast=torch.bfloat16)},
    {"optimizer": partial(torch.optim.SGD, lr=0.1, foreach=True)},
]


def on(experiment: Experiment, **changes: Any) -> Experiment:  # noqa: ANN401
    return replace(experiment, task=replace(experiment.task, **changes))


def difference(own: Experiment, other: Experiment) -> str:
    met = Introductions(2, introduce(own, own.workload()))
    met.take(1, introduce(other, other.workload()).message())
    return met.difference(1)


@pytest.mark.parametrize(
    "machine", [*MACHINES[1:3], {"step": TrainingStep(cuda_graph=True)}], ids=str
)
def test_settings_of_a_machine_may_differ_with_a_warning(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for own, other in ((EXPERIMENT, on(EXPERIMENT, **machine)),) * 2:
        assert difference(own, other) == difference(other, own) == ""
    assert "numbers may differ, which is allowed" in caplog.text
    names = ("task.torch_device", "task.step.autocast", "task.step.cuda_graph")
    assert any(name in caplog.text for name in names)


def test_another_implementation_of_an_optimizer_may_differ() -> None:
    one, other = (
        on(EXPERIMENT, optimizer=partial(torch.optim.SGD, lr=0.1, foreach=foreach))
        for foreach in (True, False)
    )
    assert difference(one, other) == ""
    slower = on(EXPERIMENT, optimizer=partial(torch.optim.SGD, lr=0.2, foreach=True))
    assert "task.optimizer.lr 0.2, this one 0.1" in difference(one, slower)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"batch_size": 4}, "task.batch_size 4, this one 8"),
        ({"step": TrainingStep(max_grad_norm=1.0)}, "'task.step.max_grad_norm' 1.0"),
    ],
    ids=["batch size", "norm"],
)
def test_settings_that_change_the_training_may_not(changes: dict[str, Any], what: str) -> None:
    assert what in difference(EXPERIMENT, on(EXPERIMENT, **changes))


def test_a_worker_goes_on_with_another_device(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", header(EXPERIMENT, None))
    assert not has_ended(tmp_path, header(on(EXPERIMENT, **MACHINES[1]), None))
    other = header(on(EXPERIMENT, batch_size=4), None)
    with pytest.raises(RunFolderError, match=r"its task.batch_size is 8, now 4"):
        has_ended(tmp_path, other)


def train_together(tmp_path: Path, machines: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Train one worker on each of the machines; return their final models."""
    ports = free_ports(NUM_WORKERS)
    endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]
    ends: dict[int, str | NetworkError] = {}

    def work(rank: int) -> None:
        experiment = on(EXPERIMENT, **machines[rank])
        transport = ZenohTransport(
            run=run_key(experiment, None),
            rank=rank,
            num_workers=NUM_WORKERS,
            address=Address(listen=(endpoints[rank],), connect=tuple(endpoints[:rank])),
        )
        try:
            ends[rank] = take_part(
                experiment,
                rank,
                transport,
                out=tmp_path / "workers" / str(rank),
                settings=WorkerSettings(meet_seconds=20.0),
            )
        except NetworkError as error:
            ends[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == dict.fromkeys(range(NUM_WORKERS), "finished")
    return [
        load_file(tmp_path / "workers" / str(rank) / "params.safetensors")
        for rank in range(NUM_WORKERS)
    ]


@thorough
def test_workers_on_different_devices_train_together_and_are_gathered(tmp_path: Path) -> None:
    models = train_together(tmp_path, MACHINES)
    for model in models[1:]:
        torch.testing.assert_close(model, models[0])
    results, left_out = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    assert left_out == []
    assert results.reason == "finished"


FLEET = """
from dataclasses import replace

import torch

import edgegossip as eg
from edgegossip.recipes.quickstart import DEFAULTS, quickstart


def fleet(half: bool = False, micro: int | None = None, torch_device: str = "auto"):
    settings = replace(DEFAULTS, num_workers=3, num_epochs=4, torch_device=torch_device)
    some = quickstart(settings).experiments["epoch-gossip"]
    dtype = torch.bfloat16 if half else None
    step = eg.TrainingStep(autocast=dtype, micro_batch_size=micro)
    return replace(some, task=replace(some.task, step=step))
"""
OPTIONS: list[list[str]] = [
    ["--half", "--threads", "2"],
    ["--threads", "1"],
    ["--micro", "5", "--torch-device", "cpu"],
]


@thorough
def test_commands_with_other_types_and_threads_end_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "my_fleet.py").write_text(FLEET)
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]
    program = [sys.executable, "-m", "edgegossip"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE}
    started = []
    for rank, options in enumerate(OPTIONS):
        connect = [word for each in endpoints[:rank] for word in ("--connect", each)]
        place = ["--rank", str(rank), "--listen", endpoints[rank], *connect]
        out = ["--out", f"out/workers/{rank}"]
        command = [*program, "worker", "my_fleet.py:fleet", *place, *options, *out]
        started.append(subprocess.Popen(command, text=True, **run))
    logs = [each.communicate(timeout=120)[1] for each in started]
    assert [each.returncode for each in started] == [0] * NUM_WORKERS, "\n".join(logs)
    assert "task.step.autocast" in logs[1]  # that it differs is said, and allowed
    gathered = [*program, "gather", "my_fleet.py:fleet", "--out", "out"]
    assert subprocess.run(gathered, text=True, check=False, **run).returncode == 0
    folder = tmp_path / "out"
    first, *others = (
        load_file(folder / "workers" / str(rank) / "params.safetensors")["params"]
        for rank in range(NUM_WORKERS)
    )
    # The final average is computed from the same vectors in one order, so nothing rounds.
    assert all(torch.equal(first, each) for each in others)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_accuracy"] > 0.9
    for rank in range(NUM_WORKERS):
        own = json.loads((folder / "workers" / str(rank) / "summary.json").read_text())
        assert own["torch_device"] == "cpu"
        assert own["agreement"]["distance"] < 1e-6  # of the models that they exchanged


def test_a_gathered_run_names_devices_if_there_are_several(tmp_path: Path) -> None:
    gathering = Gathering(EXPERIMENT, tmp_path)
    assert gathering._measured().platforms[0].name == "worker 0"
    for rank, device in enumerate(("cuda", "cpu", "mps")):
        folder = tmp_path / "workers" / str(rank)
        folder.mkdir(parents=True)
        numbers = {"seconds": 1.0, "wall_seconds": 1.0, "mean_staleness": 0.0}
        content = {"reason": "finished", "torch_device": device, **numbers}
        (folder / "summary.json").write_text(json.dumps(content))
    names = [each.name for each in gathering._measured().platforms]
    assert names == ["worker 0 (cuda)", "worker 1 (cpu)", "worker 2 (mps)"]
