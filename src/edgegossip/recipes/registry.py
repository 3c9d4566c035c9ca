"""Recipes and studies by name or file; listing them imports no large package."""

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
    spec = importlib.util.find_spec(module)  # imports the package, but not the module
    assert spec is not None
    assert spec.origin is not None
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for node in ast.parse(Path(spec.origin).read_bytes()).body
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
        "environments/halos": "environments",
        "environments/stragglers": "environments",
        "environments/churn": "environments",
        "environments/phones": "environments",
        "environments/one-slow": "environments",
        "environments/own-machines": "environments",
    },
)
REPOSITORY = Path(__file__).parents[3]
"""The repository, if the package is used from a clone of it."""


def studies() -> dict[str, Entry]:
    """Studies by name, from a clone that the package or the current folder is in; or none."""
    for root in (REPOSITORY, Path.cwd()):
        if (root / "studies" / "__init__.py").is_file():
            _add_to_path(root)
            named = getattr(importlib.import_module("studies"), "STUDIES", {})
            return _entries("studies", named)
    return {}


def load_study(name: str) -> MakeStudy:
    """Find a study by name, or as a function in a file (``studies/training.py:fig5``).

    Raises:
        UsageError: If the name is unknown, or the file cannot be imported.
    """
    if (found := _in_file(name, "study")) is not None:
        return found
    known = studies()
    if name not in known:
        if known:
            raise UsageError(unknown_name("study", name, known))
        raise UsageError(
            f"unknown study {name!r}: studies are not installed with the package; run this in "
            "a clone of its repository, which has them in studies/, or give FILE.py:NAME"
        )
    study: MakeStudy = known[name].load()
    return study


def load_recipe(name: str) -> Recipe:
    """Find a recipe by name, or as a function in a file (``my_recipe.py:name``).

    Raises:
        UsageError: If the name is unknown, or the file cannot be imported.
    """
    if (own := _in_file(name, "recipe")) is not None:
        return own
    if name not in RECIPES:
        if name in studies():
            raise UsageError(f"{name} is a study: edgegossip study {name}")
        raise UsageError(
            f"{unknown_name('recipe', name, RECIPES)}; for one of your own, give FILE.py:NAME"
        )
    found: Recipe = RECIPES[name].load()
    return found


def _in_file(name: str, kind: str) -> Callable[..., Any] | None:
    """The function that ``FILE.py:NAME`` means; None for another kind of name."""
    file, colon, function = name.rpartition(":")
    if colon:
        return _find(Path(file), function, kind)
    if name.endswith(".py"):
        raise UsageError(f"say which function of {name} is the {kind}: {name}:NAME")
    return None


def _add_to_path(folder: Path) -> None:
    # At the end, so that its modules shadow no others.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(path: Path, kind: str) -> ModuleType:
    folder = path.parent.resolve()
    # A prefix, so that a file called random.py replaces no other module.
    name = f"recipe_{path.stem}"
    if (folder / "__init__.py").is_file():
        # The name by which the other modules of its package import it.
        _add_to_path(folder.parent)
        name = f"{folder.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"there is no Python file {path}; expected a {kind} as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    # Checkpoints look up the classes of states by module, and other processes those of cells.
    sys.modules[name] = module
    # Modules beside the file can be imported.
    _add_to_path(folder)
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


def _find(path: Path, function: str, kind: str) -> Callable[..., Any]:
    module = _load_file(path, kind)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None or not callable(found):
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
        ]
        raise UsageError(unknown_name(f"{kind} in {path.name}", function, own))
    return found
