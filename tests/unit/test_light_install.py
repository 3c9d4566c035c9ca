"""A board that only joins runs needs no pictures, no reports and no scikit-learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
RECIPE = """
import edgegossip as eg, torch

def recipe(num_workers: int = 2):
    "Two workers learn the sign of a number."
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).numpy()
    y = (x[:, 0] > 0).astype(int)
    data = eg.from_numpy("signs", (x[:160], y[:160]), (x[160:], y[160:]), num_classes=2)
    task = eg.Task(dataset=data, model=lambda: torch.nn.Linear(4, 2), optimizer=eg.SGD(lr=0.1))
    algorithm = eg.EpochGossip(topology=eg.complete(2), num_rounds=3)
    return eg.Experiment(task=task, algorithm=algorithm, platforms=eg.uneven(2))
"""
# Python imports a module of this name before anything else, also in each worker.
SITE = """
import importlib.machinery, importlib.metadata, sys

MISSING = {missing!r}
MODULES = {{"scikit-learn": "sklearn"}}

class Installed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in {{MODULES.get(each, each) for each in MISSING}}:
            return super().find_spec(name, path, target)

known = importlib.metadata.version
def version(name):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Installed
"""


def requirements(lines: list[str]) -> dict[str, str]:
    """Requirements by name."""
    return {
        re.split(r"[<>=]", line)[0]: line for line in lines if line and not line.startswith("#")
    }


def test_a_board_gets_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = requirements(project["dependencies"])
    board = requirements((ROOT / "requirements-board.txt").read_text().splitlines())
    assert {name: everything[name] for name in board} == board
    # PyTorch itself requires jinja2, and that markupsafe.
    left_out = {"jinja2", "markupsafe", "matplotlib", "scikit-learn", "scipy", "torch"}
    assert {*everything} - {*board} == left_out


@thorough
def test_a_run_needs_nothing_else(tmp_path: Path) -> None:
    missing = {"matplotlib", "scikit-learn", "scipy"}
    (tmp_path / "sitecustomize.py").write_text(SITE.format(missing=missing))
    (tmp_path / "mine.py").write_text(RECIPE)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "edgegossip", "launch", "mine.py:recipe", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "a report needs matplotlib, which a light install leaves out" in done.stderr
    assert "epoch-gossip" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "workers" / "1" / "summary.json").exists()
