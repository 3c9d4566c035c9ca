"""Recipes and studies by name. Imports nothing heavy, so that listing them is instant."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from edgegossip.core.errors import EdgeGossipError, UsageError, unknown_name

if TYPE_CHECKING:  # these import torch, which takes longer than `edgegossip list` may
    from edgegossip.experiments.experiment import Comparison, Experiment
    from edgegossip.experiments.study import Study

Recipe: TypeAlias = "Callable[..., Experiment | Comparison]"
MakeStudy: TypeAlias = "Callable[..., Study]"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a recipe or a study is, and what it does in a line (the first of its docstring)."""

    module: str
    function: str
    summary: str


_RECIPES = "edgegossip.recipes"
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
    "sparse-push/mnist-lenet5": Entry(
        f"{_RECIPES}.push_sum",
        "mnist_lenet5",
        "Push-sum, dense and compressed: MNIST with LeNet-5, 8 workers in a directed ring.",
    ),
    "sparse-push/har-cnn": Entry(
        f"{_RECIPES}.push_sum",
        "har_cnn",
        "Push-sum, dense and compressed: activities of 21 people at 7 workers in a ring.",
    ),
    "sparse-push/cifar10-lenet5": Entry(
        f"{_RECIPES}.push_sum",
        "cifar10_lenet5",
        "Push-sum, dense and compressed: CIFAR-10 with LeNet-5, 8 workers in a directed ring.",
    ),
    "sparse-push/cifar10-resnet20": Entry(
        f"{_RECIPES}.push_sum",
        "cifar10_resnet20",
        "Push-sum, dense and compressed: CIFAR-10 with ResNet-20, which takes hours.",
    ),
    "sparse-push/cifar10-vgg11": Entry(
        f"{_RECIPES}.push_sum",
        "cifar10_vgg11",
        "Push-sum, dense and compressed: CIFAR-10 with VGG11, which takes days on two cores.",
    ),
}

_STUDIES = "edgegossip.recipes.studies"
STUDIES = {
    "edgegossip/fig3": Entry(
        f"{_STUDIES}.combinations",
        "fig3",
        "The eight combinations: time of each step, and accuracy learnt from the points alone.",
    ),
    "edgegossip/fig5": Entry(
        f"{_STUDIES}.training",
        "fig5",
        "Accuracy over time: four models, three aggregations, and the controls.",
    ),
    "edgegossip/fig6": Entry(
        f"{_STUDIES}.training",
        "fig6",
        "Time to target and loss of accuracy with 4, 8, 16 and 32 platforms.",
    ),
    "edgegossip/fig7": Entry(
        f"{_STUDIES}.combinations",
        "fig7",
        "Time to generate aggregated points, for ratios 5, 10 and 20.",
    ),
    "edgegossip/fig8": Entry(
        f"{_STUDIES}.look_cost",
        "fig8",
        "The share of an epoch that looking at points takes: accounted and measured.",
    ),
    "edgegossip/fig12": Entry(
        f"{_STUDIES}.training",
        "fig12",
        "Time to target and loss of accuracy where two platforms are 3 or 5 times as fast.",
    ),
    "edgegossip/fig13": Entry(
        f"{_STUDIES}.training",
        "fig13",
        "Time to target and loss of accuracy with aggregation ratios 5, 10 and 20.",
    ),
    "edgegossip/speedup": Entry(
        f"{_STUDIES}.speedup",
        "speedup",
        "Time to EpochGossip's best accuracy less 0.3 points, at imbalances 2, 4 and 8.",
    ),
    "edgegossip/selections": Entry(
        f"{_STUDIES}.speedup",
        "selections",
        "Time to EpochGossip's best accuracy less 0.3 points, with each selection, at 4 times.",
    ),
    "sparse-push/table-iid": Entry(
        f"{_STUDIES}.compressed_push",
        "table_iid",
        "Even data: dense SGP, D-PSGD, CHOCO, and rising compression in a directed ring.",
    ),
    "sparse-push/table-skew": Entry(
        f"{_STUDIES}.compressed_push",
        "table_skew",
        "Skewed data: with and without compensation, and quasi-global momentum.",
    ),
    "sparse-push/time-varying": Entry(
        f"{_STUDIES}.compressed_push",
        "time_varying",
        "Graphs that change from round to round: dense, Sparse-Push and DifferencePush.",
    ),
    "sparse-push/consensus": Entry(
        f"{_STUDIES}.consensus",
        "consensus",
        "The map of compression and consensus step: how far apart workers end, on quadratics.",
    ),
}


def load_study(name: str) -> MakeStudy:
    """Find one of our studies by name.

    Raises:
        UsageError: If there is none of that name.
    """
    if name not in STUDIES:
        raise UsageError(unknown_name("study", name, STUDIES))
    entry = STUDIES[name]
    found: MakeStudy = getattr(importlib.import_module(entry.module), entry.function)
    return found


def load_recipe(name: str) -> Recipe:
    """Find a recipe: one of ours by name, or a function in a file, ``my_recipe.py:name``.

    Raises:
        UsageError: If there is none of that name, or its file cannot be imported.
    """
    file, colon, function = name.rpartition(":")
    if colon:
        return _find(Path(file), function)
    if name.endswith(".py"):
        raise UsageError(f"say which function of {name} is the recipe: {name}:NAME")
    if name in STUDIES:
        raise UsageError(f"{name} is a study: edgegossip study {name}")
    if name not in RECIPES:
        raise UsageError(
            f"{unknown_name('recipe', name, RECIPES)}; for one of your own, give FILE.py:NAME"
        )
    entry = RECIPES[name]
    found: Recipe = getattr(importlib.import_module(entry.module), entry.function)
    return found


def _load_file(path: Path) -> ModuleType:
    # A prefix, so that a file called random.py takes nobody else's place.
    name = f"recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"there is no Python file {path}; expected a recipe as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    # Checkpoints look up the classes of states by module.
    sys.modules[name] = module
    # What lies beside the file can be imported, but goes before nothing else.
    sys.path.append(str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except EdgeGossipError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}" for frame in frames if frame.filename == spec.origin]
        where = f"{path}{lines[-1] if lines else ''}"
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from error
    return module


def _find(path: Path, function: str) -> Recipe:
    module = _load_file(path)
    found: Recipe | None = getattr(module, function, None)
    if found is None or not callable(found):
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
        ]
        raise UsageError(unknown_name(f"recipe in {path.name}", function, own))
    return found
