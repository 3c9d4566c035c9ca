"""The scripts for shells complete commands, recipes and options."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.complaints import complaint
from tests.tiers import first, thorough

from edgegossip.cli.main import main

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_tyro_edgegossip
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "edgegossip"
    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    first(
        1,
        [
            ("run quickstart --mome", ["--momentum"]),
            ("swe", ["sweep"]),
            ("run quick", ["quickstart"]),
            ("run none", [""]),
            ("launch sparse-push/mn", ["sparse-push/mnist-lenet5"]),
            ("study edgegossip/fig1", ["edgegossip/fig12", "edgegossip/fig13"]),
            ("run quickstart --lr 0.1 --batched a", ["auto"]),
            ("run mine.py:mine --trac", ["--track"]),
            ("certs rev", ["revoke"]),
        ],
    ),
)
def test_tab_completes_in_bash(script: Path, typed: str, expected: list[str]) -> None:
    command = ["bash", "-c", PRESS_TAB, "bash", str(script), "edgegossip", *typed.split()]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stderr == ""
    assert said.stdout.removesuffix("\n").split("\n") == expected


def test_bash_offers_files_where_nothing_else_fits(script: Path) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"source {script}; complete -p edgegossip"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "-o default" in shown.stdout


@thorough
def test_a_script_is_small_enough_to_be_read_at_each_press(script: Path) -> None:
    assert script.stat().st_size < 200_000


@thorough
def test_zsh_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("#compdef edgegossip")
    assert "'sweep'" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "completion needs one shell: bash, zsh, fish"), (["fsh"], "did you mean 'fish'?")],
)
def test_another_shell_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *arguments]) == 2
    assert message in complaint(capsys)
