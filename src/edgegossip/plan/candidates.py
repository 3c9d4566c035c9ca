"""Candidates of a plan: the algorithms of a recipe, each with settings to try."""

from __future__ import annotations

import inspect
import itertools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from edgegossip.cli.options import argument_names
from edgegossip.cli.recipe import parse_recipe, parse_with_seed, pick
from edgegossip.cli.swept_values import SeveralSeeds, SweptValues, Words, label
from edgegossip.contract.errors import UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.experiment import Comparison, Experiment

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)
"""Learning rates to try, relative to the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One algorithm of a recipe, with settings to try.

    Args:
        recipe: Name of the recipe.
        only: Name of the algorithm.
        words: The recipe's options and their values, including those of `point`.
        point: The options that differ between the proposals, with their values.
    """

    recipe: str
    only: str
    words: tuple[str, ...]
    point: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """Settings that differ between the proposals, as text."""
        return label([*self.point])

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.only}, {self.told}" if self.told else self.only

    def experiment(self, seed: int, seconds: Seconds) -> Experiment:
        """Make the experiment for a run of `seconds` seconds."""
        words = [self.recipe, *self.words, *duration_words(self.recipe, seconds)]
        _, chosen = parse_with_seed("plan", SeveralSeeds, words, seed)
        return pick(self.recipe, chosen, self.only)

    def command(self, start: str, seconds: Seconds) -> str:
        """Command that starts the proposal on real machines."""
        limit = duration_words(self.recipe, seconds) or ["--max-seconds", f"{seconds:g}"]
        words = [*start.split(), self.recipe, "--only", self.only, *self.words, *limit]
        return shlex.join(["edgegossip", *words])


def duration_words(recipe: str, seconds: Seconds) -> Words:
    """Options that set the duration of a run, if the recipe has any."""
    has_seconds = "seconds" in argument_names(load_recipe(recipe))
    return ["--seconds", f"{seconds:g}"] if has_seconds else []


def candidates(
    name: str, values: SweptValues, own: tuple[str, ...], num_machines: int
) -> tuple[Comparison, dict[str, list[Proposal]]]:
    """List the settings to try for each algorithm of a recipe, the most promising first.

    An algorithm is tried with five learning rates and some values of its own settings
    (`Comparison.tunable`). If the user gives an option several values, these are tried instead;
    a single value is fixed.

    Args:
        name: Name of the recipe.
        values: Command-line arguments after the recipe's name.
        own: Options of the plan itself, which the recipe does not have.
        num_machines: Number of machines.

    Returns:
        The recipe's comparison as typed, and the proposals by algorithm name.

    Raises:
        UsageError: If the recipe, a setting or a value is invalid.
    """
    fixed = values.kept(*own)
    comparison, number = _made_for(num_machines, name, fixed)
    for option, typed in values.swept.items():
        for value in typed:  # a wrong one would be found hours later
            _made_for(num_machines, name, [*fixed, option, value])
    found = {}
    for only in comparison.experiments:
        points = _points(_values_to_try(name, values, comparison, only))
        found[only] = [
            Proposal(
                recipe=name,
                only=only,
                words=(*fixed, *point, *number),
                point=tuple(point),
            )
            for point in points
        ]
    return comparison, found


def _values_to_try(
    name: str, values: SweptValues, comparison: Comparison, only: str
) -> Mapping[str, Words]:
    """Values to try for each option, the most promising first."""
    own = comparison.tunable.get(only, {})
    tried = {_option(argument): [f"{x:g}" for x in some] for argument, some in own.items()}
    if (lr := _default(load_recipe(name), "lr")) is not None:
        tried["--lr"] = [f"{lr * factor:.3g}" for factor in FACTORS]
    of_some = {_option(each) for some in comparison.tunable.values() for each in some}
    for option, typed in values.swept.items():
        if option in tried or option not in of_some:
            tried[option] = typed
    return {option: some for option, some in tried.items() if option not in values.given}


def _points(tried: Mapping[str, Words]) -> list[Words]:
    """All combinations, ordered by the number of values that are not the most promising ones.

    >>> _points({"--p": ["1", "2"], "--lr": ["3", "4"]})[:3]
    [['--p', '1', '--lr', '3'], ['--p', '1', '--lr', '4'], ['--p', '2', '--lr', '3']]
    """
    combinations = itertools.product(*(enumerate(some) for some in tried.values()))
    ordered = sorted(combinations, key=lambda each: sum(index > 0 for index, _ in each))
    return [
        [
            word
            for option, (_, value) in zip(tried, each, strict=True)
            for word in (option, value)
        ]
        for each in ordered
    ]


def _option(argument: str) -> str:
    return "--" + argument.replace("_", "-")


def _default(make: Callable[..., Any], argument: str) -> float | None:
    """Default of a recipe's argument; None if it is not a number."""
    for name, parameter in inspect.signature(make).parameters.items():
        default = parameter.default
        if is_dataclass(default):
            default = getattr(default, argument, None)
        elif name != argument:
            continue
        if isinstance(default, int | float):
            return default
    return None


def _made_for(wanted: int, name: str, words: Words) -> tuple[Comparison, Words]:
    """Make the recipe for `wanted` machines, one of which may be its server."""
    for num_workers in (wanted, wanted - 1):
        number = ["--num-workers", str(num_workers)]
        _, _, chosen = parse_recipe("plan", SeveralSeeds, [name, *words, *number])
        if not isinstance(chosen, Comparison):
            raise UsageError(f"recipe {name!r} is a single run; plan needs a comparison")
        if {each.num_workers for each in chosen.experiments.values()} == {wanted}:
            return chosen, number
    raise UsageError(f"recipe {name!r} cannot be made for {wanted} machines")
