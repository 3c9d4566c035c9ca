"""Several executors train one worker's batches as one would, and may be lost."""

from __future__ import annotations

import copy
import logging
import socket
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_learners import OPTIMIZERS, SHARD, arguments_of, learner_of, seeded
from tests.small_runs import adam, dataset, small_model
from tests.tiers import by_name, first, thorough
from tests.together import together
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.data.dataset import from_tensors
from edgegossip.data.pictures import flip_and_crop
from edgegossip.training.executors.lead import ADDRESS, Executors, divide
from edgegossip.training.executors.learners import LeadingLearner
from edgegossip.training.executors.links import ExecutorLostError, Link, Place
from edgegossip.training.learner import Learner
from edgegossip.training.loss import TokenCrossEntropy
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Focused, Importance
from edgegossip.training.step import TrainingStep

DATA = dataset()


class Exact(nn.Module):
    """Computes in float64, without anything that depends on how a batch is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GELU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.double())
        return y


def given(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "model": seeded(Exact),
        "loss": F.cross_entropy,
        "optimizer": SGD(lr=0.05),
        "dataset": DATA.training,
        "shard": SHARD,
        "batch_size": 8,
    }
    return defaults | changes


def requests(some: Learner, number: int = 3) -> list[TrainingResult]:
    """Train as an algorithm does that changes parameters between its requests."""
    params, results = some.model.params.clone(), []
    for index in range(number):
        request = Train(params, Epochs(), rate_ratio=1 - index / 8, keep_ratio=0.8)
        results.append(some.train(request, progress=index / number))
        params = results[-1].params * 0.99
    return results


def assert_equal(found: list[TrainingResult], expected: list[TrainingResult]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.params, theirs.params, rtol=0, atol=1e-9)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-9)
        assert (ours.num_samples, ours.num_steps) == (theirs.num_samples, theirs.num_steps)


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    **{name: {"optimizer": each} for name, each in OPTIMIZERS.items() if name != "sgd"},
    "adam": {"optimizer": partial(torch.optim.Adam, lr=0.01)},
    "clipped": {"step": TrainingStep(max_grad_norm=0.1)},
    "micro-batches": {"step": TrainingStep(micro_batch_size=3)},
    "importance": {"accuracy_aware": AccuracyAware(selection=Importance())},
    "focused": {"accuracy_aware": AccuracyAware(selection=Focused())},
    "batches of 3": {"batch_size": 3},
}
CASES.pop("adam by groups")  # its groups are those of another model


@pytest.mark.parametrize("number", first(1, [2, 4]))
@pytest.mark.parametrize("changes", by_name(CASES, ["sgd", "focused"]))
def test_they_train_what_one_trains(number: int, changes: dict[str, Any]) -> None:
    arguments = given(**changes)
    expected = requests(learner_of(**arguments))
    with together(number, arguments) as crew:
        assert_equal(requests(crew.lead), expected)
        assert all(each.num_steps for each in crew.followers)
        assert sum(crew.executors.num_samples) == sum(each.num_samples for each in expected)


class Counting(TokenCrossEntropy):
    """Writes down the numbers of tokens that it counts."""

    def num_terms(self, outputs: Tensor, targets: Tensor) -> int:
        number = super().num_terms(outputs, targets)
        COUNTED.append(number)
        return number


COUNTED: list[int] = []


def tokens() -> dict[str, Any]:
    """Sequences of unequal lengths; some are nothing but padding."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(5, (32, 6), generator=random)
    y = x.clone()
    y[:4] = -100
    y[4::2, 2:] = -100
    data = from_tensors("tokens", (x, y), (x, y))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    return {"dataset": data.training, "shard": torch.arange(32), "model": model}


@pytest.mark.parametrize("size", first(0, [None, 1]))
def test_a_loss_over_tokens_counts_those_of_all_executors(size: int | None) -> None:
    step = TrainingStep(micro_batch_size=size)
    arguments = given(**tokens(), loss=Counting(), step=step, batch_size=4)
    expected = requests(learner_of(**arguments))
    COUNTED.clear()
    with together(2, arguments) as crew:
        assert_equal(requests(crew.lead), expected)
    assert 0 in COUNTED


@thorough
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "deaths", [[(1, 5)], [(2, 5)], [(1, 4), (3, 4)], [(1, 2), (2, 5), (3, 9)]]
)
def test_those_that_are_left_go_on_with_the_same_steps(
    deaths: list[tuple[int, int]], late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = given(optimizer=partial(torch.optim.Adam, lr=0.01))
    expected = requests(learner_of(**arguments), 6)
    with caplog.at_level(logging.WARNING), together(4, arguments, *deaths, late=late) as crew:
        assert_equal(requests(crew.lead, 6), expected)
        assert crew.executors.members == [*{0, 1, 2, 3} - {index for index, _ in deaths}]
    lost = [each for each in caplog.messages if "is lost" in each]
    assert len(lost) == len(deaths)
    assert f"executor {deaths[0][0]} is lost: its process has ended" in lost[0]


def test_a_step_that_failed_only_in_the_lead_is_not_taken_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = given(optimizer=partial(torch.optim.Adam, lr=0.01))
    expected = requests(learner_of(**arguments))
    with together(3, arguments) as crew:
        add_up, num_steps = crew.executors.add_up, 0

        def fail_once(values: Tensor) -> None:
            nonlocal num_steps
            num_steps += 1
            add_up(values)
            if num_steps == 3:
                raise ExecutorLostError("a sum has failed")

        monkeypatch.setattr(crew.executors, "add_up", fail_once)
        assert_equal(requests(crew.lead), expected)
        assert crew.executors.members == [0, 1, 2]


@thorough
def test_one_that_does_not_answer_is_lost_too() -> None:
    arguments = given()
    expected = requests(learner_of(**arguments))
    with together(3, arguments, patience=1.0) as crew:
        crew.followers[0].sleeps_at = 3
        assert_equal(requests(crew.lead), expected)
        assert crew.executors.members == [0, 2]


def test_a_resumed_lead_goes_on_with_another_number_of_executors() -> None:
    arguments = given(optimizer=partial(torch.optim.Adam, lr=0.01))
    alone = learner_of(**arguments)
    request = Train(alone.model.params.clone(), Steps(5))
    params = alone.train(request).params
    kept = copy.deepcopy(alone.state_dict())
    expected = alone.train(Train(params, Steps(5)))
    with together(2, arguments) as crew:
        crew.lead.train(Train(torch.ones_like(params), Steps(2)))  # state that must not stay
        crew.lead.load_state_dict(kept)
        assert_equal([crew.lead.train(Train(params, Steps(5)))], [expected])


def test_after_a_failure_all_forget_their_momentum() -> None:
    arguments = given()
    alone = learner_of(**arguments)
    request = Train(alone.model.params.clone(), Steps(4))
    with together(2, arguments) as crew:
        for each in (alone, crew.lead):
            each.train(request)
            each.start_over()
        assert_equal([crew.lead.train(request)], [alone.train(request)])


def test_momentum_of_a_request_holds_for_all() -> None:
    arguments = given()
    alone = learner_of(**arguments)
    request = Train(alone.model.params.clone(), Steps(4), momentum=0.3)
    with together(2, arguments) as crew:
        assert_equal([crew.lead.train(request)], [alone.train(request)])


def test_moments_of_a_request_hold_for_all() -> None:
    arguments = given()
    alone = learner_of(**arguments)
    with together(2, arguments) as crew:
        results = []
        for each in (alone, crew.lead):
            first = each.train(Train(each.model.params.clone(), Steps(2), moments={}))
            others = {"first": first.moments["first"] * 0.5 + 0.1}
            results.append([each.train(Train(first.params, Steps(4), moments=others))])
        assert_equal(*results)


def test_running_statistics_are_those_of_the_lead() -> None:
    arguments = given(model=seeded(small_model), optimizer=adam)
    with together(2, arguments) as crew:
        params = crew.lead.model.params.clone()
        result = crew.lead.train(Train(params, Steps(4)))
        mean = crew.lead.model.module.get_buffer("1.running_mean").clone()
        assert not torch.equal(
            mean, crew.followers[0].model.module.get_buffer("1.running_mean")
        )
        crew.lead.train(Train(result.params, Steps(1)))
        own = crew.followers[0].model.module.get_buffer("1.num_batches_tracked")
        assert int(own) == 5


def test_executors_drop_and_augment_differently() -> None:
    arguments = given(
        model=seeded(small_model),
        optimizer=adam,
        augmentation=partial(flip_and_crop, padding=1),
        batch_size=6,  # equal shares, so that equal streams would have equal states
    )
    with together(3, arguments) as crew:
        crew.lead.train(Train(crew.lead.model.params.clone(), Steps(1)))
        every = [crew.lead, *crew.followers]
        for streams in (
            [each._dropout.get_state() for each in every],
            [each._random.get_state() for each in every if each._random is not None],
        ):
            assert len({tuple(each.tolist()) for each in streams}) == 3


def test_all_executors_end_with_the_same_parameters() -> None:
    arguments = given(model=seeded(small_model), optimizer=adam, has_buffers=False)
    with together(3, arguments) as crew:
        result = crew.lead.train(Train(crew.lead.model.params.clone(), Epochs()))
    for each in crew.followers:
        assert torch.equal(each.model.params, result.params)


# Shares.


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 5.0, 0.1], [3.0, 3.0, 3.0, 1e-3]])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 64, 129])
def test_a_batch_is_divided_by_speed(number: int, speeds: list[float]) -> None:
    sizes = divide(number, speeds)
    assert sum(sizes) == number
    assert min(each for each in sizes if each) >= min(2, number)
    exact = [number * each / sum(speeds) for each in speeds]
    # No further from the exact share than the two samples that each must have.
    assert all(abs(a - b) < 2 * len(speeds) for a, b in zip(sizes, exact, strict=True))


def test_shares_follow_the_speeds_but_not_their_noise() -> None:
    with together(2, given()) as crew:
        executors = crew.executors
        for step in range(50):
            noise = 3.0 if step % 3 == 0 else 1.0  # a process is interrupted now and then
            executors.timed([32, 32], [0.1 * noise, 0.105])
            assert executors.shares(64) == [32, 32]
        for _ in range(50):
            sizes = executors.shares(64)
            executors.timed(sizes, [0.001 * sizes[0], 0.003 * sizes[1]])
        assert executors.shares(64)[0] == pytest.approx(48, rel=0.1)
        for _ in range(50):
            executors.timed([32, 32], [0.1, 0.105])
        assert executors.shares(64) == [32, 32]


# The start.


def test_an_executor_that_does_not_start_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(0, 3, HashStore())
    with caplog.at_level(logging.WARNING):
        executors = Executors(place, torch.device("cpu"), may_start=lambda index: False)
    assert executors.members == [0]
    assert "executor 1 is lost: its process ended while it started" in caplog.text
    lead = LeadingLearner(**arguments_of(given()), executors=executors)
    assert_equal(requests(lead), requests(learner_of(**given())))


def test_strangers_at_the_port_are_ignored() -> None:
    store, given_up = HashStore(), threading.Event()

    def intrude() -> None:
        host, _, port = store.get(ADDRESS).decode().rpartition(":")
        for said in (b"", b"\0\0\0\2[]", b"\0\0\0\3{}\n"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(said)
        Link(socket.create_connection((host, int(port)))).send({"index": 7})
        given_up.set()

    thread = threading.Thread(target=intrude)
    thread.start()
    executors = Executors(
        Place(0, 2, store),
        torch.device("cpu"),
        may_start=lambda index: not given_up.is_set(),
    )
    thread.join()
    assert executors.members == [0]
