"""Keep the figures of a study: one file of one or several of its folders.

    python -m benchmarks.keep_study runs/a runs/b --out benchmarks/results/NAME.json

The folders hold different cells of the same study, such as those of other `--runs` or other
`--seeds`. Tables are made again from all rows. Numbers have five digits, and a list of them is
one line; figures are left out, because the rows hold what they show.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import rounded
from studies.contest import StudySettings

from edgegossip.contract.errors import UsageError
from edgegossip.recipes.registry import load_study
from edgegossip.runs.files import json_file, read_json, write_atomically
from edgegossip.runs.study import STUDY

VARIED = ("seeds", "only")
"""Settings that folders may differ in, because the names of their cells do."""

LISTS = re.compile(r"\[\s*([^][{}\"]*?)\s*\]")
"""Lists of numbers, such as curves."""


def together(folders: Sequence[Path]) -> dict[str, Any]:
    """The contents of `study.json` of all folders as one.

    Raises:
        UsageError: If the folders are of different studies, or share a cell.
    """
    found = [read_json(folder / STUDY) for folder in folders]
    first = found[0]
    cells: dict[str, Any] = {}
    for folder, each in zip(folders, found, strict=True):
        if each["study"] != first["study"] or _fixed(each) != _fixed(first):
            raise UsageError(
                f"{folder} is of another study, or of other settings, than {folders[0]}"
            )
        if both := sorted(cells.keys() & each["cells"].keys()):
            raise UsageError(
                f"{folder} has {both[0]} a second time; name each cell's folder once"
            )
        cells |= each["cells"]
    seeds = sorted({seed for each in found for seed in each["settings"]["seeds"]})
    settings = StudySettings(short=first["settings"]["short"], seeds=tuple(seeds))
    exhibits = load_study(first["study"])(settings).exhibit(
        {name: cell["row"] for name, cell in cells.items()}
    )
    return {
        **{key: value for key, value in first.items() if key != "figures"},
        "settings": {**_fixed(first), "seeds": seeds},
        "command": "; ".join(dict.fromkeys(each["command"] or "" for each in found)),
        "cells": cells,
        "errors": {
            name: error
            for each in found
            for name, error in each["errors"].items()
            if name not in cells
        },
        "tables": [*map(dataclasses.asdict, exhibits.tables)],
        "wall_started": min(each["wall_started"] for each in found),
        "wall_seconds": sum(each["wall_seconds"] for each in found),
    }


def _in_one_line(found: re.Match[str]) -> str:
    return f"[{' '.join(found[1].split())}]"


def _fixed(study: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in study["settings"].items() if name not in VARIED}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.keep_study", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    try:
        text = json_file(rounded(together(options.folders))).decode()
        write_atomically(options.out, LISTS.sub(_in_one_line, text).encode())
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
