"""Claimed work: each sample once per epoch, whoever comes and goes, and however fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.tiers import thorough
from tests.worlds import TARGETS, Recorder

from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.algorithms.wrappers.claimed.claims import receivers, rendezvous
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds, Train, Units
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.sim.fault import Crash, Drop, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.simulator import Simulator

NUM_UNITS = 60
SIZE = 10
LINKS = Links(default=Link(latency=0.01, bandwidth=1e6))
SPEEDS = (1.0, 0.5, 0.25, 0.125)


@dataclass
class Visits:
    """Counts the visits to each unit of each epoch."""

    of: dict[int, Counter[int]] = field(default_factory=dict)
    by: dict[tuple[int, Rank], int] = field(default_factory=Counter)

    def require_once(self, num_epochs: int) -> None:
        """Fail unless each unit of each epoch was visited exactly once."""
        for epoch in range(num_epochs):
            assert self.of[epoch] == Counter(range(NUM_UNITS)), epoch


class UnitTrainer(Trainer):
    """A quadratic; trains on units of `SIZE` samples, in batches of half as many."""

    def __init__(self, rank: Rank, visits: Visits) -> None:
        self.rank, self.visits = rank, visits

    @property
    def num_samples(self) -> int:
        return SIZE * NUM_UNITS

    @property
    def num_units(self) -> int:
        return NUM_UNITS

    @property
    def epoch_cost(self) -> float:
        return self.num_samples

    def cost(self, request: Train) -> float:
        assert isinstance(request.work, Units)
        return SIZE * len(request.work.indices)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        assert isinstance(request.work, Units)
        params, num = request.params, len(request.work.indices)
        for _ in range(num):
            params = params + 0.01 * (TARGETS[self.rank] - params)
        return TrainingResult(
            params, SIZE * num, 2 * num, 0.5, metrics={"epoch": request.work.epoch}
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def run(
    inner: Algorithm[Any],
    speeds: Sequence[float] = SPEEDS,
    *,
    faults: Faults | None = None,
    platforms: Sequence[Platform] | None = None,
    until: Seconds = float("inf"),
) -> tuple[Simulator[Any], Visits, Recorder]:
    """Run claimed work around `inner`; count only training that comes to its end."""
    visits, recorder = Visits(), Recorder()
    algorithm = ClaimedWork(inner=inner)
    handle = algorithm.handle

    def counting(state: Any, event: Any, now: Seconds) -> Any:  # noqa: ANN401
        if type(event).__name__ == "Trained" and state.held is not None:
            epoch, units = state.held
            visits.of.setdefault(epoch, Counter()).update(units)
            visits.by[epoch, state.rank] += len(units)
        return handle(state, event, now)

    object.__setattr__(algorithm, "handle", counting)
    simulator = Simulator(
        algorithm,
        platforms or uneven(len(speeds), throughput=100.0, speeds=speeds),
        torch.zeros(7),
        lambda rank, incarnation: UnitTrainer(rank, visits),
        links=LINKS,
        faults=faults,
        observer=recorder,
    )
    assert simulator.run(until) or until < float("inf")
    return simulator, visits, recorder


def epochs(num_workers: int = 4, num_rounds: int = 5) -> EpochGossip:
    """EpochGossip on the complete graph."""
    return EpochGossip(topology=complete(num_workers), num_rounds=num_rounds)


@thorough
@pytest.mark.parametrize("speeds", [SPEEDS, (1.0, 1.0, 1.0, 0.1), (1.0,) * 4, (1.0, 0.01)])
def test_each_unit_is_visited_once_per_epoch(speeds: tuple[float, ...]) -> None:
    _, visits, _ = run(epochs(len(speeds)), speeds)
    visits.require_once(5)


@pytest.mark.parametrize("speeds", [SPEEDS, (1.0, 0.3, 0.3, 0.05)])
def test_rounds_that_ask_in_two_parts_get_as_many_units(speeds: tuple[float, ...]) -> None:
    def units(*, overlap: bool) -> Counter[Rank]:
        inner = DoubleSqueeze(
            topology=complete(4), num_rounds=20, local_steps=32, overlap=overlap
        )
        _, visits, _ = run(inner, speeds)
        done = Counter[Rank]()
        for (_, rank), number in visits.by.items():
            done[rank] += number
        return done

    # Not exactly, because epochs end within other rounds, and gifts differ.
    whole, parts = units(overlap=False), units(overlap=True)
    assert all(abs(parts[j] - whole[j]) <= 0.25 * whole[j] for j in whole)


def test_one_worker_alone_does_plain_epochs() -> None:
    _, visits, recorder = run(epochs(1, 2), (1.0,))
    visits.require_once(2)
    assert not recorder.messages


def test_rendezvous_moves_only_the_units_of_the_lost_worker() -> None:
    weights = {rank: 1.0 + rank for rank in range(5)}
    before = rendezvous(3, 7, 1000, weights)
    for lost in weights:
        rest = {rank: weight for rank, weight in weights.items() if rank != lost}
        after = rendezvous(3, 7, 1000, rest)
        assert torch.equal(before[before != lost], after[before != lost])
        assert lost not in after


def test_rendezvous_gives_units_in_proportion_to_weights() -> None:
    owned = rendezvous(0, 0, 100_000, {0: 1.0, 1: 2.0, 2: 5.0}).bincount() / 100_000
    assert torch.allclose(owned, torch.tensor([0.125, 0.25, 0.625]), atol=0.01)


def test_only_the_surplus_is_given_and_to_those_that_are_sooner() -> None:
    assert receivers(0, {0: 5.0, 1: 5.0}, {0: 1.0, 1: 1.0}) == []
    remaining, rates = {0: 0.0, 1: 8.0, 2: 4.0}, {0: 2.0, 1: 1.0, 2: 1.0}
    given = {j: receivers(j, remaining, rates) for j in remaining}
    assert given == {0: [], 1: [0] * 5, 2: [0]}


@thorough
@pytest.mark.parametrize("at", [3.0, 7.7, 12.345])
@pytest.mark.parametrize("rank", [0, 3])
def test_units_of_a_crashed_worker_are_visited_once_by_the_others(
    at: Seconds, rank: Rank
) -> None:
    _, visits, _ = run(epochs(), faults=Faults(script=(Crash(at=at, rank=rank),)))
    visits.require_once(5)


@thorough
@pytest.mark.parametrize("at", [3.0, 7.7, 9.345])
@pytest.mark.parametrize("back", [0.7, 4.0, 8.0])
def test_a_returning_worker_takes_part_and_repeats_nothing(at: Seconds, back: Seconds) -> None:
    script = (Crash(at=at, rank=1), Recover(at=at + back, rank=1))
    _, visits, _ = run(epochs(num_rounds=8), faults=Faults(script=script))
    visits.require_once(8)
    assert visits.by[7, 1] > 0.1 * NUM_UNITS


@thorough
def test_all_workers_go_and_come_back_and_each_unit_is_visited_once() -> None:
    script = [
        fault
        for rank, at in enumerate((3.1, 8.3, 14.7, 21.9))
        for fault in (Crash(at=at, rank=rank), Recover(at=at + 5, rank=rank))
    ]
    _, visits, _ = run(epochs(num_rounds=10), faults=Faults(script=tuple(script)))
    visits.require_once(10)


@thorough
def test_workers_without_rounds_seldom_wait_whoever_comes_and_goes() -> None:
    """One that comes waits for nothing of which the others do not think that it is theirs."""
    inner = GoSGD(topology=complete(8), num_rounds=10**6, exchange_probability=0.1)
    used = []
    for seed in range(3):
        faults = Faults.churn(
            num_workers=6,
            horizon=80.0,
            mean_up=20.0,
            mean_down=4.0,
            seed=seed,
            detection_time=0.5,
        )
        simulator, _, _ = run(inner, (1.0,) * 8, faults=faults, until=80.0)
        use = simulator.use(80.0)
        assert use is not None
        used.append(use.compute_used)
    assert min(used) > 0.95


@thorough
@pytest.mark.parametrize("group", [(2, 3), (1,)])
@pytest.mark.parametrize("detection", [0.5, 60.0])
@pytest.mark.parametrize("end", [5.3, 9.0])
def test_both_sides_of_a_short_cut_do_their_own_units(
    group: tuple[Rank, ...], detection: Seconds, end: Seconds
) -> None:
    """A cut that nobody notices holds both sides up; they go on apart after it is noticed."""
    faults = Faults(
        script=(Partition(start=4.0, end=end, group=group),), detection_time=detection
    )
    inner = EpochGossip(topology=complete(4), num_rounds=8, timeout=6.0)
    _, visits, _ = run(inner, faults=faults)
    visits.require_once(8)


@thorough
def test_a_long_cut_loses_no_unit_and_repeats_few_after_it() -> None:
    script = (Partition(start=4.0, end=19.0, group=(2, 3)),)
    _, visits, recorder = run(epochs(num_rounds=10), faults=Faults(script=script))
    for epoch in range(10):
        assert set(visits.of[epoch]) == set(range(NUM_UNITS))
    assert [max(visits.of[epoch].values()) for epoch in range(6, 10)] == [1] * 4
    repeated = sum(sum(visits.of[epoch].values()) - NUM_UNITS for epoch in range(10))
    counted = sum(note.numbers["twice"] for _, _, note in recorder.notes)
    assert 0 < counted <= repeated


@thorough
def test_units_of_one_that_hangs_are_left_to_it_until_it_answers() -> None:
    """Nothing of worker 1 arrives for some seconds; it goes on, and is not lost."""
    script = (Drop(probability=1.0, start=4.0, end=7.0, sender=1),)
    inner = EpochGossip(topology=complete(4), num_rounds=6, timeout=6.0)
    _, visits, _ = run(inner, faults=Faults(script=script))
    visits.require_once(6)


@thorough
@pytest.mark.parametrize("seconds", [7.0, 9.0])
def test_one_that_was_alone_stops_what_the_others_have_left_behind(seconds: Seconds) -> None:
    """The others are epochs ahead, and no longer know which units of its epoch are done."""
    script = (Partition(start=4.0, end=4.0 + seconds, group=(1,)),)
    _, visits, _ = run(epochs(num_rounds=10), faults=Faults(script=script))
    for epoch in range(10):
        assert set(visits.of[epoch]) == set(range(NUM_UNITS))
    repeated = sum(sum(visits.of[epoch].values()) - NUM_UNITS for epoch in range(10))
    alone = 5 * seconds  # units
    assert repeated <= alone + 0.125 * NUM_UNITS
