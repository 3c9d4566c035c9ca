"""A new project runs at once, and so do its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import thorough

from edgegossip.cli.main import main

ROOT = Path(__file__).parents[2]
TASKS = ("vision", "text", "tabular", "own-loop")


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new project, with our sources and no settings of our tests."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("tabular", marks=thorough),
        pytest.param("own-loop", marks=thorough),
        pytest.param("vision", marks=pytest.mark.slow),
        pytest.param("text", marks=pytest.mark.slow),
    ],
)
def test_the_test_of_a_new_project_passes(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert main(["new", str(folder), "--task", task]) == 0
    done = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@thorough
def test_the_command_in_the_readme_runs(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--task", "tabular"]) == 0
    assert "--only epoch-gossip" in (tmp_path / "mine" / "README.md").read_text()
    words = ["run", "recipe.py:recipe", "--only", "epoch-gossip", "--num-epochs", "1"]
    done = python(tmp_path / "mine", "-m", "edgegossip", *words)
    assert "report: " in done.stdout, done.stderr


@thorough
def test_projects_are_written_as_we_write(tmp_path: Path) -> None:
    for task in TASKS:
        assert main(["new", str(tmp_path / task), "--task", task]) == 0
        title = (tmp_path / task / "README.md").read_text().partition("\n")[0]
        assert title == f"# {task}"
    for check in (["format", "--check"], ["check"]):
        words = ["-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml")]
        done = python(tmp_path, *words, "--config", 'lint.ignore=["ANN401", "D1", "D205"]', ".")
        assert done.returncode == 0, done.stdout


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.py").write_text("mine")
    assert main(["new", str(tmp_path), "--task", "text"]) == 2
    assert "is not empty; choose a new folder" in capsys.readouterr().err
    assert (tmp_path / "recipe.py").read_text() == "mine"


@thorough
def test_the_demo_needs_nothing_and_names_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("edgegossip.cli.demo_command.EPOCHS", 1)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    assert opened == []  # nobody sits here
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    assert (out / "report.html").exists()


@thorough
def test_the_demo_opens_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("edgegossip.cli.demo_command.compare_command", lambda words: 0)
    assert main(["demo", "--out", str(tmp_path), "--open", "yes"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
