"""Training that fails goes on where it was sound, if somebody else is to blame."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Steps, Train, Trained
from edgegossip.net.host.work import LastSoundParameters

INITIAL = torch.zeros(2)
ERROR = TrainingError("the loss became nan")
SUSPECT = 1


def make() -> LastSoundParameters:
    return LastSoundParameters(INITIAL)


def trained(value: float, loss: float = 1.0) -> Trained:
    params = torch.full((2,), value)
    return Trained(
        params=params, before=INITIAL, num_samples=1, num_steps=1, seconds=1.0, loss=loss
    )


def request(value: float = 9.0) -> Train:
    return Train(torch.full((2,), value), Steps(1))


def test_it_goes_back_to_the_last_parameters_that_were_sound() -> None:
    sound = make()
    assert [sound.check(trained(value)) for value in (1.0, 2.0)] == [True, True]
    event = sound.go_back(request(), 3.0, ERROR, SUSPECT)
    assert event.params.tolist() == [2.0, 2.0]
    assert event.is_skipped
    assert event.has_gone_back
    assert event.seconds == 3.0


def test_parameters_after_which_the_loss_was_far_above_the_lowest_are_not_sound() -> None:
    sound = make()
    results = ((1.0, 4.0), (2.0, 1.0), (3.0, 1e6))
    found = [sound.check(trained(value, loss)) for value, loss in results]
    assert found == [True, True, False]
    assert sound.go_back(request(), 0.0, ERROR, SUSPECT).params.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("losses", [[1.0, 0.0, 0.001, 0.05], [-1.0, -9.0, -8.0]])
def test_losses_near_zero_and_below_are_sound(losses: list[float]) -> None:
    sound = make()
    for value, loss in enumerate(losses):
        sound.check(trained(value, loss))
    assert sound.params.tolist() == [len(losses) - 1.0] * 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_parameters_that_are_not_finite_are_a_failure(value: float) -> None:
    sound = make()
    with pytest.raises(TrainingError, match="try a smaller learning rate"):
        sound.check(trained(value))


def test_large_parameters_whose_sum_overflows_are_finite() -> None:
    sound = make()
    sound.check(trained(3e38))


def test_with_nobody_to_blame_it_fails() -> None:
    with pytest.raises(TrainingError, match="became nan"):
        make().go_back(request(), 0.0, ERROR, None)


def test_one_that_fails_from_what_only_itself_has_touched_blames_nobody() -> None:
    sound = make()
    sound.check(trained(9.0))
    with pytest.raises(TrainingError, match="became nan"):
        sound.go_back(request(9.0), 0.0, ERROR, SUSPECT)
    assert sound.needs_suspect


def test_what_others_influenced_before_an_earlier_part_of_the_training_is_given_up() -> None:
    sound = make()
    sound.check(trained(1.0))
    sound.check(replace(trained(8.0), before=torch.full((2,), 7.0)))  # after a mix
    sound.check(replace(trained(9.0), before=torch.full((2,), 8.0)))
    assert sound.go_back(request(9.0), 0.0, ERROR, SUSPECT).params.tolist() == [1.0, 1.0]
    # If it fails from there, too, nobody else is to blame.
    with pytest.raises(TrainingError, match="became nan"):
        sound.go_back(request(1.0), 0.0, ERROR, SUSPECT)


def test_inputs_come_from_others_even_where_parameters_do_not() -> None:
    sound = make()
    sound.check(trained(9.0))
    poisoned = replace(request(9.0), inputs={"activations": torch.full((2,), 1e6)})
    assert sound.go_back(poisoned, 0.0, ERROR, SUSPECT).has_gone_back
    assert not sound.needs_suspect


def test_each_blame_is_enough_for_six_times() -> None:
    sound = make()
    for _ in range(2):
        assert sound.needs_suspect
        sound.go_back(request(), 0.0, ERROR, SUSPECT)
        for _ in range(5):
            assert not sound.needs_suspect
            sound.go_back(request(), 0.0, ERROR, None)
    with pytest.raises(TrainingError, match="became nan"):
        sound.go_back(request(), 0.0, ERROR, None)
