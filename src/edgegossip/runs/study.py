"""Studies: several runs or measurements that make up a figure of a paper.

Fields of `study.json`:
    schema: Version of this layout: 1.
    study, title: Name, and the question that the study answers.
    printed: The paper's statements and numbers about the question, one sentence each.
    scaled_down: Everything that is smaller or different here, one sentence each.
    settings: Settings that the rows depend on; `--resume` requires the same settings.
    command: Command that repeats the study, without `--out`, `--threads` and `--resume`; null
        for a study from Python.
    num_cells: Total number of cells.
    cells: Finished cells by name: `group` (a part for `--only`), `row`, `wall_seconds` and
        `commit` (of the source that computed it; null if unknown).
    errors: Cells whose training failed, by name, with the reason.
    summary: Answers to the question, one sentence each, the shortest first; may be empty.
    figures: Figures, each with `name`, `heading`, `caption` and `panels`. A panel has `title`,
        `kind` (`"lines"`, `"bars"`, `"stacked"` or `"map"`), `x_label`, `y_label`, `x_unit`,
        `y_unit`, `is_x_log`, `is_log` and `series`. A series has `name`, `x`, `y`, `low` and
        `high` (ends of its range over the seeds) and `is_mark`, for a line across bars or over
        a map. In a map, a series is a row of cells: its name is the row's place on the vertical
        axis, and `y` sets the colors.
    tables: Tables, each with `heading`, `columns` (title and unit), `rows` and `note`. Units
        are `"text"`, `"number"`, `"seconds"`, `"bytes"`, `"joules"`, `"percent"`, `"points"`
        (percentage points) and `"times"`; percent and points are shares in [0, 1].
    versions, machine: Versions of the packages; `num_cores`, `system` and `architecture`.
    wall_started, wall_seconds: First start, UTC; duration of the work on finished cells.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from edgegossip.contract.errors import (
    Interrupted,
    RunFolderError,
    TrainingError,
    UsageError,
    unknown_name,
)
from edgegossip.runs.describe import source_commit, versions
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import locked, read_json, write_json
from edgegossip.runs.folder import difference, require_folder
from edgegossip.runs.parallel import AtOnce, do_at_once
from edgegossip.runs.process import interrupt, interrupted, on_stop_signal
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import Progress, Silent, Status

STUDY = "study.json"
CELLS = "cells"
CHECKPOINT_SECONDS = 600.0
"""Wall seconds between checkpoints; writing a large model's state takes ten."""

Row: TypeAlias = Mapping[str, Any]
"""Findings of a cell, as JSON values. Names of fields measured with a clock begin with
`wall_`.
"""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Resources for the work of a cell.

    Args:
        folder: Folder for the cell's run; if it exists, the run is resumed.
        rows: Rows of the cell's prerequisites, by name.
        num_threads: Number of threads of the compute pool; None for one per core.
        progress: A live view.
    """

    folder: Path
    rows: Mapping[str, Row]
    num_threads: int | None = None
    progress: Progress = Silent()

    def run(self, experiment: Experiment) -> Results:
        """Run `experiment` in the cell's folder, or resume it there."""
        return run(
            experiment,
            out=self.folder,
            resume=self.folder.is_dir(),
            num_threads=self.num_threads,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            progress=self.progress,
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A piece of a study's work with a stored result.

    Args:
        name: Path of its folder within the study's `cells`; the last part names the run.
        group: Group of the cell; `only` picks groups.
        work: Carries out the work: one simulator run or some measurements.
        scaled_down: One sentence about everything smaller than in the paper; empty if nothing
            is.
        after: Names of prerequisite cells, whose rows `work` reads.
    """

    name: str
    group: str
    work: Callable[[Session], Row]
    scaled_down: str = ""
    after: tuple[str, ...] = ()

    @property
    def run(self) -> str:
        """Name of the run, such as "edge-gossip"."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as a plain value.

    Args:
        name: Name, e.g. "edgegossip/fig3".
        title: The question, in one line.
        printed: The paper's statements and printed numbers about the question, one sentence
            each.
        scaled_down: Reductions in all cells relative to the paper, one sentence each.
        settings: Settings that the rows depend on, as JSON values.
        cells: Cells in the order of work.
        exhibit: Makes figures and tables from the existing rows, given by name of the cell.
        is_timed: Whether the cells measure times on this machine and must not run in parallel.

    Raises:
        ValueError: If two cells have the same name, or there is no cell.
    """

    name: str
    title: str
    printed: tuple[str, ...]
    scaled_down: tuple[str, ...] = ()
    settings: Mapping[str, Any]
    cells: tuple[Cell, ...]
    exhibit: Callable[[Mapping[str, Row]], Exhibits]
    is_timed: bool = False

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two cells of {self.name} have the name {twice[0]!r}; give different seeds"
            )
        if not names:
            raise ValueError(f"{self.name} has no cells; give at least one seed")

    def only(self, group: str) -> Study:
        """The study with the cells of one group.

        Raises:
            UsageError: If there is no such group.
        """
        groups = dict.fromkeys(cell.group for cell in self.cells)
        if group not in groups:
            raise UsageError(unknown_name("part of this study", group, groups))
        cells = tuple(cell for cell in self.cells if cell.group == group)
        return replace(self, cells=cells, settings={**self.settings, "only": group})

    def with_runs(self, runs: Sequence[str]) -> Study:
        """The study with the cells whose run is one of `runs`, such as "edge-gossip".

        This is the same study with fewer cells; `run_study` can run the other cells later.

        Raises:
            UsageError: If a name in `runs` matches no cell.
        """
        known = dict.fromkeys(cell.run for cell in self.cells)
        if unknown := next((name for name in runs if name not in known), None):
            raise UsageError(unknown_name("run of this study", unknown, known))
        return replace(self, cells=tuple(cell for cell in self.cells if cell.run in runs))


def run_study(
    study: Study,
    *,
    out: Path | str,
    resume: bool = False,
    command: str | None = None,
    num_threads: int | None = None,
    num_processes: int = 1,
    at_once: AtOnce | None = None,
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Run the unfinished cells of `study`; return the rows by name of the cell.

    ``out/study.json`` is written atomically after each cell, so an interrupted study leaves a
    valid folder, and `resume` continues with the interrupted cell. If the training of a cell
    fails, the failure is stored, and the other cells still run.

    Args:
        study: Study to run.
        out: Folder, made if missing; must not hold a study unless `resume`.
        resume: Keep the finished cells in `out`.
        command: Command line that repeats the study, for the record.
        num_threads: Number of threads of the compute pool; None for one per core. No effect on
            results.
        num_processes: Number of parallel cells, each with one thread. No effect on results.
        at_once: Carries out cells in parallel instead of processes here, e.g. a `RayRuns`.
        progress: A live view.

    Raises:
        UsageError: If `at_once` is given for a study that measures this machine.
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP.
        RunFolderError: If `out` cannot be written, lacks the files that `resume` needs, or is
            in use by another process.
    """
    out = Path(out)
    if at_once is not None and study.is_timed:
        raise UsageError(f"{study.name} measures this machine; leave out --pool ray")
    if resume:
        require_folder(out)
    with locked(out):
        record = _Record(study, out, command, resume=resume)
        view = progress or Silent()
        cells = [cell for cell in study.cells if cell.name not in record.rows]
        if at_once is not None and cells:
            _do_at_once(cells, record, at_once, view)
        elif num_processes > 1 and len(cells) > 1 and not study.is_timed:
            here = partial(do_at_once, num_processes=num_processes)
            _do_at_once(cells, record, here, view)
        else:
            _do_cells(cells, record, num_threads, view)
    return record.rows


def _do_cells(
    cells: Sequence[Cell], record: _Record, num_threads: int | None, progress: Progress
) -> None:
    for cell in cells:
        try:
            # Measurements stop at once; runs handle signals themselves.
            with on_stop_signal(interrupt), record.keeping(cell) as keep:
                keep(record.work(cell, num_threads)(progress))
        except (Interrupted, KeyboardInterrupt):
            raise interrupted(record.out, f"in {cell.name}") from None


def _do_at_once(
    cells: Sequence[Cell], record: _Record, at_once: AtOnce, progress: Progress
) -> None:
    known = {cell.name: cell for cell in cells}
    # Each job makes its work when it can begin, because it needs the rows of earlier cells.
    jobs = {name: partial(record.work, cell, 0) for name, cell in known.items()}
    after = {name: cell.after for name, cell in known.items()}
    done = at_once(jobs, after, progress=progress)
    try:
        with closing(done):
            for name, future in done:
                with record.keeping(known[name]) as keep:
                    keep(future.result())
    except (Interrupted, KeyboardInterrupt):
        raise interrupted(record.out, "in several cells") from None


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of a cell, in this process or another; returns its row and its duration."""

    cell: Cell
    label: str  # name and number of the cell, for a live view
    session: Session

    @property
    def folder(self) -> Path:
        return self.session.folder

    def moved(self, folder: Path) -> _Work:
        return replace(self, session=replace(self.session, folder=folder))

    def __call__(self, progress: Progress) -> tuple[Row, float]:
        view, started = _Named(progress, self.label), time.monotonic()
        view.begin()
        row = self.cell.work(replace(self.session, progress=view))
        return row, time.monotonic() - started


class _Record:
    """The record in `study.json`, which a resumed study continues."""

    def __init__(self, study: Study, out: Path, command: str | None, *, resume: bool) -> None:
        self.rows: dict[str, Row] = {}
        self.errors: dict[str, str] = {}
        self.out = out
        self._study = study
        self._path = out / STUDY
        self._command = command
        self._facts: dict[str, dict[str, Any]] = {}
        self._commit = source_commit()  # of the code just loaded; files may change later
        self._wall_started = datetime.now(UTC).isoformat(timespec="seconds")
        kept = read_json(self._path) if self._path.exists() else {}
        if kept and resume:
            self._go_on(kept)
        elif kept and (kept.get("cells") or kept.get("errors") or (out / CELLS).exists()):
            raise RunFolderError(
                f"{out} already holds a study; choose another --out, or --resume it"
            )
        self.write()

    def _go_on(self, kept: dict[str, Any]) -> None:
        now = json.loads(json.dumps({"study": self._study.name, **self._study.settings}))
        before = {"study": kept.get("study"), **kept.get("settings", {})}
        if changed := difference(before, now):
            raise RunFolderError(
                f"{self._path} is of another study: {changed}; resume with the same settings, "
                "or choose another --out"
            )
        try:
            for name, cell in kept["cells"].items():
                self.rows[name] = cell["row"]
                self._facts[name] = {
                    key: cell[key] for key in ("group", "wall_seconds", "commit")
                }
            self._wall_started = kept["wall_started"]
        except (LookupError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{self._path} is damaged ({error!r}); choose another --out"
            ) from error

    def work(self, cell: Cell, num_threads: int | None) -> _Work:
        """The work of `cell`, with the existing rows of its prerequisites."""
        cells, folder = self._study.cells, self.out / CELLS / cell.name
        rows = {name: self.rows[name] for name in cell.after if name in self.rows}
        session = Session(folder=folder, rows=rows, num_threads=num_threads)
        return _Work(cell, f"{cells.index(cell) + 1}/{len(cells)} {cell.name}", session)

    @contextmanager
    def keeping(self, cell: Cell) -> Iterator[Callable[[tuple[Row, float]], None]]:
        """Yield a function that stores the row and duration of `cell`; store an error."""

        def keep(found: tuple[Row, float]) -> None:
            self.rows[cell.name], wall_seconds = found
            self._facts[cell.name] = {
                "group": cell.group,
                "wall_seconds": wall_seconds,
                "commit": self._commit,
            }

        try:
            yield keep
        except TrainingError as error:
            self.errors[cell.name] = str(error)
        self.write()

    def write(self) -> None:
        study = self._study
        exhibits = study.exhibit(self.rows)
        smaller = filter(None, dict.fromkeys(cell.scaled_down for cell in study.cells))
        write_json(
            self._path,
            {
                "schema": 1,
                "study": study.name,
                "title": study.title,
                "printed": study.printed,
                "scaled_down": [*smaller, *study.scaled_down],
                "summary": exhibits.summary,
                "settings": study.settings,
                "command": self._command,
                "num_cells": len(study.cells),
                "cells": {
                    name: {**self._facts[name], "row": row} for name, row in self.rows.items()
                },
                "errors": self.errors,
                "figures": [*map(dataclasses.asdict, exhibits.figures)],
                "tables": [*map(dataclasses.asdict, exhibits.tables)],
                "versions": versions(),
                "machine": machine(),
                "wall_started": self._wall_started,
                "wall_seconds": sum(facts["wall_seconds"] for facts in self._facts.values()),
            },
        )


def machine() -> dict[str, object]:
    """Properties of the machine that affect measured times."""
    return {
        "num_cores": os.cpu_count(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }


class _Named:
    """Shows the name of the cell in a live view, instead of the run's."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name

    def begin(self) -> None:
        """Show the cell at its start, because measurements report no progress."""
        self.update(
            Status(
                name=self._name,
                time=0.0,
                share=0.0,
                evaluation=None,
                wall_seconds=0.0,
                samples_per_second=0.0,
            )
        )

    def update(self, status: Status) -> None:
        self._progress.update(replace(status, name=self._name))
