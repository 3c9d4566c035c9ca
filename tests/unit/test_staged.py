"""A task that is cut into stages: its costs, its shapes, and how fast a worker of it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_runs import dataset
from torch import nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import WORKER, Role
from edgegossip.machine.profiling import TimedTraining
from edgegossip.real.join import seconds_per_sample
from edgegossip.recipes.staged_training import quickstart
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import Staged, staged
from edgegossip.training.stages.teachers import LocalLosses, SyntheticGradients, TeacherFactory
from edgegossip.training.task import Task, Workload

LEARNED = {"synthetic-gradients": 0.4, "greedy, gradients": 0.9}
"""Accuracies on ten classes that a run which diverges does not attain."""
PIPELINED = partial(PipelinedStage, max_passed=3)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.ReLU()),
        nn.Sequential(nn.Linear(32, 3)),
    )


def whole(**changes: Any) -> Task:  # noqa: ANN401
    settings: dict[str, Any] = {
        "dataset": dataset(),
        "model": model,
        "optimizer": SGD(lr=0.05),
        "batch_size": 8,
    }
    return Task(**settings | changes)


def run_of(kind: Any, parts: Staged) -> Experiment:  # noqa: ANN401
    algorithm = kind(
        inner=Alone(num_rounds=2, local_steps=4),
        boundaries=parts.boundaries,
        num_classes=parts.num_classes,
        max_batch=9,
    )
    platforms = (Platform(throughput=400.0),) * algorithm.num_workers
    return Experiment(task=parts.task, algorithm=algorithm, platforms=platforms)


def test_stages_have_the_shapes_of_the_cuts_and_cost_the_whole_together() -> None:
    parts = staged(whole(), (1, 2), PIPELINED)
    assert parts.boundaries == ((4, 6, 6), (32,))
    assert [*parts.task.models] == ["stage-0", "stage-1", "stage-2"]
    assert sum(parts.costs) == pytest.approx(1)


@pytest.mark.parametrize("teacher", [LocalLosses(), SyntheticGradients()], ids=["loss", "sg"])
def test_a_teacher_costs_what_it_computes(teacher: TeacherFactory) -> None:
    bare = staged(whole(), (1, 2), PIPELINED).costs
    taught = staged(whole(), (1, 2), DecoupledStage, teacher).costs
    assert [more > less for more, less in zip(taught, bare, strict=True)] == [True, True, False]


def test_a_task_that_is_in_parts_is_not_cut_again() -> None:
    parts = staged(whole(), (1,), PIPELINED)
    with pytest.raises(ValueError, match=r"in parts already, \['stage-0', 'stage-1'\]"):
        staged(parts.task, (1,), PIPELINED)


def test_a_pipelined_stage_relies_on_the_limit_of_its_algorithm(tmp_path: Path) -> None:
    given = run(run_of(Pipelined, staged(whole(), (1, 2), PIPELINED)), out=tmp_path / "given")
    bare = run(run_of(Pipelined, staged(whole(), (1, 2), PipelinedStage)), out=tmp_path / "no")
    assert given.params.keys() == bare.params.keys()
    assert all(torch.equal(given.params[name], bare.params[name]) for name in given.params)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (whole(trainer=PipelinedStage), r"instead of Task\(trainer=.*at, PipelinedStage\)"),
        (
            whole(trainer=partial(DecoupledStage, teacher=LocalLosses())),
            r"use the task of stag",
        ),
        (staged(whole(), (1,), DecoupledStage).task, r"needs a teacher, such as LocalLosses\("),
    ],
    ids=["whole, pipelined", "whole, decoupled", "no teacher"],
)
def test_a_trainer_of_a_stage_says_how_it_is_made(task: Task, said: str) -> None:
    role = Role("stage-0") if isinstance(task.model, Mapping) else WORKER
    with pytest.raises(ValueError, match=said):
        Workload(task, [0], 0, lambda rank: role).make_trainer(0)


def test_a_first_stage_is_timed_by_itself_if_it_waits_for_nobody() -> None:
    decoupled = run_of(Decoupled, staged(whole(), (1, 2), DecoupledStage, LocalLosses()))
    assert seconds_per_sample(decoupled, 0, seconds=0.01)
    assert seconds_per_sample(decoupled, 1) is None  # has no data
    pipelined = run_of(Pipelined, staged(whole(), (1, 2), PIPELINED))
    assert seconds_per_sample(pipelined, 0) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_synthetic_gradients_do_not_diverge_in_the_quickstart(
    tmp_path: Path, name: str
) -> None:
    results = run(quickstart().experiments[name], out=tmp_path, num_threads=1)
    assert results.reason == "finished"
    assert max(evaluation.accuracy for evaluation in results.history) > LEARNED[name]


def test_one_that_cannot_be_timed_says_so() -> None:
    workload = run_of(Pipelined, staged(whole(), (1, 2), PIPELINED)).workload()
    training = TimedTraining(workload.make_trainer(0), torch.zeros(1))
    with pytest.raises(TrainingError, match="cannot be timed by itself"):
        training.run(0.01)
