"""The commit of the code that computes results."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgegossip.runs.describe import source_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a repository with one commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # set by a hook, they would name the developer's repository
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    file = tmp_path / "code.py"
    file.write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "first")
    return file


def test_it_is_the_last_commit(tracked: Path) -> None:
    assert source_commit(tracked) == git(tracked.parent, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize(
    ("changed", "ending"), [("code.py", "-dirty"), ("sub/new.py", "-dirty"), ("data.json", "")]
)
def test_changed_and_new_code_is_dirty(tracked: Path, changed: str, ending: str) -> None:
    file = tracked.parent / changed
    file.parent.mkdir(exist_ok=True)
    file.write_text("2\n")
    assert source_commit(tracked) == git(tracked.parent, "rev-parse", "HEAD")[:12] + ending


def test_a_relative_path_and_the_environment_of_a_hook_change_nothing(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tracked.parents[1])
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert source_commit(tracked.relative_to(tracked.parents[1])) is not None


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
