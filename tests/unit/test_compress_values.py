"""Few bits keep most of a vector, and never less than promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.compressors import normal, squared_norm
from torch import Tensor

from edgegossip.compression.compressor import Values
from edgegossip.compression.values import BFloat16, Quantize, Sign, fit, guarantee


def relative_error(compressor: Values, x: Tensor) -> float:
    got = compressor.decompress(compressor.compress(x), len(x))
    return squared_norm(got - x) / squared_norm(x)


# Max, "Quantizing for minimum distortion", 1960, table 1: the least error of N levels.
@pytest.mark.parametrize(("bits", "least"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_normal_entries_lose_no_more_than_the_best_levels_must(bits: int, least: float) -> None:
    assert relative_error(Quantize(bits=bits), normal(200_000)) == pytest.approx(
        least, rel=0.03
    )


def test_8_bits_lose_next_to_nothing() -> None:
    assert relative_error(Quantize(bits=8), normal(100_000)) < 6e-5


def test_the_sign_keeps_what_theory_says() -> None:
    assert relative_error(Sign(), normal(200_000)) == pytest.approx(1 - 2 / math.pi, rel=0.01)
    x = torch.tensor([1.0, -2.0, 3.0, 0.0])
    assert relative_error(Sign(), x) == pytest.approx(1 - 36 / 4 / 14)


def test_few_different_entries_are_kept_as_they_are() -> None:
    x = torch.tensor([-2.0, 0.5, 0.5, 8.0, 2.0, -0.5]).repeat(50)
    assert relative_error(Quantize(bits=3), x) < 1e-6


def test_bfloat16_rounds_to_the_nearest_and_never_to_infinity() -> None:
    x = torch.tensor([1.0, 1.003, -1e-30, 3.4028e38, -3.4028e38])
    got = BFloat16().decompress(BFloat16().compress(x), 5)
    assert torch.equal(got[:3], x[:3].bfloat16().float())
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, x, rtol=2**-8, atol=0.0)


def worst(numel: int, num_levels: int, seed: int) -> Tensor:
    """Magnitudes that lie at the ends of the cells, each cell with as much energy."""
    random = np.random.default_rng(seed)
    thresholds = guarantee(numel, num_levels)[1]
    ends = np.concatenate([thresholds, 0.99 * thresholds, [math.sqrt(numel)]])
    energy = 1.0 / ends**2
    entries = random.choice(ends, numel, p=energy / energy.sum())
    return torch.from_numpy(entries.astype(np.float32))


@pytest.mark.parametrize("numel", [1, 10, 1000, 20_000])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_vector_loses_more_than_promised(bits: int, numel: int) -> None:
    compressor = Quantize(bits=bits)
    vectors = [worst(numel, compressor.num_levels, seed) for seed in range(3)]
    vectors += [torch.logspace(-6, 6, numel), torch.arange(1.0, numel + 1) ** -0.5]
    bound = 1 - compressor.contraction(numel)
    assert all(relative_error(compressor, x) <= bound for x in vectors)


def test_the_promise_holds_with_the_thresholds_alone() -> None:
    # Without those that Lloyd finds, so that the proof is tested and not the practice.
    numel, num_levels = 20_000, 8
    delta, thresholds = guarantee(numel, num_levels)
    for seed in range(5):
        x = worst(numel, num_levels, seed).double().numpy()
        x /= np.sqrt(np.mean(x**2))
        cells = np.searchsorted(thresholds, x, side="right")
        mass = np.bincount(cells, minlength=num_levels)
        moment = np.bincount(cells, x, minlength=num_levels)
        captured = np.sum(moment[mass > 0] ** 2 / mass[mass > 0]) / np.sum(x**2)
        assert captured >= delta


def test_the_promise_grows_with_bits_and_falls_with_length() -> None:
    deltas = [Quantize(bits=bits).contraction(10**6) for bits in range(2, 9)]
    assert deltas == sorted(deltas)
    assert deltas[2] > 0.6
    lengths = [Quantize(bits=4).contraction(10**k) for k in range(8)]
    assert lengths == sorted(lengths, reverse=True)


def test_levels_are_never_worse_than_the_thresholds_they_began_with() -> None:
    magnitudes = np.abs(normal(5000).numpy()) ** 3
    weights = np.ones(5000)
    for thresholds in (np.array([0.01, 0.02, 0.03]), np.array([1.0, 10.0, 30.0])):
        codes, levels = fit(magnitudes, weights, 4, thresholds)
        error = np.sum((magnitudes - levels[codes]) ** 2)
        cells = np.searchsorted(thresholds, magnitudes, side="right")
        means = np.bincount(cells, magnitudes, 4) / np.maximum(1, np.bincount(cells, None, 4))
        assert error <= np.sum((magnitudes - means[cells]) ** 2) * (1 + 1e-9)


def test_weights_count_as_repetitions() -> None:
    magnitudes = np.array([1.0, 2.0, 9.0, 10.0, 11.0], np.float32)
    repetitions = np.array([3, 1, 2, 5, 1])
    thresholds = np.array([5.0])
    weighted = fit(magnitudes, repetitions.astype(np.float64), 2, thresholds)[1]
    repeated = np.repeat(magnitudes, repetitions)
    plain = fit(repeated, np.ones(len(repeated)), 2, thresholds)[1]
    np.testing.assert_allclose(weighted, plain)
