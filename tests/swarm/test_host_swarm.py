"""Real hosts survive what machines, networks and one liar do to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.algorithms import ALL, NUM_WORKERS, PEERS
from tests.host_swarm import (
    KINDS,
    LIES,
    NOTICED,
    SLACK,
    Disturbance,
    World,
    check,
    check_server,
    check_sharing,
    check_staged,
    check_standby,
    digest,
    draw_server_world,
    draw_sharing_world,
    draw_staged_world,
    draw_standby_world,
    draw_world,
    longer,
    longest_pause,
)
from tests.virtual import Wire

from edgegossip.core.protocol import Rank, Seconds

ONE_SEED = os.environ.get("EDGEGOSSIP_SWARM_SEED")
BATCHES = [range(first, first + 10) for first in range(0, 200, 10)]
SERVER_BATCHES = [range(first, first + 8) for first in range(0, 32, 8)]
MANY_BATCHES = [range(first, first + 100) for first in range(200, 10_000, 100)]


@contextmanager
def replayable(seed: int) -> Iterator[None]:
    """Say in a failure which world it was, and how to see it again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {draw_world(seed)}")
        error.add_note(f"again: python -m tests.host_swarm --first {seed} --worlds 1")
        raise


@pytest.mark.parametrize("seeds", BATCHES, ids=str)
def test_no_world_breaks_a_host(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check(draw_world(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", MANY_BATCHES, ids=str)
def test_none_of_very_many_worlds_breaks_a_host(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check(draw_world(seed))


@pytest.mark.parametrize(
    "seeds", [range(first, first + 8) for first in range(0, 32, 8)], ids=str
)
def test_no_world_breaks_the_hosts_of_a_parameter_server(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check_server(draw_server_world(seed))


@pytest.mark.parametrize(
    "seeds", [range(first, first + 6) for first in range(0, 24, 6)], ids=str
)
def test_no_world_leaves_workers_without_a_server(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check_standby(draw_standby_world(seed))


@pytest.mark.parametrize(
    "seeds", [range(first, first + 7) for first in range(0, 28, 7)], ids=str
)
def test_no_world_breaks_the_hosts_of_stages(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check_staged(draw_staged_world(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(first, first + 24) for first in range(24, 600, 24)], ids=str
)
def test_none_of_many_worlds_leaves_workers_without_a_server(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check_standby(draw_standby_world(seed))


@pytest.mark.parametrize(
    "seeds", [range(first, first + 6) for first in range(0, 24, 6)], ids=str
)
def test_no_world_sets_servers_that_share_a_model_apart(seeds: range) -> None:
    for seed in seeds:
        with replayable(seed):
            check_sharing(draw_sharing_world(seed))


def test_one_seed_gives_one_trace() -> None:
    seeds = [seed for seed in range(60) if draw_world(seed).disturbances][:8]
    traces = [digest(check(draw_world(seed))) for seed in seeds]
    assert [digest(check(draw_world(seed))) for seed in seeds] == traces
    assert len(set(traces)) == len(traces)


def calm(name: str, step_seconds: Seconds = 0.1) -> World:
    """A world in which nothing goes wrong."""
    return replace(
        draw_world(0, name),
        algorithm=ALL[name],
        step_seconds=(step_seconds,) * NUM_WORKERS,
        start_at=(0.0,) * NUM_WORKERS,
        wire=Wire(),
        disturbances=(),
        meet_seconds=2.0,
        liar=None,
        lie="",
    )


@pytest.mark.parametrize("name", PEERS)
def test_two_that_join_late_do_not_wait_for_each_other(name: str) -> None:
    check(replace(calm(name), start_at=(0.0, 0.0, 0.0, 3.0, 3.0)))


@pytest.mark.parametrize("name", PEERS)
def test_one_that_was_cut_off_and_is_slow_holds_nobody_up(name: str) -> None:
    slow: Rank = 2
    steps = [0.05] * NUM_WORKERS
    steps[slow] = 8 * 0.05
    away = Disturbance(kind="partition", at=2.0, ranks=(slow,), seconds=10.0)
    world = replace(calm(name), step_seconds=tuple(steps), disturbances=(away,))
    world = replace(world, algorithm=longer(PEERS[name], 8))
    run = check(world)
    others = [rank for rank in range(NUM_WORKERS) if rank != slow]
    pause = longest_pause(run, others, after=away.at + away.seconds)
    assert pause <= max(away.seconds / 10, world.round_seconds + SLACK)
    assert longest_pause(run, others, after=0.0) <= NOTICED + world.round_seconds + SLACK


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "name", ["epoch-gossip", "gosgd", "stochastic-gradient-push", "diloco"]
)
def test_one_that_lies_about_itself_stops_nobody(name: str, lie: str) -> None:
    check(replace(calm(name), liar=1, lie=lie))
    again = Disturbance(kind="kill", at=1.0, ranks=(3,), seconds=0.5, with_disk=False)
    check(replace(calm(name), liar=1, lie=lie, disturbances=(again,)))


def test_worlds_have_every_size_and_every_kind_of_trouble() -> None:
    worlds = [draw_world(seed) for seed in range(300)]
    assert {world.name for world in worlds} == {*PEERS}
    assert {world.num_workers for world in worlds} >= {3, 4, 5}
    assert {each.kind for world in worlds for each in world.disturbances} == {*KINDS}
    assert {world.lie for world in worlds} == {*LIES, ""}
    assert all(any(getattr(w.wire, what) for w in worlds) for what in ("late", "lost", "twice"))
    assert any(any(world.start_at) for world in worlds)
