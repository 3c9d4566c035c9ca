"""Notebooks show runs and reports."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.small_runs import small_run
from tests.tiers import thorough

from edgegossip.contract.errors import UsageError
from edgegossip.report import page as shown
from edgegossip.report.page import Report
from edgegossip.runs import results as inline
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run


class Frames(HTMLParser):
    """Collects the frames of a piece of HTML."""

    def __init__(self, text: str | None) -> None:
        super().__init__()
        self.frames: list[dict[str, str | None]] = []
        self.others: set[str] = set()
        self.feed(text or "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "iframe":
            self.frames.append(dict(attrs))
        else:
            self.others.add(tag)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(small_run("gosgd"), out=tmp_path_factory.mktemp("run"), num_threads=0)


@pytest.fixture(scope="module")
def report(results: Results) -> Report:
    """The report of that run; tests only look at it."""
    return Report(results)


@thorough
def test_a_report_is_shown_as_a_frame_with_the_whole_page_and_no_scripts(
    results: Results, report: Report
) -> None:
    found = Frames(report._repr_html_())
    [frame] = found.frames
    assert frame["srcdoc"] == report.page.read_text()
    assert frame["sandbox"] == ""
    assert found.others == set()
    assert results._repr_html_() == report._repr_html_()  # drawn by now


def test_results_without_a_report_are_a_table_of_numbers(results: Results) -> None:
    text = replace(results, folder=None, name="<b>")._repr_html_()
    assert "<b>" not in text
    assert f"<th>accuracy</th><td>{results.final_accuracy:.4g}</td>" in text


def test_results_print_in_a_line_without_tensors(results: Results) -> None:
    assert repr(replace(results, folder=None, virtual_seconds=12.0)) == (
        f"Results('gosgd', 'finished', accuracy={results.final_accuracy:.4g}, "
        "virtual_seconds=12, folder=None)"
    )
    assert "folder=None" in repr(replace(results, folder=None, history=[]))


@thorough
def test_a_large_page_is_a_link(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "_MAX_BYTES", 1000)
    found = Frames(report._repr_html_())
    assert found.frames == []
    assert found.others == {"p", "a"}
    assert report.page.as_uri() in unescape(report._repr_html_() or "")


def test_results_without_a_folder_have_no_report(results: Results) -> None:
    with pytest.raises(UsageError, match="these results have no folder"):
        Report(replace(results, folder=None))


def test_a_folder_is_taken_as_text_too(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "write_report", lambda folder: folder / "report.html")
    assert Report(str(results.folder)).page == Path(str(results.folder)) / "report.html"
