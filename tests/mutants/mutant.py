"""Deliberate faults of the sources, each in a file of `tests/mutants/list`.

A file says what the fault is (`reason`). It names the source (`file`, below `src/edgegossip`),
text that the source has exactly once (`old`), and its replacement (`new`). The worlds that
should notice it are those of `kinds` (see `tests.mutants.worlds`) and, where only some
algorithms run the code, of `algorithms`.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "edgegossip"
FOLDER = Path(__file__).parent / "list"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault, and the worlds that are to notice it; see the module."""

    name: str
    reason: str
    file: str
    old: str
    new: str
    kinds: tuple[str, ...]
    algorithms: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The source with the fault.

        Raises:
            ValueError: If the source does not have the old text exactly once.
        """
        source = (SOURCES / self.file).read_text()
        if (number := source.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has the old text of {self.name} {number} times, not once: "
                f"adapt tests/mutants/list/{self.name}.toml to the source"
            )
        return source.replace(self.old, self.new)

    def write(self, folder: Path) -> Path:
        """Write all sources with the fault into `folder`; return the path to import from."""
        copy = copied(folder)
        (copy / "edgegossip" / self.file).write_text(self.text)
        return copy


def copied(folder: Path) -> Path:
    """Copy the sources into `folder`; return the path to import from."""
    shutil.copytree(SOURCES, folder / "src" / "edgegossip")
    return folder / "src"


def read(path: Path) -> Mutant:
    values = tomllib.loads(path.read_text())
    for name in ("kinds", "algorithms"):
        values[name] = tuple(values.get(name, ()))
    return Mutant(name=path.stem, **values)


def read_all() -> dict[str, Mutant]:
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml"))}
