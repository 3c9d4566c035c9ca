"""The view of a running experiment: a live table, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from edgegossip.contract.protocol import Seconds
from edgegossip.report import units
from edgegossip.runs.tracking import Status, WorkerRow

_OLD = 1.0
"""Seconds from which on the age of a measurement is told."""
_SILENT = 10.0
"""Seconds without news after which a worker's row is yellow; a long training is no fault."""
WORKER_LINE_SECONDS = 30.0
"""Seconds between two lines of each worker, without a terminal."""
MAX_ROWS = 12
"""Maximum number of runs on the screen; the newest runs stay."""

METRIC = "metric"
"""Column title if the runs' metrics differ; otherwise, the metric's name is used."""
COLUMNS = (
    "run",
    "done",
    "time",
    "epochs",
    METRIC,
    "sent",
    "commits",
    "samples/s",
    "left",
    "alive",
)

OPTIONAL = ("commits", "alive")
"""Columns that are left out if they are empty."""


def cells(status: Status) -> list[str]:
    """One row of the live table."""
    evaluation, left, total = status.evaluation, status.seconds_left, status.num_workers
    value = ""
    if evaluation:  # shares with two decimals, so that progress is visible
        is_share, found = status.metric.is_share, evaluation.value
        value = f"{found:.2%}" if is_share else units.metric_value(found, status.metric)
        if (age := status.time - evaluation.time) >= _OLD:
            value += f" ({units.seconds(round(age))} old)"
    epochs, num_bytes = status.epochs, status.bytes_sent
    if evaluation:
        epochs = evaluation.epochs if epochs is None else epochs
        num_bytes = evaluation.bytes_sent if num_bytes is None else num_bytes
    return [
        escape(status.name),
        f"{status.share:.0%}",
        units.seconds(status.time),
        "" if epochs is None else f"{epochs:.1f}",
        value,
        "" if num_bytes is None else units.data_size(num_bytes),
        "" if status.commits is None else f"{status.commits:,}",
        f"{status.samples_per_second:,.0f}",
        units.seconds(left) if left is not None else "",
        "" if total is None else f"{total - status.num_lost} of {total}",
    ]


WORKER_COLUMNS = ("worker", "state", "round", "samples/s", "waiting", "last news", "left")


def worker_cells(row: WorkerRow) -> list[str]:
    """One row of the table of workers; all numbers are as of the last news."""
    return [
        row.name,
        row.state,
        f"{row.round:,}",
        "" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}",
        "" if row.waiting is None else f"{row.waiting:.0%}",
        "" if row.age is None else f"{_age(row.age)} ago",
        "" if row.seconds_left is None else units.seconds(round(row.seconds_left)),
    ]


def _age(age: Seconds) -> str:
    r"""A duration that does not flicker.

    >>> _age(0.31), _age(75.2)
    ('< 1\xa0s', '75\xa0s')
    """
    return f"< 1{units.NO_BREAK}s" if age < 1 else units.seconds(int(age))


def shown_workers(rows: Sequence[WorkerRow], most: int) -> list[WorkerRow]:
    """At most this many workers: the lost ones, and those that were silent for longest."""
    urgent = sorted(
        range(len(rows)),
        key=lambda i: (rows[i].state != "lost", rows[i].state == "ended", -(rows[i].age or 0)),
    )
    return [rows[i] for i in sorted(urgent[:most])]


def titles(statuses: Iterable[Status]) -> list[str]:
    """Titles of the columns for these runs."""
    names = {status.metric.name for status in statuses}
    metric = names.pop() if len(names) == 1 else METRIC
    return [metric if each == METRIC else each for each in COLUMNS]


class LiveView:
    """A table with a row for each run; without a terminal, a line every few seconds.

    The workers of a launched run have a row each below it, or a line each every half minute.

    Closing the terminal ends only the view.
    """

    def __init__(self, console: Console | None = None, line_seconds: float = 5.0) -> None:
        self._console = console or Console(file=sys.stderr)
        self._last_workers = -WORKER_LINE_SECONDS
        self._line_seconds = line_seconds
        self._last_line = -line_seconds
        self._statuses: dict[str, Status] = {}
        self._roles = ""  # as printed last
        is_terminal = self._console.is_terminal
        self._live = Live(console=self._console, transient=True) if is_terminal else None

    def update(self, status: Status) -> None:
        self._statuses[status.name] = status
        with suppress(OSError):
            self._show(status)

    def _show(self, status: Status) -> None:
        if self._live is not None:
            parts = [self._table(), *([self._workers(status)] if status.workers else [])]
            self._live.update(Group(*parts))
            return
        now = time.monotonic()
        if now - self._last_line >= self._line_seconds or status.share == 1:
            self._last_line = now
            if status.roles != self._roles:
                self._print(escape(status.roles))
                self._roles = status.roles
            pairs = zip(titles([status]), cells(status), strict=True)
            self._print("  ".join(f"{name} {cell}" for name, cell in pairs if cell))
        is_known = any(row.age is not None for row in status.workers)
        if is_known and now - self._last_workers >= WORKER_LINE_SECONDS:
            self._last_workers = now
            for name, state, *rest in map(worker_cells, status.workers):
                pairs = zip(WORKER_COLUMNS[2:], rest, strict=True)
                told = [f"{title} {cell}" for title, cell in pairs if cell]
                self._print("  ".join([f"  {name} {state}", *told]))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        shown = list(self._statuses.values())[-MAX_ROWS:]
        roles = shown[-1].roles
        table = Table(
            box=None, padding=(0, 2), caption=escape(roles) or None, caption_justify="left"
        )
        rows = zip(*map(cells, shown), strict=True)
        columns = [(name, row) for name, row in zip(titles(shown), rows, strict=True)]
        # Runs without a server have no commits, and simulated workers are no processes.
        kept = [each for each in columns if each[0] not in OPTIONAL or any(each[1])]
        for name, _ in kept:
            table.add_column(name, justify="left" if name == "run" else "right")
        for row in zip(*(row for _, row in kept), strict=True):
            table.add_row(*row)
        return table

    def _workers(self, status: Status) -> Table:
        """A row for each worker that fits on the screen."""
        room = max(4, self._console.height - len(self._statuses) - 6)
        shown = shown_workers(status.workers, room)
        left_out = len(status.workers) - len(shown)
        caption = f"and {left_out} more, which were heard more recently" if left_out else None
        table = Table(box=None, padding=(0, 2), caption=caption, caption_justify="left")
        for name in WORKER_COLUMNS:
            table.add_column(name, justify="left" if name in ("worker", "state") else "right")
        for row in shown:
            is_old = row.state == "runs" and (row.age or 0) >= _SILENT
            style = "red" if row.state == "lost" else "yellow" if is_old else None
            table.add_row(*map(escape, worker_cells(row)), style=style)
        return table

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
