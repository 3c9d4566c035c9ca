"""Nothing that a schema allows ends a worker, or makes it send what others reject."""

from __future__ import annotations

import pytest
from tests.protocol_fuzz import FUZZED, WITH_BEST, run_world, search
from tests.tiers import REPRESENTATIVES


def test_what_a_schema_allows_ends_nobody_and_leads_to_nothing_that_is_rejected() -> None:
    counts, found = search(
        2400, seed=0, names=sorted({*REPRESENTATIVES, *WITH_BEST}), num_a_world=100
    )
    assert not found, found[0].what
    assert counts["forged"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_what_a_schema_allows_ends_nobody_in_longer_worlds(name: str) -> None:
    counts, found = search(10_000, seed=1, names=[name])
    assert not found, found[0].what
    assert counts["let in"] > 0


def test_a_world_is_the_same_each_time() -> None:
    crowds = [run_world("gosgd", 3, 0, 100)[0] for _ in range(2)]
    first, second = (crowd.members[0].state for crowd in crowds)
    assert first.params.equal(second.params)
    assert crowds[0].now == crowds[1].now
