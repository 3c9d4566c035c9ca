"""Training on a GPU: the same updates as on the CPU, and everything else that works there."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.full_size.forecast import device_name, of_experiment
from benchmarks.full_size.queue import Limits
from tests.dense_models import dense_task, flat_data
from tests.full_size_cells import kept, run_cell, short_queue
from tests.networks import NETWORKS
from tests.process_groups import in_processes
from tests.small_learners import (
    DATA,
    OPTIMIZERS,
    SHARD,
    Optimizer,
    learner,
    learner_of,
    seeded,
)
from tests.small_runs import (
    ALGORITHMS,
    FAULTS,
    NUM_WORKERS,
    SHAPE,
    ctrl_c_at,
    small_run,
    small_task,
    tensors,
)
from tests.small_tasks import experiment, labelling, language, regression
from tests.stage_runs import KINDS, run_of_kind
from tests.stopped_runs import left
from tests.together import together
from tests.unit.test_followers import followed
from tests.unit.test_mixed_machines import EXPERIMENT, train_together
from torch import nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.contract.topology import complete
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.gather import gather
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.runs.batching import batched
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.training import feed
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import SELECTIONS, Focused
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-3}
EPOCHS: dict[str, Any] = {"topology": complete(NUM_WORKERS), "num_rounds": 3}


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Compute convolutions as the CPU does, and allow nondeterministic kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        debug_mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
        yield
        torch.set_deterministic_debug_mode(debug_mode)


def without_dropout() -> nn.Module:
    """Dropout draws other masks on another device.

    A bias before batch norm has a gradient of rounding noise, which Adam blows up.
    """
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def without_batch_norm() -> nn.Module:
    """Batch norm would see shares of a batch."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def assert_the_same_on_both(tmp_path: Path, some: Experiment) -> None:
    found = {}
    for torch_device in ("cpu", "cuda"):
        task = replace(some.task, torch_device=torch_device)
        folder = tmp_path / torch_device
        run(replace(some, task=task), out=folder, num_threads=2)
        found[torch_device] = tensors(folder)
    for name, tensor in found["cpu"].items():
        torch.testing.assert_close(found["cuda"][name], tensor, **CLOSE)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_the_same_model(tmp_path: Path, name: str) -> None:
    task = small_task(model=without_dropout)
    assert_the_same_on_both(tmp_path, small_run(name, task=task))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_learns_the_same_model(tmp_path: Path, optimizer: Optimizer) -> None:
    task = small_task(model=without_dropout, optimizer=optimizer)
    assert_the_same_on_both(tmp_path, small_run(task=task))


@pytest.mark.parametrize("make", [regression, language, labelling])
def test_other_tasks_learn_the_same_model(tmp_path: Path, make: Any) -> None:  # noqa: ANN401
    assert_the_same_on_both(tmp_path, experiment(make()))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_learns(tmp_path: Path, selection: str) -> None:
    aware = AccuracyAware(selection=SELECTIONS[selection])
    task = small_task(torch_device="cuda", accuracy_aware=aware)
    algorithm = TrailingAverage(
        inner=ControlVariates(inner=EdgeGossip(inner=EpochGossip(**EPOCHS))), window=2
    )
    some = replace(small_run(task=task), algorithm=algorithm)
    assert run(some, out=tmp_path, num_threads=2).reason == "finished"


@pytest.mark.filterwarnings("default")  # of the compiler's own code
@pytest.mark.parametrize(
    "step",
    [
        TrainingStep(autocast=torch.bfloat16),
        TrainingStep(micro_batch_size=3),
        TrainingStep(max_grad_norm=0.1),
        TrainingStep(compile=True),
        TrainingStep(cuda_graph=True),
        TrainingStep(cuda_graph=True, autocast=torch.bfloat16, max_grad_norm=0.1),
        TrainingStep(cuda_graph=True, micro_batch_size=3),
    ],
    ids=[
        "autocast",
        "micro-batches",
        "clipped",
        "compiled",
        "graph",
        "clipped graph",
        "graph of micro-batches",
    ],
)
def test_every_step_learns(tmp_path: Path, step: TrainingStep) -> None:
    task = small_task(torch_device="cuda", step=step)
    assert run(small_run(task=task), out=tmp_path, num_threads=1).reason == "finished"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_stage_learns(tmp_path: Path, name: str) -> None:
    some = run_of_kind(name, torch_device="cuda")
    assert run(some, out=tmp_path, num_threads=2).reason == "finished"


GRAPHED = TrainingStep(cuda_graph=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_graph_learns_the_same_model(tmp_path: Path, optimizer: Optimizer) -> None:
    task = small_task(model=without_dropout, optimizer=optimizer, step=GRAPHED)
    assert_the_same_on_both(tmp_path, small_run(task=task))


def on_gpu(name: str, step: TrainingStep, **changes: Any) -> Learner:  # noqa: ANN401
    make, settings = NETWORKS[name]
    return learner(
        **{
            "model": seeded(make),
            "optimizer": SGD(lr=0.01),
            "augmentation": None,
            "shard": torch.arange(80),
            "torch_device": "cuda",
            "step": step,
        }
        | settings
        | changes
    )


def trained(some: Learner, numbers: list[int]) -> tuple[Any, list[float]]:
    params, losses = some.model.params.cpu(), []
    for number in numbers:
        result = some.train(Train(params, Steps(number)))
        params = result.params
        losses.append(result.loss)
    return params, losses


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_takes_the_steps_of_a_loop(name: str) -> None:
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        plain, losses = trained(on_gpu(name, TrainingStep()), [5, 8, 7])
        some = on_gpu(name, GRAPHED)
        found, their_losses = trained(some, [5, 8, 7])
    graphs = some._at_work().graphs
    assert graphs is not None
    assert len(graphs._graphs) == 1, "captured"
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)
    assert their_losses == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stopped_learner_goes_on_with_a_graph(name: str) -> None:
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        some = on_gpu(name, GRAPHED)
        params, _ = trained(some, [9])
        kept = copy.deepcopy(dismantle(some.state_dict()))
        expected = some.train(Train(params, Steps(8))).params
        some.train(Train(params, Steps(2)))
        for each in (some, on_gpu(name, GRAPHED)):  # with a graph already, and without one
            each.load_state_dict(assemble(*copy.deepcopy(kept)))
            found = each.train(Train(params, Steps(8))).params
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("step", [TrainingStep(), GRAPHED], ids=["loop", "graph"])
@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "pinned"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_waits_for_the_gpu(
    name: str, is_resident: bool, step: TrainingStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_RESIDENT", weakref.WeakKeyDictionary())
    if not is_resident:
        monkeypatch.setattr(feed, "free_bytes", lambda torch_device: 0)
    some = on_gpu(name, step)
    trained(some, [6])  # so that all that is made once has been made
    first, *batches = some.take(Train(torch.empty(0), Steps(4)))
    some._step_on(first)  # copies the indices of the pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            some._step_on(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["lenet5", "gpt"])
def test_pinned_batches_are_those_of_a_resident_split(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        for free in (2**40, 0):
            monkeypatch.setattr(feed, "_RESIDENT", weakref.WeakKeyDictionary())
            monkeypatch.setattr(feed, "free_bytes", lambda torch_device, free=free: free)
            found.append(trained(on_gpu(name, TrainingStep()), [30])[0])
    torch.testing.assert_close(*found)


def test_a_gpu_and_a_cpu_take_part_in_one_real_run(tmp_path: Path) -> None:
    machines = [{"torch_device": "auto"}, {"torch_device": "cpu"}, {"torch_device": "cuda:0"}]
    first, *others = train_together(tmp_path, machines)
    for model in others:
        torch.testing.assert_close(model, first)
    results, left_out = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    assert left_out == []
    header = json.loads((tmp_path / "experiment.json").read_text())
    names = [each["name"] for each in header["platforms"]]
    assert names == ["worker 0 (cuda)", "worker 1 (cpu)", "worker 2 (cuda:0)"]


def test_workers_learn_together(tmp_path: Path) -> None:
    task = dense_task(dataset=flat_data(80))
    together = batched(small_run(task=task), "on")
    assert_the_same_on_both(tmp_path, together)


def test_a_model_that_keeps_its_buffers_learns_the_same(tmp_path: Path) -> None:
    task: Task = small_task(model=without_dropout, has_buffers=False)
    assert_the_same_on_both(tmp_path, small_run(task=task))


@pytest.mark.parametrize("way", ["ddp_before", "ddp_afterwards", "ddp_with_views"])
def test_two_processes_of_a_worker_share_a_gpu(way: str) -> None:
    first, second = in_processes(2, followed, way, "epochs", "cuda")
    assert first == second
    on_cpu, _ = in_processes(2, followed, way, "epochs")
    assert first[0] == on_cpu[0]
    for ours, theirs in zip(first[1], on_cpu[1], strict=True):
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), **CLOSE)


def test_a_loop_of_ones_own_keeps_the_model_on_its_device() -> None:
    model = without_dropout().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = MemoryNetwork().transport(0)
    with TrainingLoop(model, Alone(num_rounds=3), 0, 1, transport, num_samples=8) as loop:
        while not loop.is_over:
            optimizer.zero_grad()
            loss = model(torch.ones(8, *SHAPE, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            loop.step(loss.item(), num_samples=8)
    assert all(each.device.type == "cuda" for each in model.parameters())


@pytest.mark.parametrize(
    "devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")]
)
def test_executors_train_together(devices: tuple[str, ...]) -> None:
    if torch.device(devices[-1]).index == 1 and torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    given = {
        "model": seeded(without_batch_norm),
        "loss": nn.functional.cross_entropy,
        "optimizer": SGD(lr=0.05),
        "dataset": DATA.training,
        "shard": SHARD,
        "batch_size": 8,
    }
    alone = learner_of(**given)
    request = Train(alone.model.params.clone(), Steps(5))
    with together(2, given, devices=devices) as crew:
        found = crew.lead.train(request)
        assert crew.executors.backend == ("nccl" if devices[-1] == "cuda:1" else "gloo")
        assert all(each.num_steps for each in crew.followers)
    torch.testing.assert_close(found.params, alone.train(request).params, **CLOSE)


def whole_on_gpu(**changes: Any) -> Experiment:  # noqa: ANN401
    return small_run(task=small_task(torch_device="cuda", **changes))


def faulty_on_gpu(name: str) -> Experiment:
    return small_run(name, task=small_task(torch_device="cuda"), faults=FAULTS)


def batched_on_gpu() -> Experiment:
    return batched(small_run(task=dense_task(dataset=flat_data(80), torch_device="cuda")), "on")


STOPPED: dict[str, Callable[[], Experiment]] = {
    **{name: partial(faulty_on_gpu, name) for name in ("gosgd", "gossip", "double-squeeze")},
    **{name: partial(whole_on_gpu, optimizer=each) for name, each in OPTIMIZERS.items()},
    **{name: partial(run_of_kind, name, torch_device="cuda") for name in KINDS},
    "focused": partial(whole_on_gpu, accuracy_aware=AccuracyAware(selection=Focused())),
    "batched": batched_on_gpu,
    "resident": partial(whole_on_gpu, augmentation=None),
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on(tmp_path: Path, name: str) -> None:
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        some = STOPPED[name]()
        run(some, out=tmp_path / "whole", num_threads=2)
        with ctrl_c_at(20, some.algorithm), pytest.raises(Interrupted, match="--resume"):
            run(some, out=tmp_path / "stopped", num_threads=2)
        run(some, out=tmp_path / "stopped", num_threads=1, resume=True)
    assert left(tmp_path / "stopped") == left(tmp_path / "whole")


def test_the_queue_of_experiments_stops_and_goes_on(tmp_path: Path) -> None:
    task = small_task(torch_device="cuda")
    cells = [run_cell("b", "gosgd", {"task": task})]
    for _ in range(100):
        queue = short_queue(tmp_path, cells)
        queue.run(Limits(minutes=1.0))
        if queue.state(cells[0]) == "done":
            break
    assert queue.state(cells[0]) == "done"
    assert kept(tmp_path)["b-gosgd-seed0"]["row"]["reason"] == "finished"


def test_a_forecast_takes_real_steps_on_a_gpu() -> None:
    experiment = replace(small_run("gosgd"), task=small_task(torch_device="cuda"))
    found = of_experiment(experiment, num_epochs=100.0, device=device_name("cuda"))
    assert found.training > 0
    assert found.device == torch.cuda.get_device_name()
