"""Reading a run folder: whole, torn or damaged; and accounting for each worker's time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.run_folders import (
    Event,
    comparison,
    ended,
    header,
    log_of,
    rounds,
    whole_run,
    write_run,
)

from edgegossip.contract.errors import RunFolderError
from edgegossip.report.folder import read_folder
from edgegossip.report.log import activities, read_log
from edgegossip.report.page import write_report
from edgegossip.report.timeline import legible_window
from edgegossip.runs import events as event_log

# Where the time went.

NOTHING = {
    "epochs": 0.0,
    "accuracy": 0.0,
    "bytes_sent": 0,
    "samples_processed": 0,
    "loss": None,
    "consensus_distance": None,
}


def test_barrier_makes_fast_workers_wait_and_no_barrier_does_not() -> None:
    with_barrier = activities(log_of(rounds(5, has_barrier=True)))
    without = activities(log_of(rounds(5, has_barrier=False)))
    # A round lasts as long as the slowest trains (2 s) and sends (0.2 s).
    assert with_barrier[0].shares["training"] == pytest.approx(0.25 / 2.2)
    assert with_barrier[0].shares["sending"] == pytest.approx(0.2 / 2.2)
    assert with_barrier[0].shares["waiting"] == pytest.approx(1 - 0.45 / 2.2)
    assert with_barrier[3].shares["waiting"] == pytest.approx(0, abs=1e-9)
    assert all(worker.shares["waiting"] == pytest.approx(0) for worker in without)
    assert without[0].shares["finished"] == pytest.approx(1 - (5 * 0.25 + 0.2) / 10)


def test_shares_of_a_worker_make_up_the_whole_run() -> None:
    events = [
        *rounds(5, has_barrier=True, end=8.0),
        {"type": "crashed", "time": 8.1, "rank": 1},
        {"type": "recovered", "time": 8.6, "rank": 1},
        {"type": "crashed", "time": 8.7, "rank": 2},
    ]
    for worker in activities(log_of(events)):
        assert sum(worker.shares.values()) == pytest.approx(1)
        assert min(worker.shares.values()) >= -1e-12


def test_work_cut_off_by_a_crash_is_not_called_waiting() -> None:
    events = [
        {
            "type": "trained",
            "time": 1.0,
            "start": 0.0,
            "rank": 0,
            "num_samples": 1,
            "num_steps": 1,
        },
        {"type": "crashed", "time": 3.0, "rank": 0},
        {"type": "recovered", "time": 4.0, "rank": 0},
        {
            "type": "trained",
            "time": 5.0,
            "start": 4.0,
            "rank": 0,
            "num_samples": 1,
            "num_steps": 1,
        },
        {"type": "finished", "time": 10.0, "rank": 0},
    ]
    shares = activities(log_of(events, speeds=[1.0]))[0].shares
    assert shares["unfinished"] == pytest.approx(0.2)
    assert shares["crashed"] == pytest.approx(0.1)
    assert shares["training"] == pytest.approx(0.2)
    assert shares["waiting"] == pytest.approx(0.5)


def test_a_worker_that_crashes_after_it_has_finished_was_not_waiting() -> None:
    events = [
        {
            "type": "trained",
            "time": 4.0,
            "start": 0.0,
            "rank": 0,
            "num_samples": 1,
            "num_steps": 1,
        },
        {"type": "finished", "time": 5.0, "rank": 0},
        {"type": "crashed", "time": 8.0, "rank": 0},
        {"type": "evaluated", "time": 10.0} | NOTHING,
    ]
    [worker, *_] = activities(log_of(events))
    assert worker.shares == pytest.approx(
        {
            "training": 0.4,
            "waiting": 0.1,
            "finished": 0.3,
            "crashed": 0.2,
            "sending": 0.0,
            "unfinished": 0.0,
        }
    )


def test_a_worker_that_comes_back_has_not_finished_again() -> None:
    events = [
        {
            "type": "trained",
            "time": 2.0,
            "start": 0.0,
            "rank": 0,
            "num_samples": 1,
            "num_steps": 1,
        },
        {"type": "finished", "time": 2.0, "rank": 0},
        {"type": "crashed", "time": 3.0, "rank": 0},
        {"type": "recovered", "time": 4.0, "rank": 0},
        {
            "type": "trained",
            "time": 5.0,
            "start": 4.0,
            "rank": 0,
            "num_samples": 1,
            "num_steps": 1,
        },
        {"type": "evaluated", "time": 10.0} | NOTHING,
    ]
    [worker, *_] = activities(log_of(events))
    assert worker.shares["finished"] == pytest.approx(0.1)
    assert worker.shares["unfinished"] == pytest.approx(0.5)


def test_a_crash_ends_what_was_on_the_uplink() -> None:
    sent = {"type": "sent", "rank": 0, "kind": "params", "round": 0, "start": 1.0, "end": 100.0}
    events = [
        sent | {"time": 1.0},
        {"type": "crashed", "time": 5.0, "rank": 0},
        {"type": "recovered", "time": 10.0, "rank": 0},
        {"type": "evaluated", "time": 100.0} | NOTHING,
    ]
    [worker, *_] = activities(log_of(events))
    assert worker.shares["sending"] == pytest.approx(0.04)


def test_worker_that_never_came_back_is_crashed_to_the_end() -> None:
    events = [
        {"type": "crashed", "time": 1.0, "rank": 0},
        {"type": "finished", "time": 4.0, "rank": 1},
    ]
    workers = activities(log_of(events, speeds=[1.0, 1.0]))
    assert workers[0].shares["crashed"] == pytest.approx(0.75)


def test_timeline_shows_only_as_much_as_can_be_seen() -> None:
    short, long = (log_of(rounds(num, has_barrier=False)) for num in (10, 1000))
    assert legible_window(activities(short), short.duration) == short.duration
    # 150 bars of the fastest worker, which trains 0.25 s each.
    assert legible_window(activities(long), long.duration) == pytest.approx(150 * 0.25)


# Files that are not as they should be.


def test_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False, num_rounds=2))
    whole = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(whole[:-9])
    log = read_log(folder / "events.jsonl")
    assert log.ended is None
    assert log.evaluations


@pytest.mark.parametrize(
    "damaged",
    [b'{"type":"trained"', b"[1]", b'{"type":["sent"]}', b"\0\0\0", b"\xff", b"[" * 10**5],
    ids=["torn", "a list", "no type", "zeros", "no text", "deep"],
)
def test_a_damaged_line_is_skipped_and_named(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False, num_rounds=2))
    path = folder / "events.jsonl"
    whole = read_log(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], damaged + b"\n", *lines[4:]]))
    assert read_log(path) == whole
    assert f"{path}, line 5 is damaged and skipped" in caplog.text


def test_a_flood_of_damaged_lines_is_a_few_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False, num_rounds=2))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\n" * 1000)
    assert read_log(folder / "events.jsonl").ended is not None
    assert len(caplog.records) == 5
    assert "further ones are skipped silently" in caplog.messages[-1]


def test_a_damaged_first_line_is_made_up_for_by_the_experiment(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False, num_rounds=2))
    path = folder / "events.jsonl"
    whole = read_log(path)
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first[:-9] + b"\n", *others]))
    with pytest.raises(RunFolderError, match=r"experiment\.json is missing"):
        read_log(path)
    (folder / "experiment.json").write_bytes(first)
    assert read_log(path) == whole


def test_a_line_without_an_end_is_not_taken_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_LONGEST_LINE", 2**16)
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False, num_rounds=2))
    os.truncate(folder / "events.jsonl", 2**40)  # a hole, which takes no space
    with pytest.raises(RunFolderError, match=r"events\.jsonl has a line of more than 65,536"):
        read_log(folder / "events.jsonl")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "trained", "time": 1.0, "rank": 0},
        {"type": "trained", "time": 1.0, "start": 0.0, "rank": 7},
        {"type": "sent", "time": 1.0, "rank": 0, "start": "early", "end": 1.0},
        {"type": "finished", "time": 1e300, "rank": 0},
        {"type": "crashed", "time": float("nan"), "rank": 0},
        {"type": "recovered", "time": 1.0, "rank": 0.5},
    ],
    ids=["missing", "no such rank", "no number", "too late", "not a time", "half a rank"],
)
def test_an_event_without_its_fields_is_skipped_and_named(
    tmp_path: Path, event: Event, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, [header("gossip"), event, ended(2.0)])
    [run] = read_folder(folder).runs
    without = write_run(tmp_path / "without", [header("gossip"), ended(2.0)])
    assert run.log == read_log(without / "events.jsonl")
    assert "events.jsonl, line 2 is damaged and skipped" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "has schema 2, this version reads 1"),
        ({"platforms": []}, "line 1: expected the experiment"),
        ({"num_train": "many"}, "line 1: expected the experiment"),
        ({"algorithm": {}}, "the algorithm has no type"),
    ],
)
def test_header_that_is_not_an_experiment_is_refused(
    tmp_path: Path, change: Event, message: str
) -> None:
    folder = write_run(tmp_path, [header("gossip") | change])
    with pytest.raises(RunFolderError, match=message):
        read_folder(folder)


def test_folder_of_one_worker_is_to_be_gathered(tmp_path: Path) -> None:
    first = {**header("gossip"), "type": "worker", "recipe": "quickstart"}
    folder = write_run(tmp_path / "workers" / "1", [first, {"type": "ended", "time": 1.0}])
    for path in (folder, folder.parent):
        with pytest.raises(RunFolderError, match="folder of one worker; gather") as raised:
            write_report(path)
        assert "edgegossip gather quickstart" in str(raised.value)
        assert str(raised.value).endswith(f"--out {tmp_path}")


def test_folder_without_runs_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run in .*expected events\.jsonl"):
        write_report(tmp_path)


def test_run_that_the_summary_lists_must_be_there(tmp_path: Path) -> None:
    folder = comparison(tmp_path)
    (folder / "gossip" / "events.jsonl").unlink()
    with pytest.raises(RunFolderError, match=r"gossip.events\.jsonl .*No such file"):
        read_folder(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"final_accuracy": "high"}', '{"target_accuracy": true}']
)
def test_damaged_summary_is_named(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, [header("gossip"), ended(1.0)])
    (folder / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"summary\.json: expected .*delete the file"):
        read_folder(folder)


def test_summary_that_was_never_written_is_made_from_the_events(tmp_path: Path) -> None:
    log = whole_run("gossip", has_barrier=False)[:-1]
    last = [event for event in log if event["type"] == "evaluated"][-1]
    (run,) = read_folder(write_run(tmp_path, log)).runs
    assert run.summary.final_value == last["accuracy"]
    assert run.summary.bytes_sent == last["bytes_sent"]
    assert run.summary.worker_worst is None


def test_a_target_that_the_own_summary_knows_nothing_of_is_looked_up(tmp_path: Path) -> None:
    comparison(tmp_path)
    path = tmp_path / "summary.json"
    overall = json.loads(path.read_text())
    reached = {run.name: run.summary.time_to_target for run in read_folder(tmp_path).runs}
    name = next(n for n, time in reached.items() if time is not None)
    del overall["runs"][name]
    path.write_text(json.dumps(overall))
    (tmp_path / name / "summary.json").write_text(json.dumps({"time_to_target": None}))
    again = {run.name: run.summary.time_to_target for run in read_folder(tmp_path).runs}
    assert again == reached


def test_interrupted_comparison_shows_the_runs_there_are(tmp_path: Path) -> None:
    write_run(tmp_path / "gossip", whole_run("gossip", has_barrier=False))
    write_run(tmp_path / "all-reduce", whole_run("all-reduce", has_barrier=True))
    folder = read_folder(tmp_path)
    assert [run.name for run in folder.runs] == ["all-reduce", "gossip"]
    assert folder.baseline is None
    assert folder.target is None
