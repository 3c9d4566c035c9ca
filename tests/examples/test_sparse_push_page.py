"""The claims of `docs/sparse-push.md` about its figure hold, and its code runs."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sparse-push.md").read_text(encoding="utf-8")
EXAMPLE = str(ROOT / "examples/sparse_push.py")
NUM_ROUNDS = 50


@pytest.fixture(scope="module")
def example() -> Mapping[str, Any]:
    return runpy.run_path(EXAMPLE)


@thorough
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("without weight", 0.8, 1.0),
        ("without memory", 1.0, 1.5),
        ("SparsePush", 0.2, 0.35),
        ("DifferencePush", 0.1, 0.2),
        ("uncompressed", 0.0, 1e-6),
    ],
)
def test_each_part_that_is_left_out_keeps_estimates_from_the_mean_and_sums_stay(
    example: Mapping[str, Any], name: str, least: float, most: float
) -> None:
    course = example["average"](example["algorithms"](NUM_ROUNDS)[name])
    assert least <= course.distances[-1] <= most
    assert course.drift < 1e-5


def test_numerators_tend_to_the_mean_times_their_weight(example: Mapping[str, Any]) -> None:
    course = example["average"](example["algorithms"](NUM_ROUNDS)["uncompressed"])
    expected = course.weights[-1][:, None] * course.mean
    assert torch.allclose(course.numerators[-1], expected, rtol=0, atol=1e-5)
    assert course.weights[-1].max() / course.weights[-1].min() == pytest.approx(8, rel=1e-4)


@pytest.mark.slow
def test_figure_is_drawn_and_the_numbers_beside_it_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        monkeypatch.setattr(sys, "argv", [EXAMPLE, str(picture)])
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    leaves = re.compile(r"^ *(\w.*?) +leaves +([\d.]+)%", re.MULTILINE)
    found, told = leaves.findall(capsys.readouterr().out)[:5], leaves.findall(PAGE)
    assert [name for name, _ in told] == [name for name, _ in found]
    for (_, percent), (_, said) in zip(found, told, strict=True):
        # Other builds of PyTorch round otherwise, and what is left out then differs.
        assert float(percent) == pytest.approx(float(said), rel=0.2, abs=0.01)


def test_code_on_the_page_compresses_each_layer_of_a_model_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    assert "num_rounds=20" in block
    short = block.replace("num_rounds=20", "num_rounds=2")
    exec(compile(short, "docs/sparse-push.md", "exec"), names)
    assert names["sizes"] == (2048, 32, 320, 10)
