"""Optimizers that users write or wrap themselves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from tests.small_learners import Optimizer, learner, seeded, start
from torch import nn

from edgegossip.contract.protocol import Steps, Train

OTHERS = [nn.Parameter(torch.zeros(2))]


def of_others(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(OTHERS)


def of_some_others(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([*params, *OTHERS])


@pytest.mark.parametrize("optimizer", [of_others, of_some_others])
def test_an_optimizer_of_other_tensors_is_refused(optimizer: Optimizer) -> None:
    with pytest.raises(ValueError, match=r"made Adam for tensors that are not the model's own"):
        learner(optimizer=optimizer)


def of_the_weights(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for each in params if each.ndim > 1])


def test_an_optimizer_may_leave_parameters_as_they_are() -> None:
    some = learner(optimizer=of_the_weights)
    some.train(Train(start(some), Steps(1)))
    before, after = dict(seeded().named_parameters()), some.model.module.named_parameters()
    unchanged = {each for name, each in after if torch.equal(each, before[name])}
    assert {each.ndim for each in unchanged} == {1}


class Unrated(torch.optim.Optimizer):
    """A user's own optimizer whose learning rate has another name."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"step_size": 0.1})


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of Unrated has no 'lr', which the schedule"):
        learner(optimizer=Unrated)
