"""The command that measures how loads slow training. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from edgegossip.cli.command import parse_recipe
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor, SlowDown
from edgegossip.machine.profile import Profile
from edgegossip.machine.profiling import (
    ROWS_PER_LOAD,
    TimedTraining,
    choose_loads,
    measure,
    profile_of,
)
from edgegossip.report import units


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options for profiling this machine.

    Args:
        minutes: Duration in minutes, at least 0.5.
        out: CSV file for the profile.
        threads: Threads of one training step; use as many as the worker will have.
        only: Algorithm whose task is trained if the recipe is a comparison.
    """

    minutes: float = 4.0
    out: Path = Path("profile.csv")
    threads: int = 1
    only: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, minutes="at least 0.5 and finite", threads="at least 1")
        if not self.out.parent.is_dir():
            raise ValueError(f"there is no folder {self.out.parent} to write --out to")


def profile_command(arguments: list[str]) -> int:
    """`edgegossip profile`."""
    command = parse_recipe("profile", ProfileOptions, arguments)
    options = command.options
    experiment = command.call.experiment(options.only)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    workload = experiment.workload()
    rank = experiment.data_ranks[0]
    training = TimedTraining(workload.make_trainer(rank), workload.initial_params(rank))
    counters = SystemCounters()
    loads = choose_loads(60 * options.minutes, counters.num_cores)
    with Monitor(PerformancePredictor(), counters=counters) as monitor:
        rows = list(
            track(
                measure(training, monitor, loads),
                "profiling",
                total=ROWS_PER_LOAD * len(loads),
                transient=True,
            )
        )
    profile = profile_of(rows)
    profile.write(options.out)
    _say(profile)
    print(f"profile: {options.out}")
    return 0


def _say(profile: Profile) -> None:
    slow_down = SlowDown(profile, None)
    slowest = max(range(len(profile)), key=profile.seconds.__getitem__)
    times = profile.seconds[slowest] / slow_down.seconds_alone
    print(
        f"alone {units.number(1 / slow_down.seconds_alone)} samples/s; at worst "
        f"{units.number(times)} times slower, with "
        f"{units.percent(profile.contentions[slowest].cores, 0)} of the cores busy; "
        f"held-out seconds are {units.percent(slow_down.relative_error)} off"
    )
