"""The trailing average: its weights, its age, and noise that it removes."""

from __future__ import annotations

import statistics

import pytest
import torch
from tests.algorithms import NUM_ROUNDS, SERVED
from tests.tiers import first, thorough
from tests.trained import trained_event
from tests.worlds import UNEVEN, Recorder, final_params, make_world

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage, TrailingState
from edgegossip.contract.protocol import Started, Trained
from edgegossip.contract.randomness import generator


def served(values: list[float], window: float) -> tuple[TrailingAverage, TrailingState]:
    """A worker whose rounds ended with these parameters."""
    algorithm = TrailingAverage(inner=Alone(num_rounds=10**6), window=window)
    state = algorithm.init(0, torch.zeros(1, dtype=torch.float64))
    algorithm.handle(state, Started(has_rejoined=False, num_samples=1), now=0.0)
    for value in values:
        end_round(algorithm, state, value)
    return algorithm, state


def end_round(
    algorithm: TrailingAverage, state: TrailingState, value: float, *, gone_back: bool = False
) -> None:
    params = torch.tensor([value], dtype=torch.float64)
    event = trained_event(params, state.params, has_gone_back=gone_back)
    algorithm.handle(state, event, now=0.0)


def weights(window: float, num_rounds: int) -> list[float]:
    """The weight of each round in the average, the newest last."""
    ones = torch.eye(num_rounds).tolist()
    return [served(row, window)[1].estimate.item() for row in ones]


@pytest.mark.parametrize("num_rounds", [1, 2, 4])
def test_the_first_rounds_count_equally(num_rounds: int) -> None:
    assert weights(7.0, num_rounds) == pytest.approx([1 / num_rounds] * num_rounds)


@thorough
@pytest.mark.parametrize("window", first(1, [10.5, 2.0, 5.0]))
def test_the_mean_age_is_that_of_an_equal_average_over_the_window(window: float) -> None:
    found = weights(window, 150)
    age = sum((len(found) - 1 - k) * weight for k, weight in enumerate(found))
    assert sum(found) == pytest.approx(1)
    assert age == pytest.approx((window - 1) / 2, rel=1e-3)


def test_independent_noise_falls_as_the_window_grows() -> None:
    # A mean of w values has the variance 1 / w, and so has an exponential one of equal age.
    noise = torch.randn(4000, generator=generator(0, "noise")).tolist()
    algorithm, state = served([], 9.0)
    found = []
    for value in noise:
        end_round(algorithm, state, value)
        found.append(state.estimate.item())
    assert statistics.pvariance(found[50:]) == pytest.approx(1 / 9, rel=0.15)


@pytest.mark.parametrize("name", SERVED)
def test_a_window_of_one_round_and_training_itself_are_the_inner_algorithm(name: str) -> None:
    algorithm = SERVED[name]
    plain, one, three = Recorder(), Recorder(), Recorder()
    inner = make_world(algorithm.inner, platforms=UNEVEN, observer=plain)
    expected = final_params(inner)
    newest = TrailingAverage(inner=algorithm.inner, window=1)
    world = make_world(newest, platforms=UNEVEN, observer=one)
    assert torch.equal(final_params(world), expected)
    averaged = make_world(algorithm, platforms=UNEVEN, observer=three)
    assert not torch.equal(final_params(averaged), expected)
    assert plain.trace == one.trace == three.trace


def test_parameters_that_were_unsound_leave_the_average() -> None:
    algorithm, state = served([1.0, 1e30], window=9.0)
    end_round(algorithm, state, 1.0, gone_back=True)
    assert state.estimate.item() == 1.0
    end_round(algorithm, state, 2.0)
    assert state.estimate.item() == 2.0


def test_an_average_that_was_handed_over_never_changes() -> None:
    algorithm, state = served([1.0, 3.0], window=9.0)
    handed_over = state.estimate
    end_round(algorithm, state, 5.0)
    assert handed_over.item() == 2.0
    assert state.estimate.item() == 3.0


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r'window must be at least 1 or "auto", got 0\.5'):
        TrailingAverage(inner=Alone(num_rounds=NUM_ROUNDS), window=0.5)


def test_a_window_by_itself_has_the_mean_age_of_a_third_of_the_run() -> None:
    weights = torch.zeros(0, dtype=torch.float64)
    for number in range(1, 301):
        newest = 5 / (number + 4)
        weights = torch.cat([weights * (1 - newest), torch.tensor([newest])])
    ages = torch.arange(300, 0, -1, dtype=torch.float64) - 1
    assert float(weights @ ages) == pytest.approx(300 / 6, rel=0.03)
    served = TrailingAverage(inner=Alone(num_rounds=300), window="auto")
    state = served.init(0, torch.zeros(300))
    for number in range(300):
        after = torch.eye(300)[number]
        served.handle(state, Trained.skipped(after), now=0.0)
    torch.testing.assert_close(state.estimate.double(), weights, rtol=1e-4, atol=1e-7)
