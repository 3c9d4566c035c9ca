"""The arrows between the packages point one way, and the pure packages stay pure."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "edgegossip"
FILES = sorted(SOURCES.rglob("*.py"))
# A package may import itself and lower layers; a new one needs a place here.
LAYERS = {"core": 0, "algorithms": 1, "balance": 1, "learning": 1, "sim": 2, "net": 2}
LAYERS |= {"experiments": 3, "report": 4, "cli": 5}
IMPURE = {"time", "asyncio", "socket", "random", "threading", "logging"}
PICKLE = re.compile(r"import (cloud)?pickle|from pickle|torch\.(load|save)\(|allow_pickle=True")


def package(file: Path) -> str:
    return file.relative_to(SOURCES).parts[0]


def imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_to_lower_layers() -> None:
    for file in SOURCES.glob("*/**/*.py"):
        for name in imports(file):
            top, *rest = name.split(".")
            if top == "edgegossip" and rest[0] != package(file):
                assert LAYERS[rest[0]] < LAYERS[package(file)], f"{file} imports {name}"


def test_pure_packages_import_no_clock_socket_thread_or_global_generator() -> None:
    for file in FILES:
        if package(file) in {"core", "algorithms", "balance"}:
            assert not IMPURE & {name.split(".")[0] for name in imports(file)}, file


def test_nothing_is_pickled() -> None:
    assert [file for file in FILES if PICKLE.search(file.read_text())] == []


def test_files_fit_in_the_head() -> None:
    assert {f: n for f in FILES if (n := len(f.read_text().splitlines())) > 400} == {}
