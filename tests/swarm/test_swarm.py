"""Hundreds of random worlds: speeds, links, loss, crashes. Nobody hangs, invariants hold.

A failure names its world. To run that one alone, for every algorithm::

    EDGEGOSSIP_SWARM_SEED=17 pytest -m "not slow" tests/swarm

The fast tests see one world of each algorithm, the thorough ones the next four, and the slow
ones a thousand, from seed `EDGEGOSSIP_SWARM_FIRST` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.algorithms import ALL, ALONE
from tests.invariants import Checks, inside, require_equal_replicas
from tests.random_worlds import LR, MANY_SEEDS, SEEDS, World, draw_world
from tests.shrinking import does_fail, shrink, simpler_worlds
from tests.tiers import by_name, thorough
from tests.worlds import joined

from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.algorithms.stages.state import StageState
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.sim.fault import Crash, Partition

EACH = {**ALL, "alone": ALONE}


def check_world(world: World) -> None:
    checks = Checks()
    simulator = world.simulator(checks)
    if isinstance(world.algorithm, Standby):
        check_standby(world, checks)
        return
    assert simulator.run()
    checks.require_unchanged_payloads()
    assert not checks.in_flight
    checks.require_total_weight()
    checks.require_models(world.size, LR)
    checks.require_settled()
    # What was sent before a crash may arrive when the sender has begun anew.
    if not any(isinstance(fault, Crash) for fault in world.faults.script):
        require_equal_replicas([inside(state) for state in simulator.states])
    algorithm = world.algorithm
    while not isinstance(algorithm, Shards) and hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    serves = isinstance(algorithm, ParameterServer | Shards)
    is_left = serves and checks.crashed >= {*algorithm.workers}
    num_above = 1 + algorithm.num_regions if isinstance(algorithm, HALoS) else 0
    for rank, state in enumerate(simulator.states):
        # Those that train nothing know the rounds of others, who may have crashed.
        is_above = isinstance(state, StageState) and state.inner is None
        is_above = is_above or rank < num_above
        if rank not in checks.crashed and not is_left and not is_above:
            assert state.round == algorithm.traits.num_rounds


def check_standby(world: World, checks: Checks) -> None:
    """Run it; unless most have crashed for good, all come to the end with one server."""
    simulator = checks.simulator
    try:
        assert simulator.run()
    except ServerLostError:
        assert len(checks.crashed) >= len(simulator.states) / 2
        return
    workers = [state for state in simulator.states if state.rank not in checks.crashed]
    for state in workers:
        assert state.rank == SERVER or state.round == world.algorithm.traits.num_rounds
    cuts = [each for each in world.faults.script if isinstance(each, Partition)]
    if simulator.now > max((cut.end for cut in cuts), default=0.0) + 100.0:
        assert len([state for state in workers if inside(state).server is not None]) <= 1


@contextmanager
def replayable(name: str, seed: int) -> Iterator[None]:
    """Say in a failure which world it was, what of it matters, and how to see it again."""
    try:
        yield
    except Exception as error:
        world, fails = draw_world(EACH[name], seed), does_fail(check_world)
        if fails(world):
            error.add_note(f"shrunk: {shrink(world, fails, simpler_worlds)}")
        error.add_note(f"{name} in world {seed}: {draw_world(EACH[name], seed)}")
        error.add_note(
            f"again: EDGEGOSSIP_SWARM_SEED={seed} pytest -m 'not slow' tests/swarm -k {name}"
        )
        raise


def check_worlds(name: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        with replayable(name, seed):
            check_world(draw_world(EACH[name], seed))


@pytest.mark.parametrize("name", by_name([*EACH]))
def test_no_world_breaks_it(name: str) -> None:
    check_worlds(name, SEEDS[:1])


@thorough
@pytest.mark.parametrize("name", EACH)
def test_none_of_some_more_worlds_breaks_it(name: str) -> None:
    check_worlds(name, SEEDS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_none_of_very_many_worlds_breaks_it(name: str) -> None:
    check_worlds(name, MANY_SEEDS)


@pytest.mark.parametrize("name", by_name([*EACH]))
def test_run_resumed_from_a_checkpoint_ends_with_the_same_bits(name: str) -> None:
    for seed in SEEDS[:2]:
        with replayable(name, seed):
            world = draw_world(EACH[name], seed)
            whole, first, second = (world.simulator() for _ in range(3))
            whole.run()
            first.run(until=whole.now / 2)
            second.load_state_dict(assemble(*dismantle(first.state_dict())))
            assert second.run()
            assert second.num_events == whole.num_events
            assert torch.equal(joined(second.estimates()), joined(whole.estimates()))
