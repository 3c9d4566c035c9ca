"""Joules of runs that can be computed by hand: watts x seconds + joules per byte x bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.scripted import SIZE, message, on_start, world
from tests.worlds import EVEN, UNEVEN, Recorder, make_world

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.compression.sparse import TopK
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Event,
    Finish,
    Rank,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
)
from edgegossip.contract.topology import directed_ring, ring
from edgegossip.machine.contention import Contention
from edgegossip.machine.energy import BUSY_WATTS, IDLE_WATTS, JOULES_PER_BYTE, Energy
from edgegossip.sim.fault import Crash, Drop, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import ContentionTrace, Platform, Sensitivity

BOARD = Platform(throughput=10.0, idle_watts=2.0, busy_watts=6.0)
DESK = Platform(throughput=20.0, idle_watts=30.0, busy_watts=100.0)
TRAIN = Train(torch.zeros(3), Steps(20))  # 2 s on the board, 1 s on the desk
"""Work that the scripted trainer counts as 20 samples."""


def test_joules_are_watts_times_seconds_and_bytes_times_joules_per_byte() -> None:
    links = Links(
        default=Link(joules_per_byte=0.5), overrides={(1, 0): Link(joules_per_byte=0.25)}
    )
    effects: dict[Rank, list[Effect]] = {
        0: [TRAIN, Send(1, message()), Send(1, message())],
        1: [TRAIN, Send(0, message())],
    }
    found = world(on_start(effects), platforms=(BOARD, DESK), links=links).run()
    # Both are there for 2 s, until the board has finished; the desk works for one of them.
    assert found.simulator.energy(2.0) == Energy(
        busy=2 * 6.0 + 1 * 100.0, idle=1 * 30.0, links=(2 * 0.5 + 0.25) * SIZE
    )


def test_a_look_between_two_events_counts_the_work_that_is_done() -> None:
    simulator = world(on_start({0: [TRAIN]}), platforms=(BOARD, BOARD)).run(0.5).simulator
    assert simulator.energy(0.5) == Energy(busy=0.5 * 6.0, idle=0.5 * 2.0)
    assert simulator.energy(1.5) == Energy(busy=1.5 * 6.0, idle=1.5 * 2.0)


def test_evaluations_and_queued_work_are_busy() -> None:
    effects: dict[Rank, list[Effect]] = {0: [TRAIN, Evaluate(torch.zeros(3))]}
    found = world(
        on_start(effects),
        num_workers=1,
        platforms=(BOARD,),
        evaluate=lambda params: (0.0, {}),
        evaluation_cost=5.0,
    ).run(4.0)
    # The evaluation waits for the training, and then takes half a second.
    assert found.simulator.energy(4.0) == Energy(busy=2.5 * 6.0, idle=1.5 * 2.0)


def test_a_finished_worker_idles_and_a_crashed_one_is_off() -> None:
    effects: dict[Rank, list[Effect]] = {0: [TRAIN], 1: [TRAIN]}
    script = (Crash(at=0.5, rank=1), Recover(at=1.5, rank=1))
    found = world(on_start(effects), 2, *script, platforms=(BOARD, BOARD)).run()
    # Worker 1 works for half a second, is off for one, and does all of its work again.
    assert found.simulator.now == 3.5
    assert found.simulator.energy(3.5) == Energy(busy=(2.0 + 0.5 + 2.0) * 6.0, idle=1.5 * 2.0)


def test_a_worker_that_stays_away_stays_off() -> None:
    found = world(on_start({0: [TRAIN]}), 2, Crash(at=0.0, rank=1), platforms=(BOARD, BOARD))
    assert found.run().simulator.energy(2.0) == Energy(busy=12.0)


def test_lost_messages_have_taken_energy() -> None:
    effects: dict[Rank, list[Effect]] = {0: [Send(1, message())]}
    links = Links(default=Link(joules_per_byte=1.0))
    found = world(on_start(effects), 2, Drop(probability=1.0), links=links).run()
    assert found.watcher.losses
    assert found.simulator.energy(0.0) == Energy(links=float(SIZE))


def test_contention_costs_the_time_that_work_takes_longer() -> None:
    halved = ContentionTrace((0.0,), (Contention(cores=1.0),))
    loaded = replace(BOARD, trace=halved, sensitivity=Sensitivity(cores=0.5))
    simulator = world(on_start({0: [TRAIN]}), 1, platforms=(loaded,)).run().simulator
    assert simulator.energy(simulator.now) == Energy(busy=4.0 * 6.0)


def test_a_barrier_costs_the_idle_power_of_those_who_wait() -> None:
    """Equal work on uneven machines: the wait, and nothing else, is in the idle joules."""
    number, rounds = len(UNEVEN), 3
    algorithm = EpochGossip(topology=ring(number), num_rounds=rounds)
    free = Links(default=Link(joules_per_byte=0.0))
    even, uneven = (
        make_world(algorithm, size=6, platforms=platforms, links=free)
        for platforms in (EVEN, UNEVEN)
    )
    found = []
    for each in (even, uneven):
        assert each.run()
        found.append(each.energy(each.now))
    waiting = sum(rounds * 6 * (1 / 0.25 - 1 / speed.throughput) for speed in UNEVEN)
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].idle == pytest.approx(0.0, abs=1e-9)
    assert found[1].idle == pytest.approx(IDLE_WATTS * waiting)


def test_sparse_push_takes_energy_on_links_in_proportion_to_its_bytes() -> None:
    def energy(keep_ratio: float) -> tuple[float, float]:
        algorithm = SparsePush(
            topology=directed_ring(len(EVEN)),
            num_rounds=5,
            compressor=TopK(keep_ratio=keep_ratio),
        )
        initial = torch.zeros(len(EVEN), 4000)
        simulator = make_world(algorithm, initial=initial, observer=(seen := Recorder()))
        assert simulator.run()
        found = simulator.energy(simulator.now)
        assert found is not None
        sent = [words.split() for *_, words in seen.trace if words.startswith("sent")]
        num_bytes = sum(int(number) for _, number, *_ in sent)
        assert found.links == pytest.approx(JOULES_PER_BYTE * num_bytes)
        return found.links, found.busy + found.idle

    dense, sparse, sparser = energy(1.0), energy(0.1), energy(0.01)
    assert sparse[1] == pytest.approx(dense[1])  # it saves nothing else
    assert dense[0] / sparse[0] > 4
    # The rest of a message, such as its header, is the same for any share.
    assert 5 < sparse[0] / sparser[0] <= 10


def test_energy_goes_on_from_a_checkpoint() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Started):
            return [TRAIN, Send(1 - rank, message())]
        if isinstance(event, Trained) and now < 6:
            return [TRAIN]
        return [Finish()] if isinstance(event, Trained) else []

    script = (Crash(at=1.0, rank=1), Recover(at=2.5, rank=1))
    whole = world(answer, 2, *script, platforms=(BOARD, DESK)).run().simulator
    first = world(answer, 2, *script, platforms=(BOARD, DESK)).run(1.7).simulator
    second = world(answer, 2, *script, platforms=(BOARD, DESK)).simulator
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.energy(second.now) == whole.energy(whole.now)


def test_a_checkpoint_of_a_version_without_energy_goes_on_without_it() -> None:
    first = world(on_start({0: [TRAIN]}), platforms=(BOARD, BOARD)).run(1.0).simulator
    state = first.state_dict()
    del state["machines"]["usage"], state["link_joules"]
    second = world(on_start({}), platforms=(BOARD, BOARD)).simulator
    second.load_state_dict(state)
    assert second.energy(2.0) is None


def test_the_defaults_are_a_board_and_wifi() -> None:
    platform = Platform(throughput=1.0)
    assert (platform.idle_watts, platform.busy_watts) == (IDLE_WATTS, BUSY_WATTS) == (2.7, 6.4)
    assert Link().joules_per_byte == JOULES_PER_BYTE == 5e-6
