"""Algorithms with one model for all: where it goes, and how far workers are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import NUM_PARAMS, TARGETS, Watched, make_world
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Event, Seconds, WorkerState
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


def outer_sgd(num_rounds: int, local_steps: int, lr: float, momentum: float) -> Tensor:
    """The model after outer steps of SGD with Nesterov's momentum, without compression."""
    model = torch.zeros(NUM_PARAMS, requires_grad=True)
    outer = torch.optim.SGD([model], lr=lr, momentum=momentum, nesterov=True)
    for _ in range(num_rounds):
        # Each step of 0.1 towards each target leaves 0.9 of the way.
        left = 0.9**local_steps
        model.grad = -(1 - left) * (TARGETS[:NUM_WORKERS] - model.detach()).mean(0)
        outer.step()
    return model.detach()
