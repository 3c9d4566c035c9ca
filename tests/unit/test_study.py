"""Studies: cell after cell, stopped and resumed, and never mixed up."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import ALGORITHMS, Recorder, ctrl_c_at, quick

from edgegossip.contract.errors import Interrupted, RunFolderError, TrainingError, UsageError
from edgegossip.runs.exhibits import Exhibits, Table
from edgegossip.runs.study import Cell, Row, Session, Study, run_study


class Counter:
    """Work that counts how often it was done, and fails when told to."""

    def __init__(self, value: float, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        self.num_times = 0

    def __call__(self, session: Session) -> Row:
        self.num_times += 1
        if self.error is not None:
            raise self.error
        return {"value": self.value}


def table(rows: Mapping[str, Row]) -> Exhibits:
    lines = tuple((name, row["value"]) for name, row in rows.items())
    columns: Any = (("cell", "text"), ("value", "number"))
    return Exhibits(tables=(Table(heading="Values", columns=columns, rows=lines),))


def study_of(works: Mapping[str, Any], **changes: Any) -> Study:  # noqa: ANN401
    cells = [
        Cell(name=name, group=name.partition("/")[0], work=work) for name, work in works.items()
    ]
    settings: dict[str, Any] = {
        "name": "test/values",
        "title": "What are the values?",
        "printed": ("The paper prints 3.",),
        "settings": {"seeds": [0]},
        "cells": tuple(cells),
        "exhibit": table,
    }
    return Study(**settings | changes)


def kept(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "study.json").read_text())
    return content


def test_rows_and_what_they_show_are_kept(tmp_path: Path) -> None:
    works = {"a/1": Counter(1.0), "b/1": Counter(2.0)}
    rows = run_study(study_of(works), out=tmp_path, command="edgegossip study x")
    found = kept(tmp_path)
    assert rows == {"a/1": {"value": 1.0}, "b/1": {"value": 2.0}}
    assert {name: cell["row"] for name, cell in found["cells"].items()} == rows
    assert found["tables"][0]["rows"] == [["a/1", 1.0], ["b/1", 2.0]]
    assert found["command"] == "edgegossip study x"
    assert found["machine"]["num_cores"] >= 1


def test_each_cell_keeps_the_commit_that_computed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of({"one/a": Counter(1.0), "one/b": Counter(2.0)})
    for commit, runs in (("first", ["a"]), ("second", ["a", "b"])):
        monkeypatch.setattr("edgegossip.runs.study.source_commit", lambda c=commit: c)
        run_study(study.with_runs(runs), out=tmp_path, resume=commit == "second")
    commits = {name: cell["commit"] for name, cell in kept(tmp_path)["cells"].items()}
    assert commits == {"one/a": "first", "one/b": "second"}


def test_a_part_says_what_is_smaller_in_it_and_not_in_others(tmp_path: Path) -> None:
    cells = tuple(
        Cell(name=f"{group}/{i}", group=group, work=Counter(1.0), scaled_down=sentence)
        for group, sentence in (("har", ""), ("mnist", "Half of MNIST."), ("cifar", "No."))
        for i in range(2)
    )
    study = study_of({}, cells=cells, scaled_down=("One seed.",))
    run_study(study.only("mnist"), out=tmp_path)
    assert kept(tmp_path)["scaled_down"] == ["Half of MNIST.", "One seed."]


def test_a_stopped_study_is_valid_and_goes_on_without_doing_anything_twice(
    tmp_path: Path,
) -> None:
    works = {"a": Counter(1.0), "b": Counter(2.0, KeyboardInterrupt()), "c": Counter(3.0)}
    with pytest.raises(Interrupted, match=rf"in b; {tmp_path} holds everything so far"):
        run_study(study_of(works), out=tmp_path)
    assert list(kept(tmp_path)["cells"]) == ["a"]
    assert kept(tmp_path)["num_cells"] == 3
    started = kept(tmp_path)["wall_started"]
    works["b"].error = None
    rows = run_study(study_of(works), out=tmp_path, resume=True)
    assert list(rows) == ["a", "b", "c"]
    assert [work.num_times for work in works.values()] == [1, 2, 1]
    assert kept(tmp_path)["wall_started"] == started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_measurements_too(number: int, tmp_path: Path) -> None:
    def measure(session: Session) -> Row:
        signal.raise_signal(number)
        return {"value": 1.0}

    earlier = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="interrupted in a;"):
        run_study(study_of({"a": measure}), out=tmp_path)
    assert kept(tmp_path)["cells"] == {}
    assert signal.getsignal(signal.SIGTERM) == earlier


def test_a_run_that_was_stopped_goes_on_within_its_study(tmp_path: Path) -> None:
    def work(session: Session) -> Row:
        return {"value": session.run(quick("gosgd")).final_accuracy}

    study = study_of({"a/gosgd": work})
    whole = run_study(study, out=tmp_path / "whole", num_threads=0)
    out = tmp_path / "stopped"
    with ctrl_c_at(8, ALGORITHMS["gosgd"]), pytest.raises(Interrupted, match=f"; {out} holds"):
        run_study(study, out=out, num_threads=0)
    assert run_study(study, out=out, num_threads=0, resume=True) == whole


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(session: Session) -> Row:
        return {"value": session.run(quick("gosgd")).final_accuracy}

    study = study_of({"a/gosgd": work})
    whole = run_study(study, out=tmp_path / "whole", num_threads=0)
    out = tmp_path / "killed"
    monkeypatch.setattr("edgegossip.runs.study.CHECKPOINT_SECONDS", 0.0)
    # A second Ctrl+C stops a run without a last checkpoint, as SIGKILL does.
    with ctrl_c_at(11, ALGORITHMS["gosgd"], times=2), pytest.raises(Interrupted):
        run_study(study, out=out, num_threads=0)
    assert (out / "cells/a/gosgd/checkpoint.safetensors").exists()
    assert run_study(study, out=out, num_threads=0, resume=True) == whole


def test_a_cell_that_fails_is_noted_and_tried_again_on_resume(tmp_path: Path) -> None:
    works = {"a": Counter(1.0, TrainingError("the loss became nan")), "b": Counter(2.0)}
    assert list(run_study(study_of(works), out=tmp_path)) == ["b"]
    assert kept(tmp_path)["errors"] == {"a": "the loss became nan"}
    works["a"].error = None
    assert set(run_study(study_of(works), out=tmp_path, resume=True)) == {"a", "b"}
    assert kept(tmp_path)["errors"] == {}


def test_a_folder_of_another_study_is_left_alone(tmp_path: Path) -> None:
    works = {"a": Counter(1.0)}
    run_study(study_of(works), out=tmp_path)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(RunFolderError, match="already holds a study; choose another --out"):
        run_study(study_of(works), out=tmp_path)
    other = study_of(works, settings={"seeds": [0, 1]})
    with pytest.raises(RunFolderError, match=r"its seeds is \[0\], now \[0, 1\]"):
        run_study(other, out=tmp_path, resume=True)
    with pytest.raises(RunFolderError, match='its study is "test/values", now "test/others"'):
        run_study(study_of(works, name="test/others"), out=tmp_path, resume=True)
    with pytest.raises(RunFolderError, match=r"there is no folder .* to resume"):
        run_study(study_of(works), out=tmp_path / "none", resume=True)
    assert (tmp_path / "study.json").read_bytes() == before


def test_a_study_that_could_not_begin_is_no_obstacle(tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> Any:  # noqa: ANN401
        raise UsageError("there is no cluster at this address")

    works = {"a": Counter(1.0)}
    with pytest.raises(UsageError, match="no cluster"):
        run_study(study_of(works), out=tmp_path, at_once=refused)
    changed = study_of(works, settings={"seeds": [5]})
    assert set(run_study(changed, out=tmp_path)) == {"a"}


def test_a_damaged_study_is_an_error_for_people(tmp_path: Path) -> None:
    works = {"a": Counter(1.0)}
    run_study(study_of(works), out=tmp_path)
    content = json.loads((tmp_path / "study.json").read_text())
    del content["cells"]["a"]["row"]
    (tmp_path / "study.json").write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"is damaged .*; choose another --out"):
        run_study(study_of(works), out=tmp_path, resume=True)


def test_a_part_of_a_study_can_be_done_alone(tmp_path: Path) -> None:
    works = {"mnist/1": Counter(1.0), "har/1": Counter(2.0), "har/2": Counter(3.0)}
    assert list(run_study(study_of(works).only("har"), out=tmp_path)) == ["har/1", "har/2"]
    assert kept(tmp_path)["settings"]["only"] == "har"
    with pytest.raises(UsageError, match=r"'mnits'; choose one of .*did you mean 'mnist'"):
        study_of(works).only("mnits")


def test_some_runs_of_a_study_can_be_done_and_the_others_later(tmp_path: Path) -> None:
    works = {"har/gosgd": Counter(1.0), "har/random": Counter(2.0), "mnist/gosgd": Counter(3.0)}
    study = study_of(works)
    assert list(run_study(study.with_runs(["gosgd"]), out=tmp_path)) == [
        "har/gosgd",
        "mnist/gosgd",
    ]
    assert run_study(study, out=tmp_path, resume=True).keys() == works.keys()
    assert [work.num_times for work in works.values()] == [1, 1, 1]
    with pytest.raises(UsageError, match="'goSGD'; choose one of 'gosgd', 'random'"):
        study.with_runs(["goSGD"])


def test_cells_of_one_name_and_no_cells_are_refused() -> None:
    study = study_of({"a": Counter(1.0)})
    with pytest.raises(ValueError, match="two cells of test/values have the name 'a'; give"):
        replace(study, cells=study.cells * 2)
    with pytest.raises(ValueError, match="test/values has no cells; give at least one seed"):
        replace(study, cells=())


def test_a_cell_sees_earlier_rows_and_runs_in_a_folder_of_its_own(tmp_path: Path) -> None:
    def second(session: Session) -> Row:
        results = session.run(quick("gosgd"))
        return {"value": session.rows["a"]["value"] + len(results.history)}

    view = Recorder()
    study = study_of({"a": Counter(0.5), "b/gosgd": second})
    first, then = study.cells
    study = replace(study, cells=(first, replace(then, after=("a",))))
    rows = run_study(study, out=tmp_path, num_threads=0, progress=view)
    assert rows["b/gosgd"]["value"] > 1
    assert (tmp_path / "cells" / "b" / "gosgd" / "events.jsonl").exists()
    assert {status.name for status in view.statuses} == {"1/2 a", "2/2 b/gosgd"}
