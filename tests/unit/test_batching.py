"""Learners that train together: what each finds is what it finds alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import dense, dense_task, flat_data, stacked
from tests.small_learners import Slowing
from tests.small_runs import FAULTS, adam, small_model
from tests.tiers import thorough
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.cli import commands
from edgegossip.cli.main import main
from edgegossip.contract.errors import TrainingError, UsageError
from edgegossip.contract.protocol import Epochs, Steps, Train, Work
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import Prepared, TrainingResult
from edgegossip.data.dataset import ArraySplit, Dataset, TorchSplit, WorkerData
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import resnet20
from edgegossip.runs.batching import Batched, batched, try_together
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import uneven
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.learner import Learner
from edgegossip.training.metrics import R2
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.stacked.learner import MOST_TOGETHER, StackedLearner
from edgegossip.training.stacked.stack import Stack
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Task, Workload


def elementwise(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params)


elementwise.is_elementwise = True  # type: ignore[attr-defined]


def prepared(
    workload: Workload, rank: int, work: Work, params: Tensor | None = None
) -> Prepared:
    start = workload.initial_params() if params is None else params
    found = workload.make_trainer(rank).prepare(Train(start, work), 0.0)
    assert found is not None
    return found


def outcomes(first: Prepared, *others: Prepared) -> list[Any]:
    return list(first.train_with(others))


def filtered() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8))


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3, 4]], [[0, 3], [4, 1, 2]], [[0], [1, 4], [2, 3]]]
)
@pytest.mark.parametrize("changes", [{}, {"model": filtered, "augmentation": flip_and_crop}])
def test_who_trains_together_changes_nothing(
    groups: list[list[int]], changes: dict[str, Any]
) -> None:
    task = stacked(dataset=flat_data(80), **changes)

    def trained(groups: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        workload = Workload(task, range(5), seed=0)
        learners = [workload.make_trainer(rank) for rank in range(5)]
        params = dict.fromkeys(range(5), workload.initial_params())
        for _ in range(2):
            for group in groups:
                work = [
                    learners[r].prepare(Train(params[r], Steps(3), rate_ratio=1 + r / 9), 0.0)
                    for r in group
                ]
                first, *others = work
                assert first is not None
                for rank, outcome in zip(group, first.train_with(others), strict=True):
                    assert isinstance(outcome, TrainingResult)
                    params[rank] = outcome.params
        return params

    alone = trained([[rank] for rank in range(5)])
    together = trained(groups)
    assert all(torch.equal(alone[rank], together[rank]) for rank in range(5))


def test_learners_of_other_models_or_momentum_do_not_train_together() -> None:
    workload = Workload(stacked(), range(2), seed=0)
    two = prepared(workload, 0, Steps(2))
    assert two.key == prepared(workload, 1, Steps(3)).key
    request = Train(workload.initial_params(), Steps(2), momentum=0.5)
    with_other_momentum = workload.make_trainer(0).prepare(request, 0.0)
    assert with_other_momentum is not None
    assert two.key != with_other_momentum.key
    other = Workload(stacked(), range(2), seed=0)
    assert two.key != prepared(other, 0, Steps(2)).key


@pytest.mark.parametrize("optimizer", [Slowing, elementwise])
def test_optimizers_whose_state_is_unknown_are_refused(optimizer: Any) -> None:  # noqa: ANN401
    workload = Workload(stacked(optimizer=optimizer), range(1), seed=0)
    with pytest.raises(ValueError, match=r"StackedLearner supports .* train with a Learner"):
        workload.make_trainer(0)


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="PyTorch before 2.5")
def test_optimizers_that_pytorch_names_otherwise_are_its_own() -> None:
    def adafactor(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params)

    assert try_together(dense_task(optimizer=adafactor)).reason is None


def test_learners_of_different_data_do_not_train_together() -> None:
    found = []
    workload = Workload(stacked(), range(2), seed=0)
    for dataset in (flat_data(20), flat_data(20)):
        data = WorkerData(dataset=dataset.training, shard=torch.arange(20))
        copies = workload._copies("")
        learner = StackedLearner(workload._settings[""], data, copies=copies)
        work = learner.prepare(Train(workload.initial_params(), Steps(1)), 0.0)
        found.append((learner, work.key))
    (_, first), (_, second) = found
    assert first != second


def test_one_that_fails_leaves_the_others_alone() -> None:
    workload = Workload(stacked(), range(3), seed=0)
    bad = torch.full_like(workload.initial_params(), math.nan)
    work = [prepared(workload, rank, Steps(2), bad if rank == 1 else None) for rank in range(3)]
    first, failed, last = outcomes(*work)
    assert isinstance(failed, TrainingError)
    assert "worker 1 became nan" in str(failed)
    alone = Workload(stacked(), range(3), seed=0)
    for rank, outcome in ((0, first), (2, last)):
        assert torch.equal(outcome.params, outcomes(prepared(alone, rank, Steps(2)))[0].params)


@pytest.mark.parametrize(
    ("number", "size"), [(7, 7), (15, 15), (17, 9), (33, 17), (65, 22), (1, 1)]
)
def test_groups_keep_two_cores_busy_and_fit_into_a_cache(number: int, size: int) -> None:
    workload = Workload(stacked(), range(1), seed=0)
    assert prepared(workload, 0, Steps(1)).size_of_groups(number) == size


@pytest.mark.parametrize("most", [1, 2])
def test_work_that_does_not_fit_into_memory_is_done_in_parts(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    task = stacked(accuracy_aware=AccuracyAware(), augmentation=flip_and_crop)

    step = Stack.step
    sizes = []

    def limited(stack: Stack, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        sizes.append(stack.num_models)
        if stack.num_models > most and len(sizes) > 2:  # in the middle of a pass
            raise torch.OutOfMemoryError("no room")
        return step(stack, *arguments, **options)

    monkeypatch.setattr(StackedLearner, "may_lack_memory", property(lambda learner: True))
    expected = [each.params for each in outcomes(*_work(task))]
    monkeypatch.setattr(Stack, "step", limited)
    work = _work(task)
    found = [each.params for each in outcomes(*work)]
    assert sizes[:3] == [4, 4, 4]
    assert work[0].size_of_groups(4) == most
    torch.testing.assert_close(found, expected)


def _work(task: Task) -> list[Prepared]:
    workload = Workload(task, range(4), seed=0)
    return [prepared(workload, rank, Epochs()) for rank in range(4)]


# In a run.


def many(num_workers: int = MOST_TOGETHER + 3, **changes: Any) -> Experiment:  # noqa: ANN401
    algorithm = GoSGD(
        topology=complete(num_workers), num_rounds=4, exchange_probability=0.5, local_steps=2
    )
    return Experiment(
        task=stacked(dataset=flat_data(4 * num_workers), **changes),
        algorithm=algorithm,
        platforms=uneven(num_workers),
        faults=FAULTS,
    )


def final(experiment: Experiment, num_threads: int, *, do_pause: bool = False) -> Tensor:
    workload = experiment.workload()

    def simulator(pool: ComputePool) -> Simulator[Any]:
        return Simulator(
            experiment.algorithm,
            experiment.platforms,
            workload.initial_params,
            workload.make_trainer,
            faults=experiment.faults,
            pool=pool,
        )

    with ComputePool(num_threads) as pool:
        sim = simulator(pool)
        if do_pause:
            sim.run(until=0.05)
            kept, sim = sim.state_dict(), simulator(pool)
            sim.load_state_dict(kept)
        sim.run()
        return workload.average(sim.estimates())[0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_threads_change_no_bit_of_batches_that_are_not_aligned(batch_size: int) -> None:
    experiment = many(optimizer=SGD(lr=0.05), batch_size=batch_size)
    expected = final(experiment, 0)
    assert all(torch.equal(final(experiment, number), expected) for number in (2, 3))


@thorough
def test_threads_and_checkpoints_change_no_bit() -> None:
    experiment = many()
    expected = final(experiment, 0)
    assert torch.equal(final(experiment, 2), expected)
    assert torch.equal(final(experiment, 0, do_pause=True), expected)


def test_passes_that_end_with_smaller_batches_are_trained_too() -> None:
    task = replace(stacked(dataset=flat_data(39)), batch_size=4)
    workload = Workload(task, range(4), seed=0)  # three have ten samples, one has nine
    with ComputePool(0) as pool:
        trainers = [workload.make_trainer(rank) for rank in range(4)]
        request = Train(workload.initial_params(), Epochs())
        results = [pool.train(each, request, 0.0) for each in trainers]
        assert [each.result().num_samples for each in results] == [10, 10, 10, 9]


def test_a_failure_reaches_the_one_who_asks() -> None:
    workload = Workload(stacked(), range(2), seed=0)
    start = workload.initial_params()
    bad = torch.full_like(start, math.inf)
    with ComputePool(1) as pool:
        good, failing = (
            pool.train(workload.make_trainer(rank), Train(params, Steps(1)), 0.0)
            for rank, params in enumerate((start, bad))
        )
        with pytest.raises(TrainingError, match="worker 1"):
            failing.result()
        assert good.result().num_steps == 1


# The choice.


class Deciding(nn.Module):
    """A model whose computation depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.dense(x)
        return outputs if outputs.sum() > 0 else -outputs


class Mixing(nn.Module):
    """A model that draws from PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.dense(x))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"loss": partial(F.cross_entropy, label_smoothing=0.1)}, None),
        ({"model": small_model}, None),
        ({"optimizer": adam}, None),
        ({"augmentation": flip_and_crop, "accuracy_aware": AccuracyAware()}, None),
        ({"trainer": StackedLearner}, "of its own"),
        ({"step": TrainingStep(micro_batch_size=2)}, "micro-batches"),
        ({"optimizer": Slowing}, "PyTorch's own"),
        ({"optimizer": elementwise}, "one vector"),
        ({"model": Deciding}, r"torch.vmap cannot run the model"),
        ({"model": Mixing}, r"torch.vmap cannot run the model"),
    ],
)
def test_what_cannot_be_stacked_is_told(changes: dict[str, Any], reason: str | None) -> None:
    found = try_together(dense_task(**changes)).reason
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"collate": lambda samples: default_collate(samples)}, "collate"), ({}, None)],
)
def test_batches_that_are_collated_in_ones_own_way_stay_apart(
    options: dict[str, Any], reason: str | None
) -> None:
    x, y = flat_data(20).train.batch(torch.arange(20))
    split = TorchSplit(TensorDataset(x, y), **options)
    dataset = Dataset("own", split, split, num_classes=0)
    found = try_together(dense_task(dataset=dataset, metrics=(R2(),))).reason
    assert found is None if reason is None else found is not None and reason in found


def test_batches_that_are_read_ahead_stay_apart() -> None:
    x, y = flat_data(20).train.batch(torch.arange(20))
    split = ArraySplit(x, y, num_workers=1)
    dataset = replace(flat_data(20), train=split, test=split)
    assert "read ahead" in str(try_together(dense_task(dataset=dataset)).reason)


def diverging(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * math.inf


def test_a_trial_that_fails_leaves_learners_apart() -> None:
    plain = replace(many(64), task=dense_task(loss=diverging))
    assert batched(plain) is plain
    with pytest.raises(UsageError, match="cannot take its first steps"):
        batched(plain, "on")


def test_a_trial_leaves_no_trace() -> None:
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    try_together(dense_task(model=Mixing))  # without a warning, which would be an error here
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == num_threads


class Together(Protocol):
    batch_size: int


class RoundedByNumber(torch.autograd.Function):
    """Returns its input, with last bits that depend on the number of models together.

    Matrix products do so on some CPUs, on others not.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Together, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return x * (1 + info.batch_size * 2**-20), in_dims[0]


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found = RoundedByNumber.apply(super().forward(x.flatten(1)))  # type: ignore[no-untyped-call]
        assert isinstance(found, Tensor)
        return found


def test_last_bits_that_depend_on_others_are_noticed() -> None:
    task = dense_task(model=partial(Rounded, 36, 3))
    assert try_together(task).depends_on_others
    some = replace(many(64), task=task)
    assert batched(some).task.trainer is Learner
    assert batched(some, "on").task.trainer is StackedLearner


def test_large_convolutions_are_trained_apart() -> None:
    large = partial(resnet20, (3, 32, 32), 3)
    dataset = flat_data(60, (3, 32, 32))
    some = replace(many(64), task=dense_task(model=large, dataset=dataset, batch_size=16))
    assert batched(some).task.trainer is Learner


@pytest.mark.parametrize(
    ("choice", "num_workers", "trainer"),
    [
        ("auto", 64, StackedLearner),
        ("auto", 63, Learner),
        ("on", 5, StackedLearner),
        ("off", 64, Learner),
    ],
)
def test_many_dense_models_are_batched(
    choice: Batched, num_workers: int, trainer: object
) -> None:
    plain = replace(many(num_workers), task=dense_task())
    assert batched(plain, choice).task.trainer is trainer


def test_what_is_wanted_and_cannot_be_is_an_error() -> None:
    experiment = replace(many(64), task=dense_task(model=Deciding))
    assert batched(experiment) is experiment
    with pytest.raises(UsageError, match=r"vmap.*--batched on"):
        batched(experiment, "on")


@thorough
def test_the_command_says_in_the_folder_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "write_report", lambda folder: folder / "report.html")
    words = ["run", "quickstart", "--only", "gosgd", "--num-epochs", "1", "--threads", "0"]
    for choice, trainer in (("on", "StackedLearner"), ("auto", "Learner")):
        out = tmp_path / choice
        assert main([*words, "--batched", choice, "--out", str(out)]) == 0
        kept = json.loads((out / "experiment.json").read_text())
        assert kept["task"]["trainer"] == trainer
    assert main([*words, "--batched", "off", "--out", str(tmp_path / "on"), "--resume"]) == 1
