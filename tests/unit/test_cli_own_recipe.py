"""The commands with a recipe of one's own: what they leave, print and give as exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.complaints import complaint
from tests.small_runs import ALGORITHMS, ctrl_c_at, repeatable_events, summary
from tests.tiers import thorough

from edgegossip.cli import commands
from edgegossip.cli.main import main
from edgegossip.contract.errors import Interrupted
from edgegossip.plan.candidates import Proposal
from edgegossip.recipes.call import RecipeCall

OWN = """
from dataclasses import replace
from tests.small_runs import small_run, small_task, with_rounds
from edgegossip import Comparison, Experiment, SGD

def single(num_rounds: int = 3, seed: int = 0) -> Experiment:
    '''My own run.

    Args:
        num_rounds: How long.
        seed: Of everything random.
    '''
    return replace(with_rounds(small_run("gosgd"), num_rounds), seed=seed)

def both() -> Comparison:
    runs = {name: with_rounds(small_run(name), 2) for name in ("epoch-gossip", "gosgd")}
    return Comparison(experiments=runs, baseline="epoch-gossip")

def exploding() -> Experiment:
    return small_run("gosgd", task=small_task(optimizer=SGD(lr=1e20), augmentation=None))

def negative() -> Experiment:
    return single(-1)

def number():
    return 3

def limited(max_seconds: float = 1.0) -> Experiment:
    return single()

def broken():
    raise KeyError("k")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe file in the working folder; reports are not drawn, which takes a second."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "write_report", lambda folder: folder / "report.html")
    return "own.py"


# What goes well: 0.


def test_a_run_of_ones_own_takes_its_own_options(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "own.py:single", "--num-rounds", "2", "--seed", "7", "--out", "out"]
    assert main([*arguments, "--threads", "0"]) == 0
    captured = capsys.readouterr()
    assert "gosgd" in captured.out
    assert "report: out/report.html" in captured.out
    assert summary(Path("out"))["reason"] == "finished"
    assert b'"seed":7' in repeatable_events(Path("out"))
    with pytest.raises(SystemExit) as exit:
        main(["run", "own.py:single", "--help"])
    assert exit.value.code == 0
    assert "How long." in capsys.readouterr().out


def test_by_default_runs_go_below_runs_under_the_recipes_name(own: str) -> None:
    assert main(["run", "own.py:single", "--threads", "0"]) == 0
    [stamp] = Path("runs", "single").iterdir()
    assert (stamp / "summary.json").exists()


@pytest.mark.parametrize(
    ("more", "name"), [([], "epoch-gossip"), (["--only", "gosgd"], "gosgd")]
)
def test_run_takes_one_of_a_comparison(own: str, more: list[str], name: str) -> None:
    assert main(["run", "own.py:both", "--out", "out", "--threads", "0", *more]) == 0
    assert summary(Path("out"))["name"] == name


def test_compare_takes_all(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "own.py:both", "--out", "out", "--threads", "0"]) == 0
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == [
        "epoch-gossip",
        "gosgd",
    ]
    printed = capsys.readouterr().out
    assert "epoch-gossip" in printed
    assert "gosgd" in printed


@thorough
@pytest.mark.parametrize("name", ["single", "both"])
def test_a_sweep_seeds_runs_with_and_without_an_argument_seed(own: str, name: str) -> None:
    words = ["sweep", f"own.py:{name}", "--only", "gosgd"][: 2 if name == "single" else 4]
    assert main([*words, "--seeds", "3", "4", "--out", "out", "--threads", "0"]) == 0
    cells = json.loads(Path("out/study.json").read_text())["cells"]
    losses = {cell["row"]["seed"]: cell["row"]["loss"] for cell in cells.values()}
    assert [*losses] == [3, 4]
    assert losses[3] != losses[4]


def test_a_plan_seeds_the_runs_of_a_recipe_without_an_argument_seed(own: str) -> None:
    proposal = Proposal(call=RecipeCall("own.py:both"), only="gosgd")
    assert proposal.experiment(seed=7, seconds=1.0).seed == 7


# Wrong usage: 2.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "own.py:sinlge"],
            r"unknown recipe in own\.py 'sinlge'.*did you mean 'single'",
        ),
        (["run", "none.py:single"], r"there is no Python file none\.py"),
        (["run", "own.py"], r"say which function of own\.py is the recipe: own\.py:NAME"),
        (["run", "own.py:number"], "gave 3; it must return an Experiment or a Comparison"),
        (["run", "own.py:negative"], "num_rounds must be at least 1, got -1"),
        (["compare", "own.py:single"], "is a single run; use: edgegossip run own.py:single"),
        (["run", "own.py:single", "--only", "gosgd"], "is a single run, so leave out --only"),
        (["launch", "own.py:limited"], "launch own.py:limited has an option --max-seconds"),
        (
            ["launch", "own.py:single", "-n", "2"],
            "has 4 workers, and no argument num_workers or num_stages that -n 2 could set",
        ),
        pytest.param(
            ["launch", "synthetic-gradients/quickstart", "-n", "2"],
            "this run has the whole model on one machine; choose one in stages with --only",
            marks=thorough,
        ),
        (["run", "fails.py:single"], r"fails\.py, line 2: ZeroDivisionError"),
    ],
    ids=" ".join,
)
def test_a_wrong_recipe_of_ones_own_is_explained_in_a_line(
    own: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("fails.py").write_text("x = 1\nx / 0\n")
    assert main([*arguments, "--out", "out"]) == 2
    assert re.search(message, complaint(capsys))
    assert not Path("out").exists()


def test_an_error_within_a_recipe_of_ones_own_shows_where(own: str) -> None:
    with pytest.raises(KeyError, match="k"):
        main(["run", "own.py:broken"])


# Failures: 1.


def test_a_loss_that_explodes_is_a_failure_and_has_a_report(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(commands, "write_report", drawn.append)
    assert main(["run", "own.py:exploding", "--out", "out", "--threads", "0"]) == 1
    assert re.search(r"the loss of worker \d became (nan|inf)", complaint(capsys))
    assert summary(Path("out"))["reason"] == "failed"
    assert drawn == [Path("out")]


def test_a_folder_that_holds_a_run_is_a_failure_and_left_alone(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "own.py:single", "--out", "out", "--threads", "0"]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    capsys.readouterr()
    monkeypatch.delattr(commands, "write_report")
    for command in ("run own.py:single", "run own.py:both", "compare own.py:both"):
        assert main([*command.split(), "--out", "out"]) == 1
        assert "choose another --out" in complaint(capsys)
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before


@pytest.mark.parametrize("out", ["own.py", "own.py/below", "/proc/none"])
def test_a_folder_that_cannot_be_made_is_a_failure(
    own: str, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    assert main(["run", "own.py:single", "--out", out]) == 1
    assert f"cannot make {out}" in complaint(capsys)


@pytest.mark.parametrize("folder", [".", "none", "own.py"])
def test_a_report_of_what_is_no_run_is_a_failure(
    own: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: str,
) -> None:
    from edgegossip.report.page import write_report

    monkeypatch.setattr(commands, "write_report", write_report)
    assert main(["report", folder]) == 1
    assert f"no run in {folder}" in complaint(capsys)


# Ctrl+C: 130.


@pytest.mark.parametrize("command", ["run own.py:single", "compare own.py:both"])
def test_ctrl_c_leaves_a_folder_that_resume_goes_on_with(
    own: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def go(out: str, *more: str) -> int:
        return main([*command.split(), "--out", out, "--threads", "0", *more])

    assert go("whole") == 0
    capsys.readouterr()
    with ctrl_c_at(8, ALGORITHMS["gosgd"]):
        assert go("stopped") == 130
    line = complaint(capsys)
    assert line.startswith("edgegossip: interrupted at")
    again = line.partition("to continue: edgegossip ")[2].split()
    assert again == [*command.split(), "--threads", "0", "--resume", "--out", "stopped"]
    assert main(again) == 0
    for path in Path("whole").rglob("events.jsonl"):
        other = Path("stopped") / path.relative_to("whole").parent
        assert repeatable_events(other) == repeatable_events(path.parent)
    assert go("stopped", "--resume") == 0  # finished by now: it is read
    assert main([*command.split(), "--out", "tpyo", "--resume"]) == 1
    assert "there is no folder tpyo to resume" in complaint(capsys)


def test_ctrl_c_before_the_first_run_says_so(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgegossip.report.page import write_report

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted("interrupted before the first run")

    monkeypatch.setattr(commands, "write_report", write_report)
    monkeypatch.setattr(commands, "compare", interrupted)
    assert main(["compare", "own.py:both", "--out", "out"]) == 130
    line = complaint(capsys)
    assert line.startswith("edgegossip: interrupted before the first run; out holds everything")


def test_ctrl_c_outside_of_a_run_has_no_traceback_either(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "parse_recipe", interrupted)
    assert main(["run", "own.py:single"]) == 130
    assert complaint(capsys) == "edgegossip: interrupted"
