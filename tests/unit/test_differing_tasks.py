"""Workers whose tasks differ are told where, and those with one task train together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.small_runs import parameters, summary
from tests.small_tasks import experiment, language, regression, regression_data, windows
from tests.tiers import thorough
from tests.worker_threads import WITHIN, Crew
from torch import Tensor

from edgegossip.contract.errors import NetworkError
from edgegossip.data.dataset import from_tensors
from edgegossip.data.hold_out import hold_out
from edgegossip.net.host.introduction import Introductions
from edgegossip.real.gathering import Gathering
from edgegossip.real.introduction import introduce
from edgegossip.runs.runner import run
from edgegossip.training.loss import Loss, model_and_batch
from edgegossip.training.metrics import R2, MeanAbsoluteError
from edgegossip.training.task import Task


def difference(one: Task, other: Task) -> str:
    """Return the message to a worker with the first task about one with the second."""
    own, theirs = (experiment(each) for each in (one, other))
    met = Introductions(2, introduce(own, own.workload()))
    met.take(1, introduce(theirs, theirs.workload()).message())
    return met.difference(1)


def test_workers_whose_tasks_differ_are_named_the_difference() -> None:
    assert difference(regression(), regression()) == ""
    other = replace(regression(), metrics=(MeanAbsoluteError(unit="days"), R2()))
    assert difference(regression(), other) == 'task.metrics.0.unit "days", this one "years"'
    chosen = difference(regression(), regression(target_metric="R2"))
    assert chosen == "'task.target_metric' \"R2\", this one none"
    assert difference(language(), language(loss=F.cross_entropy)).startswith("task.loss ")
    assert difference(language(), language(forward=model_and_batch)).startswith("task.forward")


def scaled(factor: float, noise: float = 0.0) -> Loss:
    def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * F.mse_loss(outputs, targets) + noise * torch.rand(())

    return squared_error


def test_functions_of_one_name_that_give_different_losses_are_different_tasks() -> None:
    named = difference(regression(loss=scaled(1.0)), regression(loss=scaled(2.0)))
    assert named == "other loss of the initial parameters"
    assert difference(regression(loss=scaled(1.0)), regression(loss=scaled(1.0))) == ""
    # Different values of a random loss do not show that the tasks differ.
    own, other = (regression(loss=scaled(1.0, noise=1.0)) for _ in range(2))
    assert difference(own, other) == ""


def test_workers_whose_nested_data_differ_are_told_where() -> None:
    samples = windows()
    samples["next"] = samples["next"].roll(5, dims=0)
    parts = [
        {n: each[some] for n, each in samples.items()}
        for some in (slice(-20), slice(-20, None))
    ]
    other = language(dataset=from_tensors("text", *parts))
    assert difference(language(), other).startswith("other training samples['next']")


@thorough
def test_workers_with_a_regression_end_where_the_simulator_does(tmp_path: Path) -> None:
    data = hold_out(regression_data(), 0.25)
    trained = experiment(regression(dataset=data), num_rounds=4)
    crew = Crew(tmp_path / "run")
    assert crew.all(trained) == ["finished"] * 3
    results = Gathering(trained, crew.out).finish()
    run(trained, out=tmp_path / "simulated", num_threads=0)
    assert parameters(crew.out) == parameters(tmp_path / "simulated")
    assert results.metric.name == "MAE"
    assert summary(crew.out)["final_mae"] == summary(tmp_path / "simulated")["final_mae"]
    assert 0 < summary(crew.folder(0))["validation_mae"] < 10
    assert summary(crew.folder(0))["validation_r2"] < 1


@thorough
def test_workers_whose_tasks_differ_do_not_train_together(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    one = experiment(regression(), num_rounds=4)
    other = experiment(regression(target_metric="R2"), num_rounds=4)
    settings = replace(WITHIN, meet_seconds=0.5)
    crew.start(one, 0, 1, settings=settings)
    crew.start(other, 2, settings=settings)
    assert crew.join(0, 1) == ["finished"] * 2
    [error] = crew.join(2)
    assert isinstance(error, NetworkError)
    assert 'task.target_metric none, this one "R2"' in str(error)
