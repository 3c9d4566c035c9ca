"""The common part of the frameworks' callbacks, without the frameworks."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.script_workers import workers_in_threads
from torch import nn

from edgegossip.contract.errors import UsageError
from edgegossip.integrations.joined_training import JoinedTraining
from edgegossip.integrations.lightning import lightning_callback
from edgegossip.integrations.transformers import TransformersHooks, transformers_callback
from edgegossip.real.script import ScriptWorker
from edgegossip.recipes.script_averaging import averaging


def joined(worker: ScriptWorker | None = None, **options: Any) -> JoinedTraining:  # noqa: ANN401
    return JoinedTraining(averaging(), worker or ScriptWorker(), None, options)


def begin(training: JoinedTraining, **changes: Any) -> nn.Module:  # noqa: ANN401
    given: dict[str, Any] = {
        "model": nn.Linear(1, 1),
        "optimizers": [],
        "num_samples": 4,
        "num_steps": 6,
        "num_processes": 1,
        **changes,
    }
    training.begin(**given)
    model: nn.Module = given["model"]
    return model


def test_processes_of_a_framework_have_to_use_torch_distributed() -> None:
    with pytest.raises(UsageError, match=r"2 processes without torch\.distributed; use .* DDP"):
        begin(joined(), num_processes=2)


def test_deepspeed_is_refused() -> None:
    hooks, args = TransformersHooks(joined()), SimpleNamespace(deepspeed_plugin=object())
    with pytest.raises(UsageError, match="DeepSpeed's optimizer has its own copy"):
        hooks.on_train_begin(args, None, None, nn.Linear(1, 1), None, None)


@pytest.mark.parametrize("num_steps", [6, 7])
def test_steps_that_the_algorithm_does_not_take_are_told(
    num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = JoinedTraining(averaging(every=2), ScriptWorker(), None, {})
    begin(training, num_steps=num_steps)
    for _ in range(6):
        training.step(1.0, 1)
    assert training.is_over
    training.end()
    assert ("ended the training after 6 of 7 steps" in caplog.text) == (num_steps == 7)


def test_an_unknown_number_of_samples_has_to_be_given() -> None:
    with pytest.raises(UsageError, match="give the callback num_samples"):
        begin(joined(), num_samples=None)
    training = JoinedTraining(averaging(), ScriptWorker(), 7, {})
    begin(training, num_samples=None)
    assert training.num_samples == 7
    training.end()


def test_leaving_before_the_end_is_said_and_leaving_after_it_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = joined()
    begin(training)
    training.step(1.0, 1)
    assert not training.is_over
    training.end()
    assert "training ended after 1 rounds, before the algorithm did" in caplog.text
    caplog.clear()
    begin(training)
    for _ in range(6):
        training.step(1.0, 1)
    assert training.is_over
    training.end()
    training.end()
    assert "has ended" not in caplog.text


def test_moments_of_training_that_failed_are_forgotten() -> None:
    lengths: list[list[int]] = [[], []]

    def go(worker: ScriptWorker) -> None:
        training = joined(worker)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        begin(training, model=model, optimizers=[optimizer])
        assert training._loop is not None
        training._loop._host._sound._credit = 1  # another worker has been blamed before
        for number in range(6):
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 - 3.0 * worker.rank)).sum().backward()
            optimizer.step()
            is_failing = (worker.rank, number) == (1, 3)
            training.step(torch.nan if is_failing else 1.0 - 0.1 * worker.rank, 1)
            lengths[worker.rank].append(len(optimizer.state))
        training.end()

    assert workers_in_threads(2, go) == [None, None]
    assert lengths == [[2] * 6, [2, 2, 2, 0, 2, 2]]


@pytest.mark.parametrize(
    ("make", "package", "message"),
    [
        (lightning_callback, "lightning", r"Lightning needs .* 'edgegossip\[lightning\]'"),
        (transformers_callback, "transformers", r"Transformers .*edgegossip\[transformers\]'"),
    ],
)
def test_a_missing_framework_is_named(
    make: Any,  # noqa: ANN401
    package: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else found(name),
    )
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    with pytest.raises(UsageError, match=message):
        make(averaging(), ScriptWorker())
