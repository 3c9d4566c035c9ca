"""Runs that are stopped, and what they would have left without a stop."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.small_runs import FAULTS, parameters, repeatable_events, small_run

from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Faults


def faulty(name: str) -> Experiment:
    return small_run(name, faults=FAULTS)


@lru_cache
def whole(name: str, faults: Faults = FAULTS) -> tuple[bytes, bytes]:
    """Events and parameters of the uninterrupted run."""
    with TemporaryDirectory() as folder:
        run(small_run(name, faults=faults), out=folder, num_threads=0)
        return repeatable_events(Path(folder)), parameters(Path(folder))


def left(folder: Path) -> tuple[bytes, bytes]:
    return repeatable_events(folder), parameters(folder)
