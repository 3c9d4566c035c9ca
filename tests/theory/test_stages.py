"""Stages of a model against the whole model."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_runs import (
    FAULTS,
    adam,
    ctrl_c_at,
    parameters,
    repeatable_events,
    small_task,
    tensors,
)
from tests.stage_runs import (
    STAGE_SETTINGS,
    Trained,
    arguments,
    part,
    staged_run,
    staged_task,
    whole_of_parts,
)
from tests.tiers import by_name, first, thorough
from torch import Tensor, nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.topology import complete, ring
from edgegossip.data.pictures import flip_and_crop
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.training.optimizer import SGD
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.teachers import (
    Both,
    Greedy,
    LocalLosses,
    Shape,
    SyntheticGradients,
    Teacher,
    TeacherFactory,
)
from edgegossip.training.task import Task

AUGMENTED: dict[str, Any] = {"augmentation": partial(flip_and_crop, padding=1)}


def pipelined(inner: Any, **changes: Any) -> Pipelined:  # noqa: ANN401
    return Pipelined(inner=inner, **{**STAGE_SETTINGS, **changes})


def decoupled(inner: Any, **changes: Any) -> Decoupled:  # noqa: ANN401
    return Decoupled(inner=inner, **{**STAGE_SETTINGS, **changes})


def pipelined_task(**changes: Any) -> Task:  # noqa: ANN401
    return staged_task(PipelinedStage, options={"max_passed": 9}, **changes)


def left(folder: Path) -> list[Tensor]:
    return [*tensors(folder).values()]


# One batch in flight is the whole model.


@thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD(lr=0.05, momentum=0.9)},
        pytest.param({"optimizer": adam, "has_buffers": False}, marks=thorough),
    ],
    ids=["momentum", "adam, own buffers"],
)
def test_naive_pipelining_is_training_of_the_whole_model_bit_for_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """With momentum, augmentation, batch norm, and dropout in the first stage."""
    alone = Alone(num_rounds=7, local_steps=2)
    task = small_task(model=whole_of_parts, **AUGMENTED, **changes)
    run(staged_run(alone, task), out=tmp_path / "whole")
    algorithm = pipelined(alone, in_flight=1)
    run(staged_run(algorithm, pipelined_task(**AUGMENTED, **changes)), out=tmp_path / "stages")
    whole, stages = left(tmp_path / "whole"), left(tmp_path / "stages")
    assert len(whole) == len(stages) > 10
    for expected, found in zip(whole, stages, strict=True):
        assert torch.equal(found, expected)


def test_a_pass_over_the_data_is_that_of_the_whole_model_too(tmp_path: Path) -> None:
    epochs = EpochGossip(topology=complete(1), num_rounds=2)
    settings: dict[str, Any] = {
        "optimizer": SGD(lr=0.05),
        "batch_size": 9,
    }  # 64 are no multiple
    task = small_task(model=whole_of_parts, augmentation=None, **settings)
    run(staged_run(epochs, task), out=tmp_path / "whole")
    algorithm = pipelined(epochs, in_flight=1, max_batch=10)
    run(staged_run(algorithm, pipelined_task(**settings)), out=tmp_path / "stages")
    for expected, found in zip(
        left(tmp_path / "whole"), left(tmp_path / "stages"), strict=True
    ):
        assert torch.equal(found, expected)


# Decoupled.


class TrueGradients(TeacherFactory):
    """Knows the stages above, as no teacher can, and gives their gradient."""

    def __init__(self, *above: nn.Module) -> None:
        self.above = nn.Sequential(*above)

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        return Oracle(self.above)


class Oracle(Teacher):
    def __init__(self, above: nn.Module) -> None:
        super().__init__(above, lr=0.0)

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.module(outputs), labels)


def test_a_teacher_that_gives_the_true_gradient_is_back_propagation() -> None:
    first = nn.Sequential(*[*part(0).children()][:3])  # no dropout, which draws by rank
    teacher = TrueGradients(part(1), part(2))
    stage, same = (
        Trained(DecoupledStage(teacher=teacher, **arguments(0, model=first))) for _ in range(2)
    )
    x, y = same.trainer.batch({}, Train(same.params, Steps(1)))
    model = nn.Sequential(first, part(1), part(2))
    whole = Trained(PipelinedStage(max_passed=1, **arguments(2, model=model)))
    stage.train()
    whole.train({"activations": x, "labels": y})
    num_trained = stage.trainer.layout.num_trained
    torch.testing.assert_close(stage.params[:num_trained], whole.params[:num_trained])
    assert not torch.equal(stage.params[:num_trained], same.params[:num_trained])


TEACHERS: dict[str, TeacherFactory] = {
    "local": LocalLosses(),
    "prediction": LocalLosses(similarity=0.0),
    "greedy": Greedy(lr=1e-2),
    "both": Both(weight=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEACHERS)
def test_decoupled_stages_learn(tmp_path: Path, name: str) -> None:
    optimizer = SGD(lr=0.05, momentum=0.0)
    options = {"teacher": TEACHERS[name]}
    task = staged_task(DecoupledStage, options=options, optimizer=optimizer)
    results = run(staged_run(decoupled(Alone(num_rounds=400)), task), out=tmp_path)
    assert results.history[-1].accuracy > 0.8


# Several first-stage workers.

FIRST: dict[str, Any] = {"topology": ring(3), "num_rounds": 5}
INNER = {
    "gossip": Gossip(**{**FIRST, "topology": complete(3)}, local_steps=3),
    "epoch-gossip": EpochGossip(**{**FIRST, "topology": complete(3)}),
    "diloco": DiLoCo(**FIRST, local_steps=3),
    "balanced": EdgeGossip(inner=EpochGossip(**{**FIRST, "topology": complete(3)})),
}


@thorough
@pytest.mark.parametrize("name", first(1, INNER))
@pytest.mark.parametrize("is_pipelined", [True, False], ids=["pipelined", "decoupled"])
def test_workers_of_the_first_stage_agree_and_learn(
    tmp_path: Path, name: str, is_pipelined: bool
) -> None:
    make = pipelined if is_pipelined else decoupled
    calm = SGD(lr=0.05, momentum=0.5)  # with 0.9, some seeds end no better than they began
    options = {"teacher": LocalLosses()}
    decoupled_task = staged_task(DecoupledStage, options=options, optimizer=calm)
    task = pipelined_task() if is_pipelined else decoupled_task
    experiment = staged_run(make(INNER[name], num_first=3), task)
    results = run(experiment, out=tmp_path)
    assert results.history[-1].loss < results.history[0].loss
    if name in ("gossip", "epoch-gossip", "balanced"):  # averaged exactly in the end
        assert results.history[-1].consensus_distance < 1e-3


# Stopped and gone on with.


def faulty_run(is_pipelined: bool) -> Experiment:
    inner = Gossip(topology=complete(2), num_rounds=4, local_steps=4, timeout=0.5)
    teacher = Both(gradients=SyntheticGradients(width=8, channels=2))
    decoupled_task = staged_task(DecoupledStage, options={"teacher": teacher, "replay": 2})
    task = pipelined_task(**AUGMENTED) if is_pipelined else decoupled_task
    make = pipelined if is_pipelined else decoupled
    return staged_run(make(inner, num_first=2, forget_after=0.3), task, faults=FAULTS)


@cache
def whole(is_pipelined: bool) -> tuple[bytes, bytes]:
    """Parameters and events of the uninterrupted run."""
    with TemporaryDirectory() as folder:
        run(faulty_run(is_pipelined), out=folder, num_threads=0)
        return parameters(Path(folder)), repeatable_events(Path(folder))


@thorough
@pytest.mark.parametrize("at", first(1, [60, 3, 141]))
@pytest.mark.parametrize(
    "is_pipelined", by_name({"pipelined": True, "decoupled": False}, ["pipelined"])
)
def test_a_run_in_stages_goes_on_with_batches_in_flight_to_the_same_bytes(
    tmp_path: Path, is_pipelined: bool, at: int
) -> None:
    experiment = faulty_run(is_pipelined)
    with ctrl_c_at(at, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0)
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert (parameters(tmp_path), repeatable_events(tmp_path)) == whole(is_pipelined)
