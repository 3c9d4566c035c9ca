"""Goodput in folders, reports and the table of `edgegossip compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.run_folders import comparison, whole_run, write_run

from edgegossip.cli.commands import print_table
from edgegossip.contract.metrics import ACCURACY
from edgegossip.machine.energy import Energy
from edgegossip.machine.goodput import NodeUse
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.runs.results import Evaluation, Results

USE = NodeUse(goodput=0.625, compute_used=0.75, node_seconds=40.0)
EVALUATION = Evaluation(
    time=10.0,
    epochs=0.5,
    metrics={"accuracy": 0.9},
    loss=0.1,
    consensus_distance=0.0,
    bytes_sent=123_456_789,
    samples_processed=4,
    energy=Energy(busy=1230.0),
    use=USE,
)
RESULTS = Results(
    name="gossip",
    reason="finished",
    history=[replace(EVALUATION, time=5.0, use=replace(USE, node_seconds=20.0)), EVALUATION],
    worker_values=[0.85, 0.9],
    params={"w": torch.zeros(1)},
    virtual_seconds=10.0,
    wall_seconds=1.0,
    mean_staleness=0.0,
    folder=None,
)


def test_lines_keep_the_use_and_older_lines_have_none() -> None:
    line = json.loads(json.dumps(EVALUATION.line()))
    assert (line["goodput"], line["compute_used"], line["node_seconds"]) == (0.625, 0.75, 40.0)
    assert Evaluation.from_line(line, [ACCURACY]) == EVALUATION
    del line["goodput"]
    assert Evaluation.from_line(line, [ACCURACY]).use is None


def test_a_wrong_number_of_node_seconds_makes_a_line_damaged() -> None:
    with pytest.raises(TypeError, match="node_seconds is 'many', not a number"):
        Evaluation.from_line({**EVALUATION.line(), "node_seconds": "many"}, [ACCURACY])


def test_a_summary_has_the_use_at_the_end_and_node_seconds_to_the_target() -> None:
    summary = RESULTS.summary(target=0.9)
    assert {name: summary[name] for name in ("goodput", "compute_used", "node_seconds")} == {
        "goodput": 0.625,
        "compute_used": 0.75,
        "node_seconds": 40.0,
    }
    assert summary["node_seconds_to_target"] == RESULTS.node_seconds_to(0.9) == 20.0
    assert RESULTS.node_seconds_to(0.95) is None
    unknown = replace(RESULTS, history=[replace(EVALUATION, use=None)]).summary(target=0.9)
    assert not {"goodput", "node_seconds", "node_seconds_to_target"} & unknown.keys()


def test_a_report_shows_the_use_of_the_machines(tmp_path: Path) -> None:
    comparison(tmp_path)
    for name in ("all-reduce", "gossip"):
        events = [
            {**event, "goodput": 0.625, "compute_used": 0.755, "node_seconds": 4.0}
            if event["type"] == "evaluated"
            else event
            for event in whole_run(name, has_barrier=name == "all-reduce")
        ]
        write_run(tmp_path / name, events)
    summary = read_folder(tmp_path).runs[0].summary
    assert (summary.goodput, summary.node_seconds_to_target) == (0.625, 4.0)
    page = write_report(tmp_path).read_text()
    assert "<td>62.5\u00a0%</td>\n<td>75.5\u00a0%</td>" in page
    assert page.count("<td>4\u00a0s</td>\n<td>4\u00a0s</td>") == 2
    assert "Goodput is the share" in page
    # One table of all columns was wider than a page of 1,400 pixels.
    results, use, *_ = page.split("<thead>")[1:]
    columns = [each.partition("</thead>")[0].count("<th ") for each in (results, use)]
    assert max(columns) <= 10
    assert all(name in results for name in ("Final accuracy", "Worst worker", "Wall time"))
    assert all(name in use for name in ("Waiting", "Goodput", "Data sent", "Node-seconds"))


def test_a_report_of_an_older_folder_says_nothing_of_goodput(tmp_path: Path) -> None:
    comparison(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "oodput" not in page
    assert "Node-seconds" not in page


def test_the_table_of_compare_shows_the_use_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table({"epoch-gossip": RESULTS, "alone": replace(RESULTS, history=[EVALUATION])})
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(" ".join(lines).split())
    assert "goodput" in shown
    assert "62.5 % 75.0 % 123 MB 1.23 kJ 40 s 10 s 1 s" in shown.replace("\u00a0", " ")
    assert max(map(len, lines)) <= 80
