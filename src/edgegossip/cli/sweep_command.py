"""The command for many settings and seeds of a recipe. Importing this module imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from edgegossip.cli.command import NOT_RECORDED, Command, parse_values
from edgegossip.cli.options import ClusterOptions
from edgegossip.cli.study_command import carry_out
from edgegossip.contract.ranges import check_range
from edgegossip.plan.sweep import sweep
from edgegossip.recipes.call import RecipeCall
from edgegossip.report.units import written
from edgegossip.runs.exhibits import Table
from edgegossip.runs.study import Study
from edgegossip.runs.tuning import check_seeds


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ClusterOptions):
    """Options for a sweep; each option of the recipe may have several values.

    Args:
        seeds: Seeds for each setting, e.g. 0 1 2 or 0..4.
        held_out: Share of the training samples to hold out for ranking settings. With 0,
            settings are ranked on test samples, so their accuracy is not a valid result.
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
    """

    seeds: tuple[int, ...] = (0,)
    held_out: float = 0.1
    only: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("held_out", self.held_out, "in [0, 1)")
        check_seeds(self.seeds)


def sweep_command(arguments: list[str]) -> int:
    """`edgegossip sweep`."""
    command, study = parse_sweep(arguments)
    rows = carry_out(study, command, at_once=command.options.at_once)
    exhibits = study.exhibit(rows)
    for table in exhibits.tables:
        print_settings(table)
    for line in exhibits.summary:
        print(line)
    return 0


def print_settings(table: Table) -> None:
    """Print the settings of a sweep, best first."""
    shown = RichTable(box=None, padding=(0, 1))
    for title, unit in table.columns:
        shown.add_column(title, justify="left" if unit == "text" else "right", no_wrap=True)
    for row in table.rows:
        units_of_row = (unit for _, unit in table.columns)
        cells = zip(row, units_of_row, strict=True)
        shown.add_row(*(escape(written(value, unit)) for value, unit in cells))
    # Where rich cannot tell the width, as in a pipe, it assumes 80 columns and cuts the names.
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def parse_sweep(
    arguments: Sequence[str],
) -> tuple[Command[SweepOptions, RecipeCall], Study]:
    """Make a study of all combinations of option values.

    Raises:
        UsageError: If the recipe or one of its settings is invalid.
    """
    command = parse_values("sweep", SweepOptions, arguments)
    options, name = command.options, command.call.name
    _, _, *words = command.words(*NOT_RECORDED, "seeds", *command.values)
    return command, sweep(
        command.call,
        command.values,
        only=options.only,
        seeds=options.seeds,
        held_out=options.held_out,
        record={"recipe": name, "arguments": words},
    )
