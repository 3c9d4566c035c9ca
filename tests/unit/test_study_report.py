"""A study's page tells what is in `study.json`, and nothing that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import thorough
from tests.unit.test_report import PageReader

from edgegossip.contract.errors import RunFolderError
from edgegossip.report.charts import (
    draw_map,
    draw_panel,
    map_words,
    series_colors,
    study_picture,
)
from edgegossip.report.study_page import write_study_report
from edgegossip.report.style import new_figure


def panel(kind: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    x: list[Any] = [0.0, 1.0, 2.0] if kind == "lines" else ["3 times", "5 times"]
    y = [0.1, 0.5, 0.75] if kind == "lines" else [0.5, None]
    series = {"x": x, "y": y, "low": [], "high": [], "is_mark": False}
    values = {
        "title": f"Some {kind}",
        "kind": kind,
        "x_label": "",
        "y_label": "accuracy",
        "y_unit": "percent",
        "x_unit": "number",
        "is_log": False,
        "is_x_log": False,
        "series": [{"name": "random", **series}, {"name": "epoch-gossip", **series}],
    }
    return values | changes


def figure(*kinds: str) -> dict[str, Any]:
    return {
        "name": "fig12",
        "heading": "Uneven",
        "caption": "How to read it.",
        "panels": [panel(kind) for kind in kinds],
    }


def write_study(folder: Path, **changes: Any) -> Path:  # noqa: ANN401
    table = {
        "heading": "Ours",
        "columns": [["run", "text"], ["bound", "times"], ["loss", "points"]],
        "rows": [["random", 2.38, 0.0078], ["<gosgd>", None, -0.002]],
        "note": "Medians.",
    }
    study = {
        "study": "test/fig12",
        "title": "What if?",
        "printed": ["The paper prints 2.70."],
        "scaled_down": ["2,000 pictures."],
        "settings": {"seeds": [0, 1]},
        "command": "edgegossip study test/fig12",
        "num_cells": 1,
        "cells": {"a": {}},
        "errors": {},
        "figures": [figure("bars")],
        "tables": [table],
        "versions": {"torch": "2.13.0"},
        "machine": {"num_cores": 2, "architecture": "x86_64", "system": "Linux"},
        "wall_started": "2026-11-21T10:00:00+00:00",
        "wall_seconds": 12.0,
    }
    (folder / "study.json").write_text(json.dumps(study | changes))
    return folder


def read(folder: Path) -> PageReader:
    reader = PageReader()
    reader.feed(write_study_report(folder).read_text(encoding="utf-8"))
    return reader


def test_the_page_has_paper_and_ours_and_how_it_was_done(tmp_path: Path) -> None:
    reader = read(write_study(tmp_path))
    for words in (
        "The paper prints 2.70.",
        "2,000 pictures.",
        "2.4 ×",  # noqa: RUF001
        "0.78 pp",
        "<gosgd>",
        "edgegossip study test/fig12",
        "2 cores",
    ):
        assert words in reader.text.replace("\xa0", " "), words
    assert "Not complete" not in reader.text
    assert all(load.startswith("data:") for load in reader.loads)
    assert (tmp_path / "figures" / "fig12.svg").read_bytes().startswith(b"<?xml")
    [alt] = [alt for alt in reader.alts if alt]
    assert "random: 3 times 50\xa0% and 5 times \u2013" in alt


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    errors = {"a/gosgd": "the loss became nan"}
    nothing: dict[str, list[Any]] = {"figures": [], "tables": []}
    text = read(write_study(tmp_path, num_cells=3, errors=errors, **nothing)).text
    assert "1 of 3 parts are done" in text
    assert "a/gosgd failed. the loss became nan" in text
    assert "Nothing yet." in text


@thorough
def test_a_sweep_has_no_section_about_a_paper(tmp_path: Path) -> None:
    assert "What the paper says" in read(write_study(tmp_path)).text
    assert "What the paper says" not in read(write_study(tmp_path, printed=[])).text


def test_a_table_alone_is_a_result(tmp_path: Path) -> None:
    assert "Nothing yet." not in read(write_study(tmp_path, figures=[])).text


def test_names_in_backticks_are_code_and_the_rest_stays_text(tmp_path: Path) -> None:
    write_study(tmp_path, scaled_down=["`lr` <b> is `0.1 & 0.2`, and ` is alone."])
    page = write_study_report(tmp_path)
    sentence = "<code>lr</code> &lt;b&gt; is <code>0.1 &amp; 0.2</code>, and ` is alone."
    assert sentence in page.read_text()


@pytest.mark.slow
def test_each_kind_of_panel_is_drawn_the_same_again() -> None:
    first, second = (study_picture(figure("lines", "bars", "stacked")) for _ in range(2))
    assert first.svg == second.svg
    assert "Some lines. random ends at 75\xa0%" in first.alt


@thorough
def test_a_curve_without_values_is_told() -> None:
    curves = panel("lines")
    curves["series"][0] |= {"x": [], "y": []}
    drawn = figure() | {"panels": [curves]}
    assert "random has no values; epoch-gossip ends at 75" in study_picture(drawn).alt


@pytest.mark.slow
def test_a_place_without_a_panel_stays_empty() -> None:
    svg = study_picture(figure("lines", "bars", "lines")).svg
    assert svg.count(b'"matplotlib.axis_') == 2 * 3


def map_panel() -> dict[str, Any]:
    shares = [0.001, 0.01, 0.1]
    steps = {"0.01": [0.5, 0.1, 0.2], "0.1": [None, 0.05, 0.1]}
    rows = [
        {"name": step, "x": shares, "y": y, "low": [], "high": [], "is_mark": False}
        for step, y in steps.items()
    ]
    rule = {"name": "rule", "x": shares, "y": [0.001, 0.01, 0.1], "low": [], "high": []}
    return panel("map", series=[*rows, rule | {"is_mark": True}], y_unit="number")


def test_a_map_has_a_cell_for_each_number_and_the_line_over_it() -> None:
    axes = new_figure(4, 3).subplots()
    draw_map(axes, map_panel())
    mesh: Any = axes.collections[0]
    assert np.ma.filled(mesh.get_array(), 0).tolist() == [[0.5, 0.1, 0.2], [0, 0.05, 0.1]]
    assert axes.get_xlim() == pytest.approx((0.001 / 10**0.5, 0.1 * 10**0.5))
    line = axes.get_lines()[-1]
    assert list(np.asarray(line.get_ydata())) == [0.001, 0.01, 0.1]
    assert map_words(map_panel())[:2] == [
        "least at 0.001: 0.5 at 0.01",
        "least at 0.01: 0.05 at 0.1",
    ]


def test_a_map_may_have_no_number_at_all() -> None:
    empty = map_panel()
    for each in empty["series"][:-1]:
        each["y"] = [None] * 3
    axes = new_figure(4, 3).subplots()
    draw_map(axes, empty)
    assert len(axes.get_lines()) == 2  # the rule and its outline
    assert map_words(empty)[0] == "least at 0.001: none"


@thorough
def test_a_map_is_drawn_with_only_its_line_in_the_legend() -> None:
    figure_ = figure("bars") | {"panels": [map_panel()]}
    assert list(series_colors(figure_["panels"])) == []
    assert "least at 0.1: 0.1 at 0.1" in study_picture(figure_).alt


def test_curves_may_have_a_logarithmic_axis_of_bytes() -> None:
    axes = new_figure(4, 3).subplots()
    curves = panel("lines", is_x_log=True, x_unit="bytes")
    for each in curves["series"]:
        each["x"] = [1e3, 1e6, 1e9]
    draw_panel(axes, curves, series_colors([curves]))
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(1e6) == "1\xa0MB"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot read .*study.json"),
        ("[]", "has no str 'study'; give the folder that a study wrote"),
        ('{"study": "x"}', "has no str 'title'"),
    ],
)
def test_a_damaged_study_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        write_study_report(tmp_path)


def test_a_figure_that_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path, figures=[{"panels": [{}]}])
    with pytest.raises(RunFolderError, match="is damaged"):
        write_study_report(tmp_path)
