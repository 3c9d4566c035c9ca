"""Control variates: no worker's data counts for more because it trains more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS, PARAMETER_SERVERS, STAGES
from tests.tiers import thorough
from tests.trained import trained_event
from tests.worlds import TARGETS, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.control_variates import ControlledState, ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Layout,
    Rank,
    Seconds,
    Started,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.contract.topology import complete
from edgegossip.sim.platform import Platform

SPEEDS = (8.0, 4.0, 2.0, 2.0, 1.0)


def balanced(num_rounds: int = 40) -> EdgeGossip:
    inner = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=num_rounds)
    return EdgeGossip(inner=inner, correction=0.0)


def ends_at(algorithm: Algorithm[Any]) -> Tensor:
    """Where workers of unequal speed end, each with a target of its own."""
    platforms = [Platform(throughput=speed) for speed in SPEEDS]
    world = make_world(algorithm, platforms=platforms, size=160, lr=0.02)
    assert world.run()
    return world.estimates()[0]


@thorough
def test_workers_of_unequal_speed_meet_at_the_common_optimum() -> None:
    optimum = TARGETS[:NUM_WORKERS].mean(0)
    plain = (ends_at(balanced()) - optimum).norm()
    controlled = (ends_at(ControlVariates(inner=balanced())) - optimum).norm()
    assert controlled < plain / 5


@thorough
def test_no_weight_changes_nothing_to_the_last_bit() -> None:
    assert torch.equal(
        ends_at(ControlVariates(inner=balanced(), weight=0.0)), ends_at(balanced())
    )


def test_nobody_drifts_before_the_variates_are_known() -> None:
    assert torch.equal(ends_at(ControlVariates(inner=balanced(1))), ends_at(balanced(1)))
    assert not torch.equal(ends_at(ControlVariates(inner=balanced(2))), ends_at(balanced(2)))


# One worker, whose inner algorithm is told the average.


@dataclass(frozen=True, kw_only=True)
class Told(Alone):
    """Has an average of 3 after its first round, and no other.

    Args:
        is_long: Whether its second round never ends.
    """

    is_long: bool = True

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Trained) and state.round == 0:
            event = replace(event, params=torch.cat([event.params[:2], torch.full((2,), 3.0)]))
        effects = super().handle(state, event, now)
        state.round = min(state.round, 1) if self.is_long else state.round
        return effects


def started(
    layout: Layout | None = None, *, is_long: bool = True
) -> tuple[ControlVariates, ControlledState]:
    algorithm = ControlVariates(inner=Told(num_rounds=10**6, is_long=is_long))
    state = algorithm.init(0, torch.zeros(2))
    algorithm.handle(state, Started(num_samples=1, layout=layout), now=0.0)
    return algorithm, state


def after_training(
    algorithm: ControlVariates, state: ControlledState, by: list[float], num_steps: int = 1
) -> Tensor:
    """Train, and return how far the parameters have moved."""
    before = state.params
    event = trained_event(before + torch.tensor(by), before, num_steps=num_steps)
    (train,) = (
        each for each in algorithm.handle(state, event, now=1.0) if isinstance(each, Train)
    )
    return train.params - before


def test_the_first_steps_stay_as_they_are() -> None:
    algorithm, state = started()
    assert after_training(algorithm, state, [4.0, 8.0], num_steps=4).tolist() == [4.0, 8.0]


def test_each_step_is_moved_by_the_difference_from_the_mean() -> None:
    algorithm, state = started()
    after_training(algorithm, state, [4.0, 8.0], num_steps=4)  # a mean step of (1, 2)
    moved = after_training(algorithm, state, [1.0, 0.0], num_steps=5)
    assert moved.tolist() == [1.0 + 5 * (3 - 1), 5 * (3 - 2)]


def test_the_drift_stays_until_the_next_average_and_is_not_measured() -> None:
    algorithm, state = started()
    after_training(algorithm, state, [4.0, 8.0], num_steps=4)
    for step in (2.0, 6.0):
        assert after_training(algorithm, state, [step, 0.0]).tolist() == [step + 2, 1.0]
    assert state.control is not None
    assert state.control.tolist() == [4.0, 0.0]


def test_a_worker_whose_average_is_its_own_does_not_drift() -> None:
    algorithm, state = started(is_long=False)
    moved = [after_training(algorithm, state, [1.0, 2.0]).tolist() for _ in range(4)]
    assert moved == [[1.0, 2.0], [1.0 + 2.0, 2.0 + 1.0], [1.0, 2.0], [1.0, 2.0]]


def test_statistics_have_no_variates() -> None:
    algorithm, state = started(Layout(num_trained=1))
    after_training(algorithm, state, [1.0, 1.0])
    assert state.control is not None
    assert state.control.tolist() == [1.0, 0.0]


def test_variates_of_unsound_parameters_are_dropped() -> None:
    algorithm, state = started()
    after_training(algorithm, state, [1.0, 1.0])
    sound = torch.tensor([0.5, 0.5])
    back = trained_event(sound, sound, num_steps=0, has_gone_back=True)
    algorithm.handle(state, back, now=2.0)
    assert state.control is None
    assert state.params.tolist() == [0.5, 0.5]
    assert not state.inner.params[2:].any()
    after_training(algorithm, state, [2.0, 2.0])
    assert torch.equal(state.inner.params[2:], torch.full((2,), 2.0))  # of the new steps alone


@pytest.mark.parametrize(
    ("inner", "rank"),
    [
        (PARAMETER_SERVERS["bsp"], 0),
        (STAGES["decoupled"], 0),
        (replace(balanced(), spares=(4,), on_failure="reassign"), 4),
    ],
    ids=["server", "stage", "spare"],
)
def test_ranks_that_train_no_whole_model_are_refused(inner: Algorithm[Any], rank: Rank) -> None:
    with pytest.raises(ValueError, match="whose ranks all train a whole model"):
        ControlVariates(inner=inner).init(rank, torch.zeros(64))


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_weights_are_checked(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be in"):
        ControlVariates(inner=balanced(), weight=weight)


# The rule for the weight.


def gauged(losses: list[float], steps: list[float]) -> Tensor:
    """Means over all workers, as the inner algorithm's average tells a worker."""
    told = torch.tensor([losses, steps]).double()
    loss, num_steps = told
    return torch.stack([loss, num_steps, loss * num_steps, num_steps**2]).mean(1) * 2.0**-30


RULE = ControlVariates(inner=Told(num_rounds=1), weight="auto")


@pytest.mark.parametrize(
    ("losses", "steps", "weight"),
    [
        # Two workers: the one with more steps has the loss that is lower by 1 % of the mean.
        ([0.99, 1.01], [8.0, 2.0], 0.3 + 8 * 0.01),
        ([1.01, 0.99], [8.0, 2.0], 0.3 - 8 * 0.01),
        ([0.5, 1.5], [8.0, 2.0], 0.3 + 8 * 0.025),
        ([0.9, 1.1], [5.0, 5.0], 0.3),
        ([0.0, 0.0], [8.0, 2.0], 0.3),
        ([0.5, 0.5], [0.0, 0.0], 0.3),
        ([0.5, 0.5], [-3.0, -3.0], 0.3),
        ([float("nan"), 0.5], [8.0, 2.0], 0.3),
    ],
    ids=[
        "memorized",
        "the opposite",
        "at most 0.2 a round",
        "equal steps",
        "no loss",
        "nobody has trained",
        "false numbers",
        "unknown loss",
    ],
)
def test_weight_rises_while_those_who_train_more_have_the_lower_loss(
    losses: list[float], steps: list[float], weight: float
) -> None:
    assert RULE._next_weight(0.3, gauged(losses, steps)) == pytest.approx(weight)


def test_weight_stays_between_0_and_1() -> None:
    assert RULE._next_weight(0.95, gauged([0.5, 1.5], [8.0, 2.0])) == 1.0
    assert RULE._next_weight(0.05, gauged([1.5, 0.5], [8.0, 2.0])) == 0.0


@thorough
def test_by_rule_equally_fast_workers_are_left_alone() -> None:
    def end(weight: Any) -> Tensor:  # noqa: ANN401
        algorithm = ControlVariates(inner=balanced(), weight=weight)
        world = make_world(algorithm, platforms=[Platform(throughput=1.0)] * NUM_WORKERS)
        assert world.run()
        return world.estimates()[0]

    assert torch.equal(end("auto"), end(0.0))


def test_a_worker_without_news_repeats_the_last_means() -> None:
    algorithm = ControlVariates(inner=Alone(num_rounds=9, local_steps=1), weight="auto")
    state = algorithm.init(0, torch.zeros(2))
    algorithm.handle(state, Started(num_samples=1), now=0.0)
    trained = trained_event(torch.ones(2), torch.zeros(2), num_steps=4)
    algorithm.handle(state, replace(trained, loss=0.5), now=1.0)
    told = state.inner.params[-4:]
    assert (told * 2.0**30).tolist() == [0.5, 4.0, 2.0, 16.0]
    sound = torch.tensor([0.5, 0.5])
    back = trained_event(sound, sound, num_steps=0, has_gone_back=True)
    algorithm.handle(state, back, now=2.0)
    assert torch.equal(state.inner.params[-4:], told)
