"""Pattern search (Hooke and Jeeves, 1961) for settings, on a grid without edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, TypeAlias

Point: TypeAlias = tuple[int, ...]
"""Steps from the first settings on the grid, one number for each setting."""
Exists: TypeAlias = Callable[[Point], bool]
"""Whether a point stands for settings that can be tried."""
REACH = 3


def next_point(merits: Mapping[Point, Any], start: Point, exists: Exists) -> Point:
    """The point to try next: the nearest to the best one that was not tried.

    Neighbors of the best point, which differ in one setting by one step, come first, and
    higher settings before lower ones. So the search ends inside of what it tried, however far
    away it began, if it has enough trials.

    Args:
        merits: Merits of the points that were tried: the highest wins, or the first of equals.
        start: The first point.
        exists: See `Exists`.

    >>> merits = {(0, 0): 0.5, (1, 0): 0.9, (-1, 0): 0.1, (0, 1): 0.2, (0, -1): 0.2}
    >>> next_point(merits, (0, 0), lambda point: True)
    (2, 0)
    """
    if not merits:
        return start
    best = max(merits, key=lambda point: merits[point])
    steps = product(range(REACH, -REACH - 1, -1), repeat=len(best))
    near = sorted(steps, key=lambda step: sum(each * each for each in step))
    points = (tuple(b + s for b, s in zip(best, step, strict=True)) for step in near)
    return next(point for point in points if point not in merits and exists(point))


def is_inside(point: Point, merits: Mapping[Point, Any], exists: Exists) -> bool:
    """Whether all neighbors of a point that exist were tried.

    >>> is_inside((0,), {(0,): 0.9, (1,): 0.5}, lambda point: point[0] >= 0)
    True
    """
    neighbors = (
        (*point[:k], point[k] + step, *point[k + 1 :])
        for k in range(len(point))
        for step in (1, -1)
    )
    return all(each in merits for each in neighbors if exists(each))
