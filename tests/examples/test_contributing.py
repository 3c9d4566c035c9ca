"""The algorithm that CONTRIBUTING.md writes, as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.schemas import SchemaCheck
from tests.worlds import NUM_PARAMS, UNEVEN, make_world

from edgegossip.core.metrics import consensus_distance
from edgegossip.core.topology import ring

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def half_gossip(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("half_gossip")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module.HalfGossip(topology=ring(NUM_WORKERS), num_rounds=40)


def test_the_algorithm_of_the_page_runs_and_sends_what_its_schema_says(
    half_gossip: Any,  # noqa: ANN401
) -> None:
    check = SchemaCheck.of(half_gossip, torch.zeros(NUM_PARAMS))
    world = make_world(half_gossip, platforms=UNEVEN, observer=check)
    assert world.run()
    assert check.num_sent["params"] == 40 * 2 * NUM_WORKERS
    apart = consensus_distance(torch.stack([state.params for state in world.states]))
    assert apart < 1.0  # targets are some 3 apart
