"""Trees of plain values and tensors come back as they were, without pickles."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract.protocol import Message, WorkerState
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.sim.fault import Crash


@dataclass(slots=True)
class Box:
    content: Any
    more: list[int] = field(default_factory=list)


def through_json(tree: object) -> Any:  # noqa: ANN401
    plain, tensors = dismantle(tree)
    return assemble(json.loads(json.dumps(plain)), tensors)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.builds(Box, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=40)
@given(PLAIN)
def test_any_tree_comes_back_with_its_types(tree: object) -> None:
    back = through_json(tree)
    assert back == tree
    assert repr(back) == repr(tree)  # 1 and 1.0 and True are equal, but not the same


def test_a_dict_keeps_its_order() -> None:
    assert list(through_json({3: "c", 1: "a", 2: "b"})) == [3, 1, 2]


def test_floats_that_are_not_finite_come_back() -> None:
    assert through_json([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(through_json(math.nan))


def test_a_dict_that_looks_like_our_own_words_comes_back() -> None:
    tree = {"tensor": "t0", "dataclass": "os:system", "same": 0}
    assert through_json(tree) == tree


def test_tensors_come_back_bit_for_bit_and_on_their_own() -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {"row": base[1], "column": base[:, 1], "number": torch.tensor(3)}
    plain, tensors = dismantle(tree)
    base.zero_()
    back = assemble(plain, tensors)
    assert back["row"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert back["column"].tolist() == [1.0, 5.0, 9.0]
    assert back["number"].dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_a_tensor_in_two_places_is_kept_once() -> None:
    x = torch.ones(2)
    plain, tensors = dismantle([x, {"again": x}, torch.ones(2)])
    assert len(tensors) == 2
    back = assemble(plain, tensors)
    assert back[0] is back[1]["again"]
    assert back[0] is not back[2]


def test_a_dataclass_in_two_places_is_one_again() -> None:
    box = Box(1)
    back = through_json([box, {"again": box}, Box(1), Box(box)])
    assert back[0] is back[1]["again"] is back[3].content
    assert back[0] is not back[2]


def test_frozen_and_keyword_only_dataclasses_come_back() -> None:
    state = WorkerState(rank=3, params=torch.ones(2), round=5)
    crash, back = through_json((Crash(at=1.5, rank=2), state))
    assert crash == Crash(at=1.5, rank=2)
    assert (back.rank, back.round, back.params.tolist()) == (3, 5, [1.0, 1.0])
    assert through_json(Message("kind", 1)).payload == {}


@pytest.mark.parametrize(
    "odd", [{1, 2}, b"bytes", object(), Box, len, 1j], ids=lambda odd: type(odd).__name__
)
def test_what_cannot_be_kept_is_named(odd: object) -> None:
    with pytest.raises(TypeError, match="cannot keep a"):
        dismantle({"a": [odd]})


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "no.such.module:Thing",
        "edgegossip.contract.protocol:Payload",
        "builtins:dict",
    ],
)
def test_reading_builds_nothing_but_dataclasses_of_this_program(name: str) -> None:
    plain = {"dataclass": name, "number": 0, "fields": {}}
    with pytest.raises(ValueError, match="is not a dataclass of this program"):
        assemble(plain, {})


def test_no_constructor_runs() -> None:
    @dataclass
    class Loud:
        x: Tensor

        def __post_init__(self) -> None:
            raise AssertionError

    globals()["Loud"] = Loud
    Loud.__qualname__ = "Loud"
    loud = object.__new__(Loud)
    loud.x = torch.ones(1)
    assert through_json(loud).x.tolist() == [1.0]


def test_a_dataclass_that_has_other_fields_by_now_is_refused() -> None:
    plain, tensors = dismantle(Box(content=1))
    del plain["fields"]["more"]
    with pytest.raises(ValueError, match="had other fields when the checkpoint was made"):
        assemble(plain, tensors)


@thorough
def test_nothing_is_left_for_the_garbage_collector() -> None:
    """In long runs it hardly ever comes round, and each checkpoint would stay in memory."""
    gc.collect()
    gc.disable()
    try:
        plain, tensors = dismantle({"x": Box(torch.ones(3))})
        kept = weakref.ref(tensors["t0"])
        box = assemble(plain, tensors)["x"]
        del tensors, box
        assert kept() is None
    finally:
        gc.enable()
