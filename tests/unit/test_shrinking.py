"""A failing world is shrunk to what makes it fail."""

from __future__ import annotations

from dataclasses import replace

from tests.algorithms import ALGORITHMS
from tests.host_world_draws import draw_world as draw_host_world
from tests.host_worlds import Disturbance, World as HostWorld
from tests.random_worlds import World, draw_world
from tests.shrinking import does_fail, shrink, simpler_host_worlds, simpler_worlds

from edgegossip.sim.fault import Crash


def test_a_world_of_hosts_keeps_only_the_disturbance_that_matters() -> None:
    kill = Disturbance(kind="kill", at=1.0, ranks=(1,))
    world = replace(
        draw_host_world(0, "gossip"),
        disturbances=(Disturbance(kind="pause", at=0.5, ranks=(0,)), kill),
    )
    found = shrink(world, lambda each: kill in each.disturbances, simpler_host_worlds)
    assert found.disturbances == (kill,)
    assert not any(found.start_at)
    assert len({*found.step_seconds}) == 1
    assert found.num_workers == found.algorithm.traits.topology.num_workers == 3  # type: ignore[union-attr]


def test_a_simulated_world_keeps_only_the_fault_that_matters() -> None:
    worlds = (draw_world(ALGORITHMS["gossip"], seed) for seed in range(100))
    world = next(w for w in worlds if any(isinstance(f, Crash) for f in w.faults.script))

    def check(each: World) -> None:
        assert not any(isinstance(fault, Crash) for fault in each.faults.script)

    found = shrink(world, does_fail(check), simpler_worlds)
    assert [type(fault) for fault in found.faults.script] == [Crash]
    assert not found.wire


def test_a_world_that_cannot_be_simpler_stays_as_it_is() -> None:
    def never(world: HostWorld) -> bool:
        return False

    world = draw_host_world(0)
    assert shrink(world, never, simpler_host_worlds) is world
