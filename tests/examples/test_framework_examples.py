"""The examples with frameworks join a run by at most three changed lines, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edgegossip as eg
from edgegossip.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
TEXT = "".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(40))
NEEDS = {
    "lightning_regression": ["lightning"],
    "transformers_gpt": ["transformers", "accelerate"],
    "accelerate_digits": ["accelerate"],
}
# After so little training: of guessing, it would be 1.0, 5.5 and 2.3.
SHORT = {
    "lightning_regression": (["--epochs", "4"], 0.9),
    "transformers_gpt": (["--text", "tables.txt", "--samples", "240"], 4.0),
    "accelerate_digits": (["--epochs", "3"], 1.5),
}


@pytest.mark.parametrize("name", ["lightning_regression", "transformers_gpt"])
def test_three_lines_of_a_script_name_edgegossip(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    code = text.partition('"""\n\n')[2]  # without the docstring
    changed = [line for line in code.splitlines() if re.search(r"\beg\b|edgegossip", line)]
    assert len(changed) == 3
    assert [line.rpartition("# ")[2] for line in changed] == ["1", "2", "3"]


def test_the_page_names_what_there_is() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "scripts.md").read_text(encoding="utf-8")
    names = {*re.findall(r"\beg\.(\w+)", page)}
    assert len(names) > 5
    assert names <= {*dir(eg)}
    [call] = re.findall(r"eg\.lightning_callback\((lambda.*)\)\n", page)
    assert eval(call, {"eg": eg})(4, 9) == eg.GoSGD(topology=eg.ring(4), num_rounds=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_two_processes_of_an_example_learn(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"the example needs {package}")
    monkeypatch.chdir(tmp_path)
    Path("tables.txt").write_text(TEXT)
    arguments, most = SHORT[name]
    command = ["script", "-n", "2", "--out", "out", str(EXAMPLES / f"{name}.py")]
    assert main([*command, *arguments]) == 0
    printed = capfd.readouterr().out + Path("out", "worker-1.txt").read_text()
    losses = re.findall(r"^test loss (\d\.\d+)$", printed, re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1], "both have the common model"
    assert float(losses[0]) < most
