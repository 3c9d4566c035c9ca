"""The example of an own loop with a folder runs as its text says, and its run has a report."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgegossip as eg
from edgegossip.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.mark.thorough
def test_two_workers_of_the_example_leave_a_run_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rounds = ["--num-rounds", "40"]
    script = ["script", "-n", "2", "--out", "log", str(EXAMPLE), "--out", "run"]
    assert main([*script, *rounds]) == 0
    assert Path("run/workers/1/model.pt").exists()
    gather = ["gather", f"{EXAMPLE}:experiment", "--num-workers", "2", "--out", "run"]
    assert main([*gather, *rounds]) == 0
    results = eg.load("run")
    assert isinstance(results, eg.Results)
    assert results.final_accuracy > 0.7
    assert Path("run/report.html").exists()
