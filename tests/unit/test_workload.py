"""A task made ready for workers: their models, shards and trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.small_learners import amsgrad
from tests.small_runs import SHAPE, small_model, small_task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.training.learner import Learner
from edgegossip.training.metrics import Accuracy
from edgegossip.training.optimizer import Cosine
from edgegossip.training.sampling.selection import Focused
from edgegossip.training.task import Task, Workload


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


@pytest.mark.parametrize("torch_device", ["gpu", "cuda:99", "hpu:9", "nonsense:0"])
def test_a_device_that_is_not_there_is_refused_at_once(torch_device: str) -> None:
    with pytest.raises(ValueError, match=f"torch_device '{torch_device}' cannot be used"):
        small_task(torch_device=torch_device)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_a_device_is_refused_without_the_list_of_all_of_pytorch() -> None:
    with pytest.raises(ValueError, match="torch_device 'mps' cannot be used") as raised:
        small_task(torch_device="mps")
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"model": nn.Linear(2, 1)}, "got an instance of Linear; give e.g. model=lambda: MyMo"),
        ({"model": {"stage 0": nn.Linear(2, 1)}}, "model must be a function that makes the"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
            "optimizer must be a function that makes the optimizer, got an instance of SGD",
        ),
        ({"dataset": TensorDataset(torch.ones(2))}, "dataset must be an instance of Dataset"),
        ({"schedule": abs}, r"schedule must be an instance of Schedule, such as Cosine\(\)"),
        ({"schedule": Cosine}, "such as .*, got the class Cosine"),
        ({"accuracy_aware": Focused()}, r"such as AccuracyAware\(selection=Focused\(\)\)"),
        (
            {"metrics": Accuracy()},
            r"metrics must be an instance of Sequence, such as \(R2\(\),",
        ),
        ({"metrics": (abs,)}, "a metric must be an instance of Metric, such as MeanMetric"),
    ],
)
def test_arguments_of_another_kind_are_refused_at_once(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small_task(**changes)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([[0]], "partition made 1 shards for 2 workers; return one for each worker"),
        ([[0], [64]], r"gave worker 1 .* indices of training samples, int64 \[n\] in 0 .. 63"),
        ([[0], [-1]], "partition gave worker 1 "),
        ([[0.0], [1]], "partition gave worker 0 "),
        ([[True], [1]], "partition gave worker 0 "),
        ([[[0]], [1]], "partition gave worker 0 "),
    ],
)
def test_shards_of_other_workers_or_samples_are_refused(
    shards: list[Any], message: str
) -> None:
    task = small_task(partition=lambda dataset, n, seed: [*map(torch.tensor, shards)])
    with pytest.raises(ValueError, match=message):
        Workload(task, range(2), seed=0)


def test_a_worker_may_have_no_samples_by_an_own_partition() -> None:
    halves = (torch.arange(n) for n in (64, 0))
    task = small_task(partition=lambda dataset, n, seed: halves)
    assert [len(shard) for shard in Workload(task, range(2), seed=0).shards.values()] == [64, 0]
