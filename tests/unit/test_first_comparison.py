"""A first comparison: the usual algorithms, some runs of a recipe, my machines, its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.machine_lists import three_machines
from tests.small_tasks import regression

import edgegossip as eg
from edgegossip.cli.main import main
from edgegossip.contract.errors import RunFolderError, UsageError
from edgegossip.plan.machines import read_machines
from edgegossip.plan.planning import on_machines
from edgegossip.recipes.call import RecipeCall
from edgegossip.recipes.registry import load_recipe

SHORT = ("--num-epochs", "1", "--threads", "0")


def test_the_usual_algorithms_run_side_by_side(tmp_path: Path) -> None:
    experiments = {
        name: eg.Experiment(
            task=regression(), algorithm=each, platforms=eg.uneven(3), max_seconds=0.2
        )
        for name, each in eg.usual_algorithms(3).items()
    }
    comparison = eg.Comparison(experiments=experiments, baseline="all-reduce")
    results = eg.compare(comparison, out=tmp_path, num_threads=0)
    assert [*results] == [*eg.usual_algorithms(3)]
    assert all(each.history[-1].samples_processed > 0 for each in results.values())
    assert all(each.reason == "time limit" for each in results.values())
    read = eg.load(tmp_path)
    assert isinstance(read, dict)
    assert {name: each.history for name, each in read.items()} == {
        name: each.history for name, each in results.items()
    }
    alone = eg.load(str(tmp_path / "gosgd"))
    assert isinstance(alone, eg.Results)
    assert alone.history == results["gosgd"].history
    with pytest.raises(ValueError, match="num_workers must be at least 2, got 1"):
        eg.usual_algorithms(1)


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run has ended in .*give a folder"):
        eg.load(tmp_path)


def test_some_runs_of_a_comparison_are_carried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["compare", "quickstart", "--runs", "gosgd", "gossip", *SHORT, "--out", str(out)]
    assert main(words) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [*summary["runs"]] == ["gosgd", "gossip"]
    assert summary["baseline"] == "gosgd"
    assert main(["compare", "quickstart", "--runs", "gosg"]) == 2
    assert "unknown run 'gosg'" in capsys.readouterr().err


def test_a_comparison_of_some_runs_keeps_its_baseline_and_what_is_tuned() -> None:
    comparison = load_recipe("quickstart")()
    assert isinstance(comparison, eg.Comparison)
    some = comparison.with_runs(["epoch-gossip", "gosgd"])
    assert (some.baseline, [*some.tunable]) == ("epoch-gossip", ["gosgd"])
    assert comparison.with_runs(["gossip"]).tunable == {}
    with pytest.raises(UsageError, match="did you mean 'gossip'"):
        comparison.with_runs(["gosip"])


def test_a_comparison_takes_place_on_my_machines(tmp_path: Path) -> None:
    machines, out = three_machines(tmp_path), tmp_path / "out"
    words = ["compare", "quickstart", "--machines", str(machines), "--runs", "gosgd"]
    assert main([*words, "--num-epochs", "2", "--threads", "0", "--out", str(out)]) == 0
    header = json.loads((out / "gosgd" / "experiment.json").read_text())
    assert [each["throughput"] for each in header["platforms"]] == [1000, 250.5, 250.5]
    assert [each["name"] for each in header["platforms"]] == ["desk", "phone", "phone"]
    recipe = RecipeCall("quickstart", {"num_epochs": 2, "num_workers": 3}).experiment("gosgd")
    samples = recipe.max_seconds * sum(each.throughput for each in recipe.platforms)  # type: ignore[operator]
    assert header["max_seconds"] == pytest.approx(samples / 1501, rel=0.01)


def test_all_runs_on_my_machines_are_evaluated_at_the_same_times(tmp_path: Path) -> None:
    comparison = on_machines(RecipeCall("quickstart"), read_machines(three_machines(tmp_path)))
    intervals = {each.evaluation_interval for each in comparison.experiments.values()}
    limits = {each.max_seconds for each in comparison.experiments.values()}
    assert len(intervals) == len(limits) == 1
    other = RecipeCall("environments/one-slow", {"task": "digits"})
    with pytest.raises(UsageError, match="different numbers of machines"):
        on_machines(other, read_machines(three_machines(tmp_path)))
