"""Commits are counted from what was sent, and each once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.algorithms import PARAMETER_SERVERS
from tests.worlds import UNEVEN, make_world

from edgegossip.algorithms.parameter_server.states import ServerState
from edgegossip.core.protocol import Message
from edgegossip.experiments.commits import Commits
from edgegossip.experiments.event_log import EventLog
from edgegossip.sim.fault import Drop, Faults


@pytest.mark.parametrize("name", ["bsp", "asp", "adsp"])
def test_as_many_are_counted_as_the_server_has_merged(name: str, tmp_path: Path) -> None:
    algorithm = replace(PARAMETER_SERVERS[name], resend_after=3.0)
    log = EventLog(tmp_path / "events.jsonl")
    faults = Faults(script=(Drop(probability=0.2),))
    world = make_world(algorithm, platforms=UNEVEN, faults=faults, observer=log)
    assert world.run(until=1000.0)
    state = world.states[0]
    assert isinstance(state, ServerState)
    log.close()
    assert log.num_lost > 0
    assert log.commits.by_rank == state.num_commits


def test_a_server_counts_what_it_receives(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for round in (0, 0, 1):
        log.received(1.0, 0, 2, Message("commit", round), staleness=0)
    log.close()
    assert (log.commits.total, log.commits.by_rank) == (2, {2: 2})


def test_where_nobody_commits_there_is_no_number() -> None:
    commits = Commits()
    assert not commits.add(0, "params", 0)
    assert commits.total is None
