"""Recipes and studies by name. No large package is imported, so listing them is instant."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from edgegossip.contract.errors import EdgeGossipError, UsageError, unknown_name

if TYPE_CHECKING:  # these import torch, which takes longer than `edgegossip list` may
    from edgegossip.runs.experiment import Comparison, Experiment
    from edgegossip.runs.study import Study

Recipe: TypeAlias = "Callable[..., Experiment | Comparison]"
MakeStudy: TypeAlias = "Callable[..., Study]"


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of a recipe or a study.

    Args:
        module: Full name of its module.
        function: Name of its function.
    """

    module: str
    function: str

    @property
    def summary(self) -> str:
        """The first line of the function's docstring, read without importing its module."""
        return _summaries(self.module)[self.function]

    def load(self) -> Any:  # noqa: ANN401 - a recipe's or a study's function
        """Import the module and return the function."""
        return getattr(importlib.import_module(self.module), self.function)


@cache
def _summaries(module: str) -> dict[str, str]:
    """The first docstring line of each function in `module`."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.FunctionDef)
    }


def _entries(package: str, modules: Mapping[str, str]) -> dict[str, Entry]:
    """Make entries by name; the last part of a name is also the name of the function."""
    return {
        name: Entry(f"{package}.{module}", name.rpartition("/")[2].replace("-", "_"))
        for name, module in modules.items()
    }


RECIPES = _entries(
    "edgegossip.recipes",
    {
        "quickstart": "quickstart",
        "mnist-lenet5": "baselines",
        "cifar10-lenet5": "baselines",
        "cifar10-resnet20": "baselines",
        "har-cnn": "baselines",
        "sparse-push/mnist-lenet5": "push_sum_comparison",
        "sparse-push/har-cnn": "push_sum_comparison",
        "sparse-push/cifar10-lenet5": "push_sum_comparison",
        "sparse-push/cifar10-resnet20": "push_sum_comparison",
        "sparse-push/cifar10-vgg11": "push_sum_comparison",
        "adsp/quickstart": "parameter_servers",
        "adsp/mnist-lenet5": "parameter_servers",
        "adsp/cifar10-lenet5": "parameter_servers",
        "adsp/cifar10-cnn": "parameter_servers",
        "adsp/har-svm": "parameter_servers",
        "systems/quickstart": "systems_comparison",
        "systems/mnist-mlp": "systems_comparison",
        "systems/mnist-lenet5": "systems_comparison",
        "systems/har-cnn": "systems_comparison",
        "synthetic-gradients/quickstart": "staged_training",
        "synthetic-gradients/eight-layers": "staged_training",
        "synthetic-gradients/cloud-edge": "cloud_edge",
        "language/books-gpt": "language",
    },
)
STUDIES = _entries(
    "edgegossip.recipes.studies",
    {
        "edgegossip/fig3": "combinations",
        "edgegossip/fig5": "training",
        "edgegossip/fig6": "training",
        "edgegossip/fig7": "generation_time",
        "edgegossip/fig8": "look_cost",
        "edgegossip/fig12": "training",
        "edgegossip/fig13": "training",
        "edgegossip/speedup": "speedup",
        "edgegossip/selections": "speedup",
        "edgegossip/skew": "skewed_data",
        "edgegossip/contention": "loaded_machines",
        "edgegossip/rates": "tuned_races",
        "sparse-push/table-iid": "compressed_push",
        "sparse-push/table-skew": "compressed_push",
        "sparse-push/time-varying": "compressed_push",
        "sparse-push/controls": "rare_exchanges",
        "sparse-push/consensus": "consensus",
        "systems/table": "systems",
        "language/authors": "language_models",
        "synthetic-gradients/methods": "stage_methods",
        "synthetic-gradients/links": "stage_networks",
        "synthetic-gradients/stages": "stage_depths",
        "synthetic-gradients/vgg16": "stage_depths",
        "synthetic-gradients/published": "published_modules",
        "adsp/tuning": "time_to_loss",
        "adsp/time-to-loss": "time_to_loss",
        "adsp/heterogeneity": "time_to_loss",
        "adsp/delay": "time_to_loss",
        "adsp/bandwidth": "time_to_loss",
        "adsp/workers": "time_to_loss",
        "adsp/nonstationary": "time_to_loss",
        "adsp/search": "rate_search",
    },
)


def load_study(name: str) -> MakeStudy:
    """Find a study by name.

    Raises:
        UsageError: If the name is unknown.
    """
    if name not in STUDIES:
        raise UsageError(unknown_name("study", name, STUDIES))
    found: MakeStudy = STUDIES[name].load()
    return found


def load_recipe(name: str) -> Recipe:
    """Find a recipe by name, or as a function in a file (``my_recipe.py:name``).

    Raises:
        UsageError: If the name is unknown, or the file cannot be imported.
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
    found: Recipe = RECIPES[name].load()
    return found


def _load_file(path: Path) -> ModuleType:
    # A prefix, so that a file called random.py replaces no other module.
    name = f"recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"there is no Python file {path}; expected a recipe as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    # Checkpoints look up the classes of states by module.
    sys.modules[name] = module
    # Modules beside the file can be imported, but shadow no others.
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
