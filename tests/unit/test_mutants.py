"""Deliberate faults: each fits the sources, and the runner tells killed ones from survivors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.algorithms import ALL
from tests.mutants.__main__ import line, try_all
from tests.mutants.mutant import ROOT, SOURCES, Mutant, read_all
from tests.mutants.worlds import KINDS, describe
from tests.tiers import thorough

MUTANTS = read_all()


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_each_fault_fits_the_source_and_compiles(mutant: Mutant) -> None:
    source = (SOURCES / mutant.file).read_text()
    # More than comments and layout changes.
    assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(source))
    assert mutant.kinds
    assert {*mutant.kinds} <= {*KINDS}
    assert {*mutant.algorithms} <= ALL.keys()


def test_a_fault_that_does_not_fit_is_named() -> None:
    mutant = Mutant(
        name="gone", reason="", file="net/memory.py", old="no such text", new="", kinds=()
    )
    with pytest.raises(ValueError, match="the old text of gone 0 times, not once"):
        _ = mutant.text


def test_the_oracle_is_the_innermost_function_of_the_tests() -> None:
    def require_nothing() -> None:
        raise AssertionError("two\nlines")

    with pytest.raises(AssertionError) as raised:
        require_nothing()
    assert describe(raised.value) == {
        "oracle": "require_nothing",
        "error": "AssertionError: two",
    }


@thorough
def test_a_fault_is_killed_and_a_change_without_effect_survives(tmp_path: Path) -> None:
    gosgd = MUTANTS["gosgd-forgets-weight"]
    same = Mutant(
        name="same",
        reason="Nothing changes.",
        file=gosgd.file,
        old=gosgd.old,
        new=gosgd.old.replace("min(total, 1.0)", "min(1.0, total)"),
        kinds=gosgd.kinds,
        algorithms=gosgd.algorithms,
    )
    found = {each["name"]: each for each in try_all([gosgd, same], 2, 0, 2)}
    assert found["gosgd-forgets-weight"]["killed"]
    assert found["gosgd-forgets-weight"]["oracle"] in ("require_total_weight", "require_sum")
    assert line(found["same"]) == "same: survives 2 worlds"


@thorough
def test_a_run_goes_on_where_its_output_ends(tmp_path: Path) -> None:
    names, output = [*MUTANTS][:2], tmp_path / "found.jsonl"
    done = [{"name": name, "killed": True, "num_worlds": 1} for name in names]
    output.write_text("".join(json.dumps(each) + "\n" for each in done))
    command = [sys.executable, "-m", "tests.mutants", "--only", *names, "--output", str(output)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "2 of 2 killed (100%)\n"
