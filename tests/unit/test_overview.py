"""How a launched run and its workers get on, read from logs written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.worker_folders import EXPERIMENT, make_folders, trained, write_lines

from edgegossip.real.gathering import Gathering
from edgegossip.real.overview import Overview


def sent(time: float, round: int) -> dict[str, object]:
    counts = {"round": round, "num_bytes": 100}
    return {
        "type": "sent",
        "time": time,
        "start": time,
        "end": time,
        "kind": "params",
        **counts,
    }


@pytest.fixture
def overview(tmp_path: Path) -> Overview:
    make_folders(tmp_path)
    experiment = replace(EXPERIMENT, max_seconds=100.0)
    return Overview(experiment, Gathering(experiment, tmp_path))


def test_nothing_is_known_while_the_processes_start(overview: Overview) -> None:
    overview.status(0.0)
    status = overview.status(30.0)
    assert {row.state for row in status.workers} == {"starts"}
    assert {row.age for row in status.workers} == {None}
    assert status.wall_seconds == 0.0  # so that it does not count for the remaining time
    assert status.seconds_left is None


def test_a_row_has_the_speed_and_the_waiting_of_the_last_trainings(
    overview: Overview, tmp_path: Path
) -> None:
    overview.status(0.0)
    lines = [trained(time, 40) for time in (1.0, 1.4, 1.8, 2.0)]  # each takes 0.1 s
    write_lines(tmp_path, 1, *lines, sent(2.0, 3))
    row = overview.status(20.0).workers[1]
    assert (row.state, row.round, row.age) == ("runs", 4, 0.0)
    assert row.samples_per_second == pytest.approx(120.0)
    assert row.waiting == pytest.approx(0.7)
    later = overview.status(29.0).workers[1]
    assert later == replace(row, age=9.0)  # nothing new, and it says so


def test_only_the_last_half_minute_counts(overview: Overview, tmp_path: Path) -> None:
    fast = [trained(0.1 + time / 10, 1000) for time in range(50)]
    slow = [trained(10.0 * time, 10) for time in range(1, 8)]
    write_lines(tmp_path, 0, *fast, *slow)
    status = overview.status(1.0)
    assert status.workers[0].samples_per_second == pytest.approx(1.0)


def test_the_runs_own_numbers_are_those_of_now(overview: Overview, tmp_path: Path) -> None:
    overview.status(0.0)
    overview.status(40.0)  # the processes have started
    write_lines(tmp_path, 0, trained(1.0, 30), sent(1.0, 0))
    overview.status(41.0)
    write_lines(tmp_path, 1, trained(2.0, 60), sent(2.0, 0))
    status = overview.status(42.0)
    assert status.evaluation is None
    assert status.epochs == pytest.approx(90 / EXPERIMENT.workload().num_train)
    assert status.bytes_sent == 200
    assert status.samples_per_second == pytest.approx(45.0)  # 90 in the last 2 s
    assert overview.status(80.0).samples_per_second == 0.0


def test_the_remaining_time_is_by_what_this_start_has_done(
    overview: Overview, tmp_path: Path
) -> None:
    overview.status(0.0)
    write_lines(tmp_path, 0, trained(20.0, 30))
    overview.status(10.0)
    write_lines(tmp_path, 0, trained(40.0, 30))  # a fifth of the run in 10 s
    assert overview.status(20.0).workers[0].seconds_left == pytest.approx(30.0)
    assert overview.status(25.0).workers[0].seconds_left == pytest.approx(25.0)
    assert overview.status(99.0).workers[0].seconds_left is None  # longer than expected


def test_lost_and_ended_workers_are_told(overview: Overview, tmp_path: Path) -> None:
    write_lines(tmp_path, 0, trained(20.0, 30))
    status = overview.status(1.0, lost=[0], ended=[1])
    states = [row.state for row in status.workers]
    assert states[:2] == ["lost", "ended"]
    assert status.num_lost == 1
    assert status.workers[0].seconds_left is None
