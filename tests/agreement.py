"""How far the workers' models are from each other during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.worlds import Watched, make_world

from edgegossip.core.algorithm import Algorithm
from edgegossip.core.protocol import Event, Seconds, WorkerState
from edgegossip.sim.fault import Fault, Faults
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform


def distances(
    algorithm: Algorithm[Any],
    platforms: Sequence[Platform],
    script: Sequence[Fault],
    links: Links | None = None,
) -> list[float]:
    """Run to the end; after each event, the distance from the first of those not lost."""
    found: list[float] = []

    def note(_state: WorkerState, _event: Event, _now: Seconds) -> None:
        models = torch.stack([*simulator.estimates().values()])
        found.append(float((models - models[0]).norm()))

    watched = Watched(algorithm, after=note)
    faults = Faults(script=tuple(script))
    simulator = make_world(watched, platforms=platforms, links=links, faults=faults)
    assert simulator.run()
    return found
