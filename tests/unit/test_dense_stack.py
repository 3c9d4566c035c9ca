"""A stacked learner finds what a `Learner` finds, whatever its layers, loss and optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import dense_task, flat_data
from tests.small_tasks import regression
from torch import nn

from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.data.dataset import ArraySplit
from edgegossip.runs.experiment import why_not_batched
from edgegossip.training.learner import Learner
from edgegossip.training.loss import IGNORED
from edgegossip.training.metrics import R2
from edgegossip.training.optimizer import SGD, Cosine
from edgegossip.training.stacked import StackedLearner
from edgegossip.training.task import Workload

WEIGHT = torch.tensor([1.0, 2.0, 0.5])


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.05),
        SGD(lr=0.1, momentum=0.0),
        SGD(lr=0.05, weight_decay=0.1),
        SGD(lr=0.05, nesterov=True, weight_decay=0.01),
    ],
    ids=str,
)
def test_a_stacked_learner_finds_what_a_learner_finds(optimizer: SGD) -> None:
    schedule = Cosine()
    results = []
    for trainer in (Learner, StackedLearner):
        task = dense_task(optimizer=optimizer, schedule=schedule, trainer=trainer)
        workload = Workload(task, range(2), seed=0)
        learner, params = workload.make_trainer(0), workload.initial_params()
        for number in range(3):
            request = Train(params, Steps(3), rate_ratio=0.5 + number)
            result = learner.train(request, number / 3)
            params = result.params
        results.append(result)
    plain, ours = results
    torch.testing.assert_close(ours.params, plain.params, rtol=1e-4, atol=1e-6)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-4)
    assert (ours.num_samples, ours.num_steps) == (plain.num_samples, plain.num_steps)


MODELS = {
    "activations": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 7), nn.GELU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    ),
    "without bias": lambda: nn.Sequential(
        nn.Flatten(1, -1),
        nn.LayerNorm(36, bias=False),
        nn.Linear(36, 6, bias=False),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)),
    ),
    "flattening in two steps": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(6, 5), nn.Tanh(), nn.Flatten(-2, -1), nn.Linear(30, 3)
    ),
    "before flattening": lambda: nn.Sequential(
        nn.LayerNorm((6, 6), eps=0.1),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.LayerNorm(5),
        nn.Flatten(),
        nn.Linear(30, 3),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", [F.cross_entropy, partial(F.cross_entropy, weight=WEIGHT)])
def test_all_dense_layers_are_trained(name: str, loss: Any) -> None:  # noqa: ANN401
    plain = dense_task(model=MODELS[name], loss=loss)
    assert why_not_batched(plain) is None
    found = []
    for task in (plain, replace(plain, trainer=StackedLearner)):
        workload = Workload(task, range(2), seed=0)
        learner, params = workload.make_trainer(0), workload.initial_params()
        for _ in range(2):
            params = learner.train(Train(params, Steps(4))).params
        found.append(params)
    assert not torch.allclose(found[0], workload.initial_params(), atol=1e-3)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_dims", [1, 2], ids=["classes", "distributions"])
def test_targets_may_be_distributions(num_dims: int) -> None:
    dataset = flat_data(20)
    if num_dims == 2:
        one_hot = F.one_hot(dataset.train.labels, 3).float()
        split = ArraySplit(dataset.train.batch(torch.arange(20))[0], 0.8 * one_hot + 0.2 / 3)
        dataset = replace(dataset, train=split, test=split, num_classes=0)
    found = []
    for trainer in (Learner, StackedLearner):
        task = dense_task(dataset=dataset, trainer=trainer, metrics=(R2(),))
        workload = Workload(task, range(1), seed=0)
        found.append(workload.make_trainer(0).train(Train(workload.initial_params(), Steps(5))))
    torch.testing.assert_close(found[0].params, found[1].params, rtol=1e-4, atol=1e-6)
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)


def test_targets_that_do_not_count_change_nothing() -> None:
    dataset = flat_data(20)
    dataset.train.labels[::3] = IGNORED
    params = []
    for trainer in (Learner, StackedLearner):
        workload = Workload(dense_task(dataset=dataset, trainer=trainer), range(1), seed=0)
        learner = workload.make_trainer(0)
        params.append(learner.train(Train(workload.initial_params(), Steps(5))).params)
    torch.testing.assert_close(*params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_nesterov", [False, True])
def test_an_algorithm_may_ask_for_momentum(*, is_nesterov: bool) -> None:
    results = []
    for trainer in (Learner, StackedLearner):
        task = dense_task(trainer=trainer, optimizer=SGD(lr=0.05, nesterov=is_nesterov))
        workload = Workload(task, range(1), seed=0)
        learner, params = workload.make_trainer(0), workload.initial_params()
        for momentum in (0.5, 0.0, None):
            request = Train(params, Steps(2), momentum=momentum)
            params = learner.train(request).params
        results.append(params)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_regressions_train_together_as_they_do_alone() -> None:
    task = regression()
    assert why_not_batched(task) is None
    together = replace(task, trainer=StackedLearner)
    params = []
    for each in (task, together):
        workload = Workload(each, [0], seed=0)
        trainer = workload.make_trainer(0)
        params.append(trainer.train(Train(workload.initial_params(), Epochs())).params)
    torch.testing.assert_close(*params)
