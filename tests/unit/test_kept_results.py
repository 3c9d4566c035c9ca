"""Kept figures name the commit that computed them, and a page prints them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HISTORICAL = RESULTS / "historical.md"


@cache
def kept() -> dict[str, dict[str, Any]]:
    """Contents of all kept files, by path within the folder of results."""
    found = (file.relative_to(RESULTS) for file in sorted(RESULTS.rglob("*.json")))
    finished = [file.as_posix() for file in found if "unfinished" not in file.parts]
    return {name: json.loads((RESULTS / name).read_text()) for name in finished}


def origins(found: dict[str, Any]) -> set[str | None]:
    """Commits that a kept file names for its figures; None for figures without one.

    >>> origins({"cells": {"a": {"commit": "3f71315f0a2b"}, "b": {}}}) == {"3f71315f0a2b", None}
    True
    """
    cells = found.get("cells")
    if cells:
        return {cell.get("commit") for cell in cells.values()}
    parts = [part for part in found.values() if isinstance(part, dict) and "commit" in part]
    return {found.get("commit"), *(part["commit"] for part in parts)}


def is_known(found: dict[str, Any]) -> bool:
    return all(re.fullmatch("[0-9a-f]{12}", commit or "") for commit in origins(found))


@cache
def listed() -> dict[str, tuple[str, str]]:
    """For each historical file, its commit and the page with its figures, as listed."""
    row = r"^\| `(\S+\.json)` \|.*\| ([\w ]+) \| \[.*?\]\((\S+)\) \|$"
    rows = re.findall(row, HISTORICAL.read_text(), re.MULTILINE)
    return {name: (commit, page) for name, commit, page in rows}


@cache
def pages() -> dict[Path, str]:
    """Texts that readers find figures in."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *RESULTS.glob("*.md")]
    return {file.resolve(): file.read_text() for file in files if file != HISTORICAL}


def subject(command: str) -> str:
    """The study, recipe or script of a command; empty if there is none.

    >>> subject("edgegossip study adsp/search --runs paper")
    'adsp/search'
    >>> subject("python benchmarks/simulator.py --json")
    'benchmarks.simulator'
    """
    found = re.search(r"(?:study|compare|-m) (\S+)|(benchmarks/\w+)\.py", command)
    return "" if found is None else (found[1] or found[2].replace("/", "."))


def named() -> Iterator[str]:
    """Names of files in all pages; `stage-kills-*.json` names several."""
    for text in pages().values():
        yield from re.findall(r"(?<![\w*-])[\w.*-]+\.json", text)


def test_a_kept_file_names_its_commits_or_is_historical() -> None:
    unknown = {name for name, found in kept().items() if not is_known(found)}
    assert unknown - {*listed()} == set(), (
        "these name no commit, or one with changes: run them again from a clean commit"
    )


def test_only_kept_files_without_a_commit_are_historical() -> None:
    unknown = {name for name, (commit, _) in listed().items() if commit != "lost"}
    known = {name for name, found in kept().items() if is_known(found)}
    assert unknown & known == set(), "remove their rows from the list"
    assert {*listed()} - {*kept()} == set(), "remove the rows of files that are gone"


def test_a_page_names_every_kept_file() -> None:
    patterns = {*named()}
    names = [name for name in kept() if "/" not in name and name not in listed()]
    unnamed = [name for name in names if not any(fnmatchcase(name, each) for each in patterns)]
    assert unnamed == [], "name them beside their figures, or remove them"


def test_the_page_of_a_historical_file_has_its_command() -> None:
    lost = []
    for name, (_, link) in listed().items():
        text = pages()[(RESULTS / link).resolve()].replace("benchmarks/", "benchmarks.")
        command = subject(kept()[name].get("command", ""))
        if name not in text and not (command and command in text):
            lost.append(f"{name} in {link}")
    assert lost == [], "their figures are gone from these pages, and so should they be"


@thorough
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_named_commits_are_in_the_history() -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("the history is not here")
    history = {commit[:12] for commit in git("rev-list", "HEAD").split()}
    names = {name for name in kept() if name not in listed()}
    gone = {name for name in names if not {*origins(kept()[name])} <= history}
    assert gone == set()
