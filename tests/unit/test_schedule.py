"""Learning rates over a worker's own epochs, and the learner that goes by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_runs import dataset
from torch import nn

from edgegossip.core.protocol import Epochs, Steps
from edgegossip.core.snapshot import assemble, dismantle
from edgegossip.learning.learner import Learner
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.schedule import Constant, Cosine, Schedule, StepDecay, WarmUp
from edgegossip.learning.task import Task, Workload

DATA = dataset()
COSINE = Cosine(num_epochs=4, warm_up=WarmUp(num_epochs=1.5, rise="linear"))


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
        "dataset": DATA,
        "shard": torch.arange(20),
        "batch_size": 2,
        "schedule": schedule,
    }
    return Learner(**settings | changes)


def rates(some: Learner, num_steps: int) -> list[float]:
    """The rate of each of the next steps."""
    found = []
    params = some.model.params.clone()
    for _ in range(num_steps):
        params = some.train(params, Steps(1), {}).params
        found.append(some._optimizer.param_groups[0]["lr"])
    return found


def test_milestones_are_met_to_the_step() -> None:
    # A tenth of an epoch a step: ten of them added up are a hair below 1.
    schedule = StepDecay(milestones=(1, 3), decay=0.5)
    assert rates(learner(schedule), 31) == [0.5] * 10 + [0.25] * 20 + [0.125]


def test_a_constant_warm_up_takes_its_epochs_at_a_tenth() -> None:
    found = rates(learner(Constant(warm_up=WarmUp())), 12)
    assert found == [pytest.approx(0.05)] * 10 + [0.5] * 2


def test_a_linear_warm_up_rises_evenly_from_its_start() -> None:
    found = rates(learner(Constant(warm_up=WarmUp(start=0.2, rise="linear"))), 11)
    assert found == pytest.approx([0.5 * (0.2 + 0.08 * step) for step in range(11)])


def test_a_cosine_ends_at_nothing_and_stays_there() -> None:
    schedule = Cosine(num_epochs=2)
    found = rates(learner(schedule), 22)
    wave = [0.25 * (1 + math.cos(math.pi * step / 20)) for step in range(20)]
    assert found == pytest.approx([*wave, 0, 0], abs=1e-9)


def test_warm_up_and_decay_are_multiplied() -> None:
    assert COSINE.factor(0.75) == pytest.approx(0.55 * Cosine(num_epochs=4).factor(0.75))
    assert COSINE.factor(2.0) == Cosine(num_epochs=4).factor(2.0) == pytest.approx(0.5)


def test_the_rate_goes_by_epochs_and_not_by_how_work_is_cut() -> None:
    some, other = learner(COSINE), learner(COSINE)
    start = some.model.params.clone()
    some.train(start, Epochs(), {})
    other.train(start, Steps(10), {})
    assert some._optimizer.param_groups[0]["lr"] == other._optimizer.param_groups[0]["lr"]
    assert torch.equal(some.model.params, other.model.params)


def test_without_a_schedule_the_rate_is_the_optimizers_own() -> None:
    assert rates(learner(Constant()), 3) == [0.5] * 3


@pytest.mark.parametrize("schedule", [COSINE, StepDecay(milestones=(1,)), Constant()], ids=repr)
def test_a_restored_learner_goes_on_at_the_rate_it_had(schedule: Schedule) -> None:
    whole, first, second = (learner(schedule) for _ in range(3))
    expected = whole.train(whole.model.params.clone(), Steps(23), {}).params
    middle = first.train(first.model.params.clone(), Steps(7), {}).params
    second.load_state_dict(assemble(*dismantle(first.state_dict())))
    assert torch.equal(second.train(middle, Steps(16), {}).params, expected)


def test_workers_that_take_equal_steps_keep_to_one_rate_whatever_their_shards() -> None:
    shards = {0: torch.arange(4), 1: torch.arange(4, 40)}
    both = [learner(COSINE, rank=k, shard=shards[k], shards=shards) for k in shards]
    first, second = (rates(some, 40) for some in both)
    assert first == second == rates(learner(COSINE), 40)


def test_passes_over_the_own_shard_are_epochs_whatever_its_size() -> None:
    shards = {0: torch.arange(4), 1: torch.arange(4, 40)}
    schedule = StepDecay(milestones=(2, 3), decay=0.5)
    for rank, shard in shards.items():
        some = learner(schedule, rank=rank, shard=shard, shards=shards)
        found = []
        params = some.model.params.clone()
        for _ in range(5):
            params = some.train(params, Epochs(), {}).params
            found.append(some._optimizer.param_groups[0]["lr"])
        assert found == [0.5, 0.5, 0.25, 0.125, 0.125]


def test_a_task_hands_its_schedule_to_every_learner() -> None:
    task = Task(dataset=DATA, model=model, optimizer=SGD(lr=0.5), schedule=COSINE, batch_size=2)
    workload = Workload(task, range(3), seed=0)
    expected = [0.5 * COSINE.factor(2 * step / (64 / 3)) for step in range(10)]
    for rank in range(3):
        assert rates(workload.make_trainer(rank), 10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmUp(num_epochs=0), "num_epochs must be above 0 and finite, got 0"),
        (lambda: WarmUp(start=0), r"start must be in \(0, 1\], got 0"),
        (lambda: WarmUp(rise="lineal"), "did you mean 'linear'"),  # type: ignore[arg-type]
        (lambda: Cosine(num_epochs=math.inf), "num_epochs must be above 0 and finite"),
        (lambda: StepDecay(milestones=(3, 3)), "milestones must ascend"),
        (lambda: StepDecay(milestones=(0, 3)), "milestones must be above 0"),
        (lambda: StepDecay(milestones=(3,), decay=1.5), r"decay must be in \(0, 1\], got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
