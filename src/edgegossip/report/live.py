"""The view of a running experiment: a live table, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from edgegossip.report import units
from edgegossip.runs.tracking import Status

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
    return [
        escape(status.name),
        f"{status.share:.0%}",
        units.seconds(status.time),
        f"{evaluation.epochs:.1f}" if evaluation else "",
        value,
        units.data_size(evaluation.bytes_sent) if evaluation else "",
        "" if status.commits is None else f"{status.commits:,}",
        f"{status.samples_per_second:,.0f}",
        units.seconds(left) if left is not None else "",
        "" if total is None else f"{total - status.num_lost} of {total}",
    ]


def titles(statuses: Iterable[Status]) -> list[str]:
    """Titles of the columns for these runs."""
    names = {status.metric.name for status in statuses}
    metric = names.pop() if len(names) == 1 else METRIC
    return [metric if each == METRIC else each for each in COLUMNS]


class LiveView:
    """A table with a row for each run; without a terminal, a line every few seconds.

    Closing the terminal ends only the view.
    """

    def __init__(self, console: Console | None = None, line_seconds: float = 5.0) -> None:
        self._console = console or Console(file=sys.stderr)
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
            self._live.update(self._table())
            return
        now = time.monotonic()
        if now - self._last_line >= self._line_seconds or status.share == 1:
            self._last_line = now
            if status.roles != self._roles:
                self._print(escape(status.roles))
                self._roles = status.roles
            pairs = zip(titles([status]), cells(status), strict=True)
            self._print("  ".join(f"{name} {cell}" for name, cell in pairs if cell))

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

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
