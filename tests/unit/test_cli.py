"""Commands, what they print and their exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.small_runs import ALGORITHMS, ctrl_c_at, repeatable_events, summary

from edgegossip.cli import commands
from edgegossip.cli import study as study_cli
from edgegossip.cli.main import main
from edgegossip.core.errors import TrainingError
from edgegossip.experiments.exhibits import Exhibits
from edgegossip.experiments.registry import RECIPES, STUDIES
from edgegossip.experiments.study import Cell, Row, Session, Study

ROOT = Path(__file__).parents[2]

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


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was complained about, in one line or two."""
    said = capsys.readouterr().err.strip()
    [line] = [line for line in said.splitlines() if line.startswith("edgegossip: ")]
    assert said.endswith(line)
    assert "Traceback" not in said
    return line


# Without torch.


def test_help_and_list_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from edgegossip.cli.main import main\n"
        "codes = [main([]), main(['--help']), main(['list']), main(['--version'])]\n"
        "codes.append(main(['lst']))\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'sklearn', 'tyro', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert codes == [2, 0, 0, 0, 2], codes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_list_has_a_line_for_each_recipe_and_study(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*RECIPES, *STUDIES]
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_is_given_when_asked_for(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert "edgegossip compare RECIPE" in capsys.readouterr().out


def test_without_a_command_the_usage_is_printed_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage:" in captured.err


# Wrong usage: 2.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown command 'rum'; .*did you mean 'run'"),
        (["list", "all"], "list takes no arguments, got all"),
        (["run"], "run needs a recipe: one of .*quickstart"),
        (["compare", "--out", "x"], "compare needs a recipe"),
        (["run", "quikstart"], "unknown recipe 'quikstart'; .*did you mean 'quickstart'"),
        (["run", "quickstart", "--resume"], "--resume needs --out DIR"),
        (["study"], "study needs a name: one of edgegossip/fig3"),
        (["study", "edgegossip/fig33"], "unknown study .*did you mean 'edgegossip/fig3'"),
        (["study", "edgegossip/fig8", "--resume"], "--resume needs --out DIR"),
        (["study", "edgegossip/fig8", "--threads", "-1"], "threads must be at least 0, got -1"),
        (["study", "edgegossip/fig8", "--seeds", "1", "1"], "give different seeds"),
        (["study", "edgegossip/fig8", "--only", "mnist-lenet"], "did you mean 'mnist-lenet5'"),
        (["run", "quickstart", "--only", "gosip"], "unknown algorithm 'gosip'.*'gossip'"),
        (["compare", "quickstart", "--only", "gosgd"], "compare runs everything"),
        (["run", "quickstart", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["run", "quickstart", "--num-epochs", "0"], "num_epochs must be at least 1, got 0"),
        (["run", "quickstart", "--num-workers", "0"], r"num_workers must be in 1 \.\. 1437"),
        (["run", "quickstart", "--num-workers", "5000"], r"num_workers must be in 1 \.\. 1437"),
        (["run", "quickstart", "--lr", "-1"], r"lr must be in \[0, inf\), got -1"),
        (["run", "quickstart", "--threads", "-1"], "threads must be at least 0, got -1"),
        (["run", "quickstart", "--momentum", "1"], "momentum must be in"),
        (["run", "quickstart", "--throughput", "0"], "throughput must be above 0"),
        (["run", "quickstart", "--exchange-probability", "2"], "exchange_probability must be"),
        (["run", "quickstart", "--torch-device", "gpu"], "torch_device 'gpu' cannot be used"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_explained_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    line = complaint(capsys)
    assert len(line) < 300
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstart", "--bach-size", "3"], "--batch-size"),
        (["run", "quickstart", "--batch-size", "three"], "three"),
        (["report"], "Of a run, a comparison or"),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_read_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err + captured.out)
    assert "Traceback" not in captured.err


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


# Recipes of one's own.


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


# Failures: 1.


def test_missing_data_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mnist-lenet5", "--data-dir", str(tmp_path)]) == 1
    assert "get MNIST from" in complaint(capsys)


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
    assert "--resume" in line
    assert go("stopped", "--resume") == 0
    for path in Path("whole").rglob("events.jsonl"):
        other = Path("stopped") / path.relative_to("whole").parent
        assert repeatable_events(other) == repeatable_events(path.parent)
    assert go("stopped", "--resume") == 0  # finished by now: it is read
    assert main([*command.split(), "--out", "tpyo", "--resume"]) == 1
    assert "there is no folder tpyo to resume" in complaint(capsys)


def test_ctrl_c_outside_of_a_run_has_no_traceback_either(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load_recipe", interrupted)
    assert main(["run", "own.py:single"]) == 130
    assert complaint(capsys) == "edgegossip: interrupted"


# Studies.


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of which a page was drawn, by a study of three cells: done, failed, stopped."""
    pages: list[Path] = []

    def work(error: BaseException | None, session: Session) -> Row:
        if error is not None:
            raise error
        return {"value": 1}

    def make_study() -> Study:
        """Three cells.

        Args:
            none: There are none.
        """
        errors = {"done": None, "bad": TrainingError("nan"), "stopped": KeyboardInterrupt()}
        return Study(
            name="test/three",
            title="",
            printed=(),
            scaled_down=(),
            settings={},
            cells=tuple(
                Cell(name=name, group=name, work=partial(work, error))
                for name, error in errors.items()
            ),
            exhibit=lambda rows: Exhibits(),
        )

    monkeypatch.setattr(study_cli, "load_study", lambda name: make_study)
    monkeypatch.setattr(study_cli, "write_study_report", pages.append)
    return pages


@pytest.mark.parametrize(
    ("only", "code", "message"),
    [
        ("done", 0, ""),
        ("bad", 1, "1 of 1 cells failed, the first of them bad; the report says why"),
        ("stopped", 130, "interrupted in stopped; out holds everything so far"),
    ],
)
def test_a_study_always_leaves_a_page_and_says_how_it_ended(
    own: str,
    drawn: list[Path],
    capsys: pytest.CaptureFixture[str],
    only: str,
    code: int,
    message: str,
) -> None:
    assert main(["study", "test/three", "--only", only, "--out", "out"]) == code
    assert message in capsys.readouterr().err
    assert drawn == [Path("out")]


def test_help_on_a_study_tells_of_options_and_not_of_arguments(
    drawn: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["study", "test/three", "--help"])
    said = capsys.readouterr().out
    assert "Three cells." in said
    assert "--resume" in said
    assert "Args:" not in said
