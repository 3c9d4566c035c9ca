"""The kept entries are exactly the largest, or drawn uniformly, in each part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.compressors import normal, squared_norm
from tests.tiers import thorough

from edgegossip.compression.compressor import Identity, PerLayer
from edgegossip.compression.sparse import RandomK, TopK, at_random, largest
from edgegossip.compression.values import BFloat16, Quantize, Sign
from edgegossip.contract import codec
from edgegossip.contract.protocol import Message
from edgegossip.contract.randomness import generator

LARGE = 400_000


def largest_by_sorting(vector: np.ndarray, count: int) -> list[int]:
    order = np.argsort(-np.abs(vector), kind="stable")
    return sorted(order[:count].tolist())


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-45, 3e38]), min_size=1),
    st.floats(0, 1),
)
def test_the_largest_are_kept_and_of_equal_ones_the_first(x: list[float], share: float) -> None:
    vector = np.array(x, np.float32)
    count = max(1, round(share * len(x)))
    assert largest(vector, count).tolist() == largest_by_sorting(vector, count)


KINDS = {
    "normal": normal(LARGE).numpy(),
    "heavy": (normal(LARGE) ** 7).numpy(),
    "all equal": np.ones(LARGE, np.float32),
    "zeros": np.zeros(LARGE, np.float32),
    "few values": normal(LARGE).round().numpy(),
    "ascending": np.arange(LARGE, dtype=np.float32),
    # What the sample meets says nothing about the rest, or the other way round.
    "comb": np.where(np.arange(LARGE) % (LARGE // 2**17) == 0, 9.0, normal(LARGE)).astype("f4"),
    "gaps": np.where(np.arange(LARGE) % (LARGE // 2**17) == 0, 0.0, normal(LARGE)).astype("f4"),
}


@pytest.mark.parametrize("count", [1, 400, 4_000, 200_000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_change_what_is_largest(kind: str, count: int) -> None:
    vector = KINDS[kind]
    chosen = largest(vector, count)
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    is_chosen = np.zeros(LARGE, bool)
    is_chosen[chosen] = True
    magnitudes = np.abs(vector)
    smallest = magnitudes[chosen].min()
    assert magnitudes[~is_chosen].max() <= smallest
    ties = np.flatnonzero(magnitudes == smallest)
    assert is_chosen[ties].tolist() == sorted(is_chosen[ties].tolist(), reverse=True)


@pytest.mark.parametrize(("numel", "count"), [(10, 1), (10, 2), (10, 5), (10, 10), (3, 0)])
def test_all_entries_are_drawn_equally_often(numel: int, count: int) -> None:
    num_draws = 2000
    counts = np.zeros(numel)
    for k in range(num_draws):
        drawn = at_random(numel, count, generator(0, k))
        assert len({*drawn.tolist()}) == count
        counts[drawn] += 1
    expected = num_draws * count / numel
    assert np.abs(counts - expected).max() <= 5 * expected**0.5


def test_other_keys_draw_other_positions() -> None:
    x, compressor = torch.ones(1000), RandomK(keep_ratio=0.1)
    sent = [compressor.decompress(compressor.compress(x, 3, key), 1000) for key in (1, 2)]
    assert not torch.equal(*sent)


def test_positions_drawn_do_not_travel() -> None:
    x = torch.ones(10_000)
    payload = RandomK(keep_ratio=0.1, values=Sign()).compress(x, 1)
    assert payload["bits"].numel() == 2 + 1000 / 8 + 8


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [(Identity(), 4.0), (BFloat16(), 2.0), (Quantize(bits=8), 1.0), (Quantize(bits=4), 0.5)],
)
def test_values_take_as_many_bits_as_said(
    values: Identity | BFloat16 | Quantize, num_bytes: float
) -> None:
    x, kept = normal(100_000), 1_000
    exact = TopK(keep_ratio=0.01, values=values).compress(x)["bits"].numel() / kept
    # Positions take 8.3 bits; levels and scale are 18 bytes with 4 bits, 258 with 8.
    assert num_bytes + 1.0 < exact < num_bytes + (1.4 if values == Quantize(bits=8) else 1.1)


def test_with_4_bits_a_kept_entry_of_a_large_vector_takes_at_most_1_6_bytes() -> None:
    x = normal(1_000_000)
    message = Message("mass", 3, TopK(keep_ratio=0.01, values=Quantize(bits=4)).compress(x))
    assert codec.num_bytes(message) / 10_000 <= 1.6


# Per layer.


def test_each_layer_keeps_its_share_and_at_least_one_entry() -> None:
    x = torch.cat([100 * normal(200), normal(200), torch.tensor([1e-3, 2e-3])])
    compressor = PerLayer(TopK(keep_ratio=0.05), sizes=(200, 200, 2))
    got = compressor.decompress(compressor.compress(x), 402)
    assert [int(part.count_nonzero()) for part in torch.split(got, [200, 200, 2])] == [
        10,
        10,
        1,
    ]


@thorough
@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_what_a_layer_keeps_does_not_depend_on_the_others(seed: int) -> None:
    first, second = normal(100, seed), 10 * normal(300, seed + 1)
    inner = TopK(keep_ratio=0.1)
    compressor = PerLayer(inner, sizes=(100, 300))
    x = torch.cat([first, second])
    alone = [inner.decompress(inner.compress(part), len(part)) for part in (first, second)]
    assert torch.equal(compressor.decompress(compressor.compress(x), 400), torch.cat(alone))


def test_each_layer_has_its_own_scale() -> None:
    x = torch.cat([1e4 * normal(500), normal(500, 1), 1e-4 * normal(500, 2)])
    for inner in (Sign(), Quantize(bits=4), TopK(keep_ratio=0.1, values=Quantize(bits=4))):
        compressor = PerLayer(inner, sizes=(500, 500, 500))
        got = compressor.decompress(compressor.compress(x), 1500)
        for part, sent in zip(torch.split(x, 500), torch.split(got, 500), strict=True):
            alone = inner.decompress(inner.compress(part), 500)
            error, least = squared_norm(sent - part), squared_norm(alone - part)
            assert error <= 1.5 * least + 0.01 * squared_norm(part)


def test_levels_fit_the_layers_that_have_the_energy() -> None:
    loud = 1e3 * torch.tensor([1.0, -3.0]).repeat(500)
    x = torch.cat([loud, 1e-3 * normal(20_000)])
    for inner in (Quantize(bits=2), TopK(keep_ratio=1.0, values=Quantize(bits=2))):
        compressor = PerLayer(inner, sizes=(1000, 20_000))
        got = compressor.decompress(compressor.compress(x), 21_000)
        assert squared_norm(got - x) < 1e-5 * squared_norm(x)


def test_layers_cost_a_scale_each_and_no_header() -> None:
    x, inner = normal(6_000), TopK(keep_ratio=0.1, values=Quantize(bits=4))
    # The header is filled up to a multiple of 8 bytes.
    whole = codec.num_bytes(Message("mass", 3, inner.compress(x)))
    parts = PerLayer(inner, sizes=(100,) * 60).compress(x)
    assert codec.num_bytes(Message("mass", 3, parts)) <= whole + 2 * 60 + 8


# Arguments.


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_a_share_out_of_range_is_refused(kind: type[TopK | RandomK], ratio: float) -> None:
    with pytest.raises(
        ValueError, match=rf"keep_ratio must be in \(0, 1\], got {ratio}; .* kept"
    ):
        kind(keep_ratio=ratio)


@pytest.mark.parametrize("bits", [0, 1, 9, 32])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"bits must be in \[2, 8\], got {bits}; take Sign"):
        Quantize(bits=bits)


@pytest.mark.parametrize("sizes", [(), (3, 0), (-1,)])
def test_layers_without_entries_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes must be .* at least 1"):
        PerLayer(Sign(), sizes=sizes)


def test_sizes_that_do_not_add_up_are_told() -> None:
    compressor = PerLayer(Sign(), sizes=(3, 4))
    message = "2 parts add up to 7, but the vector has 8 entries"
    with pytest.raises(ValueError, match=message):
        compressor.compress(torch.zeros(8))
    with pytest.raises(ValueError, match=message):
        compressor.schema(8)
    with pytest.raises(ValueError, match=message):
        compressor.contraction(8)
