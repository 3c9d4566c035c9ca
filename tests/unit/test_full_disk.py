"""A disk that becomes full costs log lines, snapshots and checkpoints, and never the model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_runs import NUM_WORKERS, small_disk, summary
from tests.tiers import thorough
from tests.unit.test_worker import LONG, before_each_event, simulated
from tests.worker_threads import WITHIN, Crew

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Event
from edgegossip.machine import files as atomic
from edgegossip.machine.files import reserve, reserve_of, write_reserved
from edgegossip.real.gathering import Gathering
from edgegossip.real.worker_files import Snapshots, WorkerEventLog, indices, read_params
from edgegossip.runs import files

FULL = OSError(errno.ENOSPC, "No space left on device")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Room that is kept.


@pytest.mark.parametrize("is_supported", [True, False])
def test_room_is_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supported: bool
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not is_supported:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        monkeypatch.setattr(atomic, "_AT_ONCE", 1000)
    path = tmp_path / "file"
    reserve(path, 100_000)
    reserve(path, 50_000)  # as after a kill
    kept = reserve_of(path).stat()
    assert kept.st_size == 50_000
    assert kept.st_blocks * 512 >= 50_000
    write_reserved(path, b"content")
    assert path.read_bytes() == b"content"
    assert path.stat().st_ino == kept.st_ino
    assert names(tmp_path) == ["file"]
    write_reserved(path, b"more")  # no room was kept
    assert path.read_bytes() == b"more"


def test_a_write_that_fails_leaves_the_old_file_and_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    reserve(path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail)
        with pytest.raises(OSError, match="No space left"):
            write_reserved(path, b"new")
    assert path.read_bytes() == b"old"
    write_reserved(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_link_in_the_place_of_the_room_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    reserve_of(tmp_path / "file").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        reserve(tmp_path / "file", 10)
    assert other.read_bytes() == b"precious"


def _fail(*_: object) -> None:
    raise FULL


# What a worker does.


def test_a_worker_begins_only_with_room_for_its_model(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve_if_small(path: Path, num_bytes: int) -> None:
        if path.name == "params.safetensors":
            raise FULL
        reserve(path, num_bytes)

    monkeypatch.setattr(files, "reserve", reserve_if_small)
    [error] = alone(crew)
    assert isinstance(error, RunFolderError)
    assert "params.safetensors: No space left on device; free some space" in str(error)
    assert not [*crew.folder(0).glob("*.reserved")]


def test_a_result_is_worth_more_than_snapshots(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = crew.folder(0) / "snapshots"

    def write_if_there_is_room(path: Path, content: bytes) -> None:
        if indices(snapshots):
            raise FULL
        write_reserved(path, content)

    monkeypatch.setattr(files, "write_reserved", write_if_there_is_room)
    assert alone(crew) == ["time limit"]
    assert "deleting this worker's snapshots, and trying again" in caplog.text
    assert summary(crew.folder(0))["reason"] == "time limit"
    assert len(read_params(crew.folder(0) / "params.safetensors"))
    assert not [*crew.folder(0).glob("*.reserved")]


def alone(crew: Crew) -> list[str | Exception]:
    settings = replace(WITHIN, meet_seconds=0.01, max_seconds=0.05, min_workers=1)
    crew.start(LONG, 0, settings=settings)
    return crew.join(0)


def test_snapshots_leave_room_for_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    free = 500 + 2 * 4000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 0, free))
    snapshots = Snapshots(tmp_path / "snapshots", lambda: torch.zeros(125), lambda: 4000)
    snapshots.due(0.0)
    written = threading.Event()
    snapshots._writer.submit(written.set)
    assert written.wait(10.0)  # later, its success would pass for the end of the shortage
    free -= 1
    for step in range(1, 10):
        snapshots.due(step / 2)
    free += 1
    snapshots.due(5.0)
    snapshots.close()
    assert indices(tmp_path / "snapshots") == [0, 10]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "a snapshot must leave room for two checkpoints" in said[0]
    assert said[1] == "there is room again for new snapshots"


def test_a_log_on_a_full_disk_loses_whole_lines_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "events.jsonl"
    diary = WorkerEventLog(path)
    numbers = iter(range(100_000))

    def write(how_many: int) -> None:
        for _ in range(how_many):
            diary.write("line", number=next(numbers))
        diary.show()

    write(10)
    with small_disk(1000):
        for _ in range(20):
            write(1000)
    write(10)
    diary.end(reason="finished")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["number"] for each in lines[:10]] == [*range(10)]
    assert [each["number"] for each in lines[-11:-1]] == [*range(20_010, 20_020)]
    assert lines[-1] == {"type": "ended", "reason": "finished"}
    assert 20 < len(lines) < 1000
    begin, end = (record.getMessage() for record in caplog.records)
    assert begin.endswith("training continues without new log lines")
    assert end == "there is room again for new log lines"
    assert names(tmp_path) == ["events.jsonl"]


# A real disk.


def fill_up(path: Path) -> None:
    """Let a file take all room on its disk."""
    with (
        suppress(OSError),
        path.open("ab", buffering=0) as file,
    ):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@thorough
def test_all_workers_on_a_full_disk_leave_their_models_and_the_ends_of_their_logs(
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Crew(disk / "run")

    def fill(state: Any, event: Event) -> None:  # noqa: ANN401
        if state.round >= 5:  # and again: nobody else gets what one gives back
            fill_up(disk / "filler")

    before_each_event(monkeypatch, fill)
    ends = crew.all(LONG, replace(WITHIN, checkpoint_seconds=0.1))
    assert ends == ["finished"] * NUM_WORKERS
    for rank in range(NUM_WORKERS):
        assert summary(crew.folder(rank))["rounds"] == 40
        last = (crew.folder(rank) / "events.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["type"] == "ended"
        assert not [*crew.folder(rank).glob("*.reserved")]
    for what in ("new log lines", "a new checkpoint"):
        assert f"training continues without {what}" in caplog.text
    assert caplog.text.count("training continues") <= 6 * NUM_WORKERS
    (disk / "filler").unlink()
    monkeypatch.undo()
    params = Gathering(LONG, crew.out).finish().params
    expected = simulated(LONG, Crew(tmp_path / "run")).params
    for name, each in params.items():
        assert torch.equal(each, expected[name])
