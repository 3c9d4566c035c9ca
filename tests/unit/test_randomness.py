"""One stream for each key, the same on every machine and independent of the others."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from edgegossip.contract.randomness import derive_seed, generator, uniform


def test_seeds_are_those_of_the_hash_on_every_machine() -> None:
    # Worked out once by hand: a change would silently change every result.
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(0, 3, "batches") == 3594339821631615881
    assert uniform(7, "drop", 2) == uniform(7, "drop", 2)


@given(st.lists(st.integers(0, 50) | st.text("ab", max_size=2), max_size=4))
def test_a_seed_fits_torch_and_a_draw_the_unit_interval(key: list[int | str]) -> None:
    assert 0 <= derive_seed(1, *key) < 2**63
    assert 0 <= uniform(1, *key) < 1


def test_keys_that_differ_in_anything_have_streams_of_their_own() -> None:
    keys = [(0, 1, "batches"), (1, 0, "batches"), (0, 1, "dropout"), (0, 11), (0, 1, 1), (0,)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)  # type: ignore[arg-type]


def test_streams_of_neighbouring_keys_are_not_correlated() -> None:
    draws = torch.stack(
        [torch.rand(2000, generator=generator(0, rank, "x")) for rank in range(4)]
    )
    correlations = torch.corrcoef(draws) - torch.eye(4)
    assert float(correlations.abs().max()) < 0.1


def test_single_draws_are_uniform() -> None:
    draws = torch.tensor([uniform(0, k, "x") for k in range(4000)])
    assert abs(float(draws.mean()) - 0.5) < 0.02
    assert abs(float(draws.var()) - 1 / 12) < 0.005


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    torch.rand(3, generator=generator(0, "x"))
    uniform(0, "x")
    assert torch.equal(torch.get_rng_state(), before)
