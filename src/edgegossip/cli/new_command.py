"""The command that writes a project of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeAlias

import tyro

from edgegossip.contract.errors import UsageError

TaskName: TypeAlias = Literal["vision", "text", "tabular", "own-loop"]
_FILES = {
    "recipe.py": "{task}.py.txt",
    "test_recipe.py": "test.py.txt",
    "README.md": "README.md",
}
_FILES_OF_A_LOOP = {
    "train.py": "own-loop.py.txt",
    "test_train.py": "test-own-loop.py.txt",
    "README.md": "README-own-loop.md",
}
_BASELINES = {"vision": "epoch-gossip", "text": "diloco", "tabular": "epoch-gossip"}


@dataclass(frozen=True, kw_only=True)
class New:
    """Write a folder with a recipe, a test and a README, which run as they are.

    Args:
        folder: New folder.
        task: Pictures with classes, a language model, rows of numbers, or a training loop of
            your own.
    """

    folder: tyro.conf.Positional[Path]
    task: TaskName


def new_command(arguments: list[str]) -> int:
    """`edgegossip new`."""
    options = tyro.cli(New, prog="edgegossip new", args=arguments)
    folder, task = options.folder, options.task
    if folder.exists() and (not folder.is_dir() or [*folder.iterdir()]):
        raise UsageError(f"{folder} is not empty; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    sources = files("edgegossip.cli") / "projects"
    for name, source in (_FILES_OF_A_LOOP if task == "own-loop" else _FILES).items():
        text = (sources / source.format(task=task)).read_text(encoding="utf-8")
        text = text.replace("# NAME\n", f"# {folder.resolve().name}\n")
        text = text.replace("BASELINE", _BASELINES.get(task, ""))
        (folder / name).write_text(text, encoding="utf-8")
    command = "script -n 4 train.py" if task == "own-loop" else "compare recipe.py:recipe"
    print(f"{folder} is ready; next:\n  cd {folder}\n  edgegossip {command}")
    return 0
