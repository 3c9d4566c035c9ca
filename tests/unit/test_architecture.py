"""The arrows between the packages point one way, and the pure packages stay pure."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tiers import thorough

from edgegossip.recipes.registry import RECIPES

SOURCES = Path(__file__).parents[2] / "src" / "edgegossip"
FILES = sorted(SOURCES.rglob("*.py"))
MODULES = {
    ".".join(("edgegossip", *file.relative_to(SOURCES).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in FILES
}
REGISTRY = "edgegossip.recipes.registry"
REGISTERED = {entry.module for entry in RECIPES.values()}
MODULE_NAME = re.compile(r"edgegossip(\.\w+)+")
# What a package may import besides itself.
ARROWS = {
    "contract": (),
    "compression": ("contract",),
    "algorithms": ("compression", "contract"),
    "data": ("contract", "machine"),
    "models": ("contract",),
    "machine": ("contract",),
    "training": ("contract", "data", "machine", "models"),
    "net": ("contract", "machine"),
    "sim": ("contract", "machine"),
    "runs": ("contract", "data", "machine", "models", "sim", "training"),
    "report": ("contract", "machine", "runs"),
    "real": ("contract", "data", "machine", "models", "net", "runs", "sim", "training"),
    "integrations": ("contract", "machine", "real", "runs", "sim"),
    "recipes": (
        "algorithms",
        "compression",
        "contract",
        "data",
        "machine",
        "models",
        "runs",
        "sim",
        "training",
    ),
    "plan": ("contract", "data", "machine", "recipes", "report", "runs", "sim", "training"),
    "cli": (
        "contract",
        "data",
        "integrations",
        "machine",
        "net",
        "plan",
        "real",
        "recipes",
        "report",
        "runs",
        "sim",
        "training",
    ),
}
PURE = {"contract", "compression", "algorithms"}
# Where particular algorithms may be named: where they are, are chosen, and are shown.
CHOOSES = {"algorithms", "recipes"}
MOST_CODE_LINES = 500
MOST_FILES_IN_A_FOLDER = 22
MOST_LINES_OF_A_BODY = 40
IMPURE = {"time", "asyncio", "socket", "random", "threading", "logging"}
PICKLE = re.compile(
    r"import (cloud)?pickle|from pickle|allow_pickle=True"
    r"|(?<!safetensors\.)torch\.(load|save)\("
)


def package(file: Path) -> str:
    return file.relative_to(SOURCES).parts[0]


@cache
def read(file: Path) -> tuple[str, ast.Module, tuple[ast.AST, ...]]:
    """The text of a file, its syntax tree, and all nodes of that."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return text, tree, (*ast.walk(tree),)


@cache
def imports(file: Path) -> set[str]:
    """Modules that a file imports, by statement or by a name that it keeps as a string."""
    _, _, nodes = read(file)
    plain = (
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    )
    return (
        {*plain}
        | named(file)
        | {
            "." * node.level + f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
    )


def named(file: Path) -> set[str]:
    """Modules whose names a file hands over as strings, for somebody to import."""
    found = {
        argument.value
        for node in read(file)[2]
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and MODULE_NAME.fullmatch(argument.value)
    }
    return found | (REGISTERED if MODULES[REGISTRY] == file else set())


def module_of(name: str) -> str:
    """The module that an import of `name` loads: `name` is one, or something in one."""
    return name if name in MODULES else name.rpartition(".")[0]


@thorough
def test_modules_named_in_strings_exist() -> None:
    for file in FILES:
        assert named(file) <= {*MODULES}, f"{file} names a module that there is not"


def test_nothing_that_the_registry_loads_leads_back_to_it() -> None:
    reached: set[str] = set()
    ahead = [*REGISTERED]
    while ahead:
        module = module_of(ahead.pop())
        if module in MODULES and module not in reached:
            reached.add(module)
            ahead += imports(MODULES[module])
    assert reached >= REGISTERED
    assert REGISTRY not in reached


def test_imports_follow_the_arrows() -> None:
    for file in SOURCES.glob("*/**/*.py"):
        for name in imports(file):
            top, *rest = name.split(".")
            assert top, f"{file} has a relative import"
            if top == "edgegossip" and rest[0] != package(file):
                assert rest[0] in ARROWS[package(file)], f"{file} imports {name}"


def test_neither_packages_nor_modules_import_each_other_in_a_circle() -> None:
    modules = {
        name: {module_of(each) for each in imports(file)} - {name}
        for name, file in MODULES.items()
    }
    for graph in (ARROWS, modules):
        graphlib.TopologicalSorter(graph).prepare()  # names the circle, if there is one


def test_the_package_imports_no_study() -> None:
    for file in FILES:
        assert not {name for name in imports(file) if name.split(".")[0] == "studies"}, file


def test_particular_algorithms_are_named_only_where_they_are_chosen() -> None:
    for file in FILES:
        named = [name for name in imports(file) if name.startswith("edgegossip.algorithms.")]
        assert not named or package(file) in CHOOSES, f"{file}: {named}"


def algorithms() -> set[str]:
    """The classes of `algorithms` that are one, by their bases."""
    bases = {
        node.name: {each.id for base in node.bases for each in names(base)}
        for file in FILES
        if package(file) in {"algorithms", "contract"}
        for node in read(file)[1].body
        if isinstance(node, ast.ClassDef)
    }
    found = {"Algorithm", "Wrapper"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found - {"Algorithm", "Wrapper"}


def names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def asked(node: ast.AST) -> Iterator[ast.AST]:
    """Return the class or value that `node` tests something against, if it does."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kind]):
            yield kind
        case ast.Compare():
            yield from (node.left, *node.comparators)
        case ast.MatchClass():
            yield node.cls


@thorough
def test_nobody_outside_asks_which_algorithm_it_has() -> None:
    for file in FILES:
        known = {
            name.rpartition(".")[2]
            for name in imports(file)
            if name.startswith("edgegossip.algorithms.")
        }
        found = {
            each.id for node in read(file)[2] for kind in asked(node) for each in names(kind)
        }
        assert package(file) == "algorithms" or not found & known, f"{file}: {found & known}"


def test_no_algorithm_is_known_by_a_string() -> None:
    known = algorithms()
    assert known >= {"Gossip", "GoSGD", "EdgeGossip", "ADSP", "Pipelined"}
    for file in FILES:
        texts = {node.value for node in read(file)[2] if isinstance(node, ast.Constant)}
        assert package(file) in CHOOSES or not texts & known, f"{file}: {texts & known}"


def test_writing_an_algorithm_takes_few_names() -> None:
    # `Alone` shows the bare contract, and `ChocoGossip` repairs lost increments by itself.
    most = {"gossip": 4, "alone": 16, "choco_gossip": 16}
    for file in SOURCES.glob("algorithms/*/*.py"):
        if file.parent.stem in {"gossip", "push_sum"} and file.stem != "push_sum":
            used = {each for each in imports(file) if each.startswith("edgegossip.")}
            assert len(used) <= most.get(file.stem, 12), f"{file}: {used}"


def test_pure_packages_import_no_clock_socket_thread_or_global_generator() -> None:
    for file in FILES:
        impure = IMPURE & {name.split(".")[0] for name in imports(file)}
        assert not (package(file) in PURE and impure), f"{file} imports {impure}"


def test_nothing_is_pickled() -> None:
    assert [file for file in FILES if PICKLE.search(read(file)[0])] == []


def test_no_class_has_the_name_of_another_in_its_package() -> None:
    classes = Counter(
        (file.parent, node.name)
        for file in FILES
        for node in read(file)[1].body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders = Counter(file.parent for file in FILES if file.name != "__init__.py")
    assert [folder for folder, count in folders.items() if count > MOST_FILES_IN_A_FOLDER] == []


def code_lines(file: Path) -> list[int]:
    """The numbers of its lines of code: no docstrings, no comments, no empty lines."""
    text, _, nodes = read(file)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        line
        for node in nodes
        if isinstance(node, documented) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#") and number not in docstrings
    ]


def test_files_are_short() -> None:
    num_lines = {file.name: len(code_lines(file)) for file in FILES}
    assert {name: num for name, num in num_lines.items() if num > MOST_CODE_LINES} == {}


def test_functions_are_short() -> None:
    too_long = {
        f"{file}:{node.lineno} {node.name}": num_lines
        for file in FILES
        for node in read(file)[2]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for body in [range(node.body[0].lineno, (node.end_lineno or 0) + 1)]
        if len(body) > MOST_LINES_OF_A_BODY
        if (num_lines := len({*body} & {*code_lines(file)})) > MOST_LINES_OF_A_BODY
    }
    assert too_long == {}
