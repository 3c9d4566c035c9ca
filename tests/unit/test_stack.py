"""Learners in a stack find what each finds alone, whatever the model, loss and optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import dense_task, flat_data
from tests.small_learners import OPTIMIZERS
from tests.small_tasks import regression
from tests.tiers import thorough
from torch import Tensor, nn
from torch.utils import _pytree

from edgegossip.contract.protocol import Epochs, Steps, Train, Work
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import gpt, lenet5, mlp, resnet20, sensor_cnn, vgg11
from edgegossip.models.mobile import Fire
from edgegossip.models.normalization import Normalization, normalization_2d
from edgegossip.runs.batching import try_together
from edgegossip.sim.pool import ComputePool
from edgegossip.training.learner import Learner
from edgegossip.training.loss import IGNORED, TokenCrossEntropy, next_token
from edgegossip.training.metrics import R2, BitsPerCharacter
from edgegossip.training.optimizer import SGD, Cosine
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import SELECTIONS
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Task, Workload

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
    assert try_together(plain).reason is None
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
    assert try_together(task).reason is None
    together = replace(task, trainer=StackedLearner)
    params = []
    for each in (task, together):
        workload = Workload(each, [0], seed=0)
        trainer = workload.make_trainer(0)
        params.append(trainer.train(Train(workload.initial_params(), Epochs())).params)
    torch.testing.assert_close(*params)


# In float64, so that only rounding differs.

PICTURES = (3, 8, 8)
NUM_CLASSES = 3


def double(x: Tensor, random: torch.Generator) -> Tensor:
    """Samples in float64, which no data set has; as an augmentation, which may do anything."""
    return x.double()


def flipped(x: Tensor, random: torch.Generator) -> Tensor:
    flipped: Tensor = flip_and_crop(x, random)
    return flipped.double()


def text() -> Dataset:
    random = torch.Generator().manual_seed(0)
    split = ArraySplit(torch.randint(16, (60, 9), generator=random))
    return Dataset("text", split, split, num_classes=0)


def normalized(kind: Normalization) -> nn.Module:
    """Layers that no other model here has: strides, groups, dilation, other pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        normalization_2d(kind, 8),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
        nn.ReLU6(inplace=True),
        nn.AvgPool2d(2),
        Fire(8, 4, 4),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(32, NUM_CLASSES),
    )


class Twice(nn.Module):
    """A layer used twice, a parameter of its own, a frozen one, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, 36)
        self.scale = nn.Parameter(torch.ones(36))
        self.frozen = nn.Parameter(torch.full((36,), 0.5), requires_grad=False)
        self.last = nn.Linear(36, NUM_CLASSES)
        self.last.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh() * self.scale + self.frozen
        outputs: Tensor = self.last(self.first(x).relu())
        return outputs


SMALL = (1, 6, 6)
FLOAT64: dict[str, dict[str, Any]] = {
    "mlp": {"model": partial(mlp, SMALL, NUM_CLASSES), "dataset": flat_data(60, SMALL)},
    "lenet5": {
        "model": partial(lenet5, (1, 28, 28), NUM_CLASSES),
        "dataset": flat_data(60, (1, 28, 28)),
    },
    "resnet20": {
        "model": partial(resnet20, PICTURES, NUM_CLASSES),
        "dataset": flat_data(60, PICTURES),
    },
    "vgg11": {
        "model": partial(vgg11, (3, 32, 32), NUM_CLASSES, width=0.125),
        "dataset": flat_data(60, (3, 32, 32)),
    },
    "gpt": {
        "model": partial(gpt, 16, 8, width=16, num_layers=2),
        "dataset": text(),
        "forward": next_token,
        "loss": TokenCrossEntropy(),
        "metrics": (BitsPerCharacter(),),
    },
    "sensor-cnn": {
        "model": partial(sensor_cnn, (3, 16), NUM_CLASSES),
        "dataset": flat_data(60, (3, 16)),
    },
    **{
        f"normalized by {kind}": {
            "model": partial(normalized, kind),
            "dataset": flat_data(60, PICTURES),
        }
        for kind in get_args(Normalization)
    },
    "statistics that stay": {
        "model": partial(normalized, "batch"),
        "dataset": flat_data(60, PICTURES),
        "has_buffers": False,
    },
    "twice": {"model": Twice, "dataset": flat_data(60, SMALL)},
}
CHANGES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "nesterov": {"optimizer": SGD(lr=0.05, nesterov=True, weight_decay=0.01)},
    "no momentum": {"optimizer": SGD(lr=0.05, momentum=0.0)},
    "clipped": {"step": TrainingStep(max_grad_norm=0.1)},
    **{
        name: {"optimizer": each}
        for name, each in OPTIMIZERS.items()
        if name not in ("own", "muon")  # which no stack supports
    },
    "augmented": {"augmentation": flipped},
}


def alone_and_together(
    task: Task, work: Work, num_requests: int = 2
) -> list[tuple[Tensor, Tensor]]:
    """Train three learners, of which one may have fewer samples, alone and together.

    Returns:
        Pairs of what was found alone and together: each learner's parameters and state.
    """
    found: list[list[Tensor]] = []
    for trainer in (Learner, StackedLearner):
        workload = Workload(replace(task, trainer=trainer), range(3), seed=0)
        learners = [workload.make_trainer(rank) for rank in range(3)]
        params = [workload.initial_params()] * 3
        for number in range(num_requests):
            with ComputePool(0) as pool:
                pending = [
                    pool.train(learner, Train(x, work, rate_ratio=1 + r / 9), number / 4)
                    for r, (learner, x) in enumerate(zip(learners, params, strict=True))
                ]
                params = [each.result().params for each in pending]
        states = [learner.state_dict() for learner in learners]
        found.append([*params, *(flat(state) for state in states)])
    moved = (found[0][0] - workload.initial_params()).abs().max()
    assert moved > 1e-3
    return [*zip(*found, strict=True)]


def assert_equal_alone_and_together(
    task: Task, work: Work, num_requests: int = 2, rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    for alone, together in alone_and_together(task, work, num_requests):
        torch.testing.assert_close(together, alone, rtol=rtol, atol=atol)


def flat(state: Mapping[str, Any]) -> Tensor:
    """The numbers of an optimizer's state and of buffers, as one vector."""
    kept = [state["optimizer"], state["buffers"], state["num_steps"]]
    numbers = [torch.as_tensor(each) for each in _pytree.tree_leaves(kept) if each is not None]
    return torch.cat([each.flatten().double() for each in numbers])


def float64_task(name: str, **changes: Any) -> Task:  # noqa: ANN401
    settings = FLOAT64[name]
    model = settings["model"]
    usual: dict[str, Any] = {
        "optimizer": SGD(lr=0.05),
        "batch_size": 4,
        "augmentation": None if name == "gpt" else double,
    }
    return Task(**usual | settings | changes | {"model": lambda: model().double()})


@thorough
@pytest.mark.parametrize("name", FLOAT64)
def test_each_finds_in_a_stack_what_it_finds_alone(name: str) -> None:
    assert_equal_alone_and_together(float64_task(name), Steps(10))


@thorough
@pytest.mark.parametrize("model", ["mlp", "normalized by batch"])
@pytest.mark.parametrize("change", CHANGES)
def test_so_it_is_with_every_setting(model: str, change: str) -> None:
    changes = CHANGES[change]
    assert_equal_alone_and_together(float64_task(model, **changes), Epochs(), 3)


def test_learners_with_other_numbers_of_steps_train_together() -> None:
    data = flat_data(47, SMALL)  # shards of 16, 16 and 15
    task = float64_task("mlp", dataset=data)
    assert_equal_alone_and_together(task, Epochs(0.9))


@thorough
@pytest.mark.parametrize("selection", ["focused", "importance", "ranked", "pruned"])
def test_selections_by_losses_see_what_they_see_alone(selection: str) -> None:
    aware = AccuracyAware(selection=SELECTIONS[selection])
    task = dense_task(dataset=flat_data(80), accuracy_aware=aware)
    assert_equal_alone_and_together(task, Epochs(), 2, rtol=1e-3, atol=1e-4)


@thorough
@pytest.mark.parametrize("model", ["mlp", "normalized by batch", "gpt"])
def test_mixed_precision_rounds_as_it_does_alone(model: str) -> None:
    task = float64_task(model, step=TrainingStep(autocast=torch.bfloat16), augmentation=None)
    make = task.model
    single = replace(task, model=lambda: make().float())  # type: ignore[operator]
    for alone, together in alone_and_together(single, Steps(4), 1):
        # A bfloat16 has a relative precision of 0.4 %.
        assert (together - alone).norm() < 0.02 * alone.norm()


GOLDEN = Path(__file__).parents[1] / "golden" / "stacks.json"


@thorough
def test_losses_are_the_ones_that_were_kept() -> None:
    found = {}
    for name in ("mlp", "lenet5", "resnet20", "vgg11", "gpt"):
        task = float64_task(name, trainer=StackedLearner)
        workload = Workload(task, range(3), seed=0)
        start = workload.initial_params()
        with ComputePool(0) as pool:
            pending = [
                pool.train(workload.make_trainer(rank), Train(start, Steps(20)), 0.0)
                for rank in range(3)
            ]
            results = [each.result() for each in pending]
        found[name] = [[each.loss, float(each.params.norm())] for each in results]
    if "EDGEGOSSIP_REFRESH_GOLDEN" in os.environ:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    kept = json.loads(GOLDEN.read_text())
    assert [*found] == [*kept]
    for name, expected in kept.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(expected), rtol=1e-6, atol=1e-9
        )
