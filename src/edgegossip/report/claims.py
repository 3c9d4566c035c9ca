"""Units of claimed work: done once or twice, given to others, or missing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from edgegossip.report.folder import ReportData, Run

UNITS = "units"
"""The kind of note that a worker with claimed work makes at the end of each epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """A row in the table of runs with claimed work.

    Attributes:
        run: Run of the row.
        num_epochs: Epochs that at least one worker has ended.
        num_units: Units in these epochs.
        num_given: Units that their owners gave to others, which would finish them sooner.
        num_twice: Units that two workers have done.
        num_missing: Units that no worker knew to be done when it ended the epoch.
    """

    run: Run
    num_epochs: int
    num_units: int
    num_given: int
    num_twice: int
    num_missing: int


def claim_rows(folder: ReportData) -> list[ClaimRow]:
    """Count the units of each run with claimed work."""
    return [row for run in folder.runs if (row := _row(run))]


def _row(run: Run) -> ClaimRow | None:
    sizes, given, twice = dict[float, float](), 0.0, 0.0
    missing: defaultdict[float, list[float]] = defaultdict(list)
    for note in run.log.notes:
        known = note.numbers
        if note.kind == UNITS and {"epoch", "units", "given", "twice", "missing"} <= {*known}:
            epoch = known["epoch"]
            sizes[epoch] = known["units"]
            given += known["given"]
            twice += known["twice"]
            missing[epoch].append(known["missing"])
    if not sizes:
        return None
    return ClaimRow(
        run=run,
        num_epochs=len(sizes),
        num_units=round(sum(sizes.values())),
        num_given=round(given),
        num_twice=round(twice),
        num_missing=round(sum(map(min, missing.values()))),
    )
