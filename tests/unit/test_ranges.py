"""Ranges: what the words say is what is checked."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from edgegossip.contract.ranges import check_counts, check_range


@pytest.mark.parametrize(
    ("words", "inside", "outside"),
    [
        ("at least 1", (1, 2.5, math.inf), (0, 0.999, -1, math.nan, None)),
        ("above 0", (1e-300, math.inf), (0, -1e-300, math.nan)),
        ("above 0 bytes/s and finite", (1e300,), (0, math.inf)),
        ("at least 0 and finite", (0, 1e300), (math.inf, -1e-300)),
        ("in [0, 1)", (0, 0.9999999999999999), (1, -1e-300, 1.5)),
        ("in (0, 1]", (1e-300, 1), (0, 1.0000000000000002)),
        ("in [0, inf) seconds", (0, 1e300), (math.inf, -1)),
        ("above 0 and finite, or None", (None, 1), (0, math.inf)),
    ],
)
def test_what_is_within_passes_and_all_else_is_named(
    words: str, inside: tuple[float | None, ...], outside: tuple[float | None, ...]
) -> None:
    for value in inside:
        check_range("x", value, words)
    for value in outside:
        with pytest.raises(ValueError, match=r"^x must be .*, got ") as caught:
            check_range("x", value, words)
        assert str(caught.value) == f"x must be {words}, got {value!r}"


def test_whole_numbers_of_numpy_count() -> None:
    check_counts(SimpleNamespace(rounds=np.int64(3)), "rounds")
    with pytest.raises(ValueError, match="rounds must be a whole number, got True"):
        check_counts(SimpleNamespace(rounds=True), "rounds")
