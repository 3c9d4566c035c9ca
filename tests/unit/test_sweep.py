"""A sweep: all combinations once, judged by samples that nobody trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

from edgegossip.cli.command import parse_values
from edgegossip.cli.main import main
from edgegossip.cli.sweep_command import SweepOptions, parse_sweep, print_settings
from edgegossip.contract.errors import UsageError
from edgegossip.plan.sweep import sweep
from edgegossip.recipes.call import RecipeCall

QUICK = ["quickstart", "--num-epochs", "1", "--num-workers", "2"]


def swept(out: Path, *words: str) -> dict[str, Any]:
    assert main(["sweep", *QUICK, *words, "--out", str(out), "--threads", "0"]) == 0
    found: dict[str, Any] = json.loads((out / "study.json").read_text())
    return found


def test_all_combinations_of_values_and_seeds_are_runs() -> None:
    words = ["--lr", "0.1", "0.2", "--momentum", "0", "0.9", "--seeds", "3..5"]
    command, study = parse_sweep([*QUICK, *words])
    assert command.options.seeds == (3, 4, 5)
    names = [cell.name for cell in study.cells]
    assert len(names) == len({*names}) == 12
    assert names[0] == "lr-0.1-momentum-0/seed3"


def test_the_command_that_repeats_a_sweep_has_all_values() -> None:
    words = ["--lr", "1e-1", "0.2", "--out", "x", "--only", "gosgd", "--seeds", "3..4"]
    command, study = parse_sweep(["quickstart", "--num-epochs", "1", *words])
    assert command.record == (
        "edgegossip sweep quickstart --num-epochs 1 --lr 1e-1 0.2 --only gosgd --seeds 3 4"
    )
    assert study.settings["arguments"] == ["--num-epochs", "1", "--only", "gosgd"]


def test_a_sweep_is_made_from_python_without_a_command_line() -> None:
    study = sweep(RecipeCall("quickstart"), {"lr": {"1e-1": 0.1, "0.2": 0.2}}, only="gosgd")
    assert [cell.name for cell in study.cells] == ["lr-1e-1/seed0", "lr-0.2/seed0"]
    with pytest.raises(UsageError, match="unknown argument of quickstart 'rl'"):
        sweep(RecipeCall("quickstart"), {"rl": {"1": 1.0}})


def test_an_option_that_takes_several_values_is_not_swept() -> None:
    words = ["--speeds", "1", "2", "1", "--lr", "0.1", "0.2"]
    command = parse_values("sweep", SweepOptions, ["synthetic-gradients/quickstart", *words])
    assert command.call.arguments == {"speeds": (1.0, 2.0, 1.0)}
    assert command.values == {"lr": {"0.1": 0.1, "0.2": 0.2}}


def test_true_and_false_are_values_to_try() -> None:
    words = ["--shared", "True", "False", "--only", "edge-gossip"]
    command, study = parse_sweep(["quickstart", *words])
    assert command.values == {"shared": {"True": True, "False": False}}
    assert [cell.name for cell in study.cells] == ["shared-True/seed0", "shared-False/seed0"]
    with pytest.raises(UsageError, match="--shared may have the values True and False"):
        parse_sweep(["quickstart", "--shared", "yes", "no"])


@thorough
def test_values_can_be_added_and_nothing_is_done_twice(tmp_path: Path) -> None:
    first = swept(tmp_path, "--lr", "0.05", "0.1")
    second = swept(tmp_path, "--lr", "0.05", "0.1", "0.001", "--resume")
    assert len(second["cells"]) == 3
    assert {**second["cells"], **first["cells"]} == second["cells"]  # their seconds, too
    [table] = second["tables"]
    accuracies = [row[1] for row in table["rows"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert table["rows"][-1][0] == "lr = 0.001"


@thorough
def test_settings_are_judged_by_samples_that_are_held_out(tmp_path: Path) -> None:
    held = swept(tmp_path / "held", "--lr", "0.05")
    on_test = swept(tmp_path / "test", "--lr", "0.05", "--held-out", "0")
    [first], [second] = (
        [cell["row"] for cell in each["cells"].values()] for each in (held, on_test)
    )
    assert first["accuracy"] * 144 == pytest.approx(round(first["accuracy"] * 144))
    assert second["accuracy"] * 360 == pytest.approx(round(second["accuracy"] * 360))
    assert "10% of the training samples" in held["tables"][0]["note"]
    assert "test split" in on_test["tables"][0]["note"]


def swept_row(run: str, seed: int, accuracy: float) -> dict[str, Any]:
    measured = {"accuracy": accuracy, "best_accuracy": accuracy, "loss": 1.0}
    return {"run": run, "seed": seed, **measured, "seconds": 1.0, "bytes": 10}


def test_the_best_setting_is_named_with_its_ties() -> None:
    _, study = parse_sweep([*QUICK, "--lr", "0.1", "0.2", "0.3", "--seeds", "0", "1"])
    rows = {
        f"{run}{seed}": swept_row(run, seed, value + 0.01 * seed)
        for run, value in {"lr = 0.1": 0.5, "lr = 0.2": 0.9, "lr = 0.3": 0.905}.items()
        for seed in (0, 1)
    }
    [answer] = study.exhibit(rows).summary
    assert answer.replace("\u00a0", " ") == (
        "best: lr = 0.3, accuracy 91 %, n = 2 seeds; a tie, within the spread, with lr = 0.2"
    )
    alone = {name: row for name, row in rows.items() if row["seed"] == 0}
    assert study.exhibit(alone).summary[0].endswith(", one seed (n = 1)")


def test_the_settings_are_printed_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, study = parse_sweep([*QUICK, "--lr", "0.1", "0.2"])
    rows = {run: swept_row(run, 0, value) for run, value in {"lr = 0.1": 0.5, "b": 0.9}.items()}
    print_settings(study.exhibit(rows).tables[0])
    lines = capsys.readouterr().out.replace("\u00a0", " ").splitlines()
    assert lines[0].split()[:2] == ["run", "accuracy"]
    assert lines[1].split()[:3] == ["b", "90", "%"]
    assert lines[2].split()[:5] == ["lr", "=", "0.1", "50", "%"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "sweep needs a recipe"),
        (["quickstart", "--seed", "1"], "--seeds"),
        (["quickstart", "--seeds", "1", "1"], "all different"),
        (["quickstart", "--held-out", "1"], "held_out"),
        (["quickstart", "--lr", "0.1", "-1"], "lr must be"),
        (["quickstart", "--only", "nobody"], "nobody"),
    ],
)
def test_a_wrong_argument_is_found_before_anything_is_run(words: list[str], said: str) -> None:
    with pytest.raises((UsageError, ValueError), match=said):
        parse_sweep(words)
