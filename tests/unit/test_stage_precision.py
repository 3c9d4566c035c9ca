"""How numbers travel between stages: errors, ranges and sizes of a precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.stage_workers import (
    FIRST,
    LAST,
    MIDDLE,
    PARAMS,
    SHAPE,
    Worker,
    batch,
    decoupled,
    gradient,
)

from edgegossip.algorithms.stages.wire import LARGEST, Precision

VALUES = st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=12)
ERRORS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127}


@pytest.mark.parametrize("name", ERRORS)
@given(values=VALUES)
@settings(max_examples=30)
def test_errors_of_a_precision_are_bounded(name: str, values: list[float]) -> None:
    x = torch.tensor(values)[:, None]
    precision = Precision(name)
    error = (precision.decode("x", precision.encode("x", x)) - x).abs()
    largest = float(x.abs().max())
    bound = ERRORS[name] * (x.abs() if name == "bfloat16" else largest)
    assert bool((error <= bound * 1.001 + 1e-30).all())


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1.0, LARGEST, 1e30])
def test_all_that_is_sent_fits_whatever_its_size(name: str, size: float) -> None:
    algorithm = decoupled(precision=name)
    schema = algorithm.schema(PARAMS)
    worker = Worker(algorithm, FIRST)
    worker.start()
    worker.train(batch(-size))
    spec = schema[worker.sent.kind]
    sent = worker.sent
    assert spec.mismatch(sent.payload, sent.numbers) is None
    assert spec.bad_values(sent.payload, sent.numbers) is None
    last = Worker(algorithm, LAST)
    last.start()
    last.hear(MIDDLE, replace(sent, kind="activations-1"))
    last.train(gradient=gradient(size))
    spec, sent = schema[last.sent.kind], last.sent
    assert spec.mismatch(sent.payload, sent.numbers) is None
    assert spec.bad_values(sent.payload, sent.numbers) is None


@pytest.mark.parametrize("name", ERRORS)
def test_values_far_beyond_what_is_usual_are_measured(name: str) -> None:
    specs = Precision(name).specs("x", SHAPE, 4)
    sent = Precision(name).encode("x", gradient(-512.0))
    sizes = [specs[each].magnitude(tensor) for each, tensor in sent.items()]
    assert [size for size in sizes if size is not None] == [pytest.approx(512.0)]


def test_a_precision_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of \['float32', 'bfloat16', 'int8'\]"):
        Precision("float64")
