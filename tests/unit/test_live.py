"""The display during a run."""

from __future__ import annotations

import io
import itertools
import time
from dataclasses import replace

import pytest
from rich.console import Console

from edgegossip.report.live import LiveView, cells, shown_workers, titles, worker_cells
from edgegossip.runs.results import Evaluation
from edgegossip.runs.tracking import Status, WorkerRow

EVALUATION = Evaluation(
    time=2.0,
    epochs=1.25,
    metrics={"accuracy": 0.5},
    loss=0.7,
    consensus_distance=0.1,
    bytes_sent=1_500_000,
    samples_processed=80,
)
STATUS = Status(
    name="gossip",
    time=2.0,
    share=0.25,
    evaluation=EVALUATION,
    wall_seconds=3.0,
    samples_per_second=1234.0,
)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def view(*, is_terminal: bool, line_seconds: float = 5.0) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    return LiveView(console, line_seconds), out


def test_a_row_has_a_cell_for_each_column() -> None:
    row = dict(zip(titles([STATUS]), map(plain, cells(STATUS)), strict=True))
    assert row == {
        "run": "gossip",
        "done": "25%",
        "time": "2 s",
        "epochs": "1.2",
        "accuracy": "50.00%",
        "sent": "1.5 MB",
        "commits": "",
        "samples/s": "1,234",
        "left": "9 s",
        "alive": "",
    }


def test_a_launched_run_shows_how_many_workers_are_alive() -> None:
    launched = replace(STATUS, num_workers=4, num_lost=1)
    assert cells(launched)[-1] == "3 of 4"


def test_before_anything_is_known_cells_are_empty() -> None:
    row = cells(replace(STATUS, evaluation=None, share=0.0))
    assert row[3:7] == ["", "", "", ""]
    assert row[-1] == ""


def test_the_time_left_follows_from_the_share_done() -> None:
    assert STATUS.seconds_left == pytest.approx(9.0)
    assert replace(STATUS, share=1.0).seconds_left == 0.0
    assert replace(STATUS, share=0.0).seconds_left is None
    # A resumed run has done only the second half of its share in these seconds.
    resumed = replace(STATUS, share=0.5, first_share=0.25)
    assert resumed.seconds_left == pytest.approx(2 * resumed.wall_seconds)
    assert replace(STATUS, first_share=0.25).seconds_left is None


def test_off_a_terminal_there_is_a_line_every_few_seconds_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", map(float, itertools.count()).__next__)
    live, out = view(is_terminal=False, line_seconds=4.0)
    with live:
        for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0):
            live.update(replace(STATUS, share=share))
    lines = out.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["0%", "40%", "100%"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_there_is_a_table_with_a_row_a_run() -> None:
    live, out = view(is_terminal=True)
    with live:
        for name in ("gossip", "gosgd", "gossip"):
            live.update(replace(STATUS, name=name))
        assert live._table().row_count == 2
    assert "gosgd" in out.getvalue()


def test_a_view_is_closed_whatever_happens() -> None:
    live, _ = view(is_terminal=True)
    with pytest.raises(KeyboardInterrupt), live:
        raise KeyboardInterrupt
    assert live._live is not None
    assert not live._live.is_started


def test_commits_and_roles_are_shown_where_there_is_a_server() -> None:
    served = replace(STATUS, commits=1234, roles="server: rank 0, worker: ranks 1 to 6")
    live, out = view(is_terminal=False, line_seconds=0.0)
    with live:
        live.update(served)
        live.update(served)
    text = plain(out.getvalue())
    assert text.count("server: rank 0, worker: ranks 1 to 6\n") == 1
    assert text.count("commits 1,234") == 2
    live, out = view(is_terminal=True)
    with live:
        live.update(served)
        live.update(replace(STATUS, name="other", roles=served.roles))
        live.update(served)
    assert "1,234" in out.getvalue()
    assert "server: rank 0" in out.getvalue()
    live, out = view(is_terminal=True)
    with live:
        live.update(STATUS)
    assert "commits" not in out.getvalue()


ROW = WorkerRow(
    name="worker 1",
    state="runs",
    round=1234,
    samples_per_second=500.4,
    waiting=0.25,
    age=12.9,
    seconds_left=90.2,
)


def test_what_a_launched_run_has_done_is_newer_than_its_last_evaluation() -> None:
    launched = replace(STATUS, time=15.4, epochs=9.75, bytes_sent=7_000_000)
    row = dict(zip(titles([launched]), map(plain, cells(launched)), strict=True))
    assert (row["epochs"], row["sent"]) == ("9.8", "7 MB")
    assert row["accuracy"] == "50.00% (13 s old)"


def test_a_worker_has_a_row_that_says_how_old_it_is() -> None:
    row = [plain(cell) for cell in worker_cells(ROW)]
    assert row == ["worker 1", "runs", "1,234", "500", "25%", "12 s ago", "90 s"]
    none = replace(ROW, samples_per_second=None, waiting=None, age=None, seconds_left=None)
    assert worker_cells(none)[3:] == [""] * 4


def test_rows_of_lost_and_of_silent_workers_come_first_where_room_is_short() -> None:
    ages = {"a": 0.1, "b": 50.0, "c": 0.2, "d": 3.0}
    rows = [replace(ROW, name=name, age=age) for name, age in ages.items()]
    rows[2] = replace(rows[2], state="lost")
    assert [row.name for row in shown_workers(rows, 2)] == ["b", "c"]
    assert shown_workers(rows, 9) == rows


def test_a_table_of_workers_is_below_that_of_the_run() -> None:
    live, out = view(is_terminal=True)
    rows = tuple(replace(ROW, name=f"worker {rank}") for rank in range(40))
    lost = replace(ROW, name="worker 40", state="lost")
    with live:
        live.update(replace(STATUS, workers=(*rows, lost)))
    text = out.getvalue()
    assert "last news" in text
    assert "worker 40" in text
    assert "which were heard more recently" in text


def test_off_a_terminal_each_worker_has_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "monotonic", now.__next__)
    live, out = view(is_terminal=False)
    with live:
        live.update(replace(STATUS, workers=(replace(ROW, age=None),)))  # it is starting
        for _ in range(7):
            live.update(replace(STATUS, workers=(ROW,)))
    lines = [line for line in plain(out.getvalue()).splitlines() if "worker 1" in line]
    told = "round 1,234  samples/s 500  waiting 25%  last news 12 s ago  left 90 s"
    assert lines == [f"  worker 1 runs  {told}"] * 3
