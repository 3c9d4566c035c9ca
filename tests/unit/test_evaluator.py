"""Loss and accuracy by hand, and statistics measured anew where they do not travel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.small_runs import SHAPE, dataset, small_model, small_task
from torch import nn

from edgegossip.contract.protocol import Epochs, Train
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models.dropout import Dropout
from edgegossip.models.flat import FlatModel
from edgegossip.training.evaluator import Evaluator
from edgegossip.training.task import Workload

DATA = dataset()


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 3))


def points(labels: list[int]) -> Dataset:
    x = F.one_hot(torch.tensor(labels) % 2, 2).float()
    split = ArraySplit(x, torch.tensor(labels))
    return Dataset("points", split, split, num_classes=3, input_shape=(2,))


def evaluator(model: nn.Module, data: Dataset, **settings: object) -> Evaluator:
    return Evaluator(model=model, loss=F.cross_entropy, dataset=data, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 500])
def test_loss_and_accuracy_are_means_over_samples_whatever_the_batch(batch_size: int) -> None:
    # Sample 0 is (1, 0), sample 1 is (0, 1); the outputs are the columns.
    weight = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
    params = torch.cat([weight.flatten(), torch.zeros(3)])
    some = evaluator(linear(), points([0, 1, 0, 1, 2]), batch_size=batch_size)
    loss, metrics = some.evaluate(params)
    assert metrics == {"accuracy": 4 / 5}
    right = float(torch.tensor([9.0, 0.0, 0.0]).logsumexp(0)) - 9
    assert loss == pytest.approx((4 * right + right + 9) / 5, rel=1e-6)


def test_the_validation_split_is_measured_where_it_is_asked_for() -> None:
    params = torch.cat([torch.tensor([9.0, 0, 0, 9, 0, 0]), torch.zeros(3)])
    right, wrong = points([0, 1]), points([1, 0, 1, 0])
    x = 1 - wrong.test.batch(torch.arange(4))[0]
    data = replace(right, validation=ArraySplit(x, wrong.test.labels))
    assert evaluator(linear(), data).evaluate(params)[1] == {"accuracy": 1.0}
    other = evaluator(linear(), data, split="validation")
    assert other.evaluate(params)[1] == {"accuracy": 0.0}


def test_a_validation_split_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="'points' has no validation split; use hold_out"):
        evaluator(linear(), points([0, 1]), split="validation")


def test_an_evaluation_costs_a_third_of_training_on_what_goes_through_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
    assert evaluator(model, DATA).cost == 24 / 3
    assert evaluator(model, DATA, has_buffers=False).cost == (24 + 64) / 3


def test_evaluating_leaves_no_trace() -> None:
    workload = Workload(small_task(), [0], seed=0)
    first = workload.evaluate(workload.initial_params())
    workload.evaluate(torch.zeros_like(workload.initial_params()))
    assert workload.evaluate(workload.initial_params()) == first


def test_evaluations_at_once_do_not_disturb_each_other() -> None:
    workload = Workload(small_task(has_buffers=False), [0], seed=0)
    candidates = [workload.initial_params() * factor for factor in (0.5, 1.0, 2.0, 3.0)]
    expected = [workload.evaluate(params) for params in candidates]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(workload.evaluate, candidates * 5)) == expected * 5


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Dropout(0.5)], ids=["torch's", "ours"])
@pytest.mark.parametrize("has_buffers", [True, False])
def test_dropout_never_acts_on_an_evaluation(layer: nn.Module, has_buffers: bool) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))
    some = evaluator(model, DATA, has_buffers=has_buffers)
    params = FlatModel(model, has_buffers=has_buffers).params.clone()
    before = torch.get_rng_state()
    assert some.evaluate(params) == some.evaluate(params)
    assert torch.equal(torch.get_rng_state(), before)


def test_statistics_that_do_not_travel_are_those_of_the_training_data() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
    some = evaluator(model, DATA, has_buffers=False, batch_size=16)
    params = FlatModel(model, has_buffers=False).params.clone()
    found = some.named_parameters(params)
    x = DATA.prepare(DATA.train.batch(torch.arange(64))[0])
    assert float(found["0.running_mean"]) == pytest.approx(float(x.mean()), abs=1e-4)
    assert float(found["0.running_var"]) == pytest.approx(float(x.var()), rel=0.05)


class FrozenNorm(nn.BatchNorm1d):
    """Keeps pretrained statistics, in training, too."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


def test_statistics_of_frozen_layers_are_not_measured_again() -> None:
    model = nn.Sequential(nn.Flatten(), FrozenNorm(36), nn.Linear(36, 3), nn.BatchNorm1d(3))
    model[1].get_buffer("running_mean").fill_(3.0)
    some = evaluator(model, DATA, has_buffers=False)
    found = some.named_parameters(FlatModel(model, has_buffers=False).params.clone())
    assert found["1.running_mean"].tolist() == [3.0] * 36
    assert found["3.running_mean"].tolist() != [0.0] * 3


def test_no_batch_of_one_is_left_over_to_measure_statistics_on() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))
    some = evaluator(model, DATA, has_buffers=False, batch_size=63)  # 64 = 63 + 1
    some.evaluate(FlatModel(model, has_buffers=False).params.clone())


def test_recalibration_ignores_what_the_model_had_measured() -> None:
    model = small_model()
    flat = FlatModel(model, has_buffers=False)
    found = []
    for value in (0.0, 100.0):
        model[1].running_mean.fill_(value)  # type: ignore[index]
        found.append(evaluator(model, DATA, has_buffers=False).evaluate(flat.params))
    assert found[0] == found[1]


@pytest.mark.parametrize("has_buffers", [True, False])
def test_the_tensors_to_deploy_score_what_was_measured(has_buffers: bool) -> None:
    workload = Workload(small_task(has_buffers=has_buffers), [0], seed=0)
    params = workload.initial_params()
    for _ in range(5):
        params = workload.make_trainer(0).train(Train(params, Epochs())).params
    accuracy = workload.evaluate(params)[1]["accuracy"]
    deployed = small_model()
    deployed.load_state_dict(workload.named_parameters(params))
    x, y = DATA.test.batch(torch.arange(24))
    outputs = deployed.eval()(DATA.prepare(x))
    assert float((outputs.argmax(1) == y).float().mean()) == pytest.approx(accuracy)
    assert accuracy > 0.5


def test_deployed_tensors_are_copies() -> None:
    workload = Workload(small_task(), [0], seed=0)
    tensors = workload.named_parameters(workload.initial_params())
    for tensor in tensors.values():
        tensor.zero_()
    again = workload.named_parameters(workload.initial_params())
    assert bool(again["0.weight"].any())
    assert again["0.weight"].shape == (4, *SHAPE[:1], 3, 3)
