"""The docstrings in `docs/run-folder.md` name every event and field that a run writes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from docs.tables import asked, pages, sections
from studies.contest import StudySettings
from tests.tiers import thorough

import edgegossip as eg
from edgegossip.recipes.registry import load_study
from edgegossip.runs.study import run_study

PAGE = Path(__file__).parents[2] / "docs" / "run-folder.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of one run in which everything happens that has a line of its own."""
    out = tmp_path_factory.mktemp("runs") / "out"
    task = eg.Task(
        dataset=eg.digits(),
        model=partial(eg.mlp, input_shape=(1, 8, 8), num_classes=10, hidden=()),
    )
    script = (eg.Crash(at=0.3, rank=1), eg.Recover(at=0.4, rank=1), eg.Drop(probability=0.1))
    experiment = eg.Experiment(
        task=task,
        algorithm=eg.Gossip(topology=eg.ring(3), num_rounds=8, timeout=0.1),
        platforms=eg.uneven(3),
        faults=eg.Faults(script=script, detection_time=0.01),
    )
    eg.compare(eg.Comparison(experiments={"gossip": experiment}, baseline="gossip"), out=out)
    return out


def documented() -> set[str]:
    text = PAGE.read_text(encoding="utf-8")
    names = [name for kind, name in asked(text) if kind == "fields"]
    tables = [each for name in names for each in sections(name, "Fields")]
    headings = " ".join([text, *(each.heading for each in tables)])
    return {*re.findall(r"`([a-z_]+)`", headings)}.union(*(each.names for each in tables))


def test_tables_are_those_of_the_code() -> None:
    old = [path.name for path, text, new in pages() if text != new]
    assert old == [], "write them again: make tables"
    assert len([*pages()]) == 4


def test_every_type_and_field_of_the_events_is_documented(folder: Path) -> None:
    lines = (folder / "gossip" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    types = {event["type"] for event in events}
    assert types == {
        *("experiment", "trained", "sent", "lost", "evaluated", "ended"),
        *("crashed", "recovered", "finished"),
    }
    assert types <= documented()
    assert {field for event in events for field in event} <= documented()


@pytest.mark.parametrize(
    "file", ["summary.json", "gossip/summary.json", "gossip/experiment.json"]
)
def test_every_field_of_the_json_files_is_documented(folder: Path, file: str) -> None:
    content = json.loads((folder / file).read_text())
    assert set(content) <= documented()
    assert set(content.get("runs", {}).get("gossip", {})) <= documented()


@thorough
def test_every_field_of_a_study_is_documented(tmp_path: Path) -> None:
    study = load_study("edgegossip/fig8")(StudySettings(short=True))
    run_study(study, out=tmp_path, num_threads=0)
    content = json.loads((tmp_path / "study.json").read_text())
    assert set(content) <= documented()
    [figure], [table, _] = content["figures"], content["tables"]
    panel = figure["panels"][0]
    cell = next(iter(content["cells"].values()))
    for part in (cell, figure, panel, panel["series"][0], table, content["machine"]):
        assert set(part) <= documented()
