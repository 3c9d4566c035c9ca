"""Training loops with a run folder: what they leave, and how they go on after a stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.test_training_loop import side_by_side
from torch import Tensor, nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import Interrupted, RunFolderError
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.gather import gather
from edgegossip.real.loop_folder import LoopFolder
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.report.page import write_report
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.sim.platform import Platform
from edgegossip.training.task import Task

NUM_SAMPLES, BATCH = 12, 4


def make_model() -> nn.Module:
    """A convolution, whose layout differs between loops and tasks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 4, 2)
    )


def samples(seed: int, number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(number, 2, 4, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x.mean((1, 2, 3)) > 0).long()


def make_experiment(num_workers: int = 2, num_rounds: int = 4) -> Experiment:
    train, test = (ArraySplit(*samples(seed, 40)) for seed in (7, 8))
    dataset = Dataset(
        name="pictures", train=train, test=test, num_classes=2, input_shape=(2, 4, 4)
    )
    return Experiment(
        task=Task(dataset=dataset, model=make_model),
        algorithm=EpochGossip(topology=complete(num_workers), num_rounds=num_rounds),
        platforms=(Platform(throughput=1.0),) * num_workers,
    )


class Caller:
    """A caller's model, optimizer with momentum, and batches."""

    def __init__(self, rank: int, out: Path, num_workers: int = 2) -> None:
        self.rank = rank
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        x, y = samples(1 + rank, NUM_SAMPLES)
        self.batches = [*zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)]
        self.experiment = make_experiment(num_workers)
        self.folder = LoopFolder(
            out=out / "workers" / str(rank),
            experiment=self.experiment,
            stateful={"optimizer": self.optimizer},
            checkpoint_seconds=1e-9,  # after each piece of work
        )

    def loop(self, network: MemoryNetwork, folder: LoopFolder | None = None) -> TrainingLoop:
        return TrainingLoop(
            self.model,
            self.experiment.algorithm,
            self.rank,
            self.experiment.num_workers,
            network.transport(self.rank),
            num_samples=NUM_SAMPLES,
            folder=folder or self.folder,
        )

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.item())

    def train(
        self,
        network: MemoryNetwork,
        stop_at: int | None = None,
        at_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Train to the end, or fail in the middle of an epoch."""
        num_steps = 0
        with self.loop(network) as loop:
            at_start()
            while not loop.is_over:
                for x, y in self.batches:
                    if num_steps == stop_at:
                        raise KeyError("killed")
                    num_steps += 1
                    loop.step(self.step(x, y), len(x))
                    if loop.is_over:
                        break


def both(out: Path, stop_at: int | None = None) -> list[Caller]:
    network, callers = MemoryNetwork(), [Caller(rank, out) for rank in (0, 1)]
    raised = side_by_side(*(partial(each.train, network, stop_at) for each in callers))
    assert [type(each) for each in raised] == [type(None) if stop_at is None else KeyError] * 2
    return callers


def trained(caller: Caller) -> dict[str, Tensor]:
    state = caller.model.state_dict()
    return {name: each for name, each in state.items() if each.is_floating_point()}


def test_the_folders_of_loops_become_a_run_with_the_loops_model_and_a_report(
    tmp_path: Path,
) -> None:
    callers = both(tmp_path)
    results, left_out = gather(make_experiment(), tmp_path)
    assert isinstance(results, Results)
    assert left_out == []
    assert results.reason == "finished"
    for name, each in trained(callers[0]).items():  # the order of the entries differs
        assert torch.equal(results.params[name], each), name
    assert results.history[-1].samples_processed == 2 * 4 * NUM_SAMPLES
    assert write_report(tmp_path).exists()


def test_loops_that_were_killed_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    undisturbed = both(tmp_path / "undisturbed")
    both(tmp_path / "killed", stop_at=7)
    assert (tmp_path / "killed/workers/0/checkpoint.safetensors").exists()
    again = both(tmp_path / "killed")
    for one, other in zip(undisturbed, again, strict=True):
        for name, each in trained(one).items():
            assert torch.equal(each, trained(other)[name]), name
    assert not (tmp_path / "killed/workers/0/checkpoint.safetensors").exists()
    with pytest.raises(RunFolderError, match="holds a worker that has ended"):
        Caller(0, tmp_path / "killed").loop(MemoryNetwork())


def test_ctrl_c_leaves_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    caller = Caller(0, tmp_path, num_workers=1)
    with pytest.raises(Interrupted, match="holds a checkpoint"):
        caller.train(MemoryNetwork(), at_start=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert (tmp_path / "workers/0/checkpoint.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Caller(0, tmp_path, num_workers=1).train(MemoryNetwork())
    assert (tmp_path / "workers/0/params.safetensors").exists()


class Callback:
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"stateful\['callback'\]: cannot keep a builtin"):
        LoopFolder(
            out=tmp_path, experiment=make_experiment(), stateful={"callback": Callback()}
        )


def test_an_experiment_of_another_loop_is_refused_with_what_differs(tmp_path: Path) -> None:
    caller, network = Caller(0, tmp_path), MemoryNetwork()
    more = replace(caller.folder, experiment=make_experiment(num_rounds=9))
    with pytest.raises(ValueError, match=r"algorithm.num_rounds 4.*experiment.*has 9"):
        caller.loop(network, folder=more)
    task = replace(caller.experiment.task, model=lambda: nn.Linear(2, 2))
    other = replace(caller.folder, experiment=replace(caller.experiment, task=task))
    with pytest.raises(ValueError, match=r"tensors.0 '\[3, 2, 3, 3\]'.*'\[2, 2\]'"):
        caller.loop(network, folder=other)
    assert not (tmp_path / "workers").exists()
