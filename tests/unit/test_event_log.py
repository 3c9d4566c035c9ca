"""The log has a line for everything that happened, the same bytes every time."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_runs import small_disk
from tests.tiers import thorough
from tests.trained import trained_event

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Message, Note, Trained
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.real.worker_files import WorkerEventLog
from edgegossip.runs import events as event_log
from edgegossip.runs.events import EventLog, EventReader, whole_lines


def note(round: int = 0, kind: str = "note") -> Message:
    return Message(kind, round)


def trained(num_samples: int = 8, loss: float = 0.5) -> Trained:
    params = torch.zeros(1)
    return trained_event(params, params, num_samples=num_samples, num_steps=2, loss=loss)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(content: bytes) -> list[str]:
    return [json.loads(line)["type"] for line in content.splitlines()]


def test_each_happening_is_a_line_with_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("experiment", name="x")
    log.trained(2.0, 1, 1.0, trained())
    log.received(2.5, 0, 1, note(), staleness=3)
    log.lost(3.0, 0, 1, note(), "dropped")
    log.changed(4.0, 1, "crashed")
    log.close()
    assert lines(path) == [
        {"type": "experiment", "name": "x"},
        {
            "type": "trained",
            "time": 2.0,
            "start": 1.0,
            "rank": 1,
            "num_steps": 2,
            "num_samples": 8,
            "cost": 0.0,
            "loss": 0.5,
        },
        {
            "type": "lost",
            "time": 3.0,
            "rank": 0,
            "sender": 1,
            "kind": "note",
            "reason": "dropped",
        },
        {"type": "crashed", "time": 4.0, "rank": 1},
    ]
    assert (log.samples_processed, log.num_received, log.total_staleness) == (8, 1, 3)
    assert log.num_lost == 1


def test_a_message_to_many_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for receiver, start in ((1, 2.0), (2, 3.0), (3, 4.0)):
        log.sent(2.0, 0, receiver, note(5), 100, (start, start + 1))
    log.close()
    [line] = lines(path)
    assert line["receivers"] == [1, 2, 3]
    assert (line["num_bytes"], line["start"], line["end"]) == (300, 2.0, 5.0)
    assert log.bytes_sent == 300


@pytest.mark.parametrize(
    ("time", "rank", "message"),
    [(2.0, 1, note()), (2.5, 0, note()), (2.0, 0, note(1)), (2.0, 0, note(kind="other"))],
)
def test_messages_that_differ_in_more_than_the_receiver_have_lines_of_their_own(
    tmp_path: Path, time: float, rank: int, message: Message
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.sent(2.0, 0, 2, note(), 100, (2.0, 3.0))
    log.sent(time, rank, 3, message, 100, (3.0, 4.0))
    log.close()
    assert [line["receivers"] for line in lines(path)] == [[2], [3]]


def test_a_send_is_logged_before_what_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.sent(2.0, 0, 1, note(), 100, (2.0, 3.0))
    log.lost(2.0, 1, 0, note(), "dropped")
    log.close()
    assert [line["type"] for line in lines(path)] == ["sent", "lost"]


def test_numbers_that_are_not_finite_are_null_for_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("evaluated", loss=math.nan, consensus_distance=math.inf, accuracy=0.5)
    log.close()
    assert "NaN" not in path.read_text()
    assert lines(path)[0] == {
        "type": "evaluated",
        "loss": None,
        "consensus_distance": None,
        "accuracy": 0.5,
    }


def test_a_log_cut_anywhere_and_resumed_is_the_whole_log(tmp_path: Path) -> None:
    def record(log: EventLog, at: int) -> None:
        """Two sends to one line, a training, and so on."""
        match at % 4:
            case 0 | 1:
                message = note(at // 4, "commit")
                log.sent(at // 4, 0, at % 4 + 1, message, 100 + at, (at, at + 1.0))
            case 2:
                log.trained(at // 4, 1, 0.0, trained(at))
            case 3:
                log.received(at // 4, 0, 1, note(), staleness=at)

    whole = EventLog(tmp_path / "whole")
    for at in range(12):
        record(whole, at)
    whole.close()
    for cut in range(1, 12):
        path = tmp_path / f"cut-{cut}"
        first = EventLog(path)
        for at in range(cut):
            record(first, at)
        size, kept = first.flush(), assemble(*dismantle(first.state_dict()))
        record(first, cut)
        first.write("ended")
        first.close()
        second = EventLog(path, offset=size)
        second.load_state_dict(kept)
        for at in range(cut, 12):
            record(second, at)
        second.close()
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()
        assert second.state_dict() == whole.state_dict()
        assert second.commits.total == 3


def test_a_log_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"12345")
    message = "has 5 bytes, but its checkpoint continues after 9"
    with pytest.raises(RunFolderError, match=message):
        EventLog(path, offset=9)
    with pytest.raises(RunFolderError, match="has 0 bytes"):
        EventLog(tmp_path / "none.jsonl", offset=9)


def test_a_log_that_cannot_be_opened_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write .*Is a directory"):
        EventLog(tmp_path)


def test_a_full_disk_is_an_error_for_people_and_the_log_can_be_let_go(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with small_disk(5000):
        log.write("experiment", name="x")
        size = log.flush()
        log.write("padding", text="x" * 5000)
        with pytest.raises(RunFolderError, match=r"File too large; free some space or choose"):
            log.close()
    log.abandon()
    assert lines_of((tmp_path / "events.jsonl").read_bytes()[:size]) == ["experiment"]


@pytest.mark.parametrize("at_once", [1, 7, 2**16])
def test_whole_lines_are_read_between_two_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(event_log, "_READ_AT_ONCE", at_once)
    path = tmp_path / "file"
    path.write_bytes(b"ab\ncde\n\nfgh\ntorn")
    assert list(whole_lines(path)) == [b"ab\n", b"cde\n", b"\n", b"fgh\n"]
    assert list(whole_lines(path, 3, 8)) == [b"cde\n", b"\n"]
    assert list(whole_lines(path, 12)) == []


@thorough
def test_a_diary_that_goes_on_does_not_read_all_of_itself_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for incarnation in range(3):
        diary = WorkerEventLog(path)
        assert diary.incarnation == incarnation
        diary.write("worker")
        diary.close()
    whole = path.read_bytes() + b'{"type":"lost"}\n' * 2**16
    path.write_bytes(whole + b'{"type":"wor')
    tracemalloc.start()
    try:
        diary = WorkerEventLog(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    diary.close()
    assert diary.incarnation == 3
    assert path.read_bytes() == whole
    assert peak < len(whole) / 2


def test_a_growing_log_is_read_on_from_where_the_last_reading_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, found = tmp_path / "events.jsonl", list[tuple[int, object]]()
    path.write_bytes(b'{"type":"a","n":0}\n{"type":"a"}\nno event\n{"type":"a","n"')
    reader = EventReader(path)
    reader.each(lambda event: found.append((reader.position, event["n"])))
    assert found == [(0, 0)]
    assert [record.args[1] for record in caplog.records if record.args] == [2, 3]  # type: ignore[index]
    with path.open("ab") as file:
        file.write(b":3}\n")
    reader.each(lambda event: found.append((reader.position, event["n"])))
    assert found == [(0, 0), (41, 3)]
    assert reader.position == path.stat().st_size
    assert [start for start, _ in reader.between(0, math.inf)] == [0, 19, 41]


def test_notes_of_a_kind_have_their_times(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for time, kind in ((0.5, "stage"), (1.0, "search"), (2.0, "stage")):
        log.noted(time, 0, Note(kind, {"waiting": time + 1}))
    log.close()
    notes = EventReader(tmp_path / "events.jsonl").notes("stage")
    assert notes == [{"time": 0.5, "waiting": 1.5}, {"time": 2.0, "waiting": 3.0}]
