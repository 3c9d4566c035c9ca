"""The documentation's examples run as printed, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiers import thorough

import edgegossip as eg
from edgegossip.cli import commands
from edgegossip.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def python_blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} shows no Python"
    return blocks


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.fixture(autouse=True)
def work_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("num_rounds", "accuracy"), [(20, 0.4), pytest.param(300, 0.8, marks=pytest.mark.slow)]
)
def test_readme_trains_a_model_of_the_readers_own(
    num_rounds: int, accuracy: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in python_blocks("README.md"):
        assert "num_rounds=300" in block
        exec(compile(block.replace("=300", f"={num_rounds}"), "README.md", "exec"), {})
    assert re.search(r"\d+\.\d% after \d+ virtual seconds", capsys.readouterr().out)
    assert json.loads(Path("runs/signs/summary.json").read_text())["final_accuracy"] > accuracy


@pytest.mark.slow
def test_own_model_example_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/own_model.py"), run_name="__main__")
    assert Path(capsys.readouterr().out.split()[-1]).is_file()


def test_own_model_example_makes_a_run_whose_parameters_fit_its_model() -> None:
    example = runpy.run_path(str(ROOT / "examples/own_model.py"))
    experiment = replace(example["make_experiment"](), max_seconds=0.5)
    example["make_model"]().load_state_dict(eg.run(experiment, out="out").params)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reports, which take a second to draw and have tests of their own."""
    monkeypatch.setattr(commands, "write_report", lambda folder: folder / "report.html")


@pytest.mark.usefixtures("undrawn")
def test_own_recipe_example_is_compared_by_the_command_line() -> None:
    recipe = f"{ROOT / 'examples/own_recipe.py'}:skewed_digits"
    options = ["--num-workers", "4", "--virtual-seconds", "0.5", "--out", "out"]
    assert main(["compare", recipe, *options]) == 0
    runs = json.loads(Path("out/summary.json").read_text())["runs"]
    assert list(runs) == ["gossip", "gosgd"]
    assert "crashed" in Path("out/gosgd/events.jsonl").read_text()


def test_sensor_data_example_makes_the_file_of_the_recipes() -> None:
    for split, labels in (("train", [5, 1, 2]), ("test", [1, 2])):
        folder = Path("UCI HAR Dataset", split)
        (folder / "Inertial Signals").mkdir(parents=True)
        for kind in ("body_acc", "body_gyro", "total_acc"):
            for axis in "xyz":
                file = folder / "Inertial Signals" / f"{kind}_{axis}_{split}.txt"
                np.savetxt(file, np.zeros((len(labels), 128)))
        np.savetxt(folder / f"y_{split}.txt", labels, fmt="%d")
        np.savetxt(folder / f"subject_{split}.txt", labels, fmt="%d")
    runpy.run_path(str(ROOT / "examples/uci_har.py"), run_name="__main__")
    dataset = eg.har(".")
    assert dataset.input_shape == (9, 128)
    assert dataset.train.labels.tolist() == [4, 0, 1]
    assert dataset.subjects is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {link}"


@thorough
@pytest.mark.parametrize(
    ("page", "block"),
    [
        (page, block)
        for page in ("docs/edgegossip.md", "docs/edge-squeeze.md")
        for block in python_blocks(page)
    ],
)
def test_examples_of_the_algorithms_pages_run(page: str, block: str) -> None:
    exec(compile(block, page, "exec"), {})


def test_example_of_the_stages_page_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [block] = python_blocks("docs/stages.md")
    assert "num_rounds=20" in block
    exec(compile(block.replace("=20", "=1"), "docs/stages.md", "exec"), {})
    assert json.loads(Path("runs/stages/summary.json").read_text())["reason"] == "finished"
    text = (ROOT / "docs/stages.md").read_text(encoding="utf-8")
    assert f"This prints `{capsys.readouterr().out.strip()}`" in text
