"""Fixtures that tests in several files share: certificates, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.browser import CHROMIUM, Browser
from tests.certified_machines import Machines


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes all sessions in the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def machines(tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Three, whose workers look at their files fifty times in a second."""
    monkeypatch.setattr("edgegossip.net.zenoh.session._WATCH", 0.02)
    return Machines(tmp_path, opened)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
