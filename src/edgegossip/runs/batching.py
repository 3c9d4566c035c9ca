"""Training many small models together: whether learners can, and whether they should."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from edgegossip.contract.errors import TrainingError, UsageError, unknown_name
from edgegossip.contract.protocol import Steps, Train
from edgegossip.data.dataset import WorkerData
from edgegossip.data.local import Local
from edgegossip.models.blocks import drawn_from
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.pool import ComputePool
from edgegossip.training.copies import ModelCopies
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import PLAIN
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task

Batched: TypeAlias = Literal["auto", "on", "off"]
MIN_WORKERS = 64
"""Minimum number of workers for which "auto" is "on" on a CPU; with fewer, too few requests
wait at once."""
MAX_FLOPS = 1.5e8
"""Maximum floating-point operations of a step for which "auto" is "on" on a CPU. With more, the
time goes into the operations themselves, of which those on stacks are no faster, and a
convolution in groups is slower."""
_NUM_STEPS = 4
_TOLERANCE = 0.02
_MIXED_TOLERANCE = 0.05
"""Allowed difference of a step in a stack from a step alone, as a share of its length, and the
same for mixed precision. Rounding stays far below it; a layer that mixes models does not."""


def batched(experiment: Experiment, choice: Batched = "auto") -> Experiment:
    """Let learners of the same model train together, with `StackedLearner`.

    The result then differs in its last bits, and `experiment.json` names the trainer.

    Args:
        experiment: Any experiment; "auto" does not change one that names its own trainer.
        choice: On a CPU, "auto" is "on" for 64 or more workers whose step takes at most 150
            million operations, unless last bits depended on who trains with whom. This rule
            comes from measurements (benchmarks/results/simulator.md) and counts instead of
            measuring time, so that the same experiment gives the same result in each run. On a
            GPU, it is "on" wherever learners can train together.

    Raises:
        UsageError: If `choice` is unknown, or is "on" and the learners cannot train together.
    """
    if choice not in get_args(Batched):
        raise UsageError(unknown_name("choice for batched", choice, get_args(Batched)))
    task = experiment.task
    is_on_cpu = torch.device(task.torch_device).type == "cpu"
    has_few = experiment.num_workers < (MIN_WORKERS if is_on_cpu else 2)
    if choice == "off" or (choice == "auto" and has_few):
        return experiment
    most_flops = MAX_FLOPS if is_on_cpu and choice == "auto" else math.inf
    found = try_together(task, most_flops)
    if choice == "on" and found.reason is not None:
        raise UsageError(
            f"these learners cannot train together: {found.reason}; leave out --batched on"
        )
    if found.reason is not None or (choice == "auto" and found.depends_on_others):
        return experiment
    return replace(experiment, task=replace(task, trainer=StackedLearner))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Findings of a trial of training together.

    Attributes:
        reason: Why learners cannot, or should not, train together; None if they can.
        depends_on_others: Whether the last bits of a learner's result depend, on this CPU, on
            who trains with it, so that a resumed run, which forms other stacks, may differ.
    """

    reason: str | None = None
    depends_on_others: bool = False


def try_together(task: Task, most_flops: float = math.inf) -> Trial:
    """Find out whether a task's learners can train together, by a few steps of three of them.

    Together they must take the steps that each takes alone, up to rounding.

    Args:
        task: The task.
        most_flops: Maximum number of floating-point operations of a step.
    """
    if (reason := _reason_against(task)) is not None:
        return Trial(reason=reason)
    # As in a run: on a thread of the pool, where last bits may be others than on several cores.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), ComputePool(1) as pool:
        warnings.simplefilter("ignore")  # the run will warn again
        return pool.submit(_tried, task, most_flops).result()


def _tried(task: Task, most_flops: float) -> Trial:
    """Findings of a trial of a task to which nothing else is opposed."""
    assert not isinstance(task.model, Mapping)
    with drawn_from(0):
        model = task.model()
    settings = replace(task.learner_settings(model), accuracy_aware=PLAIN)
    copies = settings.copies()
    if not copies.can_be_lent:
        return Trial(reason="the optimizer is neither edgegossip's SGD nor PyTorch's own")
    steps = partial(_steps, task, settings, copies)
    try:
        if most_flops < math.inf:
            with FlopCounterMode(display=False) as counter:
                steps(Learner, [0], 1)
            if counter.get_total_flops() > most_flops:
                return Trial(reason="steps as long as these are no faster together")
        (alone,) = steps(Learner, [2])
    except Exception as error:  # of the model's or the user's own code; the run will tell
        return Trial(reason=f"one learner cannot take its first steps ({_first_line(error)})")
    try:
        three, *pairs = (steps(StackedLearner, ranks) for ranks in ([0, 1, 2], [0, 1], [2, 0]))
    except Exception as error:  # of the model's own code, under `vmap`
        return Trial(reason=f"torch.vmap cannot run the model ({_first_line(error)})")
    # The last one, because kernels that know nothing of several models serve the first.
    tolerance = _TOLERANCE if task.step.autocast is None else _MIXED_TOLERANCE
    if not (three[2] - alone).norm() <= tolerance * alone.norm():
        return Trial(reason="together they take other steps than alone")
    expected = (three[0], three[1], three[2], three[0])
    found = [each for pair in pairs for each in pair]
    is_on_cpu = torch.device(task.torch_device).type == "cpu"
    depends = is_on_cpu and not all(map(torch.equal, expected, found))
    return Trial(depends_on_others=depends)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _reason_against(task: Task) -> str | None:
    """Why learners cannot train together, as far as the task alone tells."""
    if isinstance(task.model, Mapping):
        return "workers hold parts of the model"
    if task.trainer is not Learner:
        return "the task has a trainer of its own"
    if isinstance(task.dataset, Local):
        return "each worker has data of its own (Local)"
    split, _ = task.dataset.training.resolved(torch.arange(0))
    if getattr(split, "has_own_collate", False):
        return "a collate function of its own makes the batches"
    if getattr(split, "pool", None) is not None:
        return "each worker's batches are read ahead (num_workers)"
    if task.step.micro_batch_size is not None or task.step.compile:
        return "steps have micro-batches or a compiled model"
    if getattr(task.optimizer, "is_elementwise", False) and not isinstance(task.optimizer, SGD):
        return "the optimizer takes all parameters as one vector"
    return None


def _steps(
    task: Task,
    settings: LearnerSettings,
    copies: ModelCopies,
    trainer: type[Learner],
    ranks: list[int],
    num_steps: int = _NUM_STEPS,
) -> list[Tensor]:
    """By how much a few steps move the parameters of some learners, together if they can."""
    data = task.dataset.training
    shards = torch.arange(len(data.train)).chunk(3)
    learners = [
        trainer(
            settings=settings,
            data=WorkerData(dataset=data, shard=shards[rank]),
            rank=rank,
            copies=copies,
        )
        for rank in ranks
    ]
    request = Train(copies.initial_params, Steps(num_steps))
    work = [each.prepare(request, 0.0) for each in learners]
    first, *others = work
    outcomes = [learners[0].train(request)] if first is None else first.train_with(others)
    found = []
    for outcome in outcomes:
        if isinstance(outcome, TrainingError):
            raise outcome
        found.append(outcome.params - request.params)
    return found
