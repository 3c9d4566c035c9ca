"""Numbers and positions come back as they were, in as few bytes as promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgegossip.compression.packing import (
    MAX_WIDTH,
    Positions,
    max_positions_num_bytes,
    pack,
    pack_positions,
    packed_num_bytes,
    unpack,
    unpack_positions,
)


@given(width=st.integers(0, MAX_WIDTH), count=st.integers(0, 50), seed=st.integers(0, 99))
def test_numbers_of_any_width_come_back(width: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**width, count)
    data = pack(numbers, width)
    assert len(data) == packed_num_bytes(count, width)
    assert packed_num_bytes(count, width) == math.ceil(count * width / 8)
    assert unpack(data, width, count).tolist() == numbers.tolist()


@given(data=st.binary(max_size=20), width=st.integers(0, MAX_WIDTH), count=st.integers(0, 50))
def test_any_bytes_are_numbers_of_that_width(data: bytes, width: int, count: int) -> None:
    numbers = unpack(np.frombuffer(data, np.uint8), width, count)
    assert numbers.shape == (count,)
    assert all(0 <= number < 2**width for number in numbers.tolist())


@st.composite
def positions(draw: st.DrawFn) -> tuple[Positions, int]:
    """Some places in a vector, spread evenly or in clusters, and its length."""
    numel = draw(st.sampled_from([0, 1, 2, 50, 1000, 10**6, 2**40]))
    count = min(numel, draw(st.integers(0, 200)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    range_ = draw(st.sampled_from([numel, 300, 2 * count]))
    start = draw(st.sampled_from([0, max(0, numel - range_)]))
    drawn = start + random.integers(0, max(1, min(numel, range_)), count)
    return np.unique(drawn[drawn < numel]), numel


@given(positions())
def test_positions_come_back_in_no_more_bytes_than_promised(
    given: tuple[Positions, int],
) -> None:
    places, numel = given
    data = pack_positions(places, numel)
    assert unpack_positions(data, len(places), numel).tolist() == places.tolist()
    assert len(data) <= max_positions_num_bytes(len(places), numel)


@given(st.binary(max_size=60), st.integers(0, 50), st.sampled_from([50, 10**4, 2**40]))
def test_any_bytes_are_ascending_positions(data: bytes, count: int, numel: int) -> None:
    places = unpack_positions(np.frombuffer(data, np.uint8), count, numel)
    assert len(places) <= count
    assert (np.diff(places, prepend=-1) > 0).all()


@pytest.mark.parametrize(
    ("ratio", "most"), [(0.3, 1.13), (0.1, 1.07), (0.01, 1.04), (1e-3, 1.03)]
)
def test_positions_take_little_more_than_their_information(ratio: float, most: float) -> None:
    numel = 500_000
    places = np.flatnonzero(np.random.default_rng(0).random(numel) < ratio)
    share = len(places) / numel
    information = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert 8 * len(pack_positions(places, numel)) <= most * information * numel


def test_positions_that_stand_together_take_less() -> None:
    random = np.random.default_rng(0)
    in_layer = np.flatnonzero(random.random(5_000) < 0.5)
    places = np.concatenate([40_000 + in_layer, 45_000 + np.arange(0, 400_000, 4_000)])
    even = np.flatnonzero(random.random(445_000) < len(places) / 445_000)
    clustered = len(pack_positions(places, 445_000)) / len(places)
    assert clustered < 0.35 * len(pack_positions(even, 445_000)) / len(even)
