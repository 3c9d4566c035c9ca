"""Commands, what they print and their exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.complaints import complaint
from tests.tiers import thorough

from edgegossip.cli.main import main
from edgegossip.recipes.registry import RECIPES, studies

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


def test_doctor_needs_no_torch_to_say_that_it_is_missing() -> None:
    code = "import sys, edgegossip.cli.doctor_command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@thorough
def test_training_imports_scikit_learn_only_to_aggregate_or_predict() -> None:
    code = (
        "import sys, edgegossip.cli.worker_command, edgegossip.cli.sweep_command\n"
        "heavy = {'pandas', 'scipy', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_list_has_a_line_for_each_recipe_and_study(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*RECIPES, *studies()]
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


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", "--batched"),
        ("compare", "--processes"),
        ("study", "--runs"),
        ("sweep", "--seeds"),
        ("plan", "--machines"),
        ("launch", "-n"),
        ("worker", "--rank"),
        ("gather", "--only"),
        ("measure", "--rank"),
        ("profile", "--minutes"),
    ],
)
def test_help_of_a_command_is_about_that_command(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: edgegossip {command} ")
    assert f" {option} " in said
    assert "--help` lists all" in " ".join(said.split())


# Wrong usage: 2.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown command 'rum'; .*did you mean 'run'"),
        (["list", "all"], "list takes no arguments, got all"),
        (["run"], "run needs a recipe: quickstart, another of"),
        (["compare", "--out", "x"], "compare needs a recipe"),
        (["run", "quikstart"], "unknown recipe 'quikstart'; .*did you mean 'quickstart'"),
        (["run", "quickstart", "--resume"], "--resume needs --out DIR"),
        (["study"], "study needs a name, such as edgegossip/fig3"),
        (["study", "edgegossip/fig33"], "unknown study .*did you mean 'edgegossip/fig3'"),
        (["study", "edgegossip/fig8", "--resume"], "--resume needs --out DIR"),
        (["study", "edgegossip/fig8", "--threads", "-1"], "threads must be at least 0, got -1"),
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
        (["launch", "quickstart", "-n", "4", "--num-workers", "3"], "-n sets --num-workers;"),
        (["launch", "quickstart", "-n=4", "--num_workers=3"], "give one of them"),
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
        (["run", "quickstart", "--batch-size", "three"], "three"),
        (["run", "quickstart", "--bach-size", "3"], r"--bach-size(.|\n)*--batch-size INT"),
        (["run", "quickstart", "--epochs", "3"], r"--epochs(.|\n)*--num-epochs INT"),
        (["sweep", "quickstart", "--bach-size", "3", "4"], r"--batch-size INT"),
        (["run", "quickstart", "--xyz"], r"--xyz(.|\n)*edgegossip run quickstart --help"),
        (["report"], "Folder of a run, a compari"),
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


# Failures: 1.


def test_missing_data_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mnist-lenet5", "--data-dir", str(tmp_path)]) == 1
    assert "get MNIST from" in complaint(capsys)
