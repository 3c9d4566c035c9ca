"""The notebook runs from top to bottom, and is kept without results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_results() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells())


@thorough
def test_the_cells_of_the_notebook_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    *statements, last = ("".join(cell["source"]) for cell in cells())
    names: dict[str, Any] = {}
    for source in statements:
        exec(source, names)
    said = capsys.readouterr().out
    used = {
        line.partition(":")[0]: int(line.rstrip("%").split()[-1])
        for line in said.splitlines()
        if "used" in line
    }
    assert used["edge-gossip"] > used["epoch-gossip"] + 20
    assert "<iframe" in eval(last, names)._repr_html_()
