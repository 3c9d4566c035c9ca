"""Errors say what was given, what is allowed and what was probably meant."""

from __future__ import annotations

import pytest

from edgegossip.contract import errors
from edgegossip.contract.errors import EdgeGossipError, unknown_name


def test_a_near_miss_is_hinted_at() -> None:
    text = unknown_name("recipe", "quikstart", {"quickstart": 1, "mnist": 2})
    assert text.startswith("unknown recipe 'quikstart'; choose one of 'mnist', 'quickstart'")
    assert text.endswith("(did you mean 'quickstart'?)")


def test_a_far_miss_is_not() -> None:
    assert "did you mean" not in unknown_name("recipe", "zzz", ["quickstart"])


def test_of_many_names_only_the_one_that_was_meant_is_said() -> None:
    names = [f"edgegossip/figure{number}" for number in range(20)]
    assert unknown_name("study", "edgegossip/figur7", names) == (
        "unknown study 'edgegossip/figur7'; did you mean 'edgegossip/figure7'?"
    )
    assert all(name in unknown_name("study", "zzz", names) for name in names)


def test_there_may_be_nothing_to_choose_from() -> None:
    assert "unknown recipe 'x'" in unknown_name("recipe", "x", [])


@pytest.mark.parametrize("given", ["fig6", "edgegossip/fg6", "edgegosip/fig6"])
def test_a_name_without_its_prefix_is_hinted_at(given: str) -> None:
    text = unknown_name("study", given, ["edgegossip/fig6", "edgegossip/fig12"])
    assert text.endswith("(did you mean 'edgegossip/fig6'?)")


def test_names_that_differ_in_a_number_are_listed_by_its_value() -> None:
    text = unknown_name("study", "x", ["fig12", "fig3b", "fig3", "table", "12"])
    assert text.endswith("choose one of '12', 'fig3', 'fig3b', 'fig12', 'table'")


@pytest.mark.parametrize(
    "kind",
    [
        errors.UsageError,
        errors.DataError,
        errors.TrainingError,
        errors.RunFolderError,
        errors.LocalProtocolError,
    ],
)
def test_all_our_errors_can_be_caught_as_one(kind: type[EdgeGossipError]) -> None:
    assert issubclass(kind, EdgeGossipError)
    assert not issubclass(kind, ValueError)
