"""Recipes by name. Imports nothing heavy, so that listing them is instant."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from edgegossip.core.errors import UsageError, unknown_name

if TYPE_CHECKING:  # these import torch, which takes longer than `edgegossip list` may
    from edgegossip.experiments.experiment import Comparison, Experiment


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a recipe is, and what it does in a line (the first of its docstring)."""

    module: str
    function: str
    summary: str


_RECIPES = "edgegossip.experiments.recipes"
RECIPES = {
    "quickstart": Entry(
        f"{_RECIPES}.quickstart",
        "quickstart",
        "Handwritten digits (embedded), a small MLP, 4 uneven platforms: seconds.",
    ),
    "mnist-lenet5": Entry(
        f"{_RECIPES}.pictures",
        "mnist_lenet5",
        "MNIST with LeNet-5 on 4 uneven platforms.",
    ),
    "cifar10-lenet5": Entry(
        f"{_RECIPES}.pictures",
        "cifar10_lenet5",
        "CIFAR-10 with LeNet-5 on 4 uneven platforms.",
    ),
    "cifar10-resnet20": Entry(
        f"{_RECIPES}.pictures",
        "cifar10_resnet20",
        "CIFAR-10 with ResNet-20 on 4 uneven platforms: hours on two cores.",
    ),
    "har-cnn": Entry(
        f"{_RECIPES}.sensors",
        "har_cnn",
        "Activities of 21 people on 21 phones of measured speeds, tested on 9 others.",
    ),
}


def load_recipe(name: str) -> Callable[..., Experiment | Comparison]:
    """Find a recipe: one of ours by name, or a function in a file, ``my_recipe.py:name``.

    Raises:
        UsageError: If there is none of that name.
    """
    file, colon, function = name.rpartition(":")
    if colon:
        return _find(_load_file(Path(file)), function)
    if name not in RECIPES:
        raise UsageError(
            f"{unknown_name('recipe', name, RECIPES)}; for one of your own, give FILE.py:NAME"
        )
    entry = RECIPES[name]
    return _find(importlib.import_module(entry.module), entry.function)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected a recipe as FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; expected a recipe as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    # Checkpoints look up the classes of states by module.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, function: str) -> Callable[..., Experiment | Comparison]:
    found: Callable[..., Experiment | Comparison] | None = getattr(module, function, None)
    if found is None or not callable(found):
        functions = [
            n for n, v in vars(module).items() if callable(v) and not n.startswith("_")
        ]
        raise UsageError(unknown_name(f"recipe in {module.__name__}.py", function, functions))
    return found
