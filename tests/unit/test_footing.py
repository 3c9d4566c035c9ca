"""Training that fails goes on where it was sound, if somebody else is to blame."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Steps, Train, Trained
from edgegossip.net.host.work import Footing

INITIAL = torch.zeros(2)
ERROR = TrainingError("the loss became nan")


class Others:
    """The workers that can be blamed."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.num_went_well = 0

    def blame(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def went_well(self, params: torch.Tensor) -> None:
        self.num_went_well += 1


def make(number: int = 1) -> tuple[Footing, Others]:
    others = Others(number)
    return Footing(INITIAL, others.blame, others.went_well), others


def trained(value: float, loss: float = 1.0) -> Trained:
    params = torch.full((2,), value)
    return Trained(
        params=params, before=INITIAL, num_samples=1, num_steps=1, seconds=1.0, loss=loss
    )


def request(value: float = 9.0) -> Train:
    return Train(torch.full((2,), value), Steps(1))


def test_it_goes_back_to_the_last_parameters_that_were_sound() -> None:
    footing, others = make()
    for value in (1.0, 2.0):
        footing.check(trained(value))
    event = footing.go_back(request(), 3.0, ERROR)
    assert event.params.tolist() == [2.0, 2.0]
    assert event.is_skipped
    assert event.has_gone_back
    assert event.seconds == 3.0
    assert others.num_went_well == 2


def test_parameters_after_which_the_loss_was_far_above_the_lowest_are_not_sound() -> None:
    footing, others = make()
    for value, loss in ((1.0, 4.0), (2.0, 1.0), (3.0, 1e6)):
        footing.check(trained(value, loss))
    assert footing.go_back(request(), 0.0, ERROR).params.tolist() == [2.0, 2.0]
    assert others.num_went_well == 2


@pytest.mark.parametrize("losses", [[1.0, 0.0, 0.001, 0.05], [-1.0, -9.0, -8.0]])
def test_losses_near_zero_and_below_are_sound(losses: list[float]) -> None:
    footing, _ = make()
    for value, loss in enumerate(losses):
        footing.check(trained(value, loss))
    assert footing.params.tolist() == [len(losses) - 1.0] * 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_parameters_that_are_not_finite_are_a_failure(value: float) -> None:
    footing, _ = make()
    with pytest.raises(TrainingError, match="try a smaller learning rate"):
        footing.check(trained(value))


def test_large_parameters_whose_sum_overflows_are_finite() -> None:
    footing, _ = make()
    footing.check(trained(3e38))


def test_with_nobody_to_blame_it_fails() -> None:
    footing, _ = make(0)
    with pytest.raises(TrainingError, match="became nan"):
        footing.go_back(request(), 0.0, ERROR)


def test_one_that_fails_from_what_only_itself_has_touched_blames_nobody() -> None:
    footing, others = make()
    footing.check(trained(9.0))
    with pytest.raises(TrainingError, match="became nan"):
        footing.go_back(request(9.0), 0.0, ERROR)
    assert others.left == 1


def test_inputs_come_from_others_even_where_parameters_do_not() -> None:
    footing, others = make()
    footing.check(trained(9.0))
    poisoned = replace(request(9.0), inputs={"activations": torch.full((2,), 1e6)})
    assert footing.go_back(poisoned, 0.0, ERROR).has_gone_back
    assert others.left == 0


def test_each_blame_is_enough_for_six_times() -> None:
    footing, others = make(2)
    for number in range(12):
        footing.go_back(request(), 0.0, ERROR)
        assert others.left == (1 if number < 6 else 0)
    with pytest.raises(TrainingError, match="became nan"):
        footing.go_back(request(), 0.0, ERROR)
