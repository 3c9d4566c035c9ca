"""Reports of runs with a server: ranks by role, commits, and the search for their rate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import Event, ended, evaluations, header, write_run
from tests.tiers import thorough
from tests.unit.test_report import PageReader, read_page

from edgegossip.contract.errors import RunFolderError
from edgegossip.report.folder import Run, read_folder
from edgegossip.report.log import AVERAGED
from edgegossip.report.page import render_page
from edgegossip.report.prose import story
from edgegossip.report.servers import commit_pictures, commit_rows, searches, windows

SPEEDS = (10_000.0, 400.0, 200.0, 100.0)
ROLES = ["server", "worker", "worker", "worker"]
WINDOW = 2.0


def server_header(speeds: tuple[float, ...] = SPEEDS, **changes: Any) -> Event:  # noqa: ANN401
    num_workers = len(speeds) - 1
    return {
        **header("adsp", speeds),
        "roles": ["server", *["worker"] * num_workers],
        "evaluated": [0],
        "shard_sizes": [0, *[100] * num_workers],
        "task": {"optimizer": {"type": "SGD", "momentum": 0.5}},
        **changes,
    }


def commits(speeds: tuple[float, ...] = SPEEDS, num: int = 8) -> list[Event]:
    """Each worker trains and commits once a second; every second commit is sent again."""
    events: list[Event] = []
    for rank, speed in enumerate(speeds[1:], start=1):
        for round in range(num):
            start, end = round * 1.0, round + 1.0
            events.append(
                {
                    "type": "trained",
                    "time": end,
                    "start": start,
                    "rank": rank,
                    "num_steps": 4,
                    "num_samples": int(speed),
                    "loss": 0.5,
                }
            )
            sent = {
                "type": "sent",
                "time": end,
                "rank": rank,
                "kind": "commit",
                "round": round,
                "receivers": [0],
                "num_bytes": 100,
                "start": end,
                "end": end + 0.01,
            }
            events += [sent, {**sent, "time": end + 0.1}] if round % 2 else [sent]
    return events


def noted(window: int, at: int, rate: int, reward: float | None = None) -> Event:
    """The note of a window that is the `at`-th of the run."""
    numbers = {"window": window, "rate": rate, "loss": 1 / at, "num_commits": 3 * rate}
    numbers |= {"implicit_momentum": 0.9} | ({} if reward is None else {"reward": reward})
    time = WINDOW * at
    return {"type": "noted", "time": time, "rank": 0, "kind": "search", "numbers": numbers}


NOTES = [
    noted(1, 1, 1, 0.2),
    noted(2, 2, 2, 0.5),
    noted(3, 3, 3, 0.1),
    noted(4, 4, 2),
    noted(1, 5, 2, 0.02),
    noted(2, 6, 3, 0.03),
]


def run_of(folder: Path, *notes: Event, head: Event | None = None) -> Path:
    events = sorted([*commits(), *notes], key=lambda event: event["time"])
    both = sorted([*events, *evaluations(events)], key=lambda event: event["time"])
    return write_run(folder, [head or server_header(), *both, ended(both[-1]["time"])])


def the_run(folder: Path) -> Run:
    return read_folder(folder).runs[0]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PageReader]:
    """A run with its report; tests only read it."""
    folder = run_of(tmp_path_factory.mktemp("report"), *NOTES)
    return folder, read_page(folder)


@thorough
def test_ranks_are_named_by_role_and_a_server_has_no_speed(
    shown: tuple[Path, PageReader],
) -> None:
    folder, page = shown
    text = " ".join(story(read_folder(folder)))
    assert "3 workers and a server trained one model together" in text
    assert "at 400, 200 and 100 samples/s: the fastest is 4.0" in text
    assert any("server: training 0" in alt for alt in page.alts)
    assert "Worker 1 (400 samples/s)" in page.text
    assert "Accuracy is of the server\u2019s model, on held-out data. " in page.text
    assert "Worst worker" not in page.text
    assert "platform-0 server 0 10,000" in page.text


def test_the_time_of_a_server_is_no_workers_waiting(tmp_path: Path) -> None:
    run = the_run(run_of(tmp_path))
    assert len(run.workers) == 4
    assert [each.shares["training"] for each in run.trainers] == [
        pytest.approx(8 / run.log.duration)
    ] * 3


def test_each_commit_counts_once(tmp_path: Path) -> None:
    [row] = commit_rows(read_folder(run_of(tmp_path, *NOTES)))
    assert (row.total, row.least, row.most) == (24, 8, 8)
    assert row.num_steps == 4
    assert (row.explicit_momentum, row.implicit_momentum) == (0.5, 0.9)
    assert row.seconds == pytest.approx(row.run.log.duration / 8)


def test_searches_are_told_apart_and_the_last_has_come_to_no_end(tmp_path: Path) -> None:
    first, last = searches(windows(the_run(run_of(tmp_path, *NOTES))))
    assert first.rewards == [(1, 0.2), (2, 0.5), (3, 0.1)]
    assert (first.chosen, last.chosen) == (2, None)


@thorough
def test_the_page_shows_commits_their_rate_and_the_search(
    shown: tuple[Path, PageReader],
) -> None:
    folder, reader = shown
    assert "The server and its commits" in reader.text
    assert "tried 1 to 3 commits per window and kept 2" in reader.text
    assert (
        "The implicit momentum was 0.9 in the median window, plus an explicit one of 0.5"
        in (reader.text)
    )
    assert "shares of the best of each search" in reader.text
    assert sum("Reward of each rate tried: 1: 0.2; 2: 0.5" in alt for alt in reader.alts) == 1
    assert {"commits.svg", "commit-rate.svg", "search.svg"} <= {
        path.name for path in (folder / "figures").iterdir()
    }


def test_several_servers_are_named_and_a_commit_in_pieces_counts_once(tmp_path: Path) -> None:
    roles = ["server", "server", "worker", "worker"]
    head = server_header(roles=roles, evaluated=[0, 1], shard_sizes=[0, 0, 100, 100])
    # On real machines, each piece has a line of its own.
    pieces = [
        {**event, "time": event["time"] + 0.001, "receivers": [1]}
        for event in commits()
        if event["type"] == "sent"
    ]
    own = [event for event in [*commits(), *pieces] if event["rank"] > 1]
    events = sorted([*own, *NOTES], key=lambda event: event["time"])
    write_run(tmp_path, [head, *events, *evaluations(events)[-1:], ended(13.0)])
    contents = read_folder(tmp_path)
    [row] = commit_rows(contents)
    assert (row.servers, row.total, row.least, row.most) == ("0 to 1", 16, 8, 8)
    reader = PageReader()
    reader.feed(render_page(contents, {"adsp": "#000000"}, [], [], [], []))
    assert "The servers and their commits" in reader.text
    assert "adsp 0 to 1 16 8 8" in reader.text
    assert "In adsp the servers tried 1 to 3 commits" in reader.text
    assert "Accuracy is of the servers\u2019 model, on held-out data. " in reader.text
    assert row.run.log.name(1) == "server 1"


@pytest.mark.slow
def test_many_workers_have_room(tmp_path: Path) -> None:
    speeds = (1000.0, *(100.0 + rank for rank in range(36)))
    events = sorted(commits(speeds), key=lambda event: event["time"])
    write_run(tmp_path, [server_header(speeds), *events, ended(9.0)])
    reader = read_page(tmp_path)
    assert any("Commits of the workers to the server" in alt for alt in reader.alts)


def test_a_run_without_a_server_has_no_such_section(tmp_path: Path) -> None:
    events = [event for event in commits() if event["type"] == "trained"]
    write_run(tmp_path, [header("gossip", SPEEDS), *events, ended(8.0)])
    assert list(commit_pictures(read_folder(tmp_path), {"gossip": "#000000"})) == []
    assert commit_rows(read_folder(tmp_path)) == []


def test_without_the_roles_of_a_damaged_first_line_all_are_workers(tmp_path: Path) -> None:
    run = the_run(run_of(tmp_path, *NOTES, head=header("adsp", SPEEDS)))
    assert run.log.roles == ["worker"] * 4
    assert len(run.speeds) == 4
    assert run.log.model == AVERAGED


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": [1]},
        {"numbers": {"rate": "two"}},
        {"numbers": {"rate": True}},
        {"numbers": {"rate": 1e300}},
        {"kind": 3},
        {"rank": 9},
    ],
)
def test_a_damaged_note_is_passed_over(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_of(tmp_path, *NOTES, {**noted(3, 7, 4), **change})
    with caplog.at_level(logging.WARNING):
        assert len(windows(the_run(folder))) == len(NOTES)
    assert "damaged and skipped" in caplog.text


@pytest.mark.parametrize("numbers", [{}, {"rate": 2}, {"rate": None, "window": 1}])
def test_a_note_that_lacks_what_is_drawn_is_not_drawn(
    tmp_path: Path, numbers: dict[str, Any]
) -> None:
    folder = run_of(tmp_path, {**noted(1, 1, 1), "numbers": numbers})
    assert windows(the_run(folder)) == []


@pytest.mark.slow
def test_a_window_with_nothing_but_its_rate_is_drawn(tmp_path: Path) -> None:
    folder = run_of(tmp_path, {**noted(1, 1, 1), "numbers": {"rate": 2, "window": 1}})
    names = [each.name for each in commit_pictures(read_folder(folder), {"adsp": "#000000"})]
    assert names == ["commits", "commit-rate", "search"]


@pytest.mark.parametrize("roles", [["server"], [1, 2, 3, 4], 7])
def test_roles_that_are_none_are_refused(tmp_path: Path, roles: object) -> None:
    folder = run_of(tmp_path, head=server_header(roles=roles))
    with pytest.raises(RunFolderError, match="damaged"):
        read_folder(folder)


def test_a_server_that_crashed_is_called_so(tmp_path: Path) -> None:
    crashed = {"type": "crashed", "time": 2.5, "rank": 0}
    text = " ".join(story(read_folder(run_of(tmp_path, crashed))))
    assert "The server crashed at 2.5\u00a0s and did not come back." in text
