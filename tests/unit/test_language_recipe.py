"""The recipe of a language model, and what the commands make of its metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.small_tasks import TEXT
from tests.tiers import thorough

from edgegossip.cli import commands
from edgegossip.cli.main import main
from edgegossip.contract.protocol import Rank
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.experiment import Comparison

SMALL = {
    "--num-workers": "2",
    "--context": "16",
    "--width": "8",
    "--num-layers": "1",
    "--num-heads": "2",
    "--batch-size": "4",
    "--local-steps": "4",
    "--num-evaluations": "3",
    "--throughput": "100",
    "--lr": "0.01",
}
OPTIONS = [word for pair in SMALL.items() for word in pair]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe with tiny books, and without reports, which take a second to draw."""
    monkeypatch.setattr(commands, "write_report", lambda folder: folder / "report.html")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for author, times in (("a", 3), ("b", 4)):
        (tmp_path / "books" / f"{author}.txt").write_text(TEXT * times)
    return ["language/books-gpt", *OPTIONS, "--data-dir", str(tmp_path)]


def found(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return content


@thorough
def test_all_algorithms_are_compared_in_bits_for_as_long_as_the_slowest_needs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    many = ["--num-epochs", "1", "--processes", "1", "--out", "out"]
    assert main(["compare", *words, *many]) == 0
    assert "bits per character" in capsys.readouterr().out
    summary = found("out/summary.json")
    assert [*summary["runs"]] == ["diloco", "edge-diloco", "gossip", "all-reduce"]
    for run in summary["runs"].values():
        assert run["final_bits_per_character"] < 6
        assert run["virtual_seconds"] == summary["runs"]["diloco"]["virtual_seconds"]


@pytest.mark.parametrize(("option", "is_mixed"), [("--no-mixed", False), ("--mixed", True)])
def test_each_worker_has_an_author_or_some_of_each(
    words: list[str], option: str, is_mixed: bool
) -> None:
    assert main(["run", *words, option, "--num-epochs", "0.2", "--out", "out"]) == 0
    first = json.loads(Path("out/events.jsonl").read_text().partition("\n")[0])
    sizes: dict[Rank, int] = dict(enumerate(first["shard_sizes"]))
    assert (sizes[1] - sizes[0] <= 1) == is_mixed


@thorough
def test_settings_are_swept_by_bits_and_the_least_is_best(words: list[str]) -> None:
    sweep = ["sweep", *words, "--num-epochs", "0.5", "--threads", "0", "--out", "swept"]
    sweep[sweep.index("--lr") + 1 : sweep.index("--lr") + 2] = ["0.02", "0.0001"]
    assert main(sweep) == 0
    study = found("swept/study.json")
    rows = [cell["row"] for cell in study["cells"].values()]
    assert all(row["metric"]["name"] == "bits per character" for row in rows)
    [table] = study["tables"]
    assert [name for name, _ in table["columns"]][1:3] == [
        "bits per character",
        "best bits per character",
    ]
    assert [row[0] for row in table["rows"]] == ["lr = 0.02", "lr = 0.0001"]
    assert study["figures"][0]["heading"] == "Bits per character by setting"


@thorough
def test_a_plan_goes_by_bits(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    machines = Path("machines.toml")
    machines.write_text("[[machine]]\ncount = 2\nsamples_per_second = 100\n")
    few = ["--only", "gossip", "all-reduce", "--seeds", "0", "--num-epochs", "1"]
    plan = ["plan", *words, *few, "--threads", "0", "--out", "planned"]
    assert main([*plan, "--machines", str(machines), "--target", "7.5"]) == 0
    said = capsys.readouterr().out
    assert "\nbest: " in said
    assert " to reach 7.5, after " in said
    study = found("planned/study.json")
    assert study["figures"][0]["heading"] == "Bits per character over time"
    assert "the target is 7.5" in study["tables"][0]["note"]
    plan[-1] = "planned-again"  # the target decides which settings are tuned further
    assert main([*plan, "--machines", str(machines), "--target", "0.1"]) == 0
    assert "no candidate reaches 0.1; " in (said := capsys.readouterr().out)
    assert "give a higher --target" in said


def test_the_recipe_can_be_made_without_options(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = Path(words[-1])
    (data_dir / "books" / "a.txt").write_text(TEXT * 30)
    (data_dir / "books" / "b.txt").write_text(TEXT * 30)
    for author in "cdefgh":
        (data_dir / "books" / f"{author}.txt").write_text(TEXT * 20)
    made = load_recipe("language/books-gpt")(data_dir=data_dir)
    assert isinstance(made, Comparison)
    workload = made.experiments["diloco"].workload()
    assert len(workload.initial_params()) == 1_073_536
