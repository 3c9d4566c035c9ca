"""Recipes by name, and functions in files of people's own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import thorough

from edgegossip.cli.main import main
from edgegossip.contract.errors import DataError, UsageError
from edgegossip.recipes import registry
from edgegossip.recipes.registry import RECIPES, load_recipe, load_study, studies

CLONE = Path(__file__).parents[2]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_there_and_does_what_the_list_says(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.__doc__ or "").splitlines()[0] == RECIPES[name].summary


@pytest.mark.parametrize("name", studies())
def test_every_study_is_there_and_does_what_the_list_says(name: str) -> None:
    make_study = load_study(name)
    assert (make_study.__doc__ or "").splitlines()[0] == studies()[name].summary
    study = make_study()
    assert study.name == name
    assert study.cells
    assert study.printed
    assert make_study.__module__ == studies()[name].module


def test_an_unknown_recipe_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown recipe 'quikstart'.*mean 'quickstart'"):
        load_recipe("quikstart")
    with pytest.raises(UsageError, match=r"for one of your own, give FILE\.py:NAME"):
        load_recipe("mine")
    with pytest.raises(UsageError, match=r"which function of mine\.py is the recipe"):
        load_recipe("mine.py")


def test_a_study_given_as_a_recipe_is_answered_with_the_command() -> None:
    with pytest.raises(UsageError, match="is a study: edgegossip study edgegossip/fig8"):
        load_recipe("edgegossip/fig8")


def test_a_study_without_its_prefix_is_answered_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"unknown study 'fig6'; .* mean 'edgegossip/fig6'"):
        load_study("fig6")


def test_without_a_clone_there_are_recipes_only_and_an_error_says_where_studies_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*RECIPES]
    assert main(["study", "systems/table", "--short"]) == 2
    said = capsys.readouterr().err
    assert "unknown study 'systems/table': studies are not installed with the package" in said
    assert "a clone of its repository, which has them in studies/, or give FILE.py:NAME" in said


def test_the_folder_of_a_clone_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "REPOSITORY", tmp_path)
    monkeypatch.chdir(CLONE)
    assert "systems/table" in studies()


@thorough
def test_a_study_in_its_file_works_from_anywhere(tmp_path: Path) -> None:
    # The cells of this one run in other processes, which must find its module, too.
    study = f"{CLONE}/studies/stages.py:methods"
    words = ["study", study, "--short", "--processes", "2", "--out", "out"]
    subprocess.run([sys.executable, "-m", "edgegossip", *words], cwd=tmp_path, check=True)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_function_in_a_file_is_a_study(tmp_path: Path) -> None:
    path = own(tmp_path, "def mine(): return 3\n")
    assert load_study(f"{path}:mine")() == 3  # type: ignore[comparison-overlap]
    with pytest.raises(UsageError, match=r"unknown study in mine\.py 'ours'"):
        load_study(f"{path}:ours")
    with pytest.raises(UsageError, match=r"which function of .*mine\.py is the study"):
        load_study(str(path))


def own(tmp_path: Path, text: str, name: str = "mine.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_function_in_a_file_is_a_recipe(tmp_path: Path) -> None:
    path = own(tmp_path, "def recipe(x: int = 3):\n    return x\n")
    assert load_recipe(f"{path}:recipe")(4) == 4  # type: ignore[comparison-overlap]


def test_dataclasses_in_a_file_can_be_found_by_a_checkpoint(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass State:\n    x: int\n"
        "def recipe():\n    return State(3)\n"
    )
    state = load_recipe(f"{own(tmp_path, text)}:recipe")()
    found = sys.modules[type(state).__module__]
    assert found.State is type(state)


@pytest.mark.parametrize("name", ["json.py", "torch.py", "edgegossip.py", "my-recipe.v2.py"])
def test_a_file_takes_nobody_elses_name(tmp_path: Path, name: str) -> None:
    before = importlib.import_module("json")
    load_recipe(f"{own(tmp_path, 'def recipe(): pass', name)}:recipe")
    assert sys.modules["json"] is before
    assert importlib.import_module("edgegossip.runs").__path__


def test_a_wrong_function_is_answered_with_those_of_the_file(tmp_path: Path) -> None:
    text = (
        "from pathlib import Path\ndef recipe(): pass\ndef other(): pass\n_x = recipe\nN = 3\n"
    )
    path = own(tmp_path, text)
    for name in ("recipes", "N", "_y", ""):
        with pytest.raises(UsageError, match=r"in mine\.py .*choose one of 'other', 'recipe'"):
            load_recipe(f"{path}:{name}")


@pytest.mark.parametrize("name", ["none.py:recipe", ":recipe", "folder:recipe", "mine.txt:x"])
def test_what_is_no_python_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.txt").write_text("x = 1")
    with pytest.raises(UsageError, match="there is no Python file"):
        load_recipe(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"mine\.py, line 2: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", r"mine\.py, line 1: ModuleNotFoundError: No module"),
        ("def f(:\n", r"mine\.py.*SyntaxError.*line 1"),
        ("def f():\n    raise KeyError('k')\nf()\n", r"mine\.py, line 2: KeyError: 'k'"),
        ("\0", "mine.py: (SyntaxError|ValueError)"),
    ],
)
def test_a_file_that_fails_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(f"{own(tmp_path, text)}:recipe")


def test_our_own_errors_in_a_file_stay_what_they_are(tmp_path: Path) -> None:
    text = (
        "from edgegossip import mnist\nfrom pathlib import Path\nd = mnist(Path('/nowhere'))\n"
    )
    with pytest.raises(DataError, match="get MNIST from"):
        load_recipe(f"{own(tmp_path, text)}:recipe")
