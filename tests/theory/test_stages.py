"""Stages of a model against the whole model, and teachers against their formulas."""

from __future__ import annotations

import math
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
    batch_of,
    part,
    staged_run,
    staged_task,
    whole_of_parts,
)
from tests.tiers import by_name, first, thorough
from torch import Tensor, nn

from edgegossip.algorithms.alone import Alone
from edgegossip.algorithms.diloco import DiLoCo
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip import Gossip
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.core.errors import Interrupted
from edgegossip.core.protocol import Steps, Train
from edgegossip.core.randomness import generator
from edgegossip.core.topology import complete, ring
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.runner import run
from edgegossip.learning.augmentation import flip_and_crop
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.stages.both import Both
from edgegossip.learning.stages.decoupled_stage import DecoupledStage
from edgegossip.learning.stages.greedy import Greedy
from edgegossip.learning.stages.local_losses import LocalLosses, similarities
from edgegossip.learning.stages.pipelined_stage import PipelinedStage
from edgegossip.learning.stages.synthetic_gradients import SyntheticGradients
from edgegossip.learning.stages.teacher import Shape, Teacher, TeacherFactory
from edgegossip.learning.task import Task

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


# Teachers.


def seen(shape: Shape, num_samples: int = 12) -> tuple[Tensor, Tensor]:
    random = generator(0, "seen")
    x = torch.randn(num_samples, *shape, generator=random)
    return x, torch.arange(num_samples) % 3


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5)], ids=str)
def test_a_synthetic_gradient_begins_at_zero_and_fits_a_fixed_target(shape: Shape) -> None:
    teacher = SyntheticGradients(lr=1e-2, width=32, channels=8).make(shape, 3, 0)
    x, y = seen(shape)
    outputs = x.clone().requires_grad_()
    teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    assert not outputs.grad.any()
    by_class = torch.randn(3, *shape, generator=generator(0, "target"))
    gradient = by_class[y] / len(y)
    cosines = [teacher.fit(x, y, gradient) for _ in range(60)]
    assert cosines[0] == 0.0
    assert cosines[-1] is not None
    assert cosines[-1] > 0.95
    outputs = x.clone().requires_grad_()
    teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad, gradient, atol=0.05, rtol=0.3)


def test_what_it_learns_does_not_depend_on_the_size_of_a_batch() -> None:
    settings = SyntheticGradients(num_hidden=0)
    one, other = settings.make((16,), 3, 0), settings.make((16,), 3, 0)
    x, y = seen((16,))
    per_sample = torch.randn(12, 16, generator=generator(0, "target"))
    for _ in range(5):
        one.fit(x, y, per_sample / 12)
        other.fit(x.repeat(3, 1), y.repeat(3), per_sample.repeat(3, 1) / 36)
    for name, tensor in one.module.state_dict().items():
        torch.testing.assert_close(other.module.state_dict()[name], tensor)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10])
def test_small_gradients_are_learned_as_well_as_large_ones(factor: float) -> None:
    x, y = seen((16,))
    gradient = torch.randn(12, 16, generator=generator(0, "target"))
    found = []
    for each in (1.0, factor):
        teacher = SyntheticGradients(width=32).make((16,), 3, 0)
        cosines = [teacher.fit(x, y, each * gradient) for _ in range(5)]
        outputs = x.clone().requires_grad_()
        teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        found.append((cosines, outputs.grad / each))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_without_labels_it_sees_activations_alone() -> None:
    teacher = SyntheticGradients(num_hidden=0, is_conditioned=False).make((16,), 3, 0)
    assert [tuple(p.shape) for p in teacher.module.parameters()] == [(16, 16), (16,)]


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5)], ids=str)
def test_a_local_loss_is_that_of_nokland_and_eidnes(shape: Shape) -> None:
    beta, n = 0.7, 12
    teacher = LocalLosses(similarity=beta).make(shape, 3, 0)
    parts: Any = teacher.module
    h, y = seen(shape)
    features = parts["similarity"](h).flatten(2) if len(shape) == 3 else parts["similarity"](h)
    rows = [each.std(-1) if len(shape) == 3 else each for each in features]
    wanted = [F.one_hot(label, 3).float() for label in y]
    total = 0.0
    for i in range(n):
        for j in range(n):
            found, target = (
                float(
                    F.cosine_similarity(a[i] - a[i].mean(), a[j] - a[j].mean(), dim=0).detach()
                )
                for a in (rows, wanted)
            )
            total += (found - target) ** 2
    predicted = parts["prediction"](h.flatten(1))
    expected = (1 - beta) * F.cross_entropy(predicted, y).item() + beta * total / n**2
    assert teacher.teach(h, y).item() == pytest.approx(expected, rel=1e-4)


def test_similarities_are_those_of_deviations_from_each_samples_mean() -> None:
    x, _ = seen((6,))
    found = similarities(x)
    torch.testing.assert_close(found, torch.corrcoef(x))
    assert torch.equal(similarities(x[..., None, None]), found)  # pictures of one point


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5), (4, 1, 1)], ids=str)
def test_a_greedy_stage_is_trained_by_its_classifiers_loss(shape: Shape) -> None:
    teacher = Greedy(lr=1e-2).make(shape, 3, 0)
    h, y = seen(shape)
    losses = []
    for _ in range(60):
        outputs = h.clone().requires_grad_()
        loss = teacher.teach(outputs, y)
        assert loss.item() == pytest.approx(F.cross_entropy(teacher.module(h), y).item())
        loss.backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        assert outputs.grad.any()
        teacher.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(3), abs=0.3)
    assert losses[-1] < losses[0] / 2


def test_both_is_the_sum_of_its_parts() -> None:
    parts = SyntheticGradients(width=8), LocalLosses()
    both = Both(gradients=parts[0], losses=parts[1], weight=0.25).make((16,), 3, 0)
    gradient, loss = both._gradient, both._loss  # type: ignore[attr-defined]
    h, y = seen((16,))
    for _ in range(10):
        both.fit(h, y, h / 12)

    def slope(teach: Any) -> Tensor:  # noqa: ANN401
        outputs = h.clone().requires_grad_()
        teach(outputs, y).backward()
        assert outputs.grad is not None
        return outputs.grad

    expected = slope(gradient.teach) + 0.25 * slope(loss.teach)
    torch.testing.assert_close(slope(both.teach), expected)
    assert slope(gradient.teach).any()
    before = [p.clone() for p in loss.module.parameters()]
    both.step()
    assert not torch.equal(next(loss.module.parameters()), before[0])


def test_a_lesson_of_ones_own_batch_is_what_a_stage_learns_by() -> None:
    """The stage above stands still: the predicted gradient comes to be the true one."""
    teacher = SyntheticGradients(lr=1e-2, width=32)
    stage = Trained(
        DecoupledStage(teacher=teacher, **arguments(1, optimizer=SGD(lr=1e-9, momentum=0.0)))
    )
    above, inputs = part(2), batch_of(1)
    lesson: dict[str, Tensor] = {}
    cosine = 0.0
    for _ in range(80):
        result = stage.train({**inputs, **lesson})
        cosine = result.metrics.get("gradient_cosine", 0.0)
        h = result.outputs["activations"].clone().requires_grad_()
        F.cross_entropy(above(h), inputs["labels"]).backward()  # type: ignore[no-untyped-call]
        assert h.grad is not None
        lesson = {
            "fit_activations": h.detach(),
            "fit_labels": inputs["labels"],
            "fit_gradient": h.grad,
        }
    assert cosine > 0.95
