"""Checks of arguments: for ranges, the check parses the same words that the error shows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from numbers import Integral

_WORDS = re.compile(
    r"(at least|above) ([\d.e-]+)\b|in ([\[(])([\d.e-]+), ([\d.e-]+|inf)([\])])"
)


def check_ranges(owner: object, **words: str) -> None:
    """Check attributes of `owner` against their ranges; see `check_range`.

    Raises:
        ValueError: If an attribute is out of range.
    """
    for name, allowed in words.items():
        check_range(name, getattr(owner, name), allowed)


def check_counts(owner: object, *names: str) -> None:
    """Check that these attributes of `owner` are whole numbers, also of NumPy, or None.

    Raises:
        ValueError: If an attribute is anything else, such as 1e6 or True.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, Integral | None):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_choices(owner: object, **allowed: Sequence[str]) -> None:
    """Check that attributes of `owner` are among the allowed words.

    Raises:
        ValueError: If an attribute is not an allowed word.
    """
    for name, words in allowed.items():
        if (given := getattr(owner, name)) not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {given!r}")


def check_type(name: str, value: object, kind: type, example: str) -> None:
    """Check that `value` is an instance of `kind`.

    >>> check_type("ratio", "half", float, "0.5")
    Traceback (most recent call last):
        ...
    ValueError: ratio must be an instance of float, such as 0.5, got 'half'

    Args:
        name: Name of the argument.
        value: Any object.
        kind: The allowed class, which may be abstract.
        example: Python code of an allowed value.

    Raises:
        ValueError: If `value` is not an instance of `kind`, for example a class instead of its
            instance.
    """
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.80}"
        raise ValueError(
            f"{name} must be an instance of {kind.__name__}, such as {example}, got {given}"
        )


def check_range(name: str, value: float | str | None, words: str) -> None:
    """Check that `value` is in the range that `words` describe.

    >>> check_range("momentum", 0.9, "in [0, 1)")
    >>> check_range("timeout", None, "above 0 or None")
    >>> check_range("weight", "auto", 'in [0, 1] or "auto"')
    >>> check_range("bandwidth", float("nan"), "above 0 bytes/s and finite")
    Traceback (most recent call last):
        ...
    ValueError: bandwidth must be above 0 bytes/s and finite, got nan

    Args:
        name: Name of the argument.
        value: Any number, or a word.
        words: "at least 1", "above 0" or "in [0, 1)", optionally followed by a unit, "and
            finite", words in quotation marks, and "or None".

    Raises:
        ValueError: If `value` is out of range.
    """
    if value is None:
        is_within = words.endswith(" or None")
    elif isinstance(value, str):
        is_within = f'"{value}"' in words
    else:
        low, high = _limits(words)
        is_within = low <= value <= high
    if not is_within:
        raise ValueError(f"{name} must be {words}, got {value!r}")


@cache
def _limits(words: str) -> tuple[float, float]:
    """The smallest and the largest allowed number."""
    match = _WORDS.match(words)
    assert match is not None, words
    bound, least, opening, low, high, closing = match.groups()
    lowest, highest = float(least or low), float(high or math.inf)
    if bound == "above" or opening == "(":
        lowest = math.nextafter(lowest, math.inf)
    if closing == ")" or " and finite" in words:
        highest = math.nextafter(highest, 0.0)
    return lowest, highest


def check_rank(rank: int, num_workers: int) -> None:
    """Raise `ValueError` unless `rank` is that of one of `num_workers` workers.

    >>> check_rank(3, 3)
    Traceback (most recent call last):
    ValueError: rank must be in 0..2, got 3
    """
    if not 0 <= rank < num_workers:
        raise ValueError(f"rank must be in 0..{num_workers - 1}, got {rank}")
