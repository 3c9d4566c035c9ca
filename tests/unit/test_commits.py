"""Commits are counted from what was sent, and each once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.algorithms import PARAMETER_SERVERS
from tests.small_runs import Recorder as StatusRecorder, events, small_run, summary
from tests.worlds import UNEVEN, make_world

from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.contract.protocol import Message
from edgegossip.runs.comparison import compare
from edgegossip.runs.events import Commits, EventLog
from edgegossip.runs.experiment import Comparison
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


def test_a_simulated_run_says_who_is_who_and_counts_commits(tmp_path: Path) -> None:
    small = replace(small_run(), algorithm=BSP(num_workers=3, num_rounds=4))
    recorder = StatusRecorder()
    comparison = Comparison(experiments={"bsp": small}, baseline="bsp")
    compare(comparison, out=tmp_path, num_threads=0, progress=recorder)
    first = events(tmp_path / "bsp")[0]
    assert first["roles"] == ["server", "worker", "worker", "worker"]
    assert first["evaluated"] == [0]
    assert [size > 0 for size in first["shard_sizes"]] == [False, True, True, True]
    last = recorder.statuses[-1]
    assert last.commits == 12
    assert last.roles == "server: rank 0, worker: ranks 1 to 3"
    # A server's platform trains nothing: (320 + 130 + 100) / (3 x 100).
    assert summary(tmp_path)["throughput_bound"] == pytest.approx(550 / 300)
