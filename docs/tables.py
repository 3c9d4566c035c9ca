"""Write tables of what the code knows into pages: `python -m docs.tables`.

They have recipes, studies, their options, and the fields of files. A page asks for one in a
comment, and the table ends with another:

    <!-- recipes -->
    <!-- end -->

The others are `studies`, `options`, `fields edgegossip.runs.events`, `rows`, `names`, and
`classes edgegossip.contract.Event`. A test finds pages that are older than the code.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import get_args, get_type_hints

from edgegossip.recipes.registry import RECIPES, Entry, studies

KINDS = "recipes|studies|rows|options|fields|classes|names"
ASKED = re.compile(
    rf"^(<!-- ({KINDS})(?: (\S+))? -->)$.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
)
SHOWN = re.compile(
    r"^\.\. (auto(?:class|function|data)|currentmodule):: ([\w.]+)$", re.MULTILINE
)
PAGES = Path(__file__).parent
MAKERS = {f"studies.{name}" for name in ("contest", "race", "servers")}
"""Modules whose cells several studies share."""
SECTION = re.compile(r"^(\w[^\n]*):\n((?:    [^\n]*\n?)+)", re.MULTILINE)
ITEM = re.compile(r"^    (\w[\w, ]*):((?: [^\n]*)?(?:\n     +[^\n]*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A section of a docstring: names, each with its meaning.

    Args:
        heading: The heading, such as "Args".
        items: Meanings by name, or by several names with commas between.
    """

    heading: str
    items: Mapping[str, str]

    @property
    def names(self) -> set[str]:
        """All names, also those within the meaning of another, such as `name`."""
        found = re.findall(r"`([a-z_]+)`", " ".join(self.items.values()))
        return {name for names in self.items for name in names.split(", ")} | {*found}


def sections(name: str, heading: str) -> list[Section]:
    """The sections whose heading begins with a word, from the docstring of an object."""
    found = [
        Section(title, {names: " ".join(text.split()) for names, text in ITEM.findall(body)})
        for title, body in SECTION.findall(_docstring(name) + "\n")
        if title.startswith(heading)
    ]
    if not found:
        raise ValueError(f"the docstring of {name} has no section {heading!r}")
    return found


def asked(text: str) -> list[tuple[str, str]]:
    """The tables that a page asks for: kind, and name of the object."""
    return [(found[2], found[3] or "") for found in ASKED.finditer(text)]


def with_tables(text: str) -> str:
    """The page with new tables between the comments."""

    def filled(found: re.Match[str]) -> str:
        lines = "\n".join(_table(found[2], found[3] or "")).strip()
        lines = re.sub(r"\n{3,}", "\n\n", lines)
        return f"{found[1]}\n\n{lines}\n\n{found[4]}"

    return ASKED.sub(filled, text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each page with tables: its path, its text, and the text with new tables."""
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if asked(text):
            yield path, text, with_tables(text)


def _table(kind: str, name: str) -> Iterator[str]:
    match kind:
        case "recipes":
            yield from _rows("Recipe", _summaries(RECIPES), "Content")
        case "studies":
            yield from _rows("Study", _summaries(studies()), "Content")
        case "options":
            yield from _options()
        case "rows":
            yield from _fields_of_rows()
        case "names":
            yield from _public_names()
        case "classes":
            kinds = get_args(locate(name))
            items = [(each.__name__, _first(inspect.getdoc(each) or "")) for each in kinds]
            yield from _rows(name.rpartition(".")[2], items)
        case "fields":
            yield from _fields(name)


def _fields(name: str) -> Iterator[str]:
    """The fields in a docstring, with the paragraphs above them."""
    yield from _prose(name)
    for section in sections(name, "Fields"):
        if " of " in section.heading:
            yield f"{section.heading}:\n"
        yield from _rows("Field", section.items.items())
        yield ""


def _fields_of_rows() -> Iterator[str]:
    """The fields of the rows of studies, by the module that makes them."""
    for module in sorted({entry.module for entry in studies().values()} | MAKERS):
        if "\nFields of a row" in _docstring(module):
            yield f"`{module.rpartition('.')[2]}`:\n"
            yield from _fields(module)


def _public_names() -> Iterator[str]:
    """The names of the API reference, with a table for each of its pages."""
    index = (PAGES / "api" / "index.rst").read_text(encoding="utf-8")
    for page in re.findall(r"^    (\w+)$", index.partition("toctree::")[2], re.MULTILINE):
        text = (PAGES / "api" / f"{page}.rst").read_text(encoding="utf-8")
        yield f"## {text.partition(chr(10))[0]}\n\n| Name | Meaning |\n| --- | --- |"
        module = "edgegossip"
        for kind, name in SHOWN.findall(text):
            if kind == "currentmodule":
                module = name
            elif "." not in name:  # others are not public
                yield _public_name(module, name)
        yield ""


def _public_name(module: str, name: str) -> str:
    found = locate(f"{module}.{name}")
    has_docstring = inspect.isclass(found) or inspect.isfunction(found)
    meaning = _first(inspect.getdoc(found) or "") if has_docstring else ""
    meaning = re.sub(":math:(?=`)", "", meaning).replace("|", "&#124;")
    source = _sources(module)[name].relative_to(PAGES.parent).as_posix()
    return f"| [`{name}`](../{source}) | {meaning} |"


@cache
def _sources(module: str) -> Mapping[str, Path]:
    """The file of each public name of a package."""
    folder = PAGES.parent / "src" / module.replace(".", "/")
    found: dict[str, Path] = {}
    for node in ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            path = folder / node.module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            found |= {alias.name: file for alias in node.names}
    return found


def _options() -> Iterator[str]:
    """The options of recipes, with a table for each class of settings."""
    recipes: dict[type, list[str]] = {}
    for name, entry in RECIPES.items():
        recipes.setdefault(get_type_hints(entry.load())["settings"], []).append(f"`{name}`")
    for settings, names in recipes.items():
        yield f"Options of {', '.join(names)}:\n"
        items: dict[str, str] = {}
        for kind in reversed(settings.__mro__[:-1]):  # a subclass documents only what it adds
            for section in sections(f"{kind.__module__}.{kind.__qualname__}", "Args"):
                items |= section.items
        yield from _rows("Option", [(f"--{n.replace('_', '-')}", x) for n, x in items.items()])
        yield ""


def _first(docstring: str) -> str:
    """The first paragraph."""
    return " ".join(docstring.partition("\n\n")[0].split())


def _prose(name: str) -> Iterator[str]:
    """The paragraphs between the first line of a docstring and its first section."""
    _, *paragraphs = SECTION.split(_docstring(name) + "\n")[0].split("\n\n")
    for text in paragraphs:
        yield text.strip() + "\n"


def _summaries(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
    for name, entry in entries.items():
        text, _, _ = inspect.cleandoc(entry.load().__doc__).partition("\n\nArgs:")
        yield name, " ".join(text.split())


def _rows(
    title: str, items: Iterable[tuple[str, str]], other: str = "Meaning"
) -> Iterator[str]:
    yield f"| {title} | {other} |\n| --- | --- |"
    for names, text in items:
        codes = ", ".join(f"`{name}`" for name in names.split(", "))
        yield f"| {codes} | {text.replace('|', '&#124;')} |"


def _docstring(name: str) -> str:
    found = locate(name)
    if found is None:
        raise ValueError(f"there is no {name}")
    return inspect.getdoc(found) or ""


if __name__ == "__main__":
    for page, _, filled in pages():
        page.write_text(filled, encoding="utf-8")
