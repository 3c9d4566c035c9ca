"""Did numbers move? Each algorithm's trajectory against the one that was kept.

A change that is meant to move them refreshes the files, to be looked at before they are
committed::

    EDGEGOSSIP_REFRESH_GOLDEN=1 pytest tests/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.algorithms import (
    ALGORITHMS,
    ALONE,
    CLAIMED,
    CLIPPED,
    CONTROLLED,
    EDGE_SQUEEZE,
    REGIONS,
    SERVED,
    STAGES,
    TUNED,
    WITH_MOMENTS,
)
from tests.worlds import UNEVEN, Recorder, joined, make_world

from edgegossip.contract.metrics import consensus_distance
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.link import Link, Links

KEPT = {
    **ALGORITHMS,
    **TUNED,
    **STAGES,
    **REGIONS,
    **SERVED,
    **CONTROLLED,
    **WITH_MOMENTS,
    **CLAIMED,
    **CLIPPED,
    "alone": ALONE,
    # Of `BALANCED` only the flagship: the others wrap what is here already; `TUNED`,
    # `SERVED` and `CONTROLLED` have some of EdgeGossip.
    "edge-squeeze": EDGE_SQUEEZE,
}
FOLDER = Path(__file__).parent
IS_REFRESHING = "EDGEGOSSIP_REFRESH_GOLDEN" in os.environ
LINKS = Links(default=Link(latency=0.25, bandwidth=1000.0))
FAULTS = Faults(script=(Crash(at=6.5, rank=2), Recover(at=9.25, rank=2)), detection_time=0.5)


def trajectory(name: str) -> dict[str, Any]:
    """The events, and the workers' states every three seconds."""
    recorder = Recorder()
    world = make_world(
        KEPT[name], platforms=UNEVEN, links=LINKS, faults=FAULTS, observer=recorder
    )
    points: list[dict[str, Any]] = []
    is_over = False
    while not is_over:
        is_over = world.run(until=3.0 * (len(points) + 1))
        estimates = joined(world.estimates())
        point = {
            "rounds": [state.round for state in world.states],
            "mean": estimates.mean(0)[:3].tolist(),
            "consensus_distance": consensus_distance(estimates),
        }
        points.append(point)
    num_bytes = sum(int(what.split()[1]) for _, _, what in recorder.trace if "bytes" in what)
    return {
        "seconds": world.now,
        "num_events": world.num_events,
        "num_messages": len(recorder.messages),
        "num_bytes": num_bytes,
        "points": points,
    }


@pytest.mark.parametrize("name", KEPT)
def test_trajectory_is_the_one_that_was_kept(name: str) -> None:
    path = FOLDER / f"{name}.json"
    found = trajectory(name)
    if IS_REFRESHING:
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert path.exists(), (
        f"{path.name} is missing; make it with EDGEGOSSIP_REFRESH_GOLDEN=1 pytest tests/golden"
    )
    kept = json.loads(path.read_text())
    # Events to the letter; sums of floats differ in the last bits from machine to machine.
    for key in ("num_events", "num_messages", "num_bytes"):
        assert found[key] == kept[key], key
    assert found["seconds"] == pytest.approx(kept["seconds"])
    assert len(found["points"]) == len(kept["points"])
    for point, kept_point in zip(found["points"], kept["points"], strict=True):
        assert point["rounds"] == kept_point["rounds"]
        assert point["mean"] == pytest.approx(kept_point["mean"], rel=1e-4, abs=1e-6)
        expected = pytest.approx(kept_point["consensus_distance"], rel=1e-4, abs=1e-6)
        assert point["consensus_distance"] == expected
