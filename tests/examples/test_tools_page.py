"""The examples of the page about other tools run as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.examples.test_readme import python_blocks
from tests.small_runs import small_run

import edgegossip as eg

TRACKERS, PRINTER, PANDAS = python_blocks("docs/tools.md")


@pytest.fixture(autouse=True)
def work_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(block: str, **given: Any) -> dict[str, Any]:  # noqa: ANN401
    exec(compile(block, "docs/tools.md", "exec"), given)
    return given


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_is_tracked() -> None:
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package, reason=f"needs pip install 'edgegossip[{package}]'")
    names(TRACKERS, eg=eg, experiment=small_run())
    assert Path("runs/a/tensorboard").is_dir()
    assert Path("runs/a/wandb").is_dir()


def test_ones_own_tracker_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    printer = names(PRINTER)["Printer"]()
    results = eg.run(small_run(), out="a", num_threads=0, trackers=[printer])
    first, *between, last = capsys.readouterr().out.splitlines()
    assert first == f"gossip {small_run().seed}"
    assert len(between) == len(results.history)
    assert last == f"finished {results.history[-1].bytes_sent}"


def test_a_comparison_is_one_frame() -> None:
    pd = pytest.importorskip("pandas", reason="needs pip install 'edgegossip[pandas]'")
    runs = {name: small_run(name) for name in ("gosgd", "gossip")}
    comparison = eg.Comparison(experiments=runs, baseline="gossip")
    frame = names(PANDAS, eg=eg, pd=pd, comparison=comparison)["frame"]
    assert frame.groupby("run")["accuracy"].last().index.tolist() == ["gosgd", "gossip"]
