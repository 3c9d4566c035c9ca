"""Several folders of one study become one kept file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.keep_study import main

PART = "cifar10-lenet5-even-data"


def folder_of(root: Path, run: str, accuracy: float, **settings: Any) -> Path:  # noqa: ANN401
    row = {
        "group": PART,
        "setting": "even data",
        "run": run,
        "seed": 0,
        "lr": 0.02,
        "consensus_step": None,
        "is_tuning": False,
        "times": [0.0, 1.0],
        "accuracies": [0.1, accuracy],
        "bytes_per_worker": [0.0, 100.0],
        "worker_accuracies": [accuracy],
        "worker_mean": accuracy,
    }
    study = {
        "schema": 1,
        "study": "sparse-push/cifar10",
        "settings": {"short": False, "seeds": [0], "nesterov": True} | settings,
        "command": f"edgegossip study sparse-push/cifar10 --runs {run}",
        "cells": {f"{PART}/seed0/{run}": {"commit": "3f71315f0a2b", "row": row}},
        "errors": {},
        "figures": [{"name": "large"}],
        "tables": [],
        "wall_started": "2026-11-28T13:00:00+00:00",
        "wall_seconds": 1.0,
    }
    folder = root / f"{run}-{len([*root.iterdir()])}"
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def test_folders_of_one_study_become_one_file_with_one_table(tmp_path: Path) -> None:
    dense = folder_of(tmp_path, "stochastic-gradient-push", 0.7)
    sparse = folder_of(tmp_path, "sparse-push 1 % 32 bits", 2 / 3, only=PART)
    out = tmp_path / "kept.json"
    assert main([str(dense), str(sparse), "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert [cell["commit"] for cell in kept["cells"].values()] == ["3f71315f0a2b"] * 2
    assert kept["command"].count("; ") == 1
    assert "figures" not in kept
    [table] = kept["tables"]
    lost = [name for name, _ in table["columns"]].index("lost")
    assert [row[lost] for row in table["rows"]] == [0, pytest.approx(0.7 - 2 / 3, rel=1e-4)]
    assert (
        kept["cells"][f"{PART}/seed0/sparse-push 1 % 32 bits"]["row"]["worker_mean"] == 0.66667
    )


def test_folders_that_do_not_fit_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = folder_of(tmp_path, "stochastic-gradient-push", 0.7)
    again = folder_of(tmp_path, "stochastic-gradient-push", 0.6)
    other = folder_of(tmp_path, "gossip", 0.6, nesterov=False)
    out = tmp_path / "kept.json"
    for second, message in ((again, "a second time"), (other, "of other settings")):
        assert main([str(first), str(second), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert not out.exists()
