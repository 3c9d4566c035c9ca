"""A call of a recipe is a value: it is changed, made, sent and written as words."""

from __future__ import annotations

import pickle
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from tests.tiers import thorough

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.commands import RunOptions
from edgegossip.cli.worker_command import GatherOptions, WorkerOptions, _same_for_all
from edgegossip.contract.errors import Interrupted, UsageError
from edgegossip.recipes.call import Call, RecipeCall, option_words, value_text
from edgegossip.runs.experiment import Comparison


class Shade(Enum):
    DARK = 1


def test_arguments_of_settings_and_of_the_recipe_itself_are_set_alike() -> None:
    call = RecipeCall("synthetic-gradients/eight-layers", {"lr": 0.5}).replace(
        dataset="cifar10"
    )
    assert call.defaults["lr"] == 0.01
    assert call.words()[1:] == ["--lr", "0.5", "--dataset", "cifar10"]
    with pytest.raises(UsageError, match=r"unknown argument .*'datasets'.*mean 'dataset'"):
        call.replace(datasets="mnist")


def test_a_call_makes_what_the_recipe_makes() -> None:
    made = RecipeCall("quickstart", {"num_workers": 2, "batch_size": 8}).make(seed=3)
    assert isinstance(made, Comparison)
    assert {each.num_workers for each in made.experiments.values()} == {2}
    assert {each.task.batch_size for each in made.experiments.values()} == {8}
    assert {each.seed for each in made.experiments.values()} == {3}
    with pytest.raises(UsageError, match="lr must be"):
        RecipeCall("quickstart", {"lr": -1.0}).make()


@pytest.mark.parametrize(
    ("value", "default", "words"),
    [
        (True, False, ["--a-b"]),
        (False, True, ["--no-a-b"]),
        (True, None, ["--a-b", "True"]),
        (None, 3, ["--a-b", "None"]),
        ((), (), ["--a-b"]),
        ((1.0, 2.5), None, ["--a-b", "1", "2.5"]),
        ({"x": 1}, None, ["--a-b", "x", "1"]),
        (Path("a b"), None, ["--a-b", "a b"]),
        (Shade.DARK, None, ["--a-b", "DARK"]),
    ],
)
def test_a_value_is_written_as_it_is_typed(
    value: object, default: object, words: list[str]
) -> None:
    assert option_words("a_b", value, default) == words


@pytest.mark.parametrize("number", [0.1, 1e-9, 1 / 3, 123456789.0, 1e30, 5e-324, -0.25])
def test_a_number_reads_back_as_the_same(number: float) -> None:
    assert float(value_text(number)) == number


def test_a_parsed_command_is_repeated_and_changed() -> None:
    typed = ["--lr=1e-1", "--out", "x", "--batch_size", "8", "--batched", "off"]
    command = parse_recipe("run", RunOptions, ["quickstart", *typed])
    assert command.call == RecipeCall("quickstart", {"lr": 0.1, "batch_size": 8})
    assert command.record == "edgegossip run quickstart --lr 0.1 --batch-size 8 --batched off"
    assert command.line("lr", "batched", out=Path("y")).endswith("--batch-size 8 --out y")
    with (
        pytest.raises(Interrupted, match=r"x holds .*: edgegossip .* off --resume --out x$"),
        command.how_to_resume(Path("x")),
    ):
        raise Interrupted("interrupted; ...")


def test_what_is_the_same_for_all_workers_is_not_mixed_up_with_what_is_not() -> None:
    words = ["--rank", "1", "--lr", "0.1", "--listen", "tcp/a:1", "tcp/b:1", "--only", "gosgd"]
    command = parse_recipe("worker", WorkerOptions, ["quickstart", *words])
    assert _same_for_all(command) == ["quickstart", "--lr", "0.1", "--only", "gosgd"]
    gathered = parse_recipe(
        "gather", GatherOptions, ["quickstart", "--out", "x", "--without", "1"]
    )
    assert _same_for_all(gathered) == ["quickstart"]


def test_passwords_are_not_recorded_and_repeated_options_stay_so() -> None:
    words = ["--telemetry", "redis://me:secret@box:6379/0", "--ban", "1a", "--ban", "2b"]
    command = parse_recipe("worker", WorkerOptions, ["quickstart", "--rank", "0", *words])
    assert command.options.ban == ("1a", "2b")
    assert command.record == (
        "edgegossip worker quickstart --rank 0 --telemetry redis://box:6379/0 --ban 1a --ban 2b"
    )


def test_a_call_can_be_sent_to_another_process() -> None:
    call = RecipeCall("quickstart", {"speeds": (1.0, 2.0), "data_dir": Path("data")})
    assert pickle.loads(pickle.dumps(call)) == call


@thorough
def test_a_recipes_file_may_define_the_classes_of_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "shaded.py"
    file.write_text(
        "from enum import Enum\n"
        "from edgegossip.recipes.quickstart import quickstart\n"
        "class Kind(Enum):\n"
        "    A = 1\n"
        "def mine(kind: Kind = Kind.A):\n"
        "    assert isinstance(kind, Kind)\n"
        "    return quickstart()\n"
    )
    call = parse_recipe("run", RunOptions, [f"{file}:mine", "--kind", "A"]).call
    assert call.words()[1:] == ["--kind", "A"]
    assert isinstance(call.make(), Comparison)
    sent = pickle.dumps(call)
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()).make()"
    subprocess.run([sys.executable, "-c", code], input=sent, check=True)


def test_a_recipe_with_an_argument_without_default_can_be_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from edgegossip.recipes.quickstart import DEFAULTS, quickstart\n"
        "from dataclasses import replace\n"
        "def mine(num_workers: int):\n"
        "    return quickstart(replace(DEFAULTS, num_workers=num_workers))\n"
    )
    command = parse_recipe("run", RunOptions, [f"{file}:mine", "--num-workers", "3"])
    assert command.call.experiment().num_workers == 3
    assert Call(f"{file}:mine", {"num_workers": 2}).result().experiments.keys() >= {"gosgd"}
