"""Random worlds whose workers come and go: nobody hangs, invariants hold.

EDGEGOSSIP_SWARM_SEED=17 pytest -m "not slow" tests/swarm/test_changing_swarm.py
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from tests.algorithms import ALL
from tests.invariants import Checks
from tests.random_worlds import LR, MANY_SEEDS, SEEDS, draw_changing_world
from tests.tiers import by_name, thorough
from tests.worlds import joined

from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.snapshot import assemble, dismantle

EACH = [name for name, algorithm in ALL.items() if not isinstance(algorithm, Stages)]
"""A stage that leaves ends a run in stages, so its ranks are not members that come and go."""


def check_worlds(name: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        world = draw_changing_world(ALL[name], seed)
        checks = Checks()
        try:
            simulator = world.simulator(checks)
            assert simulator.run()
            checks.require_unchanged_payloads()
            assert not checks.in_flight
            checks.require_total_weight()
            checks.require_models(world.size, LR)
        except Exception as error:
            error.add_note(f"{name} in world {seed}: {world}")
            raise


@pytest.mark.parametrize("name", by_name(EACH))
def test_members_come_and_go(name: str) -> None:
    check_worlds(name, SEEDS[:1])


@thorough
@pytest.mark.parametrize("name", EACH)
def test_members_come_and_go_in_some_more_worlds(name: str) -> None:
    check_worlds(name, SEEDS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_members_come_and_go_in_very_many_worlds(name: str) -> None:
    check_worlds(name, MANY_SEEDS)


@pytest.mark.parametrize("name", by_name(EACH))
def test_run_resumed_while_members_come_and_go_ends_with_the_same_bits(name: str) -> None:
    for seed in SEEDS[:2]:
        world = draw_changing_world(ALL[name], seed)
        whole, half, rest = (world.simulator() for _ in range(3))
        whole.run()
        half.run(until=whole.now / 2)
        rest.load_state_dict(assemble(*dismantle(half.state_dict())))
        assert rest.run()
        assert rest.num_events == whole.num_events
        assert torch.equal(joined(rest.estimates()), joined(whole.estimates()))
