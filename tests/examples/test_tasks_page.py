"""The tasks of the documentation are learned as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.examples.test_readme import python_blocks
from tests.small_runs import dataset, small_model
from tests.small_tasks import experiment
from tests.tiers import thorough
from torch import nn

import edgegossip as eg

REGRESSION, LANGUAGE, MASKED, MAPPED, BEST = python_blocks("docs/tasks.md")


@pytest.fixture(autouse=True)
def work_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(block: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(block, "docs/tasks.md", "exec"), {})
    return capsys.readouterr().out


@thorough
def test_the_regression_of_the_page_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.fullmatch(r"R2 (0\.\d\d), MAE (0\.\d\d)\n", told(REGRESSION, capsys))
    assert found is not None
    assert float(found[1]) > 0.85
    assert float(found[2]) < 0.5


@pytest.mark.parametrize(
    ("num_rounds", "bits"),
    [
        pytest.param(2, 7.0, marks=thorough),
        pytest.param(20, 2.0, marks=pytest.mark.slow),
    ],
)
def test_the_language_model_of_the_page_is_learned(
    num_rounds: int, bits: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "num_rounds=20" in LANGUAGE
    block = LANGUAGE.replace("num_rounds=20", f"num_rounds={num_rounds}")
    found = re.fullmatch(r"(\d\.\d\d) bits per character\n", told(block, capsys))
    assert found is not None
    assert float(found[1]) < bits


@pytest.mark.parametrize("block", [REGRESSION, LANGUAGE])
def test_the_examples_are_as_short_as_they_should_be(block: str) -> None:
    body = block[block.index("import edgegossip as eg") :].splitlines()[1:]
    code = [line for line in body if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 16


def test_batches_of_the_page_may_be_dicts_with_masks() -> None:
    y = torch.rand(16, 3)
    samples = {"x": torch.rand(16, 4), "y": y, "mask": (y > 0.5).float()}
    around: dict[str, Any] = {
        "eg": eg,
        "F": torch.nn.functional,
        "samples": samples,
        "held_out": samples,
        "make_model": lambda: nn.Linear(4, 3),
    }
    exec(compile(MASKED, "docs/tasks.md", "exec"), around)
    results = eg.run(experiment(around["task"]), out="out")
    assert results.final_value < results.history[0].value


@thorough
def test_the_best_model_of_the_page_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {
        "eg": eg,
        "data": dataset(),
        "make_model": small_model,
        "model": small_model(),
        "algorithm": eg.EpochGossip(topology=eg.complete(4), num_rounds=3),
    }
    exec(compile(BEST, "docs/tasks.md", "exec"), found)
    assert re.fullmatch(r"\d+\.\d% in the test, after \d+ s\n", capsys.readouterr().out)
    loaded, best = found["model"].state_dict(), found["results"].best
    assert all(torch.equal(loaded[name], each) for name, each in best.params.items())


def test_mapped_arrays_of_the_page_make_a_data_set() -> None:
    around: dict[str, Any] = {}
    exec(compile(MAPPED, "docs/tasks.md", "exec"), around)
    data = around["data"]
    assert (len(data.train), len(data.test)) == (1600, 400)
    assert isinstance(around["x"], np.memmap)
