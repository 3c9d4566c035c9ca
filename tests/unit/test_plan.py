"""A balanced epoch ends when it was to end, though speeds change under way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.effects import asked
from tests.trained import trained_event

from edgegossip.algorithms.edge_gossip.plan import TOLERANCE, EpochPlan
from edgegossip.core.protocol import Epochs, Layout, Train, Trained
from edgegossip.learning.sampling.batches import BatchStream
from edgegossip.learning.sampling.sampler import AccuracyAwareSampler
from edgegossip.learning.sampling.selection import Random

BATCH_SIZE = 10
NUM_SAMPLES = 1000


def plan_of(
    keep_ratio: float = 0.5,
    block_share: float = 0.25,
    throughput: float = 10.0,
    share: float = 1.0,
    now: float = 0.0,
) -> EpochPlan:
    return EpochPlan.begin(
        Train(torch.zeros(1), Epochs(share)),
        keep_ratio=keep_ratio,
        epoch_cost=float(NUM_SAMPLES),
        throughput=throughput,
        block_share=block_share,
        now=now,
    )


@dataclass
class Epoch:
    """What came of a plan."""

    seconds: float
    result: Trained
    blocks: list[int]  # samples of each


def carry_out(plan: EpochPlan, speed_at: Callable[[float], float]) -> Epoch:
    """On a machine whose forecasts are right as long as its speed does not change."""
    sampler = AccuracyAwareSampler(
        num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE, selection=Random()
    )
    stream = BatchStream(sampler)
    now = plan.start
    train: Train | None = plan.first()
    blocks: list[int] = []
    while train is not None:
        begins = train.begins_pass
        cost = stream.cost(train.work, train.keep_ratio, begins_pass=begins)
        batches = list(stream.take(train.work, train.keep_ratio, begins_pass=begins))
        now += cost / speed_at(now)
        size = sum(map(len, batches))
        blocks.append(size)
        params = train.params + len(batches)
        plan.account(
            trained_event(
                params,
                train.params,
                num_samples=size,
                num_steps=len(batches),
                loss=2.0,
                cost=cost,
            )
        )
        train = None if plan.is_done else plan.next(speed_at(now), now)
    return Epoch(now - plan.start, plan.result(now), blocks)


@pytest.mark.parametrize("block_share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_at_a_steady_speed_it_does_what_was_planned(block_share: float, share: float) -> None:
    epoch = carry_out(plan_of(block_share=block_share, share=share), lambda _: 10.0)
    assert sum(epoch.blocks) == share * 500
    assert epoch.seconds == pytest.approx(share * 50.0)
    assert len(epoch.blocks) == 1 if block_share == 1 else len(epoch.blocks) > 2


def test_blocks_get_smaller_towards_the_end_but_not_ever_smaller() -> None:
    blocks = carry_out(plan_of(block_share=0.5), lambda _: 10.0).blocks
    assert blocks[:3] == [250, 130, 60]  # half of what is left, rounded up to batches
    assert min(blocks) >= 20  # a twelfth of the first


def test_one_that_slows_down_does_less_and_ends_on_time() -> None:
    epoch = carry_out(plan_of(), lambda now: 10.0 if now < 25 else 5.0)
    assert sum(epoch.blocks) == pytest.approx(250 + 125, abs=4 * BATCH_SIZE)
    # At most: the block that was under way when it slowed down.
    assert epoch.seconds == pytest.approx(50.0, abs=4.0)


def test_one_that_speeds_up_does_more_and_ends_on_time() -> None:
    epoch = carry_out(plan_of(), lambda now: 10.0 if now < 25 else 14.0)
    assert sum(epoch.blocks) == pytest.approx(250 + 350, abs=4 * BATCH_SIZE)
    assert epoch.seconds == pytest.approx(50.0, abs=4.0)


def test_one_that_is_through_with_all_data_early_begins_again_rather_than_wait() -> None:
    epoch = carry_out(plan_of(keep_ratio=1.0), lambda now: 10.0 if now < 25 else 20.0)
    assert sum(epoch.blocks) == pytest.approx(250 + 1500, abs=60)
    assert epoch.seconds == pytest.approx(100.0, abs=4.0)


def test_one_that_nearly_stands_still_ends_its_epoch_with_what_it_has() -> None:
    epoch = carry_out(plan_of(), lambda now: 10.0 if now < 5 else 0.1)
    assert sum(epoch.blocks) <= 500 / 4 + BATCH_SIZE


@pytest.mark.parametrize("begins_pass", [False, True])
def test_the_first_block_begins_a_pass_if_that_was_asked_for(begins_pass: bool) -> None:
    plan = EpochPlan.begin(
        Train(torch.zeros(1), Epochs(0.5), begins_pass=begins_pass),
        keep_ratio=0.5,
        epoch_cost=100.0,
        throughput=10.0,
        block_share=0.5,
        now=0.0,
    )
    assert asked(plan.first()) == (Epochs(0.25), 0.5)
    assert plan.first().begins_pass == begins_pass


def test_a_small_deviation_is_let_be() -> None:
    plan = plan_of()
    first = plan.first()
    plan.account(
        trained_event(
            first.params,
            first.params,
            num_samples=60,
            num_steps=6,
            seconds=6.0,
            loss=1.0,
            cost=60.0,
        )
    )
    planned = plan.cost
    plan.next(10.0 * (1 + 0.5 * TOLERANCE), 6.0)
    assert plan.cost == planned
    plan.next(10.0 * (1 + 2 * TOLERANCE), 6.0)
    assert plan.cost > planned


@settings(max_examples=20, deadline=None)
@given(
    keep_ratio=st.floats(0.001, 1),
    block_share=st.sampled_from([1.0, 0.5, 0.25]),
    before=st.floats(1, 100),
    after=st.floats(1, 100),
)
def test_whatever_happens_it_ends_and_adds_up(
    keep_ratio: float, block_share: float, before: float, after: float
) -> None:
    plan = plan_of(keep_ratio, block_share, before)
    middle = 0.3 * plan.deadline
    epoch = carry_out(plan, lambda now: before if now < middle else after)
    assert sum(epoch.blocks) >= 1
    assert epoch.result.num_samples == epoch.result.cost == sum(epoch.blocks)
    # Late by no more than a block at the later speed, begun before it was known.
    block = keep_ratio * NUM_SAMPLES * block_share + 1.5 * BATCH_SIZE
    assert epoch.seconds <= plan.deadline + 1.5 * block / min(before, after)


@pytest.mark.parametrize("num_due", [359, 353, 358, 8, 3])
def test_at_even_speed_a_small_last_batch_is_not_left_out(num_due: int) -> None:
    plan = plan_of(num_due / NUM_SAMPLES, block_share=0.125)
    assert sum(carry_out(plan, lambda now: 10.0).blocks) == num_due


def test_at_uneven_speed_it_ends_on_time_on_average() -> None:
    """Less than half a batch that the pass has not got is not worth another pass."""
    late = []
    for seed in range(300):
        draw = random.Random(seed)
        plan = plan_of(draw.choice((0.3, 0.5, 0.8, 1.0)), block_share=0.125)
        epoch = carry_out(plan, lambda now, draw=draw: 10.0 * draw.uniform(0.95, 1.05))  # type: ignore[misc]
        late.append(epoch.seconds - plan.deadline)
    a_batch = BATCH_SIZE / 10.0
    assert abs(sum(late) / len(late)) < 0.2 * a_batch


def test_the_result_is_one_training_from_start_to_end() -> None:
    plan = plan_of(block_share=0.5, now=7.0)
    first = plan.first()
    middle, end = torch.ones(1), torch.full((1,), 2.0)
    plan.account(
        trained_event(
            middle,
            first.params,
            num_samples=250,
            num_steps=25,
            seconds=25.0,
            loss=4.0,
            outputs={"a": middle},
            cost=250.0,
        )
    )
    second = plan.next(10.0, 32.0)
    assert second is not None
    assert second.params is middle
    assert asked(second) == (Epochs(0.25), 0.5)
    assert not second.begins_pass
    plan.account(
        trained_event(
            end,
            middle,
            num_samples=250,
            num_steps=75,
            seconds=25.0,
            outputs={"a": end},
            cost=250.0,
        )
    )
    assert plan.is_done
    result = plan.result(57.0)
    assert result.before is first.params
    assert result.params is end
    assert result.outputs == {"a": end}
    assert (result.num_samples, result.num_steps, result.cost) == (500, 100, 500.0)
    assert result.seconds == 50.0
    assert result.loss == pytest.approx(0.25 * 4.0)


def test_a_correction_goes_beyond_the_trained_entries_but_not_beyond_statistics() -> None:
    plan = replace(plan_of(0.5, block_share=1.0), mean_keep_ratio=0.75, correction=1.0)
    plan.layout = Layout(num_trained=1)
    before, after = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.2])
    plan.train = replace(plan.train, params=before)
    plan.account(
        trained_event(after, before, num_samples=500, num_steps=50, seconds=50.0, cost=500.0)
    )
    result = plan.result(50.0)
    # With the rest of them a running variance of 0.2, after 1.0, would be -0.2.
    assert result.params.tolist() == pytest.approx([4.0, 0.2])
    assert after.tolist() == pytest.approx([3.0, 0.2])


def test_the_correction_goes_by_what_was_done_whatever_was_forecast() -> None:
    # For a moment the platform seemed to be far slower than it was.
    plan = replace(plan_of(keep_ratio=0.01), mean_keep_ratio=0.75, correction=0.5)
    before, after = torch.zeros(1), torch.ones(1)
    plan.account(
        trained_event(after, before, num_samples=900, num_steps=90, seconds=90.0, cost=900.0)
    )
    assert plan.result(90.0).params.item() == pytest.approx((0.75 / 0.9) ** 0.5)


@pytest.mark.parametrize("focus", [0.0, 0.5, 1.0])
def test_what_was_chosen_for_its_loss_is_not_corrected(focus: float) -> None:
    plan = replace(plan_of(0.5, block_share=1.0), mean_keep_ratio=0.75, correction=0.5)
    after = torch.ones(1)
    plan.account(
        trained_event(
            after,
            torch.zeros(1),
            num_samples=500,
            num_steps=50,
            seconds=50.0,
            cost=500.0,
            metrics={"focus": focus},
        )
    )
    result = plan.result(50.0)
    assert result.metrics == {"focus": focus}
    assert result.params.item() == pytest.approx(1.5 ** (0.5 * (1 - focus)))


def test_the_look_counts_as_done_and_takes_from_the_samples() -> None:
    plan = plan_of(block_share=0.5)
    first = plan.first()
    # Of the 500 samples' worth that it may do, the look took 100.
    plan.account(
        trained_event(
            first.params, first.params, num_samples=200, num_steps=20, seconds=30.0, cost=300.0
        )
    )
    second = plan.next(10.0, 30.0)
    assert second is not None
    assert asked(second) == (Epochs(0.25), 0.5)
    assert not second.begins_pass
    plan.account(
        trained_event(
            first.params, first.params, num_samples=200, num_steps=20, seconds=20.0, cost=200.0
        )
    )
    assert plan.is_done
