"""Workers of one run on different devices, as a machine with a GPU and small boards are."""

from __future__ import annotations

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
from tests.transports import free_ports

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.contract.topology import complete
from edgegossip.net.address import Address
from edgegossip.net.host.introduction import Introductions
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.gather import gather
from edgegossip.real.introduction import introduce, run_key
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


@pytest.mark.parametrize("machine", MACHINES[1:3], ids=str)
def test_settings_of_a_machine_may_differ_with_a_warning(
    machine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for own, other in ((EXPERIMENT, on(EXPERIMENT, **machine)),) * 2:
        assert difference(own, other) == difference(other, own) == ""
    assert "numbers may differ, which is allowed" in caplog.text
    assert any(name in caplog.text for name in ("task.torch_device", "task.step.autocast"))


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


@thorough
def test_workers_on_different_devices_train_together_and_are_gathered(tmp_path: Path) -> None:
    ports = free_ports(NUM_WORKERS)
    endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]
    ends: dict[int, str | NetworkError] = {}

    def work(rank: int) -> None:
        experiment = on(EXPERIMENT, **MACHINES[rank])
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
    models = [
        load_file(tmp_path / "workers" / str(rank) / "params.safetensors")
        for rank in range(NUM_WORKERS)
    ]
    for model in models[1:]:
        torch.testing.assert_close(model, models[0])
    results, left_out = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    assert left_out == []
    assert results.reason == "finished"
