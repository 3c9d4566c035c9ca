"""Only trainable parameters travel; the optimizer's state stays where it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_runs import ALGORITHMS, ctrl_c_at, events, parameters, tensors
from tests.small_tasks import experiment, regression
from tests.tiers import first, thorough
from torch import nn

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.models.flat import FlatModel, frozen_sample
from edgegossip.real.introduction import introduce
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Learner
from edgegossip.training.task import Task, Workload

TRUNK, HEAD = 4 * 256 + 256, 256 + 1


def trunk_and_head(is_frozen: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad_(not is_frozen)
    return model


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fine_tuning() -> Task:
    return regression(model=trunk_and_head, optimizer=adamw)


def sizes(folder: Path) -> set[int]:
    return {event["num_bytes"] for event in events(folder, "sent")}


@thorough
def test_messages_have_no_room_for_a_frozen_trunk(tmp_path: Path) -> None:
    whole = regression(model=lambda: trunk_and_head(is_frozen=False))
    run(experiment(fine_tuning()), out=tmp_path / "head")
    run(experiment(whole), out=tmp_path / "whole")
    (small,), (large,) = sizes(tmp_path / "head"), sizes(tmp_path / "whole")
    assert 2 * 4 * HEAD < small < 2 * (4 * HEAD + 200), "for two neighbors"
    assert large - small == 2 * 4 * TRUNK


def test_the_model_of_a_run_has_its_frozen_parameters(tmp_path: Path) -> None:
    task = fine_tuning()
    results = run(experiment(task), out=tmp_path)
    found = tensors(tmp_path)
    assert {*found} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    start = Workload(task, [0, 1, 2], 1).named_parameters(
        Workload(task, [0], 1).initial_params()
    )
    for name, tensor in found.items():
        assert torch.equal(tensor, start[name]) == name.startswith("0."), name
    trunk_and_head().load_state_dict(results.params)
    assert results.final_value < results.history[0].value


@thorough
def test_a_resumed_run_has_them_too(tmp_path: Path) -> None:
    some = experiment(fine_tuning())
    run(some, out=tmp_path / "whole")
    with ctrl_c_at(20, some.algorithm), pytest.raises(Interrupted):
        run(some, out=tmp_path / "resumed")
    run(some, out=tmp_path / "resumed", resume=True)
    assert parameters(tmp_path / "resumed") == parameters(tmp_path / "whole")


def test_workers_compare_their_frozen_parameters() -> None:
    def settings(shift: float) -> dict[str, object]:
        def make() -> nn.Module:
            model = trunk_and_head()
            dict(model.named_parameters())["0.weight"].data[5, 1] += shift
            return model

        some = experiment(regression(model=make))
        return dict(introduce(some, some.workload()).settings)

    name = "frozen parameters of a worker"
    assert settings(0.0)[name] == settings(0.0)[name] != settings(1.0)[name]
    assert settings(math.inf)[name] == settings(math.inf)[name]
    trained = experiment(regression())
    assert name not in introduce(trained, trained.workload()).settings
    assert frozen_sample(nn.Linear(2, 2)) is None


def test_buffers_that_a_model_does_not_save_do_not_travel() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("saved", torch.ones(3))
    model.register_buffer("derived", torch.ones(50), persistent=False)
    assert FlatModel(model).num_params == 3 + 3


def test_a_trunk_may_have_another_precision() -> None:
    model = trunk_and_head()
    model[0].to(torch.bfloat16)
    flat = FlatModel(model)
    assert (flat.num_params, flat.params.dtype) == (HEAD, torch.float32)
    sample = frozen_sample(model)
    assert sample is not None
    assert len(sample) <= TRUNK


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """After each training: steps that the learner has done, and that its optimizer knows of."""
    found: list[tuple[int, int]] = []
    train = Learner.train

    def counting(self: Learner, request: Train, progress: float = 0.0) -> TrainingResult:
        result = train(self, request, progress)
        known = {int(state["step"]) for state in self._optimizer.state.values()}
        found.extend((self._num_steps, number) for number in known)
        return result

    monkeypatch.setattr(Learner, "train", counting)
    return found


def on_four(algorithm: Algorithm[Any]) -> Experiment:
    platforms = tuple(Platform(throughput=100.0 + 50 * i) for i in range(4))
    return replace(experiment(fine_tuning()), algorithm=algorithm, platforms=platforms)


@pytest.mark.parametrize("name", first(3, ALGORITHMS))
def test_adamw_keeps_its_state_whatever_an_algorithm_exchanges(
    name: str, tmp_path: Path, counted: list[tuple[int, int]]
) -> None:
    run(on_four(ALGORITHMS[name]), out=tmp_path, num_threads=0)
    assert counted
    assert all(done == known for done, known in counted), "no exchange resets it"


def test_a_learner_goes_on_with_its_own_moments_from_parameters_of_others() -> None:
    trainer = Workload(fine_tuning(), [0], 0).make_trainer(0)
    assert isinstance(trainer, Learner)
    begin = trainer.model.params.clone()
    trainer.train(Train(begin, Steps(3)))
    head = [each for each in trainer.model.module.parameters() if each.requires_grad]
    kept = [trainer._optimizer.state[each]["exp_avg"].clone() for each in head]
    theirs = begin + 1.0
    ours = trainer.train(Train(theirs, Steps(1))).params
    fresh = Workload(fine_tuning(), [0], 0).make_trainer(0)
    assert any(each.any() for each in kept)
    assert not torch.equal(ours, fresh.train(Train(theirs, Steps(1))).params)
