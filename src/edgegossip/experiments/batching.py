"""Training many small models together, if that is faster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from edgegossip.core.errors import UsageError, unknown_name
from edgegossip.experiments.experiment import Experiment
from edgegossip.learning.dense_stack import DENSE, leaves
from edgegossip.learning.hooks import hooks
from edgegossip.learning.learner import Learner
from edgegossip.learning.loss import forward_pair
from edgegossip.learning.models.initialization import drawn_from
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.stacked import StackedLearner
from edgegossip.learning.task import Task
from edgegossip.learning.training_step import PLAIN_STEP

Batched: TypeAlias = Literal["auto", "on", "off"]
MIN_WORKERS = 64
"""Minimum number of workers for which "auto" is "on"; with fewer, too few requests wait at
once."""


def batched(experiment: Experiment, choice: Batched = "auto") -> Experiment:
    """Let learners whose work has the same shape train together, with `StackedLearner`.

    The result then differs in its last bits, and `experiment.json` names the trainer.

    Args:
        experiment: Any experiment; "auto" does not change one that names its own trainer.
        choice: "auto" is "on" for dense models on 64 or more workers. This rule comes from
            measurements on a CPU (benchmarks/results/simulator.md) and does not depend on the
            machine, so the same experiment gives the same result everywhere.

    Raises:
        UsageError: If `choice` is unknown, or is "on" and the task cannot be stacked.
    """
    if choice not in get_args(Batched):
        raise UsageError(unknown_name("choice for batched", choice, get_args(Batched)))
    task = experiment.task
    if choice == "off" or (choice == "auto" and experiment.num_workers < MIN_WORKERS):
        return experiment
    reason = why_not_batched(task)
    if reason is None:
        return replace(experiment, task=replace(task, trainer=StackedLearner))
    if choice == "on":
        raise UsageError(
            f"these learners cannot train together: {reason}; leave out --batched on"
        )
    return experiment


def why_not_batched(task: Task) -> str | None:
    """Explain why a task's learners cannot train together; None if they can."""
    selection = task.accuracy_aware.selection
    loss = task.loss.func if isinstance(task.loss, functools.partial) else task.loss
    if isinstance(task.model, Mapping):
        return "workers hold parts of the model"
    if task.trainer is not Learner:
        return "the task has a trainer of its own"
    if task.forward is not forward_pair:
        return "the task has a forward of its own"
    if task.step != PLAIN_STEP:
        return "the task has settings for its training steps"
    if task.augmentation is not None:
        return "batches are augmented"
    if not isinstance(task.optimizer, SGD):
        return "the optimizer is not edgegossip's SGD"
    if selection.needs_losses or selection.needs_sample_losses:
        return f"{type(selection).__name__} chooses samples by their losses"
    if getattr(loss, "__module__", "") != "torch.nn.functional":
        return "the loss is not one of torch.nn.functional"
    with drawn_from(0):
        model = task.model()
    for name, layer in model.named_modules():
        what = f"layer {name or 'model'!r}"
        if type(layer) not in DENSE or getattr(layer, "approximate", "none") != "none":
            return f"{what} is a {layer}, which cannot be stacked"
        if hooks(layer):
            return f"{what} has hooks"
    if [*model.buffers()]:
        return "the model has buffers"
    parameters = [*model.parameters()]
    if not all(each.is_contiguous() and each.ndim < 4 for each in parameters):
        return "some parameters are not laid out row by row"
    if not all(each.requires_grad for each in parameters):
        return "some parameters are frozen"
    if sum(len([*layer.parameters()]) for layer in leaves(model)) != len(parameters):
        return "two layers share parameters"
    return None
