"""EdgeGossip in random worlds: speeds that change, platforms that fail, spares that take over.

A failure names its world. To run that one alone, for every algorithm::

    EDGEGOSSIP_SWARM_SEED=17 pytest tests/swarm
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.algorithms import ALGORITHMS, NUM_WORKERS, PEERS, AnyAlgorithm, with_settings
from tests.invariants import Checks
from tests.random_worlds import LR, MANY_SEEDS, SEEDS, World, draw_world
from tests.tiers import by_name, thorough
from tests.worlds import EVEN, TARGETS, make_world

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.contract.topology import complete
from edgegossip.machine.contention import Contention
from edgegossip.sim.fault import Crash, Drop, Fault, Faults, Recover
from edgegossip.sim.platform import ContentionTrace, Platform, ThrottlingTrace

INNER = [name for name in ALGORITHMS if name in PEERS]
each_inner = pytest.mark.parametrize("name", INNER)


def draw_balanced_world(inner: AnyAlgorithm, seed: int) -> World:
    """The world of `seed`, balanced in one of many ways, on platforms whose speed changes."""
    world = draw_world(inner, seed)
    draw = random.Random(f"balance {seed}")
    num_workers = len(world.platforms)
    settings: dict[str, Any] = {
        "spread": draw.choice(["exact", "exact", "gossip"]),
        "block_share": draw.choice([1.0, 0.5, 0.25]),
        "timeout": draw.choice([None, 0.01, 30.0]),
        "correction": 0.5 if seed % 2 else 0.0,
    }
    if settings["spread"] == "exact" and draw.random() < 0.6:
        settings["on_failure"] = "reassign"
        spares = draw.sample(range(num_workers), draw.randint(0, num_workers - 1))
        settings["spares"] = tuple(spares)
    # Some platforms are so slow at times that they count as failed.
    balancer = Balancer(min_throughput=draw.choice([0.001, 0.5]))
    algorithm = EdgeGossip(inner=world.algorithm, balancer=balancer, **settings)
    platforms = [
        replace(platform, trace=draw_trace(draw)) if draw.random() < 0.5 else platform
        for platform in world.platforms
    ]
    return replace(world, algorithm=algorithm, platforms=tuple(platforms), size=12)


def draw_trace(draw: random.Random) -> ContentionTrace:
    times = (0.0, *sorted(draw.uniform(1, 20) for _ in range(3)))
    return ContentionTrace(times, tuple(Contention(cores=draw.random()) for _ in times))


@dataclass
class BalancedChecks(Checks):
    """The same, but that spares start without weight."""

    has_spares: bool = False

    def require_total_weight(self) -> None:
        if not self.has_spares:
            super().require_total_weight()


def check_balanced_world(world: World) -> None:
    algorithm = world.algorithm
    assert isinstance(algorithm, EdgeGossip)
    checks = BalancedChecks(has_spares=bool(algorithm.spares))
    simulator = world.simulator(checks)
    assert simulator.run()
    checks.require_unchanged_payloads()
    checks.require_models(world.size, LR)
    for rank, state in enumerate(simulator.states):
        if rank not in checks.crashed and rank not in algorithm.spares:
            if state.rest_seconds:  # a platform that has failed, for which nobody waits
                continue
            assert state.round == algorithm.traits.num_rounds
            assert state.waiting is None
            assert state.plan is None


def check(name: str, seed: int) -> None:
    world = draw_balanced_world(ALGORITHMS[name], seed)
    try:
        check_balanced_world(world)
    except Exception as error:
        error.add_note(f"{name} in world {seed}: {world}")
        error.add_note(f"again: EDGEGOSSIP_SWARM_SEED={seed} pytest tests/swarm -k {name}")
        raise


@each_inner
def test_nobody_waits_for_ever(name: str) -> None:
    for seed in SEEDS:
        check(name, seed)


@pytest.mark.slow
@each_inner
def test_nobody_waits_for_ever_in_very_many_worlds(name: str) -> None:
    for seed in MANY_SEEDS:
        check(name, seed)


@pytest.mark.parametrize("name", by_name([*INNER]))
def test_balanced_run_resumed_from_a_checkpoint_ends_with_the_same_bits(name: str) -> None:
    for seed in SEEDS[:2]:
        world = draw_balanced_world(ALGORITHMS[name], seed)
        whole, first, second = (world.simulator() for _ in range(3))
        whole.run()
        first.run(until=whole.now / 2)
        second.load_state_dict(assemble(*dismantle(first.state_dict())))
        assert second.run()
        assert second.num_events == whole.num_events
        assert torch.equal(
            torch.stack([*second.estimates().values()]),
            torch.stack([*whole.estimates().values()]),
        )


# What must not stall the rest.

FEW_ROUNDS: dict[str, AnyAlgorithm] = {
    "epoch-gossip": EpochGossip(topology=complete(NUM_WORKERS), num_rounds=4),
    "gosgd": GoSGD(topology=complete(NUM_WORKERS), num_rounds=40, exchange_probability=0.5),
}
SPEEDS = (8.0, 4.0, 2.0, 2.0, 1.0)
each_spread = pytest.mark.parametrize("spread", ["exact", "gossip"])


def run_after(
    crashed: tuple[Rank, ...], inner: AnyAlgorithm, spread: str, *script: Fault
) -> tuple[Seconds, list[int]]:
    """When the rest was done, and with how many rounds, if some crash in their first epoch."""
    crashes = tuple(Crash(at=2.0, rank=rank) for rank in crashed)
    algorithm = EdgeGossip(inner=inner, spread=spread)  # type: ignore[arg-type]
    world = make_world(
        algorithm,
        platforms=[Platform(throughput=speed) for speed in SPEEDS],
        faults=Faults(script=(*crashes, *script)),
        size=32,
        lr=0.01,
    )
    assert world.run()
    rest = [rank for rank in range(NUM_WORKERS) if rank not in crashed]
    return world.now, [world.states[rank].round for rank in rest]


@each_spread
@pytest.mark.parametrize("name", FEW_ROUNDS)
def test_a_crash_of_the_fastest_does_not_stall_the_rest(name: str, spread: str) -> None:
    inner = FEW_ROUNDS[name]
    seconds, rounds = run_after((0,), inner, spread)
    assert set(rounds) == {inner.traits.num_rounds}
    if name == "epoch-gossip":
        # An epoch of the next fastest takes 8 s. In the first nobody knows of the others yet
        # if news spreads by gossip, and the slowest needs 32 s for all it has.
        first = 8 if spread == "exact" else 32
        assert seconds < first + 3 * 8 + 5


@each_spread
@pytest.mark.parametrize("name", FEW_ROUNDS)
@pytest.mark.parametrize("survivor", [0, 4])
def test_a_crash_of_all_but_one_does_not_stall_it(
    name: str, spread: str, survivor: Rank
) -> None:
    crashed = tuple(rank for rank in range(NUM_WORKERS) if rank != survivor)
    seconds, rounds = run_after(crashed, FEW_ROUNDS[name], spread)
    assert rounds == [FEW_ROUNDS[name].traits.num_rounds]
    if name == "epoch-gossip":
        assert seconds < 4 * 32 / SPEEDS[survivor] + 5


def test_a_slow_platform_that_comes_back_holds_nobody_up() -> None:
    inner = with_settings(FEW_ROUNDS["epoch-gossip"], num_rounds=8)
    seconds, _ = run_after((4,), inner, "exact", Recover(at=6.0, rank=4))
    # All of its data would take it 32 s; the others need 4 s for an epoch.
    assert seconds < 8 * 4 + 5


def test_a_failed_platform_that_misses_a_forecast_holds_nobody_up() -> None:
    algorithm = EdgeGossip(inner=FEW_ROUNDS["epoch-gossip"])
    platforms = [Platform(throughput=speed) for speed in (*SPEEDS[:-1], 1e-4)]
    missed = Drop(probability=1.0, sender=1, receiver=4, end=0.01)
    world = make_world(
        algorithm, platforms=platforms, faults=Faults(script=(missed,)), size=32, lr=0.01
    )
    assert world.run()
    # 5 % of its own epoch would be 16,000 s.
    assert world.now < 4 * 4 + 1


@thorough
@pytest.mark.parametrize("name", FEW_ROUNDS)
def test_a_platform_that_has_recovered_trains_again(name: str) -> None:
    inner = with_settings(FEW_ROUNDS[name], num_rounds=1000 if name == "gosgd" else 40)
    heat = ThrottlingTrace((0.0, 5.0, 100.0), (1.0, 20.0, 1.0))
    hot = Platform(throughput=SPEEDS[0], throttling=heat)
    world = make_world(
        EdgeGossip(inner=inner, balancer=Balancer(min_throughput=0.5), block_share=0.25),
        platforms=[hot, *(Platform(throughput=speed) for speed in SPEEDS[1:])],
        size=32,
        lr=0.01,
    )
    assert not world.run(until=100.0)
    assert world.states[0].throughput < 0.5
    assert world.run()
    assert world.states[0].throughput > 4.0


@pytest.mark.parametrize("block_share", [1.0, 0.25])
def test_epochs_end_together_on_idle_platforms(block_share: float) -> None:
    algorithm = EdgeGossip(inner=FEW_ROUNDS["epoch-gossip"], block_share=block_share)
    platforms = [Platform(throughput=speed) for speed in SPEEDS]
    world = make_world(algorithm, platforms=platforms, size=160, lr=0.001)
    assert world.run()
    assert world.now == pytest.approx(4 * 160 / 8.0, rel=0.03)


def test_blocks_come_to_the_same_as_an_epoch_in_one_piece() -> None:
    after = []
    for block_share in (1.0, 0.5, 0.25):
        algorithm = EdgeGossip(inner=FEW_ROUNDS["epoch-gossip"], block_share=block_share)
        platforms = [Platform(throughput=speed) for speed in SPEEDS]
        world = make_world(algorithm, platforms=platforms, size=160, lr=0.01)
        assert world.run()
        after.append(torch.stack([*world.estimates().values()]))
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


def test_a_spare_ends_with_the_model_of_the_others() -> None:
    inner = Gossip(topology=complete(NUM_WORKERS), num_rounds=60)
    algorithm = EdgeGossip(inner=inner, on_failure="reassign", spares=(1,))
    faults = Faults(script=(Crash(at=5.0, rank=0),))
    world = make_world(algorithm, platforms=EVEN, faults=faults, size=20, lr=0.05)
    assert world.run()
    assert [world.states[rank].round for rank in range(1, NUM_WORKERS)] == [60] * 4
    others = torch.stack([world.states[rank].params for rank in (2, 3, 4)]).mean(0)
    # The survivors average exactly, so that all have one model.
    torch.testing.assert_close(world.states[1].params, others)
    # The spare pulls it towards the target whose data it took over.
    with_spare, without = TARGETS[[0, 2, 3, 4]].mean(0), TARGETS[[2, 3, 4]].mean(0)
    assert (others - with_spare).norm() < 0.1 * (others - without).norm()
