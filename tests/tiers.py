"""Which cases run each time (`make test`), and which only before a merge (`make check`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

thorough = pytest.mark.thorough

REPRESENTATIVES = frozenset(
    {
        "bsp",  # a barrier
        "adsp",  # no barrier, and a search
        "asp-standby",
        "adacomm-servers",
        "bsp-tuned",
        "gossip",
        "epoch-gossip",
        "gosgd",
        "adpsgd",
        "choco-gossip",
        "sparse-push",
        "diloco",
        "epoch-gossip-balanced-exact",
        "gossip-balanced-gossip",
        "edge-squeeze",
        "decoupled",
        "pipelined-diloco",
        "halos",
        "gosgd-trailing",
        "epoch-gossip-balanced-controlled",
        "epoch-gossip-balanced-moments",
        "epoch-gossip-claimed",
        "gosgd-clipped",
    }
)
"""One algorithm of each family in `tests.algorithms.ALL`."""


def by_name(
    cases: Mapping[str, Any] | Sequence[str], plain: Collection[str] = REPRESENTATIVES
) -> list[Any]:
    """Parameters with names for their ids; those not in `plain` are thorough.

    A name without a case is its own case.

    >>> [each.id for each in by_name({"gossip": 1, "all-reduce": 2}) if not each.marks]
    ['gossip']
    """
    if not isinstance(cases, Mapping):
        cases = dict(zip(cases, cases, strict=True))
    assert not {*plain}.isdisjoint(cases), "no case would run each time"
    return [
        pytest.param(case, id=name, marks=() if name in plain else thorough)
        for name, case in cases.items()
    ]


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of which all but the first few are thorough.

    >>> [(each.values, len(each.marks)) for each in first(1, ["a", ("b", "c")])]
    [(('a',), 0), (('b', 'c'), 1)]
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=() if index < number else thorough)
        for index, row in enumerate(rows)
    ]
