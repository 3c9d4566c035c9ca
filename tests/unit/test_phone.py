"""Reports on a screen as wide as a phone, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser import Browser
from tests.small_runs import small_run
from tests.tiers import thorough
from tests.unit.test_study_report import write_study

from edgegossip.report.page import write_report
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.runner import run

FIGURE = "document.querySelector('figure .scroll')"


@thorough
@pytest.mark.parametrize("dark", [False, True])
def test_only_what_shows_that_it_scrolls_is_wider_than_a_phone(
    dark: bool, tmp_path: Path, browser: Browser
) -> None:
    run(small_run(), out=tmp_path / "run", num_threads=0)
    page = write_report(tmp_path / "run")
    browser.call("Page.navigate", url=page.as_uri())
    browser.until(f"document.readyState === 'complete' && !!{FIGURE}")
    browser.screenshot(tmp_path / "shot.png", 400, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= 400
    assert browser.value(f"{FIGURE}.scrollWidth > {FIGURE}.clientWidth")
    shade = browser.value(f"getComputedStyle({FIGURE}).backgroundImage")
    assert shade.count("linear-gradient") == 4
    assert browser.complaints == []


@thorough
@pytest.mark.parametrize("is_study", [False, True])
def test_axe_finds_nothing_serious_in_a_report(
    is_study: bool, tmp_path: Path, browser: Browser
) -> None:
    if is_study:
        page = write_study_report(write_study(tmp_path))
    else:
        run(small_run(), out=tmp_path / "run", num_threads=0)
        page = write_report(tmp_path / "run")
    browser.call("Page.navigate", url=page.as_uri())
    browser.until("document.readyState === 'complete'")
    assert browser.serious_findings(tmp_path) == []
