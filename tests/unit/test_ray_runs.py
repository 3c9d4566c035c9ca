"""Whole runs on a cluster: the same results and folders, without Ray."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.small_runs import ctrl_c_at, parameters, repeatable_events
from tests.tiers import thorough
from tests.unit.test_at_once import CHAIN, double, study
from tests.unit.test_comparison import comparison

from edgegossip.cli.main import main
from edgegossip.contract.errors import (
    DataError,
    Interrupted,
    NetworkError,
    RunFolderError,
    TrainingError,
    UsageError,
)
from edgegossip.integrations import ray_runs, ray_session
from edgegossip.integrations.ray_runs import RayRuns
from edgegossip.integrations.ray_session import LostError, NodeError, RaySession
from edgegossip.runs.comparison import compare
from edgegossip.runs.study import Cell, Row, Session, run_study
from edgegossip.runs.tracking import Status


class Ray:
    """The package without a cluster."""

    def is_initialized(self) -> bool:
        return False


class Queue:
    """A queue in one process, which tasks pickle."""

    kept: ClassVar[list[Any]] = []

    def put(self, status: Status) -> None:
        self.kept.append(status)

    def qsize(self) -> int:
        return len(self.kept)

    def get_nowait_batch(self, number: int) -> list[Any]:
        found, self.kept[:] = self.kept[:number], self.kept[number:]
        return found


class OneProcess:
    """A session whose nodes are this process: all values are pickled, as on the way to others.

    Args:
        lost: Names of the folders of works that are lost.
        error: How.
    """

    def __init__(
        self, lost: Sequence[str] = (), error: Exception = LostError("the machine is gone")
    ) -> None:
        self.lost, self.error = lost, error
        self.numbers = count()
        self.is_closed = False
        self.most_running = 0
        self.started: dict[int, Callable[[], Any]] = {}

    folder = None

    def queue(self) -> Queue:
        Queue.kept.clear()
        return Queue()

    def num_cores(self) -> int:
        return 2

    def start(self, function: Callable[..., Any], home: Any, work: Any) -> int:  # noqa: ANN401
        number = next(self.numbers)
        sent = pickle.dumps(home), pickle.dumps(work)
        self.started[number] = partial(self.do, function, *sent)
        self.most_running = max(self.most_running, len(self.started))
        return number

    def do(self, function: Callable[..., Any], home: bytes, work: bytes) -> Any:  # noqa: ANN401
        loaded = pickle.loads(work)
        if loaded.folder.name in self.lost:
            raise self.error
        return pickle.loads(pickle.dumps(function(pickle.loads(home), loaded)))

    def wait(self, references: Sequence[int], seconds: float) -> list[int]:
        assert seconds > 0
        return [references[-1]]

    def get(self, reference: int) -> Any:  # noqa: ANN401
        return self.started.pop(reference)()

    def cancel(self, references: Iterable[int]) -> None:
        self.cancelled = [*references]

    def close(self) -> None:
        self.is_closed = True


def there(session: OneProcess, num_runs: int | None = None) -> RayRuns:
    return RayRuns(num_runs=num_runs, open_session=lambda *_: session)  # type: ignore[arg-type]


def write(session: Session) -> Row:
    assert not session.folder.exists()
    (session.folder / "figures").mkdir(parents=True)
    (session.folder / "figures" / "curve.bin").write_bytes(bytes(range(256)))
    return {"value": 1}


def write_and_fail(session: Session) -> Row:
    write(session)
    raise TrainingError("the loss is not finite")


def lack_data(session: Session) -> Row:
    raise DataError("no file is there")


def test_rows_and_errors_are_those_of_cells_in_turn(tmp_path: Path) -> None:
    session = OneProcess()
    plan = study(*CHAIN)
    here = run_study(plan, out=tmp_path / "here")
    rows = run_study(plan, out=tmp_path / "there", at_once=there(session))
    assert rows == here
    assert session.is_closed
    told = [(tmp_path / each / "study.json").read_text() for each in ("here", "there")]
    assert all("the loss is not finite" in each for each in told)


def test_folders_come_back_whole_and_replace_what_an_interrupt_left(tmp_path: Path) -> None:
    plan = study(
        Cell(name="a/good", group="a", work=write),
        Cell(name="a/bad", group="a", work=write_and_fail),
    )
    old = tmp_path / "cells" / "a" / "good"
    old.mkdir(parents=True)
    (old / "checkpoint").touch()
    run_study(plan, out=tmp_path, at_once=there(OneProcess()))
    for name in ("good", "bad"):
        folder = tmp_path / "cells" / "a" / name
        assert [each.name for each in folder.rglob("*")] == ["figures", "curve.bin"]
        assert (folder / "figures" / "curve.bin").read_bytes() == bytes(range(256))
    assert len([*old.parent.iterdir()]) == 2


def test_a_cell_that_is_lost_is_told_and_the_others_run(tmp_path: Path) -> None:
    plan = study(*(Cell(name=name, group="a", work=double) for name in ("first", "second")))
    rows = run_study(plan, out=tmp_path, at_once=there(OneProcess(lost=["first"])))
    assert [*rows] == ["second"]
    assert "first was lost again and again" in (tmp_path / "study.json").read_text()
    assert [*run_study(plan, out=tmp_path, resume=True)] == ["second", "first"]


def test_missing_data_ends_the_study(tmp_path: Path) -> None:
    session = OneProcess()
    cells = [Cell(name=name, group="a", work=lack_data) for name in "abc"]
    with pytest.raises(DataError, match="no file is there"):
        run_study(study(*cells), out=tmp_path, at_once=there(session))
    assert session.is_closed
    assert len(session.cancelled) == 2


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(f"{name} {number}")


def fail_oddly(session: Session) -> Row:
    raise OddError(3, "worker")


def test_errors_that_others_do_not_know_are_described(tmp_path: Path) -> None:
    plan = study(Cell(name="a", group="a", work=fail_oddly))
    run_study(plan, out=tmp_path, at_once=there(OneProcess()))
    assert "OddError('worker 3')" in (tmp_path / "study.json").read_text()


def test_a_node_that_fails_ends_the_study(tmp_path: Path) -> None:
    session = OneProcess(lost=["a"], error=NodeError("OSError: no space left on device"))
    with pytest.raises(TrainingError, match="a node of the Ray cluster failed: OSError"):
        run_study(
            study(Cell(name="a", group="a", work=double)), out=tmp_path, at_once=there(session)
        )
    assert session.is_closed


def test_a_finished_study_needs_no_cluster(tmp_path: Path) -> None:
    run_study(study(*CHAIN[:2]), out=tmp_path)
    at_once = RayRuns(open_session=lambda *_: pytest.fail("opened"))
    assert len(run_study(study(*CHAIN[:2]), out=tmp_path, resume=True, at_once=at_once)) == 2


def test_folders_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone, there_still = (tmp_path / f"eg-run-{pid}-x" for pid in (2**30, os.getpid()))
    for folder in (gone, there_still):
        (folder / "run").mkdir(parents=True)
    run_study(study(CHAIN[0]), out=tmp_path / "out", at_once=there(OneProcess()))
    assert not gone.exists()
    assert there_still.exists()


def test_a_node_with_other_versions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{"torch": "2.13.0"}, {"torch": "2.12.0"}])
    monkeypatch.setattr(ray_runs, "versions", lambda: next(found))
    with pytest.raises(NetworkError, match=r"has torch 2\.12\.0, this machine 2\.13\.0"):
        run_study(study(CHAIN[0]), out=tmp_path, at_once=there(OneProcess()))


@pytest.mark.parametrize(("num_runs", "expected"), [(None, 4), (1, 1)])
def test_no_more_runs_than_wanted_run_at_once(
    tmp_path: Path, num_runs: int | None, expected: int
) -> None:
    session = OneProcess()
    cells = [Cell(name=f"{number}", group="a", work=double) for number in range(6)]
    assert len(run_study(study(*cells), out=tmp_path, at_once=there(session, num_runs))) == 6
    assert session.most_running == expected


def test_the_view_shows_every_node(tmp_path: Path) -> None:
    seen: list[str] = []

    class View:
        def update(self, status: Status) -> None:
            seen.append(status.name)

    run_study(study(*CHAIN), out=tmp_path, at_once=there(OneProcess()), progress=View())
    assert {name.split()[-1] for name in seen} == {cell.name for cell in CHAIN}


def test_a_study_that_measures_this_machine_stays_here(tmp_path: Path) -> None:
    plan = study(CHAIN[0], is_timed=True)
    with pytest.raises(UsageError, match="measures this machine"):
        run_study(plan, out=tmp_path, at_once=there(OneProcess()))


@thorough
def test_a_comparison_has_the_results_of_runs_here(tmp_path: Path) -> None:
    session = OneProcess()
    here = compare(comparison(), out=tmp_path / "here", num_threads=0)
    results = compare(comparison(), out=tmp_path / "there", at_once=there(session))
    assert session.is_closed
    for name, result in results.items():
        folders = [tmp_path / place / name for place in ("here", "there")]
        assert result.folder == folders[1]
        assert result.worker_values == here[name].worker_values
        first, second = ((repeatable_events(each), parameters(each)) for each in folders)
        assert first == second


@thorough
def test_a_comparison_reads_its_finished_runs_and_begins_the_interrupted_ones(
    tmp_path: Path,
) -> None:
    plan = comparison()
    compare(plan, out=tmp_path / "here", num_threads=0)
    with ctrl_c_at(7, plan.experiments["gosgd"].algorithm), pytest.raises(Interrupted):
        compare(plan, out=tmp_path / "there", num_threads=0)
    session = OneProcess()
    compare(plan, out=tmp_path / "there", resume=True, at_once=there(session))
    assert next(session.numbers) == 1
    assert repeatable_events(tmp_path / "there" / "gosgd") == repeatable_events(
        tmp_path / "here" / "gosgd"
    )
    unused = RayRuns(open_session=lambda *_: pytest.fail("opened"))
    compare(plan, out=tmp_path / "there", resume=True, at_once=unused)


def test_a_comparison_replaces_no_run_of_another(tmp_path: Path) -> None:
    compare(comparison(), out=tmp_path, num_threads=0)
    with pytest.raises(RunFolderError, match="already holds a run"):
        compare(comparison(), out=tmp_path, at_once=there(OneProcess()))
    other = comparison()
    changed = {name: replace(each, seed=7) for name, each in other.experiments.items()}
    with pytest.raises(RunFolderError, match="holds another experiment"):
        compare(
            replace(other, experiments=changed),
            out=tmp_path,
            resume=True,
            at_once=there(OneProcess()),
        )


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = str(tmp_path / "run")
    assert main(["compare", "quickstart", "--pool", "ray", "--out", out]) == 2
    assert "pip install 'edgegossip[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no program answers at --ray-address 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "must be HOST:PORT or 'auto'"),
        ("somewhere", "must be HOST:PORT or 'auto'"),
    ],
)
def test_a_wrong_address_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setattr(ray_session, "require_ray", Ray)
    with pytest.raises(NetworkError, match=message):
        RaySession(address, None)


def test_an_address_where_something_else_answers_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_session, "require_ray", Ray)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NetworkError, match="is not a Ray cluster"):
            RaySession(f"127.0.0.1:{server.getsockname()[1]}", None)
        thread.join()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray-address", "auto"], "--ray-address is for --pool ray"),
        (["--pool", "ray", "--threads", "2"], "gives each run one core"),
    ],
)
def test_options_that_contradict_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "sparse-push/consensus", "--short", *words]) == 2
    assert message in capsys.readouterr().err
