"""One worker's training is what plain PyTorch does, repeats, and resumes to the last bit."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_learners import (
    DATA,
    OPTIMIZERS,
    SHARD,
    Optimizer,
    learner,
    seeded,
    start,
    taken,
)
from tests.small_runs import SHAPE, adam
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Epochs, Layout, Steps, Train
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models.flat import FlatModel
from edgegossip.sim.pool import ComputePool
from edgegossip.training import copies as model_copies
from edgegossip.training.optimizer import SGD, Muon
from edgegossip.training.quadratic import QuadraticTrainer
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Random


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_what_plain_pytorch_does(optimizer: Optimizer) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(3)
        )

    model = seeded(make)
    model(torch.zeros(2, *SHAPE))  # gives the lazy layer its size
    # No bias before batch norm: its gradient is rounding noise, which Adam blows up.
    some = learner(model=model, optimizer=optimizer, augmentation=None)
    result = some.train(Train(start(some), Steps(6)))

    plain = copy.deepcopy(model).train()
    theirs = optimizer(plain.parameters())
    losses = []
    sampler = AccuracyAwareSampler(
        num_samples=len(SHARD), batch_size=8, selection=Random(), key=(0, 0, 0)
    )
    for batch in taken(BatchStream(sampler), Steps(6)):
        x, y = DATA.train.batch(SHARD[batch.positions])
        theirs.zero_grad()
        loss = F.cross_entropy(plain(DATA.prepare(x)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        theirs.step()
        losses.append(float(loss.detach()))
    assert result.loss == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert (result.num_steps, result.num_samples) == (6, 48)
    # Muon finds its direction in bfloat16, which makes 1/256 of the last bit of a gradient.
    atol = 1e-3 if isinstance(optimizer, Muon) else 1e-4
    expected = plain.state_dict()
    for name, tensor in some.model.module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=atol)


@pytest.mark.parametrize(
    ("asked", "as_if"),
    [
        ({"rate_ratio": 2.0}, SGD(lr=0.1, momentum=0.9)),
        ({"momentum": 0.0}, SGD(lr=0.05, momentum=0.0)),
        ({"momentum": 0.5, "rate_ratio": 0.5}, SGD(lr=0.025, momentum=0.5)),
    ],
    ids=str,
)
def test_rate_and_momentum_are_those_asked_for_and_the_own_ones_afterwards(
    asked: dict[str, Any], as_if: SGD
) -> None:
    some, other = learner(optimizer=SGD(lr=0.05, momentum=0.9)), learner(optimizer=as_if)
    begin = start(some)
    trained = some.train(Train(begin, Steps(4), **asked)).params
    assert torch.equal(trained, other.train(Train(begin, Steps(4))).params)
    some.start_over()
    third = learner(optimizer=SGD(lr=0.05, momentum=0.9))
    third.train(Train(begin, Steps(4)))
    third.start_over()
    ours, plain = (each.train(Train(begin, Steps(4))).params for each in (some, third))
    assert torch.equal(ours, plain)


def test_an_optimizer_without_momentum_cannot_be_asked_for_one() -> None:
    some = learner()
    with pytest.raises(LocalProtocolError, match="Adam has no such setting; use SGD"):
        some.train(Train(start(some), Steps(1), momentum=0.5))


@pytest.mark.parametrize(
    "wrong", [{"rate_ratio": 0.0}, {"momentum": 1.0}, {"batch_ratio": -1}, {"keep_ratio": 1.5}]
)
def test_what_no_training_can_have_cannot_be_asked_for(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Train(torch.zeros(1), Steps(1), **wrong)


def test_what_was_handed_over_is_not_written_to() -> None:
    some = learner()
    params = start(some)
    before = params.clone()
    first = some.train(Train(params, Steps(2)))
    kept = first.params.clone()
    some.train(Train(first.params, Steps(2)))
    assert torch.equal(params, before)
    assert torch.equal(first.params, kept)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("has_buffers", [True, False])
def test_a_restored_learner_goes_on_to_the_last_bit(
    optimizer: Optimizer, has_buffers: bool
) -> None:
    original = learner(optimizer=optimizer, has_buffers=has_buffers)
    other = learner(optimizer=optimizer, has_buffers=has_buffers)
    middle = original.train(Train(start(original), Steps(3)))
    other.load_state_dict(assemble(*dismantle(original.state_dict())))
    for work in (Steps(5), Epochs(), Steps(3)):
        results = [one.train(Train(middle.params, work)) for one in (original, other)]
        assert torch.equal(results[0].params, results[1].params)
        assert results[0].loss == results[1].loss


class Warming(nn.Linear):
    """A user's own layer that counts its steps, and goes by the count."""

    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__(36, 3)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += self.training
        warmth: float = 1 - 0.5 ** float(self.num_seen)
        return super().forward(x.flatten(1)) * warmth


def test_a_restored_learner_goes_on_from_what_its_layers_counted() -> None:
    original, other = learner(model=seeded(Warming)), learner(model=seeded(Warming))
    middle = original.train(Train(start(original), Steps(2))).params
    other.load_state_dict(assemble(*dismantle(original.state_dict())))
    results = [one.train(Train(middle, Steps(1))).params for one in (original, other)]
    assert torch.equal(*results)


def test_it_says_which_entries_are_trained_and_which_are_statistics() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(SHAPE), 3), nn.BatchNorm1d(3))

    some = learner(model=seeded(make))
    result = some.train(Train(start(some), Steps(1)))
    assert some.layout == Layout(num_trained=len(result.params) - 2 * 3)


@thorough
def test_learners_in_threads_give_the_bits_of_learners_one_after_the_other() -> None:
    def train_all(num_threads: int) -> list[Tensor]:
        learners = [learner(rank=rank) for rank in range(4)]
        with ComputePool(num_threads) as pool:
            pending = [
                pool.submit(partial(one.train, Train(start(one), Steps(10))))
                for one in learners
            ]
            return [one.result().params for one in pending]

    one_by_one = train_all(0)
    for _ in range(3):
        assert all(map(torch.equal, train_all(4), one_by_one))


def test_the_global_generator_is_neither_read_nor_written() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        some = learner()
        found.append(some.train(Train(start(some), Steps(3))).params)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("key", [{"seed": 1}, {"rank": 1}, {"incarnation": 1}], ids=str)
def test_another_key_is_another_course(key: dict[str, int]) -> None:
    some, other = learner(), learner(**key)
    one = some.train(Train(start(some), Steps(2))).params
    assert not torch.equal(one, other.train(Train(start(some), Steps(2))).params)


def test_cost_is_the_number_of_samples_that_will_be_taken() -> None:
    some = learner()
    for work in (Steps(3), Epochs(), Epochs(0.3)):
        request = Train(start(some), work)
        cost = some.cost(request)
        assert some.train(request).num_samples == cost
    assert some.num_samples == 32


def test_frozen_parameters_are_left_alone() -> None:
    model = seeded()
    frozen = model[0].weight.requires_grad_(False)  # type: ignore[index]
    for optimizer in (SGD(lr=0.1, weight_decay=0.1), adam):
        some = learner(model=model, optimizer=optimizer)
        some.train(Train(start(some), Steps(3)))
        assert torch.equal(some.model.module[0].weight, frozen)  # type: ignore[index]


class TwoOutputs(nn.Module):
    """A user's own model: outputs of its own, dropout by layer, no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x.flatten(1)))
        return self.head(self.dropout(hidden)), hidden


def test_a_users_model_and_loss_are_trained() -> None:
    def loss(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        logits, hidden = outputs
        return F.cross_entropy(logits, y) + 0.001 * hidden.square().mean()

    some = learner(model=seeded(TwoOutputs), loss=loss, augmentation=None)
    params = start(some)
    losses = []
    for _ in range(8):
        result = some.train(Train(params, Epochs()))
        params = result.params
        losses.append(result.loss)
    assert losses[-1] < 0.7 * losses[0]


# What goes wrong.


def test_a_loss_that_is_not_finite_names_the_worker_and_the_step() -> None:
    calls = iter([1.0, 1.0, 1.0, 1.0, float("nan"), 1.0])

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * next(calls)

    some = learner(loss=loss, rank=3)
    params = some.train(Train(start(some), Steps(2))).params
    with pytest.raises(TrainingError, match=r"loss of worker 3 became nan in its step 5"):
        some.train(Train(params, Steps(4)))


def test_a_learner_that_is_cancelled_takes_no_further_step() -> None:
    some = learner()
    before = start(some)
    some.cancel()
    with pytest.raises(TrainingError, match="told to stop"):
        some.train(Train(before, Steps(2)))
    torch.testing.assert_close(some.model.params, before, rtol=0, atol=0)


def test_steps_are_counted_on_by_a_restored_learner() -> None:
    original, other = learner(), learner(loss=lambda outputs, _: outputs.sum() * float("nan"))
    middle = original.train(Train(start(original), Steps(6))).params
    other.load_state_dict(original.state_dict())
    with pytest.raises(TrainingError, match="became nan in its step 7;"):
        other.train(Train(middle, Steps(1)))


def test_an_exploding_loss_is_noticed() -> None:
    some = learner(optimizer=SGD(lr=1e30), model=seeded(TwoOutputs), loss=_first_output)
    with pytest.raises(TrainingError, match=r"of worker 0 became (nan|inf) in its step"):
        some.train(Train(start(some), Steps(10)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_learner_that_starts_over_has_forgotten_where_it_was(optimizer: Optimizer) -> None:
    some, other = (learner(optimizer=optimizer, augmentation=None) for _ in range(2))
    good = start(some)
    with pytest.raises(TrainingError, match="became"):
        some.train(Train(torch.full_like(good, 1e30), Steps(3)))
    other.train(Train(good, Steps(3)))  # so that the same samples come next
    some.start_over()
    other.start_over()
    result = some.train(Train(good, Steps(3)))
    assert torch.equal(result.params, other.train(Train(good, Steps(3))).params)


def test_running_statistics_that_are_not_exchanged_start_over_too() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))

    whole = seeded(model)
    whole(torch.zeros(2, *SHAPE))
    some = learner(model=whole, has_buffers=False, augmentation=None)
    norm = some.model.module[1]  # type: ignore[index]
    norm.running_mean.fill_(math.nan)
    some.start_over()
    assert norm.running_mean.abs().max() == 0


def test_a_mask_with_infinite_values_does_not_keep_a_learner_from_starting_over() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(36, 3)
            self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    some = learner(model=seeded(Masked))
    some.start_over()
    assert some.model.module.get_buffer("mask").isinf().sum() == 1


def _first_output(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr must be in \[0, inf\), got -1"),
        ({"lr": float("nan")}, "lr must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
    ],
)
def test_an_optimizer_out_of_range_is_refused_at_once(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SGD(**settings)


def test_a_model_that_draws_from_the_global_generator_is_warned_about() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(F.dropout(x, 0.5, self.training))  # type: ignore[no-any-return]

    split = ArraySplit(torch.rand(8, 4), torch.arange(8) % 2)
    data = Dataset("rows", split, split, num_classes=2, input_shape=(4,))
    rows = {"dataset": data.training, "shard": torch.arange(8)}
    careless = learner(model=Careless(), augmentation=None, **rows)
    with pytest.warns(UserWarning, match="draws from PyTorch's global generator"):
        careless.train(Train(start(careless), Steps(1)))


# The standard problem of theory.


def test_quadratic_steps_are_exact() -> None:
    trainer = QuadraticTrainer(target=torch.tensor([4.0, 0.0]), lr=0.5)
    result = trainer.train(Train(torch.zeros(2), Steps(3)))
    assert result.params.tolist() == [3.5, 0.0]
    assert result.loss == 8.0
    assert trainer.cost(Train(torch.zeros(2), Steps(3))) == 3
    assert trainer.train(Train(torch.zeros(2), Epochs())).params.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.05), adam], ids=["flat", "by layer"])
def test_a_checkpoint_fits_a_device_with_another_alignment(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aligned = partial(FlatModel, alignment=64)
    whole = learner(optimizer=optimizer)
    first = whole.train(Train(start(whole), Steps(5)))
    kept = copy.deepcopy(dismantle(whole.state_dict()))
    expected = whole.train(Train(first.params, Steps(5))).params
    for there, back in ((aligned, FlatModel), (FlatModel, aligned)):
        monkeypatch.setattr(model_copies, "FlatModel", there)
        one = learner(optimizer=optimizer)
        one.load_state_dict(assemble(*copy.deepcopy(kept)))
        middle = one.train(Train(first.params, Steps(2))).params
        again = copy.deepcopy(dismantle(one.state_dict()))
        monkeypatch.setattr(model_copies, "FlatModel", back)
        other = learner(optimizer=optimizer)
        other.load_state_dict(assemble(*again))
        torch.testing.assert_close(other.train(Train(middle, Steps(3))).params, expected)


def test_dropout_of_another_kind_of_device_begins_a_new_stream() -> None:
    whole = learner()
    first = whole.train(Train(start(whole), Steps(5)))
    kept = copy.deepcopy(dismantle({**whole.state_dict(), "dropout": torch.zeros(16).byte()}))
    found = []
    for _ in range(2):
        other = learner()
        other.load_state_dict(assemble(*copy.deepcopy(kept)))
        found.append(other.train(Train(first.params, Steps(3))).params)
    assert torch.equal(*found)
    assert not torch.equal(found[0], whole.train(Train(first.params, Steps(3))).params)
