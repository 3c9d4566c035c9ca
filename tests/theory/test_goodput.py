"""Goodput, compute used and node-seconds of runs that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.scripted import SIZE, message, on_start, world
from tests.worlds import EVEN, UNEVEN, make_world

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Event,
    Finish,
    Message,
    Rank,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
)
from edgegossip.contract.topology import ring
from edgegossip.machine.contention import Contention
from edgegossip.machine.goodput import NodeUse, UsefulSamples
from edgegossip.sim.fault import Crash, Drop, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import ContentionTrace, Platform, Sensitivity

BOARD = Platform(throughput=10.0)
DESK = Platform(throughput=20.0)
TRAIN = Train(torch.zeros(3), Steps(20))  # 2 s on the board, 1 s on the desk
"""Work that the scripted trainer counts as 20 samples."""


def test_a_machine_that_waits_has_processed_less_than_it_could_have() -> None:
    effects: dict[Rank, list[Effect]] = {0: [TRAIN], 1: [TRAIN]}
    found = world(on_start(effects), platforms=(BOARD, DESK)).run().simulator
    # Together, 30 samples a second for 2 s; the desk has finished after one.
    share = 40 / 60
    assert found.use(2.0) == NodeUse(goodput=share, compute_used=share, node_seconds=4.0)


def test_time_to_begin_a_training_is_used_and_gives_no_samples() -> None:
    slow = replace(BOARD, seconds_per_training=2.0)
    found = world(on_start({0: [TRAIN]}), platforms=(slow,)).run().simulator
    assert found.use(4.0) == NodeUse(goodput=0.5, compute_used=1.0, node_seconds=4.0)


def test_training_in_progress_counts_as_far_as_it_is_done() -> None:
    found = world(on_start({0: [TRAIN], 1: [TRAIN]}), platforms=(BOARD, BOARD)).run(0.5)
    assert found.simulator.use(0.5) == NodeUse(goodput=1.0, compute_used=1.0, node_seconds=1.0)
    assert found.simulator.use(0.0) is not None  # nothing is divided by zero


def test_nothing_has_been_possible_at_the_start() -> None:
    found = world(on_start({0: [TRAIN]}), platforms=(BOARD, BOARD)).run(0.0)
    assert found.simulator.use(0.0) == NodeUse(goodput=0.0, compute_used=0.0, node_seconds=0.0)


def test_evaluations_are_work_that_gives_no_samples() -> None:
    found = world(
        on_start({0: [TRAIN, Evaluate(torch.zeros(3))]}),
        num_workers=1,
        platforms=(BOARD,),
        evaluate=lambda params: (0.0, {}),
        evaluation_cost=20.0,
    ).run(4.0)
    assert found.simulator.use(4.0) == NodeUse(goodput=0.5, compute_used=1.0, node_seconds=4.0)


def trains_and_then(*effects: Effect) -> object:
    """Answers of a worker 1 that trains, does as it is told, and trains on; worker 0 rests."""

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        if rank == 0:
            return [Finish()] if isinstance(event, Started) else []
        if isinstance(event, Started):
            return [TRAIN] if not event.has_rejoined else [Finish()]
        return [*effects, TRAIN] if isinstance(event, Trained) and now < 3 else []

    return answer


@pytest.mark.parametrize(
    ("effects", "kept"),
    [
        ((), 0.0),  # nobody else has what it learned
        ((Send(0, message()),), 20.0),
        ((Send(0, Message("forecast", 0)),), 0.0),  # such a message carries nothing
    ],
)
def test_a_crash_loses_what_was_learned_since_the_last_message(
    effects: tuple[Effect, ...], kept: float
) -> None:
    script = (Crash(at=3.0, rank=1), Recover(at=5.0, rank=1))
    found = world(trains_and_then(*effects), 2, *script, platforms=(DESK, BOARD)).run(5.0)  # type: ignore[arg-type]
    use = found.simulator.use(5.0)
    assert use is not None
    # 100 samples of the desk, which rests, and 50 of the board, which worked for 3 s.
    assert use.goodput == pytest.approx(kept / 150)
    assert use.compute_used == pytest.approx(30 / (100 + 30))
    assert use.node_seconds == 5.0 + 3.0


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, 20.0), (1.5, 0.0)])
def test_a_message_that_is_cut_off_by_the_crash_saves_nothing(
    seconds: Seconds, kept: float
) -> None:
    links = Links(default=Link(bandwidth=SIZE / seconds))
    found = world(
        trains_and_then(Send(0, message())),  # type: ignore[arg-type]
        2,
        Crash(at=3.0, rank=1),
        platforms=(DESK, BOARD),
        links=links,
    ).run(4.0)
    use = found.simulator.use(4.0)
    assert use is not None
    assert use.goodput == pytest.approx(kept / 120)


def test_a_lost_message_saves_nothing() -> None:
    script = (Crash(at=3.0, rank=1), Drop(probability=1.0))
    answer = trains_and_then(Send(0, message()))
    found = world(answer, 2, *script, platforms=(DESK, BOARD)).run(4.0)  # type: ignore[arg-type]
    use = found.simulator.use(4.0)
    assert use is not None
    assert use.goodput == 0.0


def test_an_outage_counts_as_samples_that_were_possible() -> None:
    script = (Crash(at=0.0, rank=1), Recover(at=1.0, rank=1))
    effects: dict[Rank, list[Effect]] = {0: [TRAIN], 1: [TRAIN]}
    found = world(on_start(effects), 2, *script, platforms=(BOARD, BOARD)).run(2.0).simulator
    # Worker 1 comes at 1 s and never waits: its machine is fully used while it is on.
    assert found.use(2.0) == NodeUse(goodput=30 / 40, compute_used=1.0, node_seconds=3.0)


def test_loads_make_less_possible() -> None:
    halved = ContentionTrace((0.0, 1.0), (Contention(), Contention(cores=1.0)), period=2.0)
    loaded = replace(BOARD, trace=halved, sensitivity=Sensitivity(cores=0.5))
    found = world(on_start({0: [TRAIN]}), 1, platforms=(loaded,)).run(2.0).simulator
    use = found.use(2.0)
    assert use is not None
    assert use.goodput == use.compute_used == pytest.approx(1.0)


def test_a_barrier_takes_what_the_bound_says() -> None:
    """Equal work on uneven machines: goodput is the number of machines x v_min / sum of v."""
    algorithm = EpochGossip(topology=ring(len(UNEVEN)), num_rounds=3)
    even, uneven = (
        make_world(algorithm, size=6, platforms=platforms) for platforms in (EVEN, UNEVEN)
    )
    speeds = [platform.throughput for platform in UNEVEN]
    for each, expected in ((even, 1.0), (uneven, len(speeds) * min(speeds) / sum(speeds))):
        assert each.run()
        use = each.use(each.now)
        assert use is not None
        assert use.goodput == pytest.approx(expected)
        assert use.compute_used == pytest.approx(expected)
        assert use.node_seconds == pytest.approx(len(speeds) * each.now)


def test_use_goes_on_from_a_checkpoint() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Started):
            return [TRAIN, Send(1 - rank, message())]
        if isinstance(event, Trained) and now < 6:
            return [Send(1 - rank, message()), TRAIN]
        return [Finish()] if isinstance(event, Trained) else []

    script = (Crash(at=1.0, rank=1), Recover(at=2.5, rank=1), Crash(at=4.0, rank=0))
    links = Links(default=Link(bandwidth=2.0 * SIZE))
    worlds = [world(answer, 2, *script, platforms=(BOARD, DESK), links=links) for _ in range(3)]
    whole = worlds[0].run(5.0).simulator
    first = worlds[1].run(1.2).simulator
    first.use(1.2)
    second = worlds[2].simulator
    second.load_state_dict(first.state_dict())
    second.run(5.0)
    assert second.use(5.0) == whole.use(5.0)


def test_a_checkpoint_of_a_version_without_use_goes_on_without_it() -> None:
    first = world(on_start({0: [TRAIN]}), platforms=(BOARD, BOARD)).run(1.0).simulator
    state = first.state_dict()
    del state["machines"]["work"]
    second = world(on_start({}), platforms=(BOARD, BOARD)).simulator
    second.load_state_dict(state)
    assert second.use(2.0) is None


def test_a_kept_state_does_not_change_with_the_run() -> None:
    useful = UsefulSamples()
    useful.train(4)
    useful.send(now=0.0, end=2.0)
    kept = useful.copy()
    useful.train(2)
    useful.send(now=1.0, end=3.0)
    assert kept.leaving == [(2.0, 4.0)]
    kept.crash(now=2.5)
    useful.crash(now=2.5)
    assert (kept.total, useful.total) == (4.0, 4.0)
