"""A task made ready for workers: their models, shards and trainers."""

from __future__ import annotations

import pytest
import torch
from tests.small_learners import amsgrad
from tests.small_runs import SHAPE, small_model, small_task
from torch import Tensor, nn

from edgegossip.core.errors import LocalProtocolError
from edgegossip.core.protocol import Epochs, Steps, Train
from edgegossip.learning.dataset import ArraySplit, Dataset
from edgegossip.learning.learner import Learner
from edgegossip.learning.task import Task, Workload


def started(workload: Workload, rank: int, incarnation: int = 0) -> Tensor:
    trainer = workload.make_trainer(rank, incarnation)
    assert isinstance(trainer, Learner)
    return trainer.model.params


def initialized(module: nn.Module) -> nn.Module:
    module(torch.zeros(2, *SHAPE))  # gives lazy layers their size
    return module


def test_workers_start_from_one_model_that_follows_the_seed() -> None:
    one, same, other = (Workload(small_task(), range(3), seed) for seed in (1, 1, 2))
    assert torch.equal(one.initial_params(), same.initial_params())
    assert not torch.equal(one.initial_params(), other.initial_params())
    for rank in range(3):
        assert torch.equal(started(one, rank), one.initial_params())


def test_making_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Workload(small_task(), range(2), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_ranks_with_data_have_a_trainer() -> None:
    workload = Workload(small_task(), [1, 3], seed=0)
    assert set(workload.shards) == {1, 3}
    assert sum(map(len, workload.shards.values())) == 64
    without_data = workload.make_trainer(0)
    with pytest.raises(LocalProtocolError, match="worker 0 asked to Train, but it has no data"):
        without_data.train(Train(workload.initial_params(), Steps(1)))


def test_a_trainer_keeps_nothing_of_the_one_before_it() -> None:
    workload = Workload(small_task(), range(2), seed=0)
    first = workload.make_trainer(0)
    first.train(Train(workload.initial_params(), Steps(3)))
    first.rest()
    assert torch.equal(started(workload, 0, incarnation=1), workload.initial_params())


def test_learners_that_share_a_model_train_as_if_each_had_its_own() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.LazyLinear(3),
        )

    task = small_task(
        model=lambda: initialized(make()), optimizer=amsgrad, has_buffers=False, batch_size=4
    )

    def results(*, do_share: bool) -> list[Tensor]:
        workload = Workload(task, range(3), seed=0)
        learners = [workload.make_trainer(rank) for rank in range(3)]
        params = [workload.initial_params()] * 3
        for _ in range(3):
            for rank, each in enumerate(learners):
                params[rank] = each.train(Train(params[rank], Steps(2))).params
                if do_share:
                    each.rest()
        return [*params, *(each.state_dict()["buffers"]["1.running_mean"] for each in learners)]

    for ours, theirs in zip(results(do_share=True), results(do_share=False), strict=True):
        assert torch.equal(ours, theirs)


def test_a_resting_learner_lends_its_model() -> None:
    workload = Workload(small_task(), range(2), seed=0)
    one, other = (workload.make_trainer(rank) for rank in range(2))
    assert isinstance(one, Learner)
    assert isinstance(other, Learner)
    model = one.model
    one.rest()
    assert other.model is model
    assert one.model is not model


def test_pictures_of_one_color_only_are_still_data() -> None:
    split = ArraySplit(torch.zeros(4, 1, 6, 6, dtype=torch.uint8), torch.zeros(4).long())
    plain = Dataset("plain", split, split, num_classes=3, input_shape=SHAPE)
    task = Task(dataset=plain, model=small_model, batch_size=4)
    workload = Workload(task, [0], seed=0)
    request = Train(workload.initial_params(), Epochs())
    assert workload.make_trainer(0).train(request).num_steps == 1


# What is refused.


@pytest.mark.parametrize("torch_device", ["gpu", "cuda:99", "nonsense:0"])
def test_a_device_that_is_not_there_is_refused_at_once(torch_device: str) -> None:
    with pytest.raises(ValueError, match=f"torch_device '{torch_device}' cannot be used"):
        small_task(torch_device=torch_device)


def test_a_batch_size_below_one_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        small_task(batch_size=0)
