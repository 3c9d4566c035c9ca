"""Settings to try: all combinations of some values of a recipe's arguments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgegossip.recipes.call import value_text

Grid: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Values to try of each argument, the most promising first, by their text."""


@dataclass(frozen=True)
class Setting:
    """One combination of values.

    Args:
        values: Values by argument.
        texts: The same values as texts, such as a user typed them.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]

    @property
    def label(self) -> str:
        """Name in tables.

        >>> Setting({"lr": 0.1, "batch_size": 32}, {"lr": "1e-1", "batch_size": "32"}).label
        'lr = 1e-1, batch-size = 32'
        """
        pairs = self.texts.items()
        return ", ".join(f"{name.replace('_', '-')} = {text}" for name, text in pairs)


def settings_of(grid: Grid) -> list[Setting]:
    """All combinations of values; the last argument varies fastest.

    >>> [each.label for each in settings_of({"p": {"1": 1, "2": 2}, "lr": {"3": 3}})]
    ['p = 1, lr = 3', 'p = 2, lr = 3']
    """
    combinations = itertools.product(*(values.items() for values in grid.values()))
    return [
        Setting(
            {name: value for name, (_, value) in zip(grid, each, strict=True)},
            {name: text for name, (text, _) in zip(grid, each, strict=True)},
        )
        for each in combinations
    ]


def by_text(*values: object) -> dict[str, Any]:
    """Values by their text, for a `Grid`."""
    return {value_text(value): value for value in values}
