"""The algorithms that CONTRIBUTING.md writes, as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.arrivals import require_that_arrivals_count
from tests.schemas import SchemaCheck
from tests.worlds import NUM_PARAMS, UNEVEN, make_world

from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.topology import ring

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    for code in codes:
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("name", "kind", "num_sent"),
    [("HalfGossip", "params", 40 * 2 * NUM_WORKERS), ("AgeingPush", "push", 40 * NUM_WORKERS)],
)
def test_an_algorithm_of_the_page_runs_and_sends_what_its_schema_says(
    page: ModuleType, name: str, kind: str, num_sent: int
) -> None:
    algorithm = getattr(page, name)(topology=ring(NUM_WORKERS), num_rounds=40)
    check = SchemaCheck.of(algorithm, torch.zeros(NUM_PARAMS))
    world = make_world(algorithm, platforms=UNEVEN, observer=check)
    assert world.run()
    assert check.num_sent[kind] == num_sent
    apart = consensus_distance(torch.stack([state.params for state in world.states]))
    assert apart < 1.5  # targets are some 3 apart


def test_what_arrives_while_the_one_without_waiting_trains_stays_in(page: ModuleType) -> None:
    require_that_arrivals_count(page.AgeingPush(topology=ring(NUM_WORKERS), num_rounds=40))
