"""Swept values: a recipe's options with several values, their combinations, and seeds."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from edgegossip.cli.options import ManyRunsOptions
from edgegossip.contract.errors import UsageError
from edgegossip.contract.ranges import check_range
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.tuning import check_seeds

Words: TypeAlias = list[str]
_FREE = (
    "--out",
    "--threads",
    "--processes",
    "--pool",
    "--ray-address",
    "--resume",
    "--seeds",
)
"""Options that do not affect runs."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds(ManyRunsOptions):
    """Options for trying settings.

    Args:
        seeds: Seeds for each setting, e.g. 0 1 2 or 0..4.
        held_out: Share of the training samples to hold out for ranking settings. With 0,
            settings are ranked on test samples, so their accuracy is not a valid result.
    """

    seeds: tuple[int, ...] = (0,)
    held_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("held_out", self.held_out, "in [0, 1)")
        check_seeds(self.seeds)


@dataclass(frozen=True, kw_only=True)
class SweptValues:
    """Command-line arguments after a recipe's name.

    Args:
        fixed: Options with one value, or with several values as one setting.
        swept: Values to try, by option.
    """

    fixed: Words
    swept: Mapping[str, Words]

    @property
    def points(self) -> list[Words]:
        """Return all combinations of the swept values, as typed."""
        return [
            [word for pair in zip(self.swept, values, strict=True) for word in pair]
            for values in itertools.product(*self.swept.values())
        ]

    @property
    def given(self) -> set[str]:
        """Names of the fixed options."""
        return {option.partition("=")[0] for option, _ in _grouped(self.fixed)}

    def kept(self, *other: str) -> Words:
        """The words of the fixed options that affect runs.

        Args:
            other: Further options to omit.
        """
        groups = _grouped(self.fixed)
        return [w for o, values in groups if o not in (*_FREE, *other) for w in (o, *values)]


def split_values(command: str, name: str, words: Sequence[str]) -> SweptValues:
    """Separate the recipe's options with several values from all other options.

    Args:
        command: Name of the command, for messages.
        name: Name of the recipe.
        words: Command-line arguments after the recipe's name.

    >>> split_values("sweep", "quickstart", ["--lr", "0.1", "0.2", "--seeds", "0..2"])
    SweptValues(fixed=['--seeds', '0', '1', '2'], swept={'--lr': ['0.1', '0.2']})
    """
    one_value = {f"--{each}" for each in _options_of_one_value(load_recipe(name))}
    fixed: Words = []
    swept: dict[str, Words] = {}
    for option, values in _grouped(words):
        if option == "--seed":
            raise UsageError(f"{command} has --seeds, such as 0..4; leave out --seed")
        if len(values) > 1 and option in one_value:
            swept[option] = [*dict.fromkeys(values)]
        else:
            fixed += [option, *(number for value in values for number in _numbers(value))]
    return SweptValues(fixed=fixed, swept=swept)


def label(point: Words) -> str:
    """Name a combination of values.

    >>> label(["--lr", "0.1", "--batch-size", "32"])
    'lr = 0.1, batch-size = 32'
    """
    pairs = zip(point[::2], point[1::2], strict=True)
    return ", ".join(f"{option.removeprefix('--')} = {value}" for option, value in pairs)


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, Words]]:
    """Group each option with its values."""
    option, values = "", Words()
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if option:
            yield option, values
        option, values = word, []
    if option:
        yield option, values


def _numbers(value: str) -> Iterator[str]:
    """Expand a range."""
    found = _RANGE.fullmatch(value)
    if found is None:
        yield value
    else:
        yield from map(str, range(int(found[1]), int(found[2]) + 1))


def _options_of_one_value(make: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(make).parameters.items():
        settings = parameter.default
        kinds = (
            {each.name: each.type for each in fields(settings)}
            if is_dataclass(settings)
            else {name: parameter.annotation}
        )
        for each, kind in kinds.items():
            if "tuple" not in str(kind):
                yield each.replace("_", "-")
