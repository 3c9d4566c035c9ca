"""Short cells for the queue of full-size experiments.

`python -m tests.full_size_cells FOLDER` runs a longer one as a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.full_size.cells import Cell, Machine, Row, Rows
from benchmarks.full_size.experiments import row_of
from benchmarks.full_size.forecast import Forecast
from benchmarks.full_size.queue import Limits, Queue
from tests.small_runs import quick, small_run, with_rounds

from edgegossip.contract.errors import Interrupted
from edgegossip.runs.experiment import Experiment

ALWAYS = Limits(minutes=1e6)


def run_cell(
    letter: str,
    algorithm: str,
    fixed: Mapping[str, Any] | None = None,
    **changes: Any,  # noqa: ANN401
) -> Cell:
    """A run of a tenth of a second, with a few dozen evaluations.

    Args:
        letter: The cell's letter.
        algorithm: Name of the algorithm.
        fixed: Changes of the experiment that are no settings.
        changes: Changes of the experiment, as JSON values.
    """

    def experiment(machine: Machine, rows: Rows) -> Experiment:
        return quick(algorithm, evaluation_interval=0.01, **(fixed or {}), **changes)

    return Cell(
        name=f"{letter}-{algorithm}-seed0",
        settings={"letter": letter, "algorithm": algorithm, **changes},
        experiment=experiment,
        num_epochs=3,
    )


def following(name: str, before: Cell) -> Cell:
    """A run whose seed is a finding of another cell."""

    def experiment(machine: Machine, rows: Rows) -> Experiment:
        seed = rows[before.name]["samples_processed"]
        return replace(quick("gossip", evaluation_interval=0.01), seed=seed)

    return Cell(
        name=name,
        settings={"after": before.name},
        experiment=experiment,
        num_epochs=3,
        after=(before.name,),
    )


def measuring(name: str, found: Row, seconds: float = 1.0) -> Cell:
    """A cell that measures the machine."""
    return Cell(
        name=name,
        settings={"name": name},
        measure=lambda machine: found,
        measuring_seconds=lambda machine: seconds,
    )


def short_cells() -> list[Cell]:
    """One of each kind."""
    pushes = run_cell("b", "difference-push")
    return [
        measuring("a-speed", {"wall_steps": 3.0}),
        pushes,
        run_cell("e", "gosgd"),
        following("e-next-seed0", pushes),
    ]


class Minutes:
    """A clock that shows five seconds more at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 5.0
        return self.now


def short_forecast(cell: Cell, machine: Machine, rows: Rows) -> Forecast:
    """A minute for each run."""
    if cell.measuring_seconds is not None:
        return Forecast(training=cell.measuring_seconds(machine), device="cpu")
    return Forecast(training=60.0, state_bytes=1, device="cpu")


def short_queue(
    out: Path,
    cells: Sequence[Cell] | None = None,
    said: list[str] | None = None,
    clock: Callable[[], float] | None = None,
    forecast: Callable[..., Forecast] = short_forecast,
) -> Queue:
    return Queue(
        short_cells() if cells is None else cells,
        out,
        Machine(data_dir=out),
        {"commit": "abc"},
        row_of=row_of,
        clock=clock or Minutes(),
        forecast=forecast,
        say=(said if said is not None else list[str]()).append,
    )


def kept(out: Path) -> dict[str, Any]:
    """All results, without the fields of wall-clock origin."""
    return {
        path.stem: {
            key: value
            for key, value in json.loads(path.read_text()).items()
            if not key.startswith("wall_")
        }
        for path in sorted(out.glob("?-*.json"))
    }


def long_cell() -> Cell:
    """A run of a second or two."""
    return Cell(
        name="b-long-seed0",
        settings={},
        experiment=lambda machine, rows: with_rounds(small_run("gosgd"), 25),
        num_epochs=3,
    )


if __name__ == "__main__":
    try:
        short_queue(Path(sys.argv[1]), [long_cell()], clock=time.monotonic).run(ALWAYS)
    except Interrupted as error:
        sys.exit(f"{error}")
