"""A call of a recipe or a study as a value: its name and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Self

from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.experiment import Comparison, Experiment


@dataclass(frozen=True)
class Call:
    """A function by name, with arguments.

    Fields of settings count as arguments of the function: if the default of a parameter is a
    dataclass, each of its fields is one.

    Args:
        name: Name of the function.
        arguments: Given arguments by name; all others have their defaults.
        load: Finds the function by name. A call can be sent to another process, which loads
            the function again.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    load: Callable[[str], Callable[..., Any]] = load_recipe

    def __reduce__(self) -> tuple[Any, ...]:
        # A recipe's file may define the classes of its arguments, so it is loaded before them.
        state = {"arguments": self.arguments}
        return _with_loaded_function, (type(self), self.name, self.load), state

    @property
    def function(self) -> Callable[..., Any]:
        """The function; its file is executed again only if it has changed."""
        file = Path(self.name.rpartition(":")[0])
        modified = file.stat().st_mtime_ns if file.is_file() else None
        return _function(self.load, self.name, file.resolve(), modified)

    @property
    def defaults(self) -> dict[str, Any]:
        """All arguments with their defaults; `inspect.Parameter.empty` if there is none.

        >>> Call("quickstart").defaults["num_workers"]
        4
        """
        return defaults_of(self.function)

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401
        """Return this call with other arguments.

        Raises:
            UsageError: If the function does not have one of the arguments.

        >>> Call("quickstart").replace(lr=0.1).replace(seed=3).words()
        ['quickstart', '--lr', '0.1', '--seed', '3']
        """
        known = self.defaults
        if unknown := [name for name in changes if name not in known]:
            raise UsageError(unknown_name(f"argument of {self.name}", unknown[0], known))
        return replace(self, arguments={**self.arguments, **changes})

    def result(self) -> Any:  # noqa: ANN401
        """Call the function.

        Raises:
            UsageError: If an argument is out of range.
        """
        function = self.function
        given: dict[str, Any] = {}
        try:
            for name, parameter in inspect.signature(function).parameters.items():
                if is_dataclass(settings := parameter.default):
                    own = {each.name for each in fields(settings)} & self.arguments.keys()
                    changes = {each: self.arguments[each] for each in own}
                    given[name] = replace(settings, **changes)  # type: ignore[type-var]
                elif name in self.arguments:
                    given[name] = self.arguments[name]
            return function(**given)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def words(self) -> list[str]:
        """The name and the arguments as words of a command line."""
        known = self.defaults
        options = (option_words(*each, known[each[0]]) for each in self.arguments.items())
        return [self.name, *(word for words in options for word in words)]


@cache
def _function(
    load: Callable[[str], Callable[..., Any]], name: str, file: Path, modified: int | None
) -> Callable[..., Any]:
    return load(name)


def _with_loaded_function(kind: type[Call], name: str, load: Callable[..., Any]) -> Call:
    call = kind(name, load=load)
    _ = call.function
    return call


class RecipeCall(Call):
    """A recipe with arguments.

    >>> RecipeCall("quickstart", {"num_workers": 2, "seed": 1}).experiment("gosgd").num_workers
    2
    """

    def make(self, seed: int | None = None) -> Experiment | Comparison:
        """Call the recipe.

        Args:
            seed: Seed of the runs; None for that of the arguments. A recipe without an argument
                `seed` gets the seed in its experiments; their faults and algorithms keep seeds
                of their own.

        Raises:
            UsageError: If an argument is out of range, or the recipe returns neither an
                experiment nor a comparison.
        """
        if seed is not None and "seed" in self.defaults:
            return self.replace(seed=seed).make()
        made = self.result()
        if not isinstance(made, Experiment | Comparison):
            raise UsageError(
                f"recipe {self.name!r} gave {made!r:.60}; it must return an Experiment or a "
                "Comparison"
            )
        if seed is None:
            return made
        if isinstance(made, Experiment):
            return replace(made, seed=seed)
        seeded = {name: replace(each, seed=seed) for name, each in made.experiments.items()}
        return replace(made, experiments=seeded)

    def experiment(self, only: str | None = None, seed: int | None = None) -> Experiment:
        """Call the recipe, and return the run `only`, or a comparison's baseline; see `make`.

        Raises:
            UsageError: If there is no such run, or `make` raises it.
        """
        return pick(self.name, self.make(seed), only)

    def require_used(self, *experiments: Experiment) -> None:
        """Check that `shared`, which is for EdgeGossip alone, applies to one of the runs.

        Raises:
            UsageError: If it is given for other runs only.
        """
        is_used = any(each.algorithm.traits.claims_units for each in experiments)
        if self.arguments.get("shared") is True and not is_used:
            names = ", ".join(each.run_name for each in experiments)
            raise UsageError(
                f"--shared is for edge-gossip, and not for {names}; give --only edge-gossip, "
                "or leave it out"
            )


def pick(name: str, made: Experiment | Comparison, only: str | None) -> Experiment:
    """Return the selected run of recipe `name`: `only`, or a comparison's baseline.

    Raises:
        UsageError: If there is no such run.
    """
    if isinstance(made, Experiment):
        if only is not None:
            raise UsageError(f"recipe {name!r} is a single run, so leave out --only")
        return made
    picked = only or made.baseline
    if picked not in made.experiments:
        raise UsageError(unknown_name("algorithm", picked, made.experiments))
    return made.experiments[picked]


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a recipe or a study, and those of its settings, with their defaults."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if is_dataclass(default):
            found |= {each.name: getattr(default, each.name) for each in fields(default)}
        else:
            found[name] = default
    return found


def option_words(name: str, value: object, default: object = None) -> list[str]:
    """Words of a command line that give the option `name` a value.

    Args:
        name: Name of the argument, with underscores.
        value: Its value.
        default: Its default; an option whose default is true or false takes no value.

    >>> option_words("batch_size", 8), option_words("resume", True, False)
    (['--batch-size', '8'], ['--resume'])
    >>> option_words("seeds", (0, 1)), option_words("nesterov", False, True)
    (['--seeds', '0', '1'], ['--no-nesterov'])
    """
    if len(name) == 1:
        return [f"-{name}", value_text(value)]
    option = name.replace("_", "-")
    if isinstance(value, bool) and isinstance(default, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", *_value_words(value)]


def _value_words(value: object) -> list[str]:
    if isinstance(value, Mapping):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [word for each in value for word in _value_words(each)]
    return [value_text(value)]


def value_text(value: object) -> str:
    """A value as it is typed; it reads back as the same value.

    >>> value_text(60.0), value_text(1 / 3), value_text(None)
    ('60', '0.3333333333333333', 'None')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return value.name if isinstance(value, Enum) else str(value)
