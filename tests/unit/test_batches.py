"""Which samples come next: all of them, in whole batches, in orders that repeat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, strategies as st
from tests.small_learners import taken

from edgegossip.contract.protocol import Epochs, Steps, Work
from edgegossip.training.sampling.aggregation import AggregatedData
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import AccuracyAwareSampler, Batch
from edgegossip.training.sampling.selection import Candidates, Choice, Random, Selection


def stream(num_samples: int = 10, batch_size: int = 3, rank: int = 0) -> BatchStream:
    return BatchStream(
        AccuracyAwareSampler(
            num_samples=num_samples,
            batch_size=batch_size,
            selection=Random(),
            key=(0, rank, 0),
        )
    )


def flat(batches: Iterable[Batch]) -> list[int]:
    return [position for batch in batches for position in batch.positions.tolist()]


def sizes(some: BatchStream, work: Work) -> list[int]:
    return [len(batch) for batch in taken(some, work)]


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 50))
def test_an_epoch_visits_every_sample_once(num_samples: int, batch_size: int) -> None:
    some = stream(num_samples, batch_size)
    orders = [flat(taken(some, Epochs())) for _ in range(2)]
    for order in orders:
        assert sorted(order) == list(range(num_samples))
    assert num_samples < 8 or orders[0] != orders[1]


@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    share=st.floats(0.01, 1),
    before=st.integers(1, 5),
)
def test_a_share_of_an_epoch_is_as_many_samples_as_announced(
    num_samples: int, batch_size: int, share: float, before: int
) -> None:
    some = stream(num_samples, batch_size)
    sizes(some, Steps(before))
    announced = some.cost(Epochs(share))
    got = flat(taken(some, Epochs(share)))
    assert len(got) == len(set(got)) == announced
    batch = min(batch_size, num_samples)
    # One sample alone joins the batch before.
    assert share * num_samples - 1e-9 <= announced <= share * num_samples + batch


@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    parts=st.lists(st.integers(1, 9), min_size=1),
)
def test_steps_are_whole_batches_and_go_on_where_they_ended(
    num_samples: int, batch_size: int, parts: list[int]
) -> None:
    whole, pieces = stream(num_samples, batch_size), stream(num_samples, batch_size)
    got = [batch for part in parts for batch in taken(pieces, Steps(part))]
    assert flat(got) == flat(taken(whole, Steps(sum(parts))))
    batch = min(batch_size, num_samples)
    assert {len(one) for one in got} <= {batch, batch + (num_samples % batch_size == 1)}
    assert whole.cost(Steps(7)) == sum(sizes(whole, Steps(7)))


def test_within_a_pass_no_sample_comes_twice() -> None:
    got = flat(taken(stream(11, 3), Steps(3)))
    assert len(set(got)) == 9


def test_the_rest_of_a_pass_is_left_out_by_steps() -> None:
    some = stream(11, 3)
    assert sizes(some, Steps(4)) == [3] * 4
    assert some.sampler.epoch == 2


def test_a_second_epoch_begins_anew_after_a_share() -> None:
    some = stream(10, 5)
    sizes(some, Epochs(0.5))
    assert sorted(flat(taken(some, Epochs()))) == list(range(10))


def test_orders_repeat_and_belong_to_the_rank() -> None:
    assert flat(taken(stream(), Epochs())) == flat(taken(stream(), Epochs()))
    assert flat(taken(stream(), Epochs())) != flat(taken(stream(rank=1), Epochs()))


@given(st.lists(st.sampled_from([Steps(1), Steps(5), Epochs(), Epochs(0.4)]), max_size=6))
def test_a_restored_stream_goes_on_as_the_original(work: list[Steps | Epochs]) -> None:
    original, other = stream(), stream()
    for one in work:
        sizes(original, one)
    other.load_state_dict(original.state_dict())
    for one in (Steps(3), Epochs(0.7), Steps(2)):
        assert flat(taken(other, one)) == flat(taken(original, one))


@dataclass(frozen=True)
class TwoHalves(Selection):
    """Two subsets, each kept whole: batches larger than asked for."""

    needs_losses: ClassVar[bool] = False
    keeps_subsets_whole: ClassVar[bool] = True

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        return Choice(torch.arange(num_samples))


def test_work_never_costs_less_than_nothing() -> None:
    """The charge for a canceled batch is deducted from later work, bit by bit."""
    halves = AggregatedData(torch.zeros(2, 1), torch.zeros(2).long(), torch.arange(100) // 50)
    some = BatchStream(AccuracyAwareSampler(halves, batch_size=40, selection=TwoHalves()))
    work = Epochs(0.41)
    assert some.cost(work) == 80  # two batches of 40
    assert sum(sizes(some, work)) == 50
    charged = 80.0
    for _ in range(5):
        charged += some.cost(Epochs(), 0.1)
        assert some.cost(Epochs(), 0.1) >= 0
        list(some.take(Epochs(), 0.1))
    assert charged == 50 + 5 * 10


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples to choose from"):
        stream(0)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        stream(batch_size=0)


def test_a_single_last_sample_joins_the_batch_before() -> None:
    assert sizes(stream(65, 64), Epochs()) == [65]
    assert sizes(stream(1, 64), Epochs()) == [1]


def test_a_share_is_not_rounded_up_for_float_noise() -> None:
    assert 0.07 * 100 > 7
    assert stream(100, 1).cost(Epochs(0.07)) == 7


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got"):
        Epochs(share)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="after must be at least 0, got -1"):
        Steps(1, after=-1)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        Steps(0)


@given(
    num_samples=st.integers(2, 40),
    batch_size=st.integers(1, 20),
    ratios=st.lists(st.floats(0.1, 4), min_size=1, max_size=4),
)
def test_a_pass_whose_batches_are_resized_visits_every_sample_once(
    num_samples: int, batch_size: int, ratios: list[float]
) -> None:
    some = stream(num_samples, batch_size)
    visited: list[int] = []
    for ratio in ratios:
        some.resize(ratio)
        announced = some.cost(Epochs(0.2), begins_pass=not visited)
        got = flat(taken(some, Epochs(0.2), begins_pass=not visited))
        assert len(got) == announced
        visited += got
        if len(visited) == num_samples:
            return
    assert len(set(visited)) == len(visited)
    rest = flat(taken(some, Epochs(), begins_pass=False))
    assert sorted(visited + rest) == list(range(num_samples))


def test_a_resized_stream_goes_on_from_its_checkpoint() -> None:
    one, other = stream(40, 4), stream(40, 4)
    one.resize(1.5)
    flat(taken(one, Steps(2)))
    other.load_state_dict(one.state_dict())
    for some in (one, other):
        some.resize(1.5)
    assert flat(taken(one, Steps(9))) == flat(taken(other, Steps(9)))
    assert sizes(one, Steps(1)) == [6]
