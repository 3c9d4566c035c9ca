"""Two processes, or two runs of one, never write one folder."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from tests.small_runs import small_run

from edgegossip.contract.errors import RunFolderError
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.gather import gather
from edgegossip.real.launch import launch
from edgegossip.real.worker import take_part
from edgegossip.runs.comparison import compare
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.files import LOCK, locked, require_unlocked
from edgegossip.runs.runner import run
from edgegossip.runs.study import Cell, Study, run_study

HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, b"%d" % os.getpid())
print("held", flush=True)
input()
"""
EXPERIMENT = small_run("gossip")
COMPARISON = Comparison(experiments={"gossip": EXPERIMENT}, baseline="gossip")
STUDY = Study(
    name="one/cell",
    title="Is it locked?",
    printed=(),
    settings={},
    cells=(Cell(name="a", group="g", work=lambda session: {}),),
    exhibit=lambda rows: Exhibits(figures=(), tables=()),
)


def be_worker(out: Path) -> str:
    return take_part(EXPERIMENT, 0, MemoryNetwork().transport(0), out=out)


def no_command(*arguments: object) -> list[str]:
    return ["--version"]


WRITERS: dict[str, Callable[[Path], object]] = {
    "run": lambda out: run(EXPERIMENT, out=out),
    "compare": lambda out: compare(COMPARISON, out=out),
    "study": lambda out: run_study(STUDY, out=out),
    "worker": be_worker,
    "launch": lambda out: launch(EXPERIMENT, no_command, out=out),
    "gather": lambda out: gather(EXPERIMENT, out),
}


@contextmanager
def held_by_another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-S", "-c", HOLD, str(folder / LOCK)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_another_process_writes_is_refused_with_its_number(
    writer: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "workers").mkdir(parents=True)
    with held_by_another(out) as process:
        before = sorted(out.rglob("*"))
        with pytest.raises(
            RunFolderError, match=rf"{out} is in use by process {process.pid}; wait until"
        ):
            WRITERS[writer](out)
        assert sorted(out.rglob("*")) == before


def test_a_launch_refuses_a_run_of_which_a_worker_is_still_there(tmp_path: Path) -> None:
    folder = tmp_path / "workers" / "2"
    with (
        held_by_another(folder) as process,
        pytest.raises(RunFolderError, match=f"{folder} is in use by process {process.pid}"),
    ):
        launch(EXPERIMENT, no_command, out=tmp_path)


def test_a_folder_is_refused_within_one_process_too(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"),
        locked(tmp_path),
    ):
        pass


def test_what_a_killed_process_has_left_hinders_nobody(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()
        with locked(tmp_path):
            assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / LOCK).exists()


def test_a_lock_is_over_when_its_block_is_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    require_unlocked(tmp_path)
    assert not list(tmp_path.iterdir())


def test_asking_makes_no_folder(tmp_path: Path) -> None:
    require_unlocked(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def begin_and_wait(has_begun: Event, may_end: Event) -> None:
    has_begun.set()
    may_end.wait()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_hold_its_parents_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", lambda self: None)  # as if the parent were killed
    fork = multiprocessing.get_context("fork")
    has_begun, may_end = fork.Event(), fork.Event()
    with locked(tmp_path):
        child = fork.Process(target=begin_and_wait, args=(has_begun, may_end))
        child.start()
        assert has_begun.wait(10)
    try:
        with locked(tmp_path):  # the child is still there
            assert child.is_alive()
    finally:
        may_end.set()
        child.join()


def test_a_file_removed_by_its_last_holder_is_not_mistaken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, path = fcntl.flock, tmp_path / LOCK
    removed = iter([True])

    def flock_late(descriptor: int, what: int) -> None:
        if next(removed, False):
            path.unlink()  # between opening and locking
        flock(descriptor, what)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with locked(tmp_path):
        monkeypatch.undo()
        with pytest.raises(RunFolderError, match="in use"):
            require_unlocked(tmp_path)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all there is")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).symlink_to(precious)
    with pytest.raises(RunFolderError, match="cannot write"), locked(tmp_path / "out"):
        pass
    assert precious.read_text() == "all there is"


def test_a_file_system_without_locks_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, what: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        assert "cannot be locked (No locks available)" in caplog.text
