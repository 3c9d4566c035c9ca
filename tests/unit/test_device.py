"""The device of a worker: "auto", what cannot be used, and what would be silently off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import measure
from tests.small_runs import small_run, small_task
from tests.tiers import thorough
from torch import nn

from edgegossip.models.flat import FlatModel
from edgegossip.real.introduction import without_machine
from edgegossip.recipes.quickstart import quickstart
from edgegossip.recipes.tasks import Settings
from edgegossip.report.page import write_report
from edgegossip.runs.describe import header
from edgegossip.runs.runner import run
from edgegossip.training.device import chosen_device
from edgegossip.training.step import TrainingStep

MPS = torch.device("mps")


def pretend(patch: pytest.MonkeyPatch, *, num_gpus: int = 0, has_mps: bool = False) -> None:
    """Pretend that this machine has other devices, on which nothing is computed."""
    empty = torch.empty
    patch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    patch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    there = {"cuda", *(f"cuda:{i}" for i in range(num_gpus))} if num_gpus else set()

    def made(*size: int, device: str = "cpu") -> torch.Tensor:
        return empty(*size, device="cpu" if device in {*there, "mps" * has_mps} else device)

    patch.setattr(torch, "empty", made)


@pytest.mark.parametrize(
    ("num_gpus", "has_mps", "expected"),
    [(0, False, "cpu"), (0, True, "mps"), (1, False, "cuda"), (2, True, "cuda")],
)
def test_auto_is_cuda_then_mps_then_cpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, has_mps: bool, expected: str
) -> None:
    pretend(monkeypatch, num_gpus=num_gpus, has_mps=has_mps)
    task = small_task(torch_device="auto")
    assert task.torch_device == expected
    # A worker on another machine has a device of its own.
    assert replace(task, batch_size=3).torch_device == expected
    assert small_task().torch_device == "cpu"


def test_a_gpu_can_be_chosen_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, num_gpus=2)
    assert small_task(torch_device="cuda:1").torch_device == "cuda:1"
    with pytest.raises(
        ValueError, match=r"'auto', 'cuda', 'cuda:0', 'cuda:1', 'cpu'$"
    ) as raised:
        small_task(torch_device="gpu")
    assert str(raised.value).startswith("torch_device 'gpu' cannot be used")


def test_a_gpu_that_cannot_be_used_is_an_error_and_not_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one that can be used")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="torch_device 'auto' cannot be used"):
        small_task(torch_device="auto")


@pytest.mark.parametrize("torch_device", ["auto", "cpu"])
def test_recipes_take_auto_but_default_to_the_cpu(torch_device: str) -> None:
    assert Settings().torch_device == "cpu"  # on a GPU, simulated runs would not repeat
    experiments = quickstart(Settings(torch_device=torch_device)).experiments.values()
    expected = chosen_device(torch_device)
    assert {each.task.torch_device for each in experiments} == {expected}


def test_a_folder_names_the_device_that_auto_became(tmp_path: Path) -> None:
    some = small_run(task=small_task(torch_device="auto"))
    run(some, out=tmp_path, num_threads=0)
    used = some.task.torch_device
    assert (
        json.loads((tmp_path / "experiment.json").read_text())["task"]["torch_device"] == used
    )
    assert f">Device</th><td>{used}<" in write_report(tmp_path).read_text()
    assert "task.torch_device" not in without_machine(header(some, None))


def test_autocast_that_would_be_silently_off_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = TrainingStep(autocast=torch.bfloat16)
    step.require_device(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"autocast to torch.bfloat16 does nothing on 'meta'"):
        step.require_device(torch.device("meta"))
    with pytest.raises(ValueError, match="'meta'"):
        small_task(torch_device="meta", step=step)
    TrainingStep().require_device(torch.device("meta"))
    # PyTorch has no dtype of this kind for mps: it warns, and goes on in full precision.
    object.__setattr__(step, "autocast", torch.float64)
    with pytest.raises(ValueError, match=r"on 'mps' \(In MPS autocast, but the target dtype"):
        step.require_device(MPS)


def test_a_float64_model_on_mps_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'1.weight' of the model is torch.float64, .* 'mps'"):
        FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(2, 2).double()), torch_device="mps")


@thorough
def test_the_benchmark_of_a_gpu_runs_on_a_cpu_without_graphs() -> None:
    found = measure("mlp", 2, 1, torch.device("cpu"), compiles=False)
    assert [*found["steps_per_second"]] == ["host", "resident", "learner"]
    assert {*found["shares"]} == {"learner over host", "learner over resident"}
