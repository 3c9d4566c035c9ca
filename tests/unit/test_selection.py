"""Which samples the selections choose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from studies.tuned_races import LossMatched
from torch import Tensor

from edgegossip.contract.protocol import Steps
from edgegossip.contract.randomness import generator
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import (
    SELECTIONS,
    Candidates,
    Choice,
    Cyclic,
    Focused,
    Importance,
    Pruned,
    Random,
    Ranked,
    RankedInBatches,
    RankedPerClass,
    RankedShuffled,
    Sampled,
    Selection,
    selection,
)

ALL = [pytest.param(chosen, id=name) for name, chosen in SELECTIONS.items()]
DISTINCT = [param for param in ALL if param.id != "focused"]
UNBIASED = [Importance(), Importance(uniform_share=0.1), Pruned(), Pruned(prune_ratio=0.9)]


def candidates(
    losses: list[float],
    labels: list[int],
    subset_of: list[int],
    num_visits: list[int] | None = None,
    sample_losses: Tensor | None = None,
    is_newest: list[bool] | None = None,
) -> Candidates:
    num_samples = len(subset_of)
    return Candidates(
        losses=torch.tensor(losses),
        is_newest=torch.tensor(is_newest or [True] * len(losses)),
        labels=torch.tensor(labels),
        subset_of=torch.tensor(subset_of),
        num_visits=torch.tensor(num_visits or [0] * num_samples),
        sample_losses=(
            torch.full((num_samples,), torch.nan) if sample_losses is None else sample_losses
        ),
    )


def twelve() -> Candidates:
    """Class 0 in subsets 0 and 1, class 1 in 2 and 3, three samples each; class 1 is hard."""
    return candidates([0.1, 0.4, 2.0, 1.0], [0, 0, 1, 1], [0, 1, 2, 3] * 3)


def trained(sample_losses: Tensor, confidence: float = 1.0) -> Candidates:
    """One class; aggregated points have the given probability of being right."""
    loss = -torch.tensor(confidence).log().item()
    num_samples = len(sample_losses)
    subsets = [i % 2 for i in range(num_samples)]
    return candidates([loss, loss], [0, 0], subsets, None, sample_losses)


def choose(chosen: Selection, offered: Candidates, num_samples: int, seed: int = 0) -> Choice:
    return chosen.choose(offered, num_samples, generator(seed))


# Algorithm 2 and its relatives, by hand.


def test_ranked_takes_whole_subsets_from_the_highest_loss_down() -> None:
    order = choose(Ranked(), twelve(), 7).order
    # Subset 2, then 3, then one sample of subset 1.
    assert order.tolist() == [2, 6, 10, 3, 7, 11, 1]


def test_ranked_shuffled_takes_the_same_samples_in_another_order() -> None:
    order = choose(RankedShuffled(), twelve(), 7).order.tolist()
    assert sorted(order) == [1, 2, 3, 6, 7, 10, 11]
    assert order != [2, 6, 10, 3, 7, 11, 1]


def test_ranked_per_class_takes_the_hardest_of_each_class() -> None:
    order = choose(RankedPerClass(), twelve(), 6).order
    # All of subset 1 (the harder of class 0) and of subset 2 (the harder of class 1).
    assert sorted(order.tolist()) == [1, 2, 5, 6, 9, 10]


@pytest.mark.parametrize("num_samples", range(1, 13))
def test_ranked_per_class_keeps_classes_balanced_within_one_sample(num_samples: int) -> None:
    offered = twelve()
    order = choose(RankedPerClass(), offered, num_samples).order
    counts = offered.labels[offered.subset_of[order]].bincount(minlength=2)
    assert abs(int(counts[0] - counts[1])) <= 1


def test_ranked_in_batches_takes_the_hardest_points_of_each_batch_together() -> None:
    # Ten points of three samples each; the higher the number, the harder.
    offered = candidates([float(i) for i in range(10)], [0] * 10, [*range(10)] * 3)
    order = choose(RankedInBatches(num_points_per_batch=2), offered, 15).order
    points = offered.subset_of[order].tolist()
    pairs = [points[i : i + 3] for i in range(0, 15, 3)]
    assert all(len(set(each)) == 1 for each in pairs)  # half of each batch: one of two points
    kept = {each[0] for each in pairs}
    assert len(kept) == 5
    assert 9 in kept
    assert 0 not in kept
    assert kept != {5, 6, 7, 8, 9}  # as `Ranked` would
    whole = choose(RankedInBatches(), offered, 15).order  # one batch of all points
    assert set(offered.subset_of[whole].tolist()) == {5, 6, 7, 8, 9}


def test_a_subset_larger_than_the_choice_is_cut() -> None:
    offered = candidates([3.0, 1.0], [0, 0], [0] * 8 + [1] * 2)
    for chosen in (Ranked(), RankedShuffled(), RankedPerClass(), RankedInBatches()):
        order = choose(chosen, offered, 5).order
        assert set(order.tolist()) <= set(range(8))
        assert len(set(order.tolist())) == 5


def test_chance_decides_which_samples_of_the_last_subset_are_in() -> None:
    offered = candidates([1.0], [0], [0] * 8)
    chosen = [
        set(choose(RankedPerClass(), offered, 4, seed).order.tolist()) for seed in range(5)
    ]
    assert set.union(*chosen) > chosen[0]


# Draws by loss.


def test_a_low_temperature_ranks_and_a_high_one_is_blind() -> None:
    offered = candidates([4.0, 1.0], [0, 0], [0] * 50 + [1] * 50)
    cold = choose(Sampled(temperature=0.01), offered, 50).order
    hot = choose(Sampled(temperature=100), offered, 50).order
    assert int((cold < 50).sum()) == 50
    assert 15 < int((hot < 50).sum()) < 35


def test_sampled_draws_in_proportion_to_the_power_of_the_loss() -> None:
    offered = candidates([9.0, 1.0], [0, 0], [0, 1])
    firsts = [
        int(choose(Sampled(temperature=2), offered, 1, seed).order) for seed in range(800)
    ]
    # Square roots are 3 and 1: three in four, give or take four standard deviations.
    assert firsts.count(0) / 800 == pytest.approx(0.75, abs=0.06)


def test_losses_of_zero_can_be_drawn() -> None:
    offered = candidates([0.0, 0.0], [0, 0], [0, 1, 0, 1])
    for chosen in SELECTIONS.values():
        assert sorted(choose(chosen, offered, 4).order.tolist()) == [0, 1, 2, 3]


# Unbiased weights.


@pytest.mark.parametrize("chosen", UNBIASED)
def test_weighted_mean_over_the_choice_is_the_mean_over_all(chosen: Selection) -> None:
    values = torch.randn(12, generator=generator(1)).double()
    means = []
    for seed in range(400):
        choice = choose(chosen, twelve(), 5, seed)
        assert choice.weights is not None
        means.append((values[choice.order] * choice.weights).mean())
    mean = torch.stack(means)
    error = float(mean.std()) / 400**0.5
    assert float(mean.mean()) == pytest.approx(float(values.mean()), abs=4 * error)


@pytest.mark.parametrize("chosen", UNBIASED)
def test_weights_are_all_one_where_everything_is_visited(chosen: Selection) -> None:
    choice = choose(chosen, twelve(), 12)
    assert choice.weights is not None
    torch.testing.assert_close(choice.weights, torch.ones(12))


def test_importance_never_weighs_more_than_one_over_the_uniform_share() -> None:
    offered = candidates([0.0, 1.0], [0, 0], [0] * 99 + [1])
    weights = choose(Importance(uniform_share=0.5), offered, 30).weights
    assert weights is not None
    assert float(weights.max()) <= 2 + 1e-6


def test_pruned_thins_out_what_is_below_the_mean() -> None:
    offered = candidates([0.1, 2.0], [0, 0], [0, 1] * 60)
    choice = choose(Pruned(prune_ratio=0.75), offered, 60)
    is_low = choice.order % 2 == 0
    # Odds of one to four: 12 of 60, where all alike would be 30.
    assert int(is_low.sum()) == pytest.approx(12, abs=8)
    assert choice.weights is not None
    ratio = choice.weights[is_low].mean() / choice.weights[~is_low].mean()
    assert float(ratio) == pytest.approx(4)


# Cyclic.


def test_cyclic_passes_over_everything_before_it_repeats() -> None:
    num_visits = torch.zeros(10, dtype=torch.int64)
    for epoch in range(25):
        offered = candidates([1.0], [0], [0] * 10)
        offered.num_visits = num_visits.clone()
        num_visits += choose(Cyclic(), offered, 3, epoch).order.bincount(minlength=10)
        assert int(num_visits.max() - num_visits.min()) <= 1


def test_cyclic_leaves_out_at_the_end_of_a_pass_what_was_visited_most() -> None:
    stream = BatchStream(AccuracyAwareSampler(num_samples=10, batch_size=4, selection=Cyclic()))
    for _ in range(20):
        list(stream.take(Steps(2)))  # two batches a pass, and two samples left out
        num_visits = stream.sampler.state_dict()["num_visits"]
        assert int(num_visits.max() - num_visits.min()) <= 1


# Focused.


def test_focused_is_random_before_the_first_training() -> None:
    offered = candidates([0.0], [0], [0] * 4)
    assert Focused().focus(offered) == 0
    chosen = [choose(Focused(), offered, 2, seed).order.tolist() for seed in range(40)]
    assert all(len(set(order)) == 2 for order in chosen)
    assert {position for order in chosen for position in order} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("confidence", "low", "high"), [(0.49, 0, 0), (0.51, 0.5, 0.6), (0.97, 0.99, 1)]
)
def test_recognised_aggregated_points_bring_focus(
    confidence: float, low: float, high: float
) -> None:
    assert low <= Focused().focus(trained(torch.ones(4), confidence)) <= high


def test_focus_goes_by_the_newest_look_alone() -> None:
    # Two points, the first not recognised when it was last looked at, long ago.
    looked_at = candidates(
        [9.0, 0.0], [0, 0], [0, 1] * 2, None, torch.ones(4), is_newest=[False, True]
    )
    assert Focused().focus(looked_at) == 1


def test_focused_visits_in_proportion_to_the_last_loss() -> None:
    losses = torch.tensor([0.1] * 20 + [0.2] * 20)
    counts = choose(Focused(), trained(losses), 30).order.bincount(minlength=40)
    assert int(counts.sum()) == 30
    assert int(counts[:20].sum()) == pytest.approx(10, abs=1)


def test_focused_spends_a_full_epoch_on_what_is_hard_but_not_without_bound() -> None:
    losses = torch.tensor([1e-3] * 90 + [5.0] * 10)
    counts = choose(Focused(max_visits=3), trained(losses), 100).order.bincount(minlength=100)
    assert counts[90:].tolist() == [3] * 10
    assert int(counts.sum()) == 100


def test_focused_on_data_that_differ_visits_everything_once() -> None:
    losses = torch.tensor([1e-3] * 90 + [5.0] * 10)
    order = choose(Focused(), trained(losses, confidence=0.1), 100).order
    assert len(set(order.tolist())) >= 99


def test_focused_keeps_the_shares_of_classes() -> None:
    losses = torch.tensor([5.0] * 40 + [0.01] * 40)
    offered = candidates([0.0, 0.0], [0, 1], [0] * 40 + [1] * 40, None, losses)
    counts = offered.labels[offered.subset_of[choose(Focused(), offered, 20).order]].bincount()
    assert counts.tolist() == pytest.approx([10, 10], abs=1)


def test_samples_never_trained_on_count_twice_the_mean() -> None:
    losses = torch.tensor([0.5] * 20 + [torch.nan] * 20)
    counts = choose(Focused(), trained(losses), 30).order.bincount(minlength=40)
    assert int(counts[20:].sum()) == pytest.approx(20, abs=1)


def test_focused_with_nothing_to_focus_on_chooses_as_random_does_to_the_last_bit() -> None:
    offered = trained(torch.rand(50, generator=generator(3)), confidence=0.45)
    for seed in range(5):
        focused, random = (choose(each, offered, 20, seed) for each in (Focused(), Random()))
        assert torch.equal(focused.order, random.order)
        assert focused.weights is None


def test_loss_matched_weights_random_samples_to_the_loss_of_the_focused_ones() -> None:
    losses = torch.rand(100, generator=generator(3)) ** 4
    offered = trained(losses)
    focused = choose(Focused(), offered, 60)
    matched = choose(LossMatched(), offered, 60)
    assert len(set(matched.order.tolist())) == 60
    assert matched.weights is not None
    [weight] = set(matched.weights.tolist())
    assert weight * float(losses.mean()) == pytest.approx(float(losses[focused.order].mean()))
    assert weight > 1.5
    assert matched.focus == focused.focus == 1


def test_loss_matched_has_no_weights_where_nothing_is_focused() -> None:
    offered = trained(torch.rand(50, generator=generator(3)), confidence=0.1)
    matched, random = (choose(each, offered, 20) for each in (LossMatched(), Random()))
    assert torch.equal(matched.order, random.order)
    assert matched.weights is None


# All of them.


@pytest.mark.parametrize("chosen", ALL)
def test_equal_seeds_choose_alike(chosen: Selection) -> None:
    offered = trained(torch.rand(30, generator=generator(2)), confidence=0.7)
    first, second = (choose(chosen, offered, 11, seed=5) for _ in range(2))
    assert torch.equal(first.order, second.order)
    assert (first.weights is None) == (second.weights is None)


@settings(max_examples=settings().max_examples // 3)
@given(
    data=st.data(),
    num_samples=st.integers(1, 40),
    num_points=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("chosen", ALL)
def test_exactly_the_number_asked_for_is_chosen(
    chosen: Selection, data: st.DataObject, num_samples: int, num_points: int, seed: int
) -> None:
    offered, num_chosen = _draw_candidates(data, num_samples, num_points, seed)
    before = offered.num_visits.clone()
    choice = choose(chosen, offered, num_chosen, seed)
    assert choice.order.shape == (num_chosen,)
    assert choice.order.dtype == torch.int64
    assert 0 <= int(choice.order.min()) <= int(choice.order.max()) < num_samples
    assert torch.equal(offered.num_visits, before)
    if choice.weights is not None:
        assert choice.weights.shape == (num_chosen,)
        assert bool((choice.weights > 0).all())


@settings(max_examples=settings().max_examples // 3)
@given(
    data=st.data(),
    num_samples=st.integers(1, 40),
    num_points=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("chosen", DISTINCT)
def test_positions_are_distinct(
    chosen: Selection, data: st.DataObject, num_samples: int, num_points: int, seed: int
) -> None:
    offered, num_chosen = _draw_candidates(data, num_samples, num_points, seed)
    order = choose(chosen, offered, num_chosen, seed).order.tolist()
    assert len(set(order)) == num_chosen


def _draw_candidates(
    data: st.DataObject, num_samples: int, num_points: int, seed: int
) -> tuple[Candidates, int]:
    random = generator(seed, "candidates")
    losses = data.draw(
        st.lists(st.floats(0, 50, width=32), min_size=num_points, max_size=num_points)
    )
    sample_losses = torch.rand(num_samples, generator=random)
    sample_losses[torch.rand(num_samples, generator=random) < 0.3] = torch.nan
    offered = Candidates(
        losses=torch.tensor(losses),
        is_newest=torch.arange(num_points)
        >= int(torch.randint(num_points, (), generator=random)),
        labels=torch.randint(3, (num_points,), generator=random),
        subset_of=torch.randint(num_points, (num_samples,), generator=random),
        num_visits=torch.randint(4, (num_samples,), generator=random),
        sample_losses=sample_losses,
    )
    return offered, data.draw(st.integers(1, num_samples))


# Names and arguments.


def test_an_unknown_name_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"unknown selection 'rankd'.*mean 'ranked'"):
        selection("rankd")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampled(temperature=0), r"temperature must be above 0, got 0"),
        (lambda: Importance(uniform_share=0), r"uniform_share must be in \(0, 1\], got 0"),
        (lambda: Pruned(prune_ratio=1), r"prune_ratio must be in \[0, 1\), got 1"),
        (lambda: Focused(max_visits=0), r"max_visits must be at least 1, got 0"),
        (lambda: Focused(sharpness=0.5), r"sharpness must be at least 1, got 0.5"),
        (lambda: Focused(min_focus=2), r"min_focus must be in \[0, 1\], got 2"),
        (lambda: Focused(num_points=0), r"num_points must be at least 1 or None, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
