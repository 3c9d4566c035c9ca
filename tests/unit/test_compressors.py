"""Promises of every compressor, for any vector and any arriving bytes."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.compressors import NAMES, PARTWISE, compressor_for, draws, normal, squared_norm
from tests.tiers import by_name, first
from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.protocol import Message
from edgegossip.contract.schema import MessageSpec

MAX = float(torch.finfo(torch.float32).max)
few = settings(max_examples=12)
each = pytest.mark.parametrize(
    "name",
    by_name(
        NAMES,
        ["bfloat16", "sign", "quantize-3", "top-sign", "random", "top-quantize-4-per-layer"],
    ),
)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Zeros, equal entries, spikes, normal ones, many scales; from 1e-30 to the largest."""
    numel = draw(st.integers(1, 300))
    seed = draw(st.integers(0, 2**32))
    x = normal(numel, seed)
    shape = draw(st.sampled_from(["normal", "zeros", "equal", "spike", "scales", "ties"]))
    match shape:
        case "zeros":
            x = torch.zeros(numel)
        case "equal":
            x = torch.full((numel,), -1.5)
        case "spike":
            x = 1e-3 * x
            x[seed % numel] = 100.0
        case "scales":
            x = x * 10.0 ** (4 * normal(numel, seed + 1)).clamp(-12, 12)
        case "ties":
            x = x.round()
    largest = float(x.abs().max())
    scale = draw(st.sampled_from([1.0, 1e-30, 1e30, MAX]))
    return x / largest * scale if largest > 0 else x


def relative_error(name: str, x: Tensor, *key: int | str) -> float:
    """Squared error over squared norm, which is not 0."""
    compressor = compressor_for(name, len(x))
    got = compressor.decompress(compressor.compress(x, *key), len(x))
    return squared_norm(got.double() - x.double()) / squared_norm(x)


@each
@few
@given(x=vectors())
def test_every_compressor_contracts(name: str, x: Tensor) -> None:
    if squared_norm(x) == 0:
        compressor = compressor_for(name, len(x))
        assert not compressor.decompress(compressor.compress(x), len(x)).any()
        return
    delta = compressor_for(name, len(x)).contraction(len(x))
    assert 0 < delta <= 1
    num_draws = 3 if draws(name) else 1
    errors = [relative_error(name, x, 3, "round", k) for k in range(num_draws)]
    assert max(errors) <= 1 + 1e-6
    if not draws(name):
        assert errors[0] <= 1 - delta + 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if draws(name)])
@pytest.mark.parametrize("kind", first(1, ["spike", "normal"]))
def test_those_that_draw_contract_in_expectation(name: str, kind: str) -> None:
    x = normal(60)
    if kind == "spike":
        x[7] = 30.0
    errors = [relative_error(name, x, 0, k) for k in range(150)]
    delta = compressor_for(name, len(x)).contraction(len(x))
    tolerance = 4 * statistics.stdev(errors) / math.sqrt(len(errors))
    assert statistics.mean(errors) <= 1 - delta + tolerance


@each
@few
@given(x=vectors(), key=st.integers(0, 2**63))
def test_payloads_are_small_finite_repeatable_and_as_the_schema_says(
    name: str, x: Tensor, key: int
) -> None:
    compressor = compressor_for(name, len(x))
    payload = compressor.compress(x, key, "round", 3)
    spec = MessageSpec(compressor.schema(len(x)))
    assert spec.mismatch(payload) is None
    assert spec.bad_values(payload) is None
    again = compressor.compress(x.clone(), key, "round", 3)
    assert all(torch.equal(payload[key], again[key]) for key in payload)
    got = compressor.decompress(payload, len(x))
    assert got.dtype == torch.float32
    assert got.shape == x.shape
    assert bool(got.isfinite().all())


@each
@few
@given(x=vectors())
def test_what_is_counted_is_what_travels_and_what_arrives_is_what_was_meant(
    name: str, x: Tensor
) -> None:
    compressor = compressor_for(name, len(x))
    turn = compressor.feed_back(x, torch.zeros_like(x), 5)
    message = Message("mass", 12, turn.payload)
    data = bytearray().join(codec.encode(message))
    assert codec.num_bytes(message) == len(data)
    arrived = compressor.decompress(codec.decode(data).payload, len(x))
    assert torch.equal(arrived, turn.sent)
    assert torch.equal(turn.error, x - turn.sent)


@each
@few
@given(numel=st.integers(1, 200), seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_any_bytes_that_the_schema_allows_become_a_finite_vector(
    name: str, numel: int, seed: int, share: float
) -> None:
    compressor = compressor_for(name, numel)
    random = np.random.default_rng(seed)
    payload = {}
    for key, spec in compressor.schema(numel).items():
        if spec.max_numel is None:
            continue
        length = round(share * spec.max_numel)
        junk = random.integers(0, 256, length, np.uint8)
        # Long runs are as likely to be trouble: no ones, no zeros, floats that are none.
        junk[random.random(length) < random.choice([0, 0.5, 0.99])] = random.choice([0, 255])
        payload[key] = torch.from_numpy(junk)
        assert spec.fits(payload[key])
    if not payload:
        return
    got = compressor.decompress(payload, numel)
    assert got.shape == (numel,)
    assert got.dtype == torch.float32
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("name", PARTWISE)
def test_a_vector_may_be_empty(name: str) -> None:
    compressor = PARTWISE[name]
    payload = compressor.compress(torch.empty(0), 1)
    assert MessageSpec(compressor.schema(0)).mismatch(payload) is None
    assert compressor.decompress(payload, 0).tolist() == []


@each
def test_what_is_not_finite_is_compressed_to_something(name: str) -> None:
    x = normal(50)
    x[3], x[17], x[49] = math.nan, math.inf, -math.inf
    compressor = compressor_for(name, len(x))
    if "values" not in (payload := compressor.compress(x)):
        assert bool(compressor.decompress(payload, len(x)).isfinite().all())


@each
@pytest.mark.parametrize("smallest", [1e-38, 1e-45])
def test_what_is_hardly_a_number_stays_as_small(name: str, smallest: float) -> None:
    x = smallest * torch.tensor([1.0, -1.0, 3.0, 0.0])
    compressor = compressor_for(name, len(x))
    got = compressor.decompress(compressor.compress(x), len(x))
    assert float(got.abs().max()) <= 1.01 * float(x.abs().max())


@each
def test_a_vector_is_not_written_to_and_may_be_a_view(name: str) -> None:
    x = normal(100)[::2].requires_grad_()
    before = x.detach().clone()
    compressor = compressor_for(name, len(x))
    payload = compressor.compress(x, 1)
    assert torch.equal(x, before)
    again = compressor.compress(before, 1)
    assert all(torch.equal(payload[key], again[key]) for key in payload)
    frozen = {key: tensor.clone() for key, tensor in payload.items()}
    compressor.decompress(payload, len(x))
    assert all(torch.equal(payload[key], frozen[key]) for key in payload)


@each
def test_other_tensors_of_a_payload_are_not_looked_at(name: str) -> None:
    compressor = compressor_for(name, 20)
    payload = {**compressor.compress(normal(20)), "weight": torch.tensor(0.5)}
    assert compressor.decompress(payload, 20).shape == (20,)


@each
def test_error_feedback_sends_everything_in_the_end(name: str) -> None:
    x, error = normal(40), torch.zeros(40)
    total = torch.zeros(40, dtype=torch.float64)
    for k in range(60):
        turn = compressor_for(name, 40).feed_back(x, error, 0, k)
        total, error = total + turn.sent, turn.error
    torch.testing.assert_close(total + error, 60 * x.double(), rtol=1e-4, atol=1e-3)
    # What is held back does not grow with the number of rounds.
    delta = compressor_for(name, 40).contraction(40)
    assert float(error.norm()) <= 2 / delta * float(x.norm())
