"""Docstrings name their subject first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUSPECT = re.compile(r"[\"']\s*(Of|What|Who|That)\b")
"""To parse a file takes long, so only those are that may have such a docstring."""
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "lab", "examples", "docs"])
def test_no_docstring_opens_with_of_what_who_or_that(folder: str) -> None:
    opened = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if SUSPECT.search(source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
        if text.split()[0] in {"Of", "What", "Who", "That"}
    ]
    assert opened == []
