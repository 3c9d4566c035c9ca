"""Tables of what the code knows: recipes, studies, their options, and the fields of files.

A page asks for one in a comment, which a forge does not show, and names beside it the command
that prints the same:

    <!-- recipes -->
    <!-- studies -->
    <!-- options edgegossip.recipes.recipe_settings.Settings -->
    <!-- fields edgegossip.experiments.event_log -->
    <!-- classes edgegossip.contract.Event -->
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pydoc import locate
from typing import Any, get_args

from edgegossip.recipes.registry import RECIPES, STUDIES, Entry

KINDS = "recipes|studies|options|fields|classes"
ASKED = re.compile(rf"^<!-- ({KINDS})(?: (\S+))? -->$", re.MULTILINE)
LISTS = {"recipes": RECIPES, "studies": STUDIES}
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
    return ASKED.findall(text)


def with_tables(text: str) -> str:
    """The page with the tables in place of the comments."""
    return ASKED.sub(lambda found: "\n".join(_table(found[1], found[2])), text)


def _table(kind: str, name: str | None) -> Iterator[str]:
    if kind in LISTS:
        yield from _rows(kind.capitalize(), _summaries(LISTS[kind]))
        return
    assert name is not None
    if kind == "classes":
        kinds = [(each.__name__, inspect.getdoc(each) or "") for each in get_args(locate(name))]
        heading = name.rpartition(".")[2]
        yield from _rows(heading, [(each, _first(text)) for each, text in kinds])
        return
    if kind == "fields":
        yield from _prose(name)
    for section in sections(name, "Args" if kind == "options" else "Fields"):
        if " of " in section.heading:
            yield f"{section.heading}:\n"
        items = section.items.items()
        if kind == "options":
            given = {f"--{names.replace('_', '-')}": text for names, text in items}
            yield from _rows("Option", given.items())
        else:
            yield from _rows("Field", items)
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


def _rows(title: str, items: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {title} | Meaning |\n| --- | --- |"
    for names, text in items:
        codes = ", ".join(f"`{name}`" for name in names.split(", "))
        yield f"| {codes} | {text.replace('|', '&#124;')} |"


def _docstring(name: str) -> str:
    found = locate(name)
    if found is None:
        raise ValueError(f"there is no {name}")
    return inspect.getdoc(found) or ""


def setup(app: Any) -> None:  # noqa: ANN401 - tests import this without Sphinx
    """Called by Sphinx."""

    def fill(app: Any, docname: str, source: list[str]) -> None:  # noqa: ANN401
        source[0] = with_tables(source[0])

    app.connect("source-read", fill)
