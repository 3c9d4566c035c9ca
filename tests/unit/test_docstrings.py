"""Docstrings name their subject first, and public ones the errors that they raise."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/edgegossip"
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


def test_public_docstrings_name_the_errors_that_they_raise() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {function.name}: {error}"
        for file, names in _public_names().items()
        for function, text in _functions(file, names)
        for error in sorted(_raised(function))
        if error not in text
    ]
    assert missing == []


def _public_names() -> dict[Path, set[str]]:
    """Names imported by the package and by ``eg.contract``, by file; nothing is loaded."""
    found = defaultdict[Path, set[str]](set)
    for listing in ("__init__.pyi", "contract/__init__.pyi"):
        for node in ast.parse((PACKAGE / listing).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                place = (PACKAGE / listing).parent / node.module.replace(".", "/")
                for file in (
                    place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
                ):
                    found[file] |= {each.name for each in node.names}
    return found


def _functions(file: Path, names: set[str]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield public functions and methods with the docstring, theirs or that of their class."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and _is_public(method.name):
                    text = ast.get_docstring(method) or ast.get_docstring(node)
                    yield method, text or ""


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in {"__init__", "__post_init__"}


def _raised(function: ast.FunctionDef) -> set[str]:
    """Names of the errors that the function itself raises, or by a check of ranges."""
    errors = set()
    for node in ast.walk(function):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))) if name.endswith("Error"):
                errors.add(name)
            case ast.Call(func=ast.Name(id="check_range" | "check_ranges")):
                errors.add("ValueError")
    return errors
