"""Which commit results are of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgegossip.experiments.source_commit import source_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tracked(tmp_path: Path) -> Path:
    """A file in a repository with one commit."""
    file = tmp_path / "code.py"
    file.write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "first")
    return file


def test_it_is_the_last_commit(tracked: Path) -> None:
    assert source_commit(tracked) == git(tracked.parent, "rev-parse", "HEAD")[:12]


def test_changed_code_is_dirty(tracked: Path) -> None:
    (tracked.parent / "new.txt").write_text("no code\n")
    tracked.write_text("2\n")
    assert source_commit(tracked) == git(tracked.parent, "rev-parse", "HEAD")[:12] + "-dirty"


def test_a_package_that_the_repository_does_not_track_has_none(tracked: Path) -> None:
    installed = tracked.parent / "installed.py"
    installed.write_text("1\n")
    assert source_commit(installed) is None


def test_no_repository_and_no_git_have_none(
    tracked: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source_commit(tmp_path_factory.mktemp("elsewhere") / "code.py") is None
    monkeypatch.setenv("PATH", "")
    assert source_commit(tracked) is None
