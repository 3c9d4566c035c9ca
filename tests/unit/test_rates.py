"""Learning rates of whole runs: workers of different speed are at one rate in one round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.parity import Steady
from tests.small_runs import NUM_WORKERS, ctrl_c_at, small_run, small_task
from tests.tiers import by_name, thorough
from tests.worker_threads import Crew

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.protocol import Effect, Event, Rank, Seconds, Train, WorkerState
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import TrainingResult
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import SGD, Cosine

LR = 0.005
NUM_ROUNDS = 6
EVERYONE = complete(NUM_WORKERS)
EDGE_GOSSIP = EdgeGossip(
    inner=EpochGossip(topology=EVERYONE, num_rounds=NUM_ROUNDS, timeout=5.0)
)
ENDLESS = EdgeGossip(inner=EpochGossip(topology=EVERYONE, num_rounds=UNTIL_CUT_OFF))
GOSGD = GoSGD(topology=EVERYONE, num_rounds=50, exchange_probability=0.5)
SPEEDS = (80.0, 40.0, 20.0, 10.0)
PLANNED = {number: {LR * Cosine().factor(number / NUM_ROUNDS)} for number in range(NUM_ROUNDS)}


@dataclass
class Rates:
    """The rates at which workers trained, and how many steps each took."""

    by_round: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))
    at: list[tuple[Rank, Seconds, float]] = field(default_factory=list)
    num_steps: dict[Rank, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[Rank, tuple[int, Seconds]] = field(default_factory=dict)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    found = Rates()
    train = Learner.train

    def watched(self: Learner, request: Train, progress: float = 0.0) -> TrainingResult:
        result = train(self, request, progress)
        (rate,) = {group["lr"] for group in self._optimizer.param_groups}
        number, now = found.asked[self.rank]
        found.by_round[number].add(rate)
        found.at.append((self.rank, now, rate))
        found.num_steps[self.rank] += result.num_steps
        return result

    def watch(kind: type[Algorithm[Any]]) -> None:
        handle = kind.handle

        def asking(
            self: Algorithm[Any], state: WorkerState, event: Event, now: Seconds
        ) -> Iterable[Effect]:
            effects = handle(self, state, event, now)
            if any(isinstance(effect, Train) for effect in effects):
                found.asked[state.rank] = (state.round, now)
            return effects

        monkeypatch.setattr(kind, "handle", asking)

    monkeypatch.setattr(Learner, "train", watched)
    for kind in (EdgeGossip, GoSGD):
        watch(kind)
    return found


def falling(algorithm: Algorithm[Any] = EDGE_GOSSIP, **changes: Any) -> Experiment:  # noqa: ANN401
    """A run with a cosine, on workers of which one is 8 times as fast as another."""
    experiment = small_run(
        task=small_task(schedule=Cosine(), optimizer=SGD(lr=LR), batch_size=1),
        platforms=tuple(Platform(throughput=speed) for speed in SPEEDS),
        **changes,
    )
    return replace(experiment, algorithm=algorithm)


def require_one_rate_a_round(rates: Rates) -> None:
    assert rates.by_round == PLANNED
    # Not for want of difference: the slowest has done less than half of the work.
    assert rates.num_steps[0] > 2 * rates.num_steps[3] > 0


@thorough
def test_workers_8_times_as_fast_are_at_one_rate_in_one_round(
    rates: Rates, tmp_path: Path
) -> None:
    run(falling(), out=tmp_path, num_threads=0)
    require_one_rate_a_round(rates)


@thorough
def test_one_that_comes_back_trains_at_the_rate_of_the_others(
    rates: Rates, tmp_path: Path
) -> None:
    script = (Crash(at=0.5, rank=3), Recover(at=0.8, rank=3))
    run(falling(faults=Faults(script=script, detection_time=0.05)), out=tmp_path, num_threads=0)
    require_one_rate_a_round(rates)
    returned = [rate for rank, now, rate in rates.at if rank == 3 and now >= 0.8]
    assert len(returned) > 0
    assert max(returned) < LR  # its own passes would begin with the whole rate


@thorough
def test_a_run_that_goes_on_goes_on_at_the_rate_of_its_round(
    rates: Rates, tmp_path: Path
) -> None:
    with ctrl_c_at(200, EDGE_GOSSIP), pytest.raises(Interrupted):
        run(falling(), out=tmp_path, num_threads=0)
    assert 1 < len(rates.by_round) < NUM_ROUNDS
    run(falling(), out=tmp_path, num_threads=0, resume=True)
    require_one_rate_a_round(rates)


@thorough
def test_hosts_of_which_one_is_8_times_as_fast_are_at_one_rate_in_one_round(
    rates: Rates, tmp_path: Path
) -> None:
    crew = Crew(tmp_path, {rank: Steady(speed) for rank, speed in enumerate(SPEEDS)})
    assert crew.all(falling()) == ["finished"] * NUM_WORKERS
    require_one_rate_a_round(rates)


@thorough
@pytest.mark.parametrize(
    "algorithm", by_name({"nobody waits": GOSGD, "endless": ENDLESS}, ["nobody waits"])
)
def test_where_rounds_say_nothing_rates_follow_the_time_of_the_run(
    rates: Rates, tmp_path: Path, algorithm: Algorithm[Any]
) -> None:
    limit = 3.0
    experiment = falling(algorithm, max_seconds=limit)
    run(experiment, out=tmp_path, num_threads=0)
    assert {rank for rank, _, _ in rates.at} == {0, 1, 2, 3}
    for _, now, rate in rates.at:
        assert rate == LR * Cosine().factor(now / limit)


@thorough
def test_where_nobody_waits_and_no_time_is_set_rates_follow_each_ones_rounds(
    rates: Rates, tmp_path: Path
) -> None:
    run(falling(GOSGD), out=tmp_path, num_threads=0)
    for number, found in rates.by_round.items():
        assert found == {LR * Cosine().factor(number / GOSGD.num_rounds)}
