"""Facts that stand in several files of the project say the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.nightly import SEARCHES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


FRAMEWORKS = {"accelerate", "lightning", "transformers"}
TRACKERS = ("mlflow", "pandas", "tensorboard", "trackio", "wandb")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_for_this_version_and_license(project: dict[str, Any]) -> None:
    fields = dict(re.findall(r"^([\w-]+): (.+)$", read("CITATION.cff"), re.MULTILINE))
    assert fields["version"] == project["version"]
    assert fields["license"] == project["license"]


def test_every_dependency_has_its_reason_and_its_tested_version(
    project: dict[str, Any],
) -> None:
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    names = {re.split(r"[<>=\[]", each)[0] for each in asked}
    assert all("<" in each or ">=" in each for each in asked)
    reasons = read("docs/dependencies.md")
    assert {name for name in names if f"- `{name}`" not in reasons} == set()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines("constraints.txt")}
    # None of these is installed for `make check`.
    tested = names - {"datasets", "pyarrow", *TRACKERS, *FRAMEWORKS}
    assert {name for name in tested if name.lower().replace("_", "-") not in pins} == set()


def lines(name: str) -> list[str]:
    return [line for line in read(name).splitlines() if not line.startswith("#")]


def test_the_night_on_ci_runs_every_search() -> None:
    listed = re.search(r"search: \[(.*)\]", read(".github/workflows/nightly.yml"))
    assert listed
    assert listed.group(1).split(", ") == [*SEARCHES]


def test_hooks_check_what_the_style_is_checked_for() -> None:
    makefile = read("Makefile").split("check-style: ", 1)[1].split("\n\n", 1)[0]
    tools = re.findall(r"\$\(BIN\)/(ruff \w+|\w+)", makefile)
    hooks = re.findall(r"entry: \.venv/bin/(ruff \w+|\w+)", read(".pre-commit-config.yaml"))
    assert hooks == tools
