"""A worker that balances: samples with weights, data of others, shares of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.small_learners import DATA, SHARD, learner, seeded, start, taken
from torch import nn

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.training.loss import Loss
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.training.sampling.selection import (
    Candidates,
    Choice,
    Focused,
    Random,
    Ranked,
    Selection,
)


@dataclass(frozen=True)
class Weighted(Selection):
    """In order, with weights 0, 1, 2, 0, 1, 2, ..."""

    needs_losses: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        order = torch.arange(num_samples)
        return Choice(order, (order % 3).to(torch.float32))


def test_weights_multiply_the_loss_of_each_sample() -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    some = learner(
        model=model,
        optimizer=SGD(lr=0.1, momentum=0.0),
        augmentation=None,
        accuracy_aware=AccuracyAware(selection=Weighted()),
    )
    result = some.train(Train(start(some), Steps(1)))

    x, y = DATA.train.batch(SHARD[:8])
    losses = F.cross_entropy(model(DATA.prepare(x)), y, reduction="none")
    by_hand = torch.stack([(i % 3) * loss for i, loss in enumerate(losses)]).sum() / 8
    by_hand.backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(float(by_hand.detach()))
    for trained, param in zip(some.model.module.parameters(), model.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(trained, param - 0.1 * param.grad)


def test_a_loss_with_weights_for_classes_is_the_one_that_was_given() -> None:
    """Its mean is over the weights, not over the samples."""
    weighted = partial(F.cross_entropy, weight=torch.tensor([1.0, 9.0, 3.0]))
    results = []
    for selection in (Focused(), Random()):
        accuracy_aware = AccuracyAware(selection=selection)
        some = learner(
            loss=weighted,
            accuracy_aware=accuracy_aware,
            batch_size=len(SHARD),
            augmentation=None,
        )
        results.append(some.train(Train(start(some), Steps(1))).loss)
    assert results[0] == pytest.approx(results[1], rel=1e-3)  # dropout goes by position


SHARDS = {0: SHARD, 1: torch.tensor([1, 3, 5]), 2: torch.tensor([7])}


def test_assigned_data_is_trained_on_from_then_on() -> None:
    some = learner(shards=SHARDS)
    some.train(Train(start(some), Steps(1)))
    some.assign((2, 0, 2))
    assert some.num_samples == 33
    assert some.shard.tolist() == [*SHARD.tolist(), 7]
    assert some.train(Train(start(some), Epochs())).num_samples == 33
    some.assign((1,))
    assert some.train(Train(start(some), Epochs())).num_samples == 3


def test_it_says_how_much_was_chosen_for_its_loss() -> None:
    accuracy_aware = AccuracyAware(selection=Focused(min_focus=0.0))
    some = learner(accuracy_aware=accuracy_aware)
    assert (
        some.train(Train(start(some), Epochs())).metrics["focus"] == 0
    )  # nothing was trained on before
    focus = some.train(Train(start(some), Epochs())).metrics["focus"]
    assert 0 < focus < 1
    other = learner(accuracy_aware=accuracy_aware)
    other.load_state_dict(some.state_dict())
    assert other.batches.focus == focus
    ranked = learner(accuracy_aware=AccuracyAware(selection=Ranked()))
    assert ranked.train(Train(start(ranked), Epochs())).metrics["focus"] == 1
    assert learner().train(Train(start(learner()), Epochs())).metrics["focus"] == 0


def test_focused_with_nothing_to_focus_on_trains_as_random_does_to_the_last_bit() -> None:
    focused = learner(accuracy_aware=AccuracyAware(selection=Focused(min_focus=1.0)))
    random = learner(accuracy_aware=PLAIN)
    params = start(random)
    for share in (1.0, 0.3, 0.7, 1.0):
        results = [each.train(Train(params, Epochs(share))) for each in (focused, random)]
        assert results[0].loss == results[1].loss
        assert torch.equal(focused.model.params, random.model.params)
        params = start(random)
    assert focused.batches.epoch_cost > random.batches.epoch_cost  # it has looked


def test_data_that_comes_back_is_visited_in_another_order() -> None:
    some, same = learner(shards=SHARDS), learner(shards=SHARDS)
    for each in (some, same):
        each.assign((0, 1))
        each.assign((0,))
    one, again, other = (
        [batch.positions.tolist() for batch in taken(each.batches, Epochs())]
        for each in (some, same, learner(shards=SHARDS))
    )
    assert one == again != other


def test_a_learner_without_data_has_a_state_too() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    some, other = (learner(shard=nothing, shards=SHARDS) for _ in range(2))
    other.load_state_dict(some.state_dict())
    some.assign((1,))
    some.train(Train(start(some), Epochs()))
    other.load_state_dict(some.state_dict())
    assert other.num_samples == 3


def test_data_that_cannot_be_reached_is_not_assigned() -> None:
    with pytest.raises(LocalProtocolError, match="cannot reach the data of worker 3"):
        learner(shards=SHARDS).assign((0, 3))


def test_a_learner_without_data_can_be_assigned_some() -> None:
    some = learner(shard=torch.empty(0, dtype=torch.int64), shards=SHARDS)
    with pytest.raises(LocalProtocolError, match="it has no data"):
        some.train(Train(start(some), Steps(1)))
    some.assign((1,))
    assert some.train(Train(start(some), Epochs())).num_samples == 3


def test_a_restored_learner_has_the_data_it_was_assigned() -> None:
    original, other = (learner(shards=SHARDS) for _ in range(2))
    original.assign((1, 2))
    original.train(Train(start(original), Epochs(0.5)))
    other.load_state_dict(assemble(*dismantle(original.state_dict())))
    request = Train(start(original), Epochs(0.5), begins_pass=False)
    results = [one.train(request) for one in (original, other)]
    assert torch.equal(results[0].params, results[1].params)


def test_a_restored_learner_aggregates_no_sooner_than_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracy_aware = AccuracyAware(selection=Focused())
    original, other, third = (learner(accuracy_aware=accuracy_aware) for _ in range(3))
    original.train(Train(start(original), Epochs(0.5)))
    with monkeypatch.context() as no_aggregating:
        no_aggregating.setattr(AccuracyAware, "make_stream", None)
        other.load_state_dict(assemble(*dismantle(original.state_dict())))
        # Kept again before it has trained.
        third.load_state_dict(assemble(*dismantle(other.state_dict())))
    request = Train(start(original), Epochs(0.5), begins_pass=False)
    one, two, three = (each.train(request).params for each in (original, other, third))
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_a_learner_that_follows_another_keeps_its_aggregated_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracy_aware = AccuracyAware(selection=Focused())
    leader, follower = (learner(accuracy_aware=accuracy_aware, shards=SHARDS) for _ in range(2))
    for each in (leader, follower):
        each.assign((0, 1))
        each.cost(Train(start(each), Epochs()))
    with monkeypatch.context() as no_aggregating:
        no_aggregating.setattr(AccuracyAware, "make_stream", None)
        for keep_ratio in (0.5, 1.0, 0.7):
            request = Train(start(leader), Epochs(0.5), keep_ratio=keep_ratio)
            assert follower.cost(request) == leader.cost(request)
            leader.train(request)
            follower.load_state_dict(assemble(*dismantle(leader.state_dict())))
        request = Train(start(leader), Epochs(0.5), begins_pass=False)
        one, two = (each.train(request).params for each in (leader, follower))
    assert torch.equal(one, two)


@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 1.0])
def test_a_cut_pass_costs_its_share_of_a_whole_one(keep_ratio: float) -> None:
    some = learner()
    request = Train(start(some), Epochs(), keep_ratio=keep_ratio)
    assert some.cost(request) == keep_ratio * some.cost(Train(start(some), Epochs()))
    assert some.train(request).num_samples == keep_ratio * len(SHARD)


@pytest.mark.parametrize("selection", [Random(), Focused(), Focused(num_points=3), Ranked()])
@pytest.mark.parametrize("look_share", [None, 0.02, 0.2])
def test_what_a_pass_costs_is_known_before_the_data_is_aggregated(
    selection: Selection, look_share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy_aware = AccuracyAware(selection=selection, look_share=look_share)
    some, other = (learner(accuracy_aware=accuracy_aware) for _ in range(2))
    with monkeypatch.context() as no_aggregating:
        no_aggregating.setattr(AccuracyAware, "make_stream", None)
        epoch_cost = other.epoch_cost
        other.load_state_dict(other.state_dict())
    some.set_up()
    assert epoch_cost == some.epoch_cost == some.cost(Train(start(some), Epochs()))


@pytest.mark.parametrize("work", [Epochs(), Steps(2)])
def test_the_smallest_share_is_enough_for_batch_normalisation(work: Epochs | Steps) -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3)))
    some = learner(model=model)
    result = some.train(Train(start(some), work, keep_ratio=0.001))
    assert result.num_samples == 2 * result.num_steps


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: F.cross_entropy(outputs, targets),
        lambda outputs, targets, **_: F.cross_entropy(outputs, targets),
    ],
    ids=["no reduction", "reduction ignored"],
)
def test_a_loss_that_gives_none_for_each_sample_cannot_rank(loss: Loss) -> None:
    some = learner(loss=loss, accuracy_aware=AccuracyAware())
    with pytest.raises(ValueError, match=r"needs the loss of each one.* choose Random"):
        some.train(Train(start(some), Steps(1)))


def test_blocks_of_a_pass_end_where_one_piece_does() -> None:
    whole, pieces = learner(), learner()
    params = start(whole)
    expected = whole.train(Train(params, Epochs(), keep_ratio=0.75))
    num_samples = 0
    for begins_pass in (True, False, False):
        piece = Train(params, Epochs(1 / 3), keep_ratio=0.75, begins_pass=begins_pass)
        result = pieces.train(piece)
        params, num_samples = result.params, num_samples + result.num_samples
    assert torch.equal(params, expected.params)
    assert num_samples == expected.num_samples == 24
