"""Moments of the optimizer are averaged at their own rates, as DES-LOC does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms import ALGORITHMS, PARAMETER_SERVERS, STAGES
from tests.observers import Silent
from tests.small_learners import DATA, OPTIMIZERS, learner
from tests.small_runs import parameters, repeatable_events, small_run, small_task
from tests.tiers import thorough
from tests.trained import trained_event
from torch import Tensor, nn

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.averaged_moments import AveragedMoments, MomentsState
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Message,
    Payload,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerLost,
)
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import WorkerData
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import AdamW
from edgegossip.training.stacked.learner import StackedLearner

NUM = 3
SPEEDS = (4.0, 2.0, 1.0)
SHARDS = [torch.arange(rank, 64, NUM) for rank in range(NUM)]


def all_reduce(num_workers: int = NUM, num_rounds: int = 6, local_steps: int = 2) -> AllReduce:
    return AllReduce(
        topology=complete(num_workers), num_rounds=num_rounds, local_steps=local_steps
    )


def make(rank: Rank) -> Learner:
    return learner(optimizer=AdamW(lr=0.01), augmentation=None, shard=SHARDS[rank], rank=rank)


class Trainings(Silent):
    """Keeps what each training ended with."""

    def __init__(self) -> None:
        self.found: dict[Rank, list[Trained]] = {}

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.found.setdefault(rank, []).append(event)


def simulated(
    algorithm: Algorithm[Any],
    speeds: Sequence[float] = SPEEDS,
    ranks: Sequence[Rank] = range(NUM),
) -> tuple[list[Tensor], dict[Rank, list[Trained]]]:
    """All workers' final parameters, and what they trained, with the learners of `ranks`."""
    learners = [make(rank) for rank in ranks]
    observer = Trainings()
    simulator = Simulator(
        algorithm,
        [Platform(throughput=speed) for speed in speeds],
        learners[0].model.params.clone(),
        lambda rank, incarnation: learners[rank],
        observer=observer,
        wire=True,
    )
    assert simulator.run()
    return [state.estimate for state in simulator.states], observer.found


def by_hand(first_period: int, second_period: int, num_rounds: int, local_steps: int) -> Tensor:
    """Algorithm 1 of DES-LOC: train, and then average what is due after so many steps."""
    learners = [make(rank) for rank in range(NUM)]
    params = learners[0].model.params.clone()
    moments: list[dict[str, Tensor]] = [{} for _ in learners]
    for round in range(1, num_rounds + 1):
        results = [
            each.train(Train(params, Steps(local_steps), moments=given))
            for each, given in zip(learners, moments, strict=True)
        ]
        params = torch.stack([each.params for each in results]).mean(0)
        periods = {"first": first_period, "second": second_period}
        due = [kind for kind, period in periods.items() if round % period == 0]
        mean = {k: torch.stack([each.moments[k] for each in results]).mean(0) for k in due}
        moments = [mean] * NUM
    return params


@pytest.mark.parametrize("periods", [(1, 1), (2, 3)])
def test_parameters_and_moments_are_averaged_as_in_the_papers_algorithm(
    periods: tuple[int, int],
) -> None:
    first, second = periods
    averaged = AveragedMoments(inner=all_reduce(), first_period=first, second_period=second)
    found, _ = simulated(averaged)
    expected = by_hand(first, second, num_rounds=6, local_steps=2)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-7)
    # Neither local moments nor others' periods end there.
    local, _ = simulated(all_reduce())
    assert (local[0] - expected).abs().max() > 1e-4


def test_with_equal_data_and_an_average_after_each_step_all_are_one_worker() -> None:
    def trained(num_workers: int) -> tuple[list[Tensor], list[Trained]]:
        inner = all_reduce(num_workers, local_steps=1)
        averaged = AveragedMoments(inner=inner, first_period=1, second_period=1)
        # Equal streams of batches, too: each learner is that of rank 0.
        found, trainings = simulated(averaged, SPEEDS[:num_workers], ranks=[0] * num_workers)
        return found, trainings[num_workers - 1]

    (alone,), expected = trained(1)
    # The mean of two equal numbers has no rounding error, which Adam would enlarge.
    found, trainings = trained(2)
    assert all(torch.equal(each, alone) for each in found)
    for one, other in zip(trainings, expected, strict=True):
        assert torch.equal(one.moments["first"], other.moments["first"])
        assert torch.equal(one.moments["second"], other.moments["second"])


def test_one_worker_alone_is_local_adamw_to_the_bit() -> None:
    plain, _ = simulated(all_reduce(1), speeds=(1.0,))
    averaged, _ = simulated(
        AveragedMoments(inner=all_reduce(1), first_period=1, second_period=1), speeds=(1.0,)
    )
    lone, params = make(0), make(0).model.params.clone()
    for _ in range(6):
        params = lone.train(Train(params, Steps(2))).params
    assert torch.equal(plain[0], params)
    assert torch.equal(averaged[0], params)


def test_without_periods_the_state_stays_local_to_the_bit() -> None:
    local = AveragedMoments(inner=all_reduce(), first_period=None, second_period=None)
    found, trainings = simulated(local)
    expected, _ = simulated(all_reduce())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(event.moments for events in trainings.values() for event in events)


def test_after_an_average_all_workers_have_the_same_moment_and_the_others_keep_theirs() -> None:
    averaged = AveragedMoments(
        inner=all_reduce(num_rounds=5), first_period=2, second_period=None
    )
    learners = [make(rank) for rank in range(NUM)]
    asked: dict[int, list[Train]] = {}

    def recording(rank: Rank) -> Learner:
        train = learners[rank].train

        def kept(request: Train, progress: float = 0.0) -> Any:  # noqa: ANN401
            asked.setdefault(rank, []).append(request)
            return train(request, progress)

        learners[rank].train = kept  # type: ignore[method-assign]
        return learners[rank]

    simulator = Simulator(
        averaged,
        [Platform(throughput=1.0)] * NUM,
        learners[0].model.params.clone(),
        lambda rank, incarnation: recording(rank),
    )
    assert simulator.run()
    for rank in range(NUM):
        given = [each.moments for each in asked[rank]]
        assert all(each is not None for each in given)
        assert [[*(each or {})] for each in given] == [[], [], ["first"], [], ["first"]]
        for one, other in zip(given, (each.moments for each in asked[0]), strict=True):
            assert all(torch.equal((one or {})[k], x) for k, x in (other or {}).items())


class Sizes(Silent):
    """Counts the sent tensors by their number of entries."""

    def __init__(self) -> None:
        self.tensors: Counter[str] = Counter()
        self.num_bytes = 0

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.tensors.update([*message.payload])
        self.num_bytes += num_bytes


def _taken_from(learners: Sequence[Learner], rank: Rank, incarnation: int) -> Learner:
    return learners[rank]


def test_a_moment_is_sent_once_in_its_period_and_its_bytes_count() -> None:
    found = {}
    algorithms: dict[str, Algorithm[Any]] = {
        "local": all_reduce(),
        "averaged": AveragedMoments(inner=all_reduce(), first_period=2, second_period=3),
    }
    for name, algorithm in algorithms.items():
        learners, sizes = [make(rank) for rank in range(NUM)], Sizes()
        simulator = Simulator(
            algorithm,
            [Platform(throughput=1.0)] * NUM,
            learners[0].model.params.clone(),
            partial(_taken_from, learners),
            observer=sizes,
        )
        assert simulator.run()
        found[name] = sizes
    num_messages = NUM * (NUM - 1)
    tensors = found["averaged"].tensors
    assert tensors["moment.first"] == 3 * num_messages
    assert tensors["moment.second"] == 2 * num_messages
    num_trained = learners[0].layout.num_trained
    more = found["averaged"].num_bytes - found["local"].num_bytes
    assert 0 <= more - 5 * num_messages * 4 * num_trained < 5 * num_messages * 100


# What an optimizer does with moments.


WITH_MOMENTS = [name for name in OPTIMIZERS if name in ("sgd", "adamw", "muon", "amsgrad")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Learner) for name in WITH_MOMENTS),
        *((name, StackedLearner) for name in ("sgd", "amsgrad")),
    ],
)
def test_moments_given_back_change_nothing_and_others_do(
    name: str, kind: type[Learner]
) -> None:
    made = learner(optimizer=OPTIMIZERS[name], augmentation=None)

    def ends(moments: Callable[[Payload], Payload | None]) -> Tensor:
        data = WorkerData(dataset=DATA.training, shard=SHARDS[0])
        some = kind(made.settings, data)
        first = some.train(Train(some.model.params.clone(), Steps(3), moments={}))
        given = moments(first.moments)
        return some.train(Train(first.params, Steps(2), moments=given)).params

    plain = ends(lambda found: None)
    assert torch.equal(ends(dict), plain)
    assert torch.equal(ends(lambda found: {}), plain)
    # Another first moment moves the parameters along.
    pushed = ends(lambda found: {**found, "first": found["first"] + 1.0})
    assert (pushed - plain).abs().max() > 1e-3


class Sloped(nn.Module):
    """A model whose parameters have the same gradient in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ torch.tensor([3.0, -0.1])).expand(len(x))


def sloped(rank: Rank) -> Learner:
    return learner(
        model=Sloped(),
        loss=lambda outputs, targets: outputs.mean(),
        optimizer=AdamW(lr=0.01, weight_decay=0.0),
        augmentation=None,
        shard=SHARDS[rank],
        rank=rank,
    )


@pytest.mark.parametrize("returns_at", [None, 6])
def test_steps_keep_their_length_where_workers_take_different_numbers(
    returns_at: int | None,
) -> None:
    # Under a constant gradient, each step of Adam is as long as the learning rate.
    expected = [0.01 * num_steps * torch.tensor([-1.0, 1.0]) for num_steps in (16, 2)]
    learners = [sloped(0), sloped(1)]
    averaged: list[Payload] = [{}, {}]
    for round in range(10):
        if round == returns_at:
            learners[0], averaged[0] = sloped(0), {}  # with no memory of its steps
        results = [
            each.train(Train(torch.zeros(2), Steps(num_steps), moments=given))
            for each, given, num_steps in zip(learners, averaged, (16, 2), strict=True)
        ]
        for result, change in zip(results, expected, strict=True):
            torch.testing.assert_close(result.params, change, rtol=1e-4, atol=0.0)
        averaged = [
            {k: torch.stack([each.moments[k] for each in results]).mean(0) for k in own.moments}
            for own in results
        ]


def test_an_optimizer_reports_the_moments_that_it_has() -> None:
    def reported(name: str) -> dict[str, int]:
        some = learner(optimizer=OPTIMIZERS[name])
        request = Train(some.model.params.clone(), Steps(1), moments={})
        return {kind: len(each) for kind, each in some.train(request).moments.items()}

    num_trained = learner().layout.num_trained
    assert reported("adamw") == {"first": num_trained, "second": num_trained}
    assert reported("sgd") == {"first": num_trained}
    assert reported("adagrad") == {}
    if "muon" in OPTIMIZERS:
        matrix = 16 * 3
        assert reported("muon") == {"first": num_trained, "second": num_trained - matrix}


def test_moments_are_reported_only_where_they_are_asked_for() -> None:
    some = learner()
    assert not some.train(Train(some.model.params.clone(), Steps(1))).moments


# A whole run, with an optimizer of each kind.


def adapted(num_rounds: int = 4, **changes: Any) -> Experiment:  # noqa: ANN401
    inner = all_reduce(4, num_rounds)
    algorithm = AveragedMoments(inner=inner, first_period=1, second_period=2)
    return replace(small_run(task=small_task(**changes)), algorithm=algorithm)


@thorough
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_a_run_repeats_byte_for_byte(tmp_path: Path, name: str) -> None:
    experiment = adapted(optimizer=OPTIMIZERS[name])
    for out, num_threads in ((tmp_path / "one", 0), (tmp_path / "two", 2)):
        run(experiment, out=out, num_threads=num_threads)
    assert repeatable_events(tmp_path / "one") == repeatable_events(tmp_path / "two")
    assert parameters(tmp_path / "one") == parameters(tmp_path / "two")


# One worker's answers.


AVERAGED = AveragedMoments(
    inner=GoSGD(topology=complete(3), num_rounds=9, exchange_probability=1.0),
    first_period=1,
    second_period=1,
)
PARAMS = torch.zeros(2)


def begun(algorithm: AveragedMoments = AVERAGED) -> MomentsState:
    state = algorithm.init(0, PARAMS)
    algorithm.handle(state, Started(), 0.0)
    return state


def ended(first: float = 1.0, second: float = 4.0, **changes: Any) -> Trained:  # noqa: ANN401
    moments = {"first": torch.full((2,), first), "second": torch.full((2,), second)}
    return trained_event(PARAMS + 1, PARAMS, moments=moments, **changes)


def push(first: float, second: float, round: int = 0) -> Message:
    payload = {
        "params": PARAMS,
        "moment.first": torch.full((2,), first),
        "moment.second": torch.full((2,), second),
    }
    return Message("push", round, payload, {"weight": 0.25})


def trains(effects: Sequence[object]) -> Train:
    (found,) = [each for each in effects if isinstance(each, Train)]
    return found


def test_the_next_training_begins_with_the_mean_of_those_that_arrived() -> None:
    state = begun()
    AVERAGED.handle(state, Received(2, push(5.0, 1.0)), 0.5)
    AVERAGED.handle(state, Received(1, push(3.0, 1.0)), 0.6)
    train = trains(AVERAGED.handle(state, ended(first=1.0, second=4.0), 1.0))
    assert train.moments is not None
    assert train.moments["first"].tolist() == [3.0, 3.0]
    assert train.moments["second"].tolist() == [2.0, 2.0]
    # And only the next one.
    assert trains(AVERAGED.handle(state, ended(), 2.0)).moments == {}


def test_a_negative_second_moment_of_a_liar_is_none() -> None:
    state = begun()
    AVERAGED.handle(state, Received(1, push(0.0, -100.0)), 0.5)
    train = trains(AVERAGED.handle(state, ended(second=4.0), 1.0))
    assert train.moments is not None
    assert train.moments["second"].tolist() == [0.0, 0.0]


def test_moments_of_a_liar_or_of_another_length_are_dropped() -> None:
    state = begun()
    AVERAGED.handle(state, Received(1, push(9.0, 9.0)), 0.5)
    AVERAGED.handle(state, WorkerLost(1, has_lied=True), 0.6)
    message = push(9.0, 9.0)
    longer = {**message.payload, "moment.first": torch.ones(1), "moment.second": torch.ones(1)}
    AVERAGED.handle(state, Received(2, replace(message, payload=longer)), 0.7)
    assert trains(AVERAGED.handle(state, ended(), 1.0)).moments == {}


def test_after_unsound_parameters_moments_begin_anew() -> None:
    state = begun()
    AVERAGED.handle(state, ended(), 1.0)
    AVERAGED.handle(state, Received(1, push(9.0, 9.0)), 1.5)
    train = trains(AVERAGED.handle(state, ended(has_gone_back=True), 2.0))
    assert train.moments == {}
    assert state.moments == {}


def test_late_moments_of_a_round_are_dropped_and_early_ones_wait_for_theirs() -> None:
    algorithm = AveragedMoments(
        inner=Gossip(topology=complete(3), num_rounds=9), first_period=1, second_period=1
    )
    state = begun(algorithm)

    def tell(sender: Rank, round: int, first: float) -> None:
        payload = {"params": PARAMS, "moment.first": torch.full((2,), first)}
        message = Message("params", round, payload)
        assert not algorithm.handle(state, Received(sender, message), 0.5)

    tell(1, 1, 4.0)  # of the next round
    tell(1, 0, 1.0)
    tell(2, 0, 2.0)
    train = trains(algorithm.handle(state, ended(first=0.0), 1.0))
    assert train.moments is not None
    assert train.moments["first"].tolist() == [1.0, 1.0]
    tell(2, 0, 99.0)  # late
    tell(2, 1, 5.0)
    train = trains(algorithm.handle(state, ended(first=3.0), 2.0))
    assert train.moments is not None
    assert train.moments["first"].tolist() == [4.0, 4.0]
    assert not state.arrived


def test_the_inner_algorithm_gets_its_own_message() -> None:
    state = begun()
    effects = AVERAGED.handle(state, ended(), 1.0)
    (send,) = [each for each in effects if isinstance(each, Send)]
    assert {*send.message.payload} == {"params", "moment.first", "moment.second"}
    AVERAGED.handle(state, Received(1, push(1.0, 1.0)), 1.5)
    assert state.inner.estimate.shape == PARAMS.shape


@pytest.mark.parametrize(
    ("inner", "match"),
    [
        (PARAMETER_SERVERS["bsp"], "rank 0 of BSP is a server"),
        (STAGES["pipelined"], "is a stage-"),
        (ALGORITHMS["diloco"], "which other workers relay"),
    ],
)
def test_other_roles_and_relayed_messages_are_refused(inner: Any, match: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=match):
        (
            AveragedMoments(inner=inner).schema(PARAMS),
            AveragedMoments(inner=inner).init(0, PARAMS),
        )


def test_wrong_periods_are_refused() -> None:
    with pytest.raises(ValueError, match="first_period must be at least 1 or None, got 0"):
        AveragedMoments(inner=all_reduce(), first_period=0)
