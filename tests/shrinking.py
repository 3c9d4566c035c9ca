"""The simplest world that still fails: one thing after another is taken away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.algorithms import PEERS
from tests.host_worlds import World as HostWorld
from tests.random_worlds import World
from tests.varied import smaller
from tests.virtual_network import Wire

from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform

W = TypeVar("W")


def shrink(world: W, fails: Callable[[W], bool], simpler: Callable[[W], Iterator[W]]) -> W:
    """Replace `world` by a simpler one that `fails`, as long as there is one.

    >>> shrink(100, lambda x: x > 20, lambda x: iter([x // 2, x - 1]))
    21
    """
    while (found := next((each for each in simpler(world) if fails(each)), None)) is not None:
        world = found
    return world


def simpler_host_worlds(world: HostWorld) -> Iterator[HostWorld]:
    """The same with one disturbance or one trait of the network, the disk or a worker less."""
    number = len(world.disturbances)
    for place in range(number):
        kept = world.disturbances[:place] + world.disturbances[place + 1 :]
        yield replace(world, disturbances=kept)
    last = world.num_workers - 1
    if world.name in PEERS and last >= 3 and world.liar != last:
        yield replace(
            world,
            algorithm=smaller(world.algorithm, last),
            step_seconds=world.step_seconds[:last],
            start_at=world.start_at[:last],
            disturbances=tuple(each for each in world.disturbances if last not in each.ranks),
        )
    quick = (0.001, 0.001)
    wire, even = world.wire, (min(world.step_seconds),) * world.num_workers
    changes: list[HostWorld] = [
        replace(world, wire=replace(wire, late=0.0)),
        replace(world, wire=replace(wire, lost=0.0)),
        replace(world, wire=replace(wire, twice=0.0)),
        replace(world, wire=replace(wire, latency=quick, bandwidth=Wire.bandwidth)),
        replace(world, start_at=(0.0,) * world.num_workers),
        replace(world, disk_fails=0.0),
        replace(world, checkpoint_seconds=math.inf),
        replace(world, liar=None, lie=""),
        replace(world, step_seconds=even),
    ]
    yield from (each for each in changes if each != world)


def simpler_worlds(world: World) -> Iterator[World]:
    """The same with one fault less, or with even platforms and links."""
    script = world.faults.script
    for place in range(len(script)):
        kept = script[:place] + script[place + 1 :]
        yield replace(world, faults=replace(world.faults, script=kept))
    changes = [
        replace(world, links=Links()),
        replace(world, platforms=(Platform(throughput=1.0),) * len(world.platforms)),
        replace(world, wire=False),
    ]
    yield from (each for each in changes if each != world)


def does_fail(check: Callable[[W], object]) -> Callable[[W], bool]:
    """Whether `check` fails on a world."""

    def fails(world: W) -> bool:
        try:
            check(world)
        except Exception:
            return True
        return False

    return fails
