"""Workers elect another server: soon, with nearly all commits, and never two that count."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.algorithms import NUM_WORKERS, PARAMETER_SERVERS
from tests.worlds import EVEN, UNEVEN, Recorder, Watched, make_world

from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.standby.standby import Standby, StandbyState
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import Event, Rank, Seconds, WorkerState
from edgegossip.sim.fault import Crash, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

LINKS = Links(default=Link(latency=0.05))
NOTICED: Seconds = 0.2
SOON: Seconds = 3.0
NUM = NUM_WORKERS - 1
FASTEST_LAST = [*EVEN[:-1], Platform(throughput=8.0)]

WHOLE = {name: each for name, each in PARAMETER_SERVERS.items() if each.answers_whole}

each_server = pytest.mark.parametrize("algorithm", WHOLE.values(), ids=WHOLE)


@dataclass
class Log:
    """When somebody served and merged, by term, and how many commits were answered."""

    began: dict[int, Seconds] = field(default_factory=dict)
    merged_at: dict[int, list[Seconds]] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    answered: dict[Rank, int] = field(default_factory=dict)
    first_counts: dict[int, dict[Rank, int]] = field(default_factory=dict)
    answered_before: dict[int, dict[Rank, int]] = field(default_factory=dict)

    def look(self, state: WorkerState, event: Event, now: Seconds) -> None:
        assert isinstance(state, StandbyState)
        if state.worker is not None:
            self.answered[state.rank] = state.worker.num_commits
        server, term = state.server, state.election.term
        if server is None or server.is_new or not state.election.is_leading:
            return
        if term not in self.began:
            self.began[term] = now
            self.first_counts[term] = {**server.num_commits}
            self.answered_before[term] = {**self.answered}
        num_merged = sum(server.num_commits.values())
        if num_merged != self.merged.get(term, num_merged):
            self.merged_at.setdefault(term, []).append(now)
        self.merged[term] = num_merged


def run(
    algorithm: Standby,
    *script: Fault,
    platforms: Sequence[Platform] = UNEVEN,
) -> tuple[Simulator[Any], Log]:
    log = Log()
    faults = Faults(script=script, detection_time=NOTICED)
    world = make_world(
        Watched(algorithm, after=log.look), platforms=platforms, links=LINKS, faults=faults
    )
    assert world.run()
    return world, log


def leaders(world: Simulator[Any]) -> list[Rank]:
    return [state.rank for state in world.states if state.election.is_leading]


@each_server
def test_workers_have_another_server_in_three_seconds_whenever_theirs_is_lost(
    algorithm: ParameterServer,
) -> None:
    longer = Standby(inner=replace(algorithm, num_rounds=15))
    for seed in range(5):
        at = random.Random(seed).uniform(1.0, 40.0)
        world, log = run(longer, Crash(at=at, rank=0))
        first, *later = log.began
        assert first == 0
        assert len(later) == 1
        (term,) = later
        assert log.began[term] < at + NOTICED + SOON
        # What was answered is in the new server's model, but for one commit at most.
        counts, answered = log.first_counts[term], log.answered_before[term]
        assert all(answered[j] - counts[j] <= 1 for j in longer.inner.workers)
        assert all(world.states[j].round == 15 for j in longer.inner.workers)


@pytest.mark.parametrize("name", ["bsp", "asp"])
def test_no_model_is_shown_that_is_not_newer_than_that_of_the_elected_one(name: str) -> None:
    recorder = Recorder()
    algorithm = Standby(inner=replace(PARAMETER_SERVERS[name], num_rounds=15))
    faults = Faults(script=(Crash(at=6.0, rank=0),), detection_time=NOTICED)
    world = make_world(
        algorithm, platforms=UNEVEN, links=LINKS, faults=faults, observer=recorder
    )
    assert world.run()
    copies = [message for message, _ in recorder.messages if message.kind == "copy"]
    assert len(copies) == NUM - 1
    # Three of five have elected: of two workers no model is newer, and of one it may be.
    num_models = sum("params" in copy.payload for copy in copies)
    assert num_models <= (0 if name == "bsp" else 1)


def test_model_of_the_run_is_that_of_the_worker_that_serves() -> None:
    world, _ = run(Standby(inner=PARAMETER_SERVERS["asp"]), Crash(at=3.0, rank=0))
    (leader,) = (rank for rank in leaders(world) if rank > 0)
    estimates = world.estimates()
    assert [*estimates] == [leader]
    assert estimates[leader] is world.states[leader].server.params


def test_server_that_comes_back_serves_no_more() -> None:
    script = (Crash(at=3.0, rank=0), Recover(at=3.1, rank=0))
    world, _ = run(Standby(inner=ASP(num_workers=NUM, num_rounds=30)), *script)
    (leader,) = leaders(world)
    assert leader > 0


def test_one_server_after_the_other_may_be_lost_as_long_as_most_are_there() -> None:
    algorithm = Standby(inner=ASP(num_workers=NUM, num_rounds=40))
    world, log = run(algorithm, Crash(at=4.0, rank=0))
    second = max(log.began) % NUM_WORKERS
    world, log = run(algorithm, Crash(at=4.0, rank=0), Crash(at=20.0, rank=second))
    assert len(log.began) == 3
    left = {*algorithm.inner.workers} - {second}
    assert all(world.states[j].round == 40 for j in left)
    # Nor is more lost of what the second server has itself committed.
    term = max(log.began)
    counts, answered = log.first_counts[term], log.answered_before[term]
    assert all(answered[j] - counts[j] <= 1 for j in algorithm.inner.workers)


def test_worker_that_serves_commits_no_faster_than_others_hear_of_it() -> None:
    """Or it would leave them no time, and take with it what nobody else has."""
    algorithm = Standby(inner=ASP(num_workers=NUM, num_rounds=10**6))
    platforms = [*EVEN[:-1], Platform(throughput=100.0)]
    fast = Links(default=Link(latency=1.0))
    faults = Faults(script=(Crash(at=4.0, rank=0),), detection_time=NOTICED)
    elected = make_world(algorithm, platforms=platforms, links=fast, faults=faults)
    elected.run(until=20.0)
    (leader,) = (rank for rank in leaders(elected) if rank > 0)
    assert leader == 4, "it has committed most"
    before = elected.states[leader].worker.num_commits
    elected.run(until=30.0)
    # A round trip of two seconds each, as for the others.
    assert elected.states[leader].worker.num_commits - before <= 6


def test_with_two_on_standby_the_last_to_commit_may_be_lost_with_the_server() -> None:
    for standby in (1, 2):
        served = ASP(num_workers=NUM, num_rounds=40)
        algorithm = Standby(inner=served, num_standbys=standby)
        # Worker 4 is the fastest; when it goes with the server, so do its commits ...
        gone = (Crash(at=5.2, rank=0), Crash(at=5.2, rank=4))
        _, log = run(algorithm, *gone, platforms=FASTEST_LAST)
        term = max(log.began)
        lost = log.answered_before[term][4] - log.first_counts[term][4]
        # ... that only it knew of, unless another one was given the model too.
        assert lost <= 1 if standby == 2 else lost > 1


def test_server_that_most_cannot_reach_merges_nothing_and_steps_down_when_it_is_back() -> None:
    algorithm = Standby(inner=ASP(num_workers=NUM, num_rounds=60))
    cut = Partition(start=5.0, end=30.0, group=(0, 1))
    world, log = run(algorithm, cut)
    term = max(log.began)
    assert {term % NUM_WORKERS} == {*leaders(world)} <= {2, 3, 4}
    merged = log.merged_at[0]
    assert not [at for at in merged if at > cut.start + NOTICED]
    assert [at for at in log.merged_at[term] if cut.start < at < cut.end]
    assert all(world.states[j].round == 60 for j in algorithm.inner.workers)


def test_barrier_in_a_minority_is_not_passed() -> None:
    algorithm = Standby(inner=BSP(num_workers=NUM, num_rounds=30))
    _, log = run(algorithm, Partition(start=5.5, end=30.0, group=(0, 1, 2)))
    # Three of five are a majority, and go on with each other.
    assert set(log.began) == {0}
    cut = Partition(start=5.5, end=30.0, group=(0, 1))
    _, log = run(algorithm, cut)
    assert not [at for at in log.merged_at[0] if cut.start + NOTICED < at]


def test_server_alone_ends_with_an_error_that_says_why() -> None:
    algorithm = Standby(inner=ASP(num_workers=NUM, num_rounds=500, patience=30.0))
    crashes = [Crash(at=5.0, rank=rank) for rank in (2, 3, 4)]
    with pytest.raises(ServerLostError, match="more than half of all 5 ranks"):
        run(algorithm, *crashes)


def test_workers_too_few_to_elect_end_with_an_error() -> None:
    algorithm = Standby(inner=ASP(num_workers=NUM, num_rounds=500, patience=30.0))
    crashes = [Crash(at=5.0, rank=rank) for rank in (0, 1, 2)]
    with pytest.raises(ServerLostError, match="waited 30 s for the server"):
        run(algorithm, *crashes)


@pytest.mark.parametrize("standby", [0, NUM + 1])
def test_standby_out_of_range_is_refused(standby: int) -> None:
    with pytest.raises(ValueError, match="num_standbys must be in"):
        Standby(inner=ASP(num_workers=NUM, num_rounds=5), num_standbys=standby)


def test_without_a_loss_standby_changes_no_bit_of_the_model() -> None:
    models = []
    served = BSP(num_workers=NUM, num_rounds=9)
    for algorithm in (served, Standby(inner=served)):
        world = make_world(algorithm, platforms=UNEVEN, links=LINKS)
        assert world.run()
        models.append(world.states[0].estimate.tolist())
    assert models[0] == models[1]
