"""Learning rates over a run, and the learner that goes by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_learners import learner_of
from tests.small_runs import dataset
from torch import nn

from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import SGD, Constant, Cosine, Schedule, StepDecay, WarmUp
from edgegossip.training.task import Task, Workload

DATA = dataset()
COSINE = Cosine(warm_up=WarmUp(share=0.5, rise="linear"))


def model() -> nn.Module:
    some = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    for parameter in some.parameters():
        parameter.data.zero_()
    return some


def learner(schedule: Schedule, **changes: Any) -> Learner:  # noqa: ANN401
    """One with 20 samples, so that an epoch takes ten steps."""
    settings: dict[str, Any] = {
        "model": model(),
        "loss": F.cross_entropy,
        "optimizer": SGD(lr=0.5),
        "dataset": DATA.training,
        "shard": torch.arange(20),
        "batch_size": 2,
        "schedule": schedule,
    }
    return learner_of(**settings | changes)


def rates(some: Learner, *progress: float) -> list[float]:
    """The rate of a step at each of these points of the run."""
    found = []
    params = some.model.params.clone()
    for point in progress:
        params = some.train(Train(params, Steps(1)), point).params
        found.append(some._optimizer.param_groups[0]["lr"])
    return found


def test_the_rate_falls_at_each_milestone() -> None:
    schedule = StepDecay(milestones=(1 / 3, 0.75), decay=0.5)
    # After 10 of 30 rounds, a third is over to the last bit.
    assert rates(learner(schedule), 0, 9 / 30, 10 / 30, 0.75, 1) == [
        0.5,
        0.5,
        0.25,
        0.125,
        0.125,
    ]


def test_a_constant_warm_up_takes_its_share_at_a_tenth() -> None:
    found = rates(learner(Constant(warm_up=WarmUp(share=0.1))), 0, 0.09, 0.1, 1)
    assert found == [pytest.approx(0.05)] * 2 + [0.5] * 2


def test_a_linear_warm_up_rises_evenly_from_its_start() -> None:
    points = [step / 20 for step in range(11)]
    warm_up = WarmUp(share=0.5, start=0.2, rise="linear")
    found = rates(learner(Constant(warm_up=warm_up)), *points)
    assert found == pytest.approx([0.5 * (0.2 + 0.08 * step) for step in range(11)])


def test_a_cosine_ends_at_nothing() -> None:
    points = [step / 20 for step in range(21)]
    wave = [0.25 * (1 + math.cos(math.pi * point)) for point in points]
    assert rates(learner(Cosine()), *points) == pytest.approx(wave, abs=1e-9)


def test_warm_up_and_decay_are_multiplied() -> None:
    assert COSINE.factor(0.25) == pytest.approx(0.55 * Cosine().factor(0.25))
    assert COSINE.factor(0.75) == Cosine().factor(0.75)


def test_all_steps_of_one_piece_of_work_are_at_one_rate() -> None:
    some, other = learner(COSINE), learner(COSINE)
    start = some.model.params.clone()
    some.train(Train(start, Epochs()), 0.75)
    other.train(Train(start, Steps(10)), 0.75)
    assert some._optimizer.param_groups[0]["lr"] == 0.5 * COSINE.factor(0.75)
    assert torch.equal(some.model.params, other.model.params)


def test_without_a_schedule_the_rate_is_the_optimizers_own() -> None:
    assert rates(learner(Constant()), 0, 0.5, 1) == [0.5] * 3


def test_a_task_hands_its_schedule_to_every_learner() -> None:
    task = Task(dataset=DATA, model=model, optimizer=SGD(lr=0.5), schedule=COSINE, batch_size=2)
    workload = Workload(task, range(3), seed=0)
    for rank in range(3):
        trainer = workload.make_trainer(rank)
        assert isinstance(trainer, Learner)
        assert rates(trainer, 0.3) == [0.5 * COSINE.factor(0.3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmUp(share=0), r"share must be in \(0, 1\], a share of the run, got 0"),
        (lambda: WarmUp(start=0), r"start must be in \(0, 1\], got 0"),
        (lambda: WarmUp(rise="lineal"), "did you mean 'linear'"),  # type: ignore[arg-type]
        (lambda: StepDecay(milestones=(0.3, 0.3)), "milestones must ascend"),
        (lambda: StepDecay(milestones=(30, 60)), "milestones must be in .* got 30"),
        (lambda: StepDecay(milestones=(0.3,), decay=2), r"decay must be in \(0, 1\], got 2"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
