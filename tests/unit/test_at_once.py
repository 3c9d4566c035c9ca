"""Several cells at once: the same rows, in processes that end with their parent."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.contest import StudySettings

from edgegossip.contract.errors import DataError, TrainingError, UsageError
from edgegossip.recipes.registry import load_recipe, load_study, studies
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.comparison import compare
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.parallel import do_at_once
from edgegossip.runs.process import on_stop_signal
from edgegossip.runs.study import Cell, Row, Session, Study, run_study
from edgegossip.runs.tracking import Progress, Silent, Status

TWO = partial(run_study, num_processes=2)


def double(session: Session) -> Row:
    known = [row["value"] for row in session.rows.values()]
    return {"value": 2 * sum(known) or 1, "process": os.getpid()}


def fail(session: Session) -> Row:
    raise TrainingError("the loss is not finite")


def die(session: Session) -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def begin_and_wait(session: Session) -> Row:
    session.folder.mkdir(parents=True)
    begun, asked, insisted = (session.folder / name for name in ("begun", "asked", "insisted"))
    with on_stop_signal(asked.touch, insisted.touch):
        begun.touch()
        while not asked.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # one who insisted would do so at once
    return {}


def lack_data(session: Session) -> Row:
    while not session.folder.with_name("other").joinpath("begun").exists():
        time.sleep(0.01)
    raise DataError("no file is there")


def study(*cells: Cell, **changes: Any) -> Study:  # noqa: ANN401
    return Study(
        name="test/at-once",
        title="",
        printed=(),
        settings={},
        cells=cells,
        exhibit=lambda rows: Exhibits(),
        **changes,
    )


CHAIN = (
    Cell(name="first", group="a", work=double),
    Cell(name="second", group="a", work=double, after=("first",)),
    Cell(name="failing", group="a", work=fail),
    Cell(name="third", group="a", work=double, after=("first", "second", "failing")),
)


@pytest.mark.slow
def test_cells_at_once_find_what_they_find_one_after_the_other(tmp_path: Path) -> None:
    def values(rows: dict[str, Row]) -> dict[str, int]:
        return {name: row["value"] for name, row in rows.items()}

    rows = TWO(study(*CHAIN), out=tmp_path / "two")
    alone = run_study(study(*CHAIN), out=tmp_path / "one")
    assert values(rows) == values(alone) == {"first": 1, "second": 2, "third": 6}
    assert os.getpid() not in {row["process"] for row in rows.values()}
    assert "not finite" in (tmp_path / "two" / "study.json").read_text()


def test_work_that_cannot_be_pickled_is_explained(tmp_path: Path) -> None:
    cells = [Cell(name=name, group="a", work=lambda session: {}) for name in ("one", "two")]
    with pytest.raises(UsageError, match=r"cannot be passed to another process .*lambda"):
        TWO(study(*cells), out=tmp_path)


def test_a_study_that_measures_time_does_one_cell_at_a_time(tmp_path: Path) -> None:
    rows = TWO(study(*CHAIN, is_timed=True), out=tmp_path)
    assert {row["process"] for row in rows.values()} == {os.getpid()}


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    cells = (CHAIN[0], Cell(name="large", group="a", work=die, after=("first",)), CHAIN[1])
    with pytest.raises(TrainingError, match=r"killed during .*--processes"):
        TWO(study(*cells), out=tmp_path)
    smaller = study(CHAIN[0], CHAIN[1])
    assert [*TWO(smaller, out=tmp_path, resume=True)] == ["first", "second"]


@pytest.mark.slow
def test_an_error_that_ends_a_study_stops_the_other_processes_at_once(tmp_path: Path) -> None:
    cells = (
        Cell(name="lacking", group="a", work=lack_data),
        Cell(name="other", group="a", work=begin_and_wait),
    )
    with pytest.raises(DataError, match="no file is there"):
        TWO(study(*cells), out=tmp_path)
    assert (tmp_path / "cells" / "other" / "asked").exists()


@pytest.mark.slow
def test_what_a_process_tells_is_shown(tmp_path: Path) -> None:
    told: list[Status] = []

    class View:
        def update(self, status: Status) -> None:
            told.append(status)

    TWO(study(*CHAIN), out=tmp_path, progress=View())
    assert {"1/4 first", "4/4 third"} <= {status.name for status in told}


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_and_says_how_to_go_on(tmp_path: Path) -> None:
    code = (
        "from tests.unit.test_at_once import *\n"
        "from edgegossip.contract.errors import Interrupted\n"
        "if __name__ == '__main__':\n"
        "    cells = [Cell(name=n, group='a', work=begin_and_wait) for n in 'ab']\n"
        f"    out = Path({str(tmp_path / 'out')!r})\n"
        "    try:\n"
        "        TWO(study(*cells), out=out)\n"
        "    except Interrupted as error:\n"
        "        print(error)\n"
    )
    script = tmp_path / "interrupted.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    child = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    )
    begun = [tmp_path / "out" / "cells" / name / "begun" for name in "ab"]
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in begun) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=50)
    assert "--resume" in said
    for path in begun:
        assert path.with_name("asked").exists()
        assert not path.with_name("insisted").exists()  # runs leave a checkpoint


@pytest.mark.slow
def test_runs_at_once_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    comparison = load_recipe("quickstart")(Settings(num_epochs=1, num_workers=2))
    assert isinstance(comparison, Comparison)
    alone = compare(comparison, out=tmp_path / "one", num_threads=0)
    found = compare(comparison, out=tmp_path / "two", num_processes=2)
    assert [*found] == [*alone] == [*comparison.experiments]
    for name, results in found.items():
        assert results.history == alone[name].history
        for which, tensor in results.params.items():
            assert torch.equal(tensor, alone[name].params[which])
    again = compare(comparison, out=tmp_path / "two", num_processes=2, resume=True)
    assert [each.history for each in again.values()] == [e.history for e in found.values()]


def record(name: str, folder: Path, progress: Progress) -> str:
    assert not (folder / name).exists()
    (folder / name).touch()
    return name


@pytest.mark.slow
def test_no_job_begins_before_those_that_it_comes_after(tmp_path: Path) -> None:
    names, done = ["a", "b", "c", "d"], list[str]()
    after = {"a": (), "b": ("a",), "c": ("b", "not a job"), "d": ()}

    def work(name: str) -> Any:  # noqa: ANN401
        assert {*after[name]} & {*names} <= {*done}
        return partial(record, name, tmp_path)

    jobs = {name: partial(work, name) for name in names}
    future: Future[str]
    for name, future in do_at_once(jobs, after, num_processes=2, progress=Silent()):
        assert future.result() == name
        done.append(name)
    assert sorted(done) == names


@pytest.mark.parametrize("name", studies())
@pytest.mark.parametrize("short", [True, False])
def test_cells_can_be_sent_to_other_processes_and_come_after_others(
    name: str, short: bool
) -> None:
    cells = load_study(name)(StudySettings(short=short, seeds=(0,))).cells
    known: set[str] = set()
    for cell in cells:
        assert known >= {*cell.after}
        known.add(cell.name)
        pickle.dumps(cell.work)
