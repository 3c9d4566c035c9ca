"""The command that plans for real machines. Importing this module imports torch."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgegossip.cli.command import Command, parse_recipe, parse_values
from edgegossip.cli.options import ManyRunsOptions
from edgegossip.cli.study_command import carry_out
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.energy import BUSY_WATTS, IDLE_WATTS
from edgegossip.plan.machines import read_machines
from edgegossip.plan.planning import Plan, PlanSettings, make_plan
from edgegossip.plan.ranking import ranked
from edgegossip.plan.results import print_ranking, ranking_rows
from edgegossip.plan.study import measured_throughput
from edgegossip.recipes.call import RecipeCall
from edgegossip.runs.files import read_json
from edgegossip.runs.study import STUDY


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanSettings, ManyRunsOptions):
    """Options for planning; each option of the recipe may have several values to try.

    Args:
        machines: TOML file with a [[machine]] table for each machine, in rank order: name,
            speed (relative to this machine), samples_per_second or profile, mbits, latency_ms,
            ms_per_training, ms_per_message, ms_per_mb, idle_watts, busy_watts,
            joules_per_mb_sent, joules_per_mb_received, count, endpoint.
        measure: Measure this machine for this many seconds and print its table for the
            `--machines` file; nothing is planned.
        live: Invite machines, which measure themselves and their links, plan for them, and
            start the winner; `edgegossip plan RECIPE --live --help` has further options.
    """

    machines: Path | None = None
    measure: Seconds | None = None
    live: bool = False

    def __post_init__(self) -> None:
        ManyRunsOptions.__post_init__(self)
        check_ranges(self, measure="above 0 and finite, or None")
        if self.live and self.measure is not None:
            raise ValueError("--measure is for this machine alone; leave it out with --live")
        if not self.live and (self.machines is None) == (self.measure is None):
            raise ValueError(
                "plan needs --machines FILE.toml with a table for each machine; on each of "
                "them, --measure 10 prints its table; or let them join, with --live"
            )
        PlanSettings.__post_init__(self)


def plan_command(arguments: list[str]) -> int:
    """`edgegossip plan`."""
    if any(word.partition("=")[0] == "--measure" for word in arguments):
        print(measured_machine(arguments))
        return 0
    command, plan = parse_plan(arguments)
    print(plan.announcement, flush=True)
    rows = carry_out(plan.study, command)
    target, order = ranked(ranking_rows(rows), command.options.target)
    print_ranking(order, target)
    for line in plan.study.exhibit(rows).summary:
        print(line)
    return 0


def measured_machine(arguments: Sequence[str]) -> str:
    """Measure this machine, and return its table for the `--machines` file."""
    command = parse_recipe("plan", PlanOptions, arguments)
    speed = measured_throughput(command.call.experiment(), command.options.measure or 0.0)
    return (
        f"[[machine]]\nname = {json.dumps(socket.gethostname())}\n"
        f"samples_per_second = {speed:.4g}\n"
        "# mbits = 100       # of its link, each way\n"
        "# latency_ms = 5    # a quarter of the time of `doctor --connect` without --tls\n"
        f"# idle_watts = {IDLE_WATTS}  # of the whole machine, with a power meter\n"
        f"# busy_watts = {BUSY_WATTS}  # while it trains\n"
    )


def parse_plan(arguments: Sequence[str]) -> tuple[Command[PlanOptions, RecipeCall], Plan]:
    """Make the plan that a command line asks for.

    Raises:
        UsageError: If the recipe, one of its settings, or a machine is invalid, or the budget
            is too small.
    """
    command = parse_values("plan", PlanOptions, arguments)
    options = command.options
    assert options.machines is not None
    earlier = None
    if options.resume and options.out is not None and (options.out / STUDY).exists():
        earlier = read_json(options.out / STUDY)["settings"]
    return command, make_plan(
        command.call,
        read_machines(options.machines),
        options,
        values=command.values,
        num_processes=options.num_processes,
        earlier=earlier,
    )
