"""A task with a model cut into stages, and the trainers of the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from edgegossip.contract.trainer import Trainer
from edgegossip.models.blocks import drawn_from
from edgegossip.models.flops import training_flops
from edgegossip.training.loss import forward_pair, to_model
from edgegossip.training.stages.cutting import activations, stage_models
from edgegossip.training.stages.learner import Place
from edgegossip.training.stages.teachers import Shape, TeacherFactory
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A task in stages, and facts about the stages for an algorithm.

    Attributes:
        task: The task, with one model for each role ``stage-0``, ``stage-1``, ...
        boundaries: Shape of a sample's activations at each cut, for `Stages`.
        num_classes: Number of classes, for `Stages`.
        costs: Cost of a sample in each stage, in training samples of the whole model.
    """

    task: Task
    boundaries: tuple[Shape, ...]
    num_classes: int
    costs: tuple[float, ...]


def staged(
    task: Task,
    at: Sequence[int],
    make_stage: Callable[..., Trainer],
    teacher: TeacherFactory | None = None,
) -> Staged:
    """Cut the model of a task; `make_stage` makes the trainer of each stage.

    The joined stages start from the whole model's initial parameters.

    Args:
        task: Task with one model for all workers, which `cutting.blocks` can split.
        at: Index of the first block of each stage except the first.
        make_stage: `DecoupledStage` or `PipelinedStage`, with its own arguments bound.
        teacher: Teacher of decoupled stages; their costs include its operations.

    Raises:
        ValueError: If the task already has parts or is not a plain classification, or the model
            cannot be cut at these blocks.
    """
    if not task.dataset.num_classes or task.forward is not forward_pair:
        raise ValueError(
            f"stages send labels of classes with a batch, and {task.dataset.name!r} has none, "
            "or the task a forward of its own; train the whole model on each worker"
        )
    if isinstance(task.model, Mapping):
        raise ValueError(
            f"the task's model is in parts already, {[*task.model]}; give one that makes the "
            "whole model"
        )
    models = stage_models(task.model, at)
    with drawn_from(0):  # only shapes and costs matter; the run draws its own weights
        stages = [make() for make in models.values()]
    sample = _sample(task)
    outputs = activations(stages, sample)
    whole = sum(training_flops(s, x) for s, x in zip(stages, [sample, *outputs], strict=False))
    num_classes, costs, trainers = task.dataset.num_classes, [], {}
    for number, (role, stage) in enumerate(zip(models, stages, strict=True)):
        given = sample if number == 0 else outputs[number - 1]
        is_last = number == len(stages) - 1
        shape = () if is_last else tuple(outputs[number].shape[1:])
        flops = training_flops(stage, given)
        if teacher is not None and not is_last:
            flops += teaching_flops(teacher, outputs[number], num_classes)
        costs.append(flops / whole)
        place = Place(
            number=number,
            num_stages=len(stages),
            shape=shape,
            num_classes=num_classes,
            cost=costs[-1],
        )
        bound = {} if teacher is None else {"teacher": teacher}
        trainers[role] = partial(make_stage, place=place, **bound)
    return Staged(
        task=replace(task, model=models, trainer=trainers),
        boundaries=tuple(tuple(each.shape[1:]) for each in outputs[:-1]),
        num_classes=num_classes,
        costs=tuple(costs),
    )


def _sample(task: Task) -> Tensor:
    """One prepared training sample, [1, ...]."""
    data = task.dataset.training
    x, _ = data.train.batch(torch.zeros(1, dtype=torch.int64))
    return to_model(data.prepare(x), torch.device("cpu"))


def teaching_flops(teacher: TeacherFactory, outputs: Tensor, num_classes: int) -> float:
    """Count a teacher's operations for one sample, for teaching and for learning.

    Args:
        teacher: Teacher of a stage.
        outputs: Outputs of the stage for one sample, [1, ...].
        num_classes: Number of labels.
    """
    made = teacher.make(tuple(outputs.shape[1:]), num_classes, 0)
    pair = outputs.repeat(2, *(1 for _ in outputs.shape[1:])).requires_grad_()  # batch norm
    labels = torch.zeros(2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        made.teach(pair, labels).backward()  # type: ignore[no-untyped-call]
        if teacher.learns_from_gradients:
            made.fit(pair.detach(), labels, torch.zeros_like(pair))
    return int(counter.get_total_flops()) / 2
