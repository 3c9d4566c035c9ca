"""The best model by validation, among workers: chosen by theory, known to all, ended by all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiers import thorough
from torch import Tensor

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Finish,
    Message,
    Received,
    Send,
    TimerFired,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import complete, ring
from edgegossip.real.best_model import BestByValidation, BestState, best_state, with_best
from edgegossip.runs.best import LOSS, KeepBest
from edgegossip.runs.final_average import FinalAverage
from edgegossip.sim.fault import Crash, Drop, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM, SIZE, LR = 4, 3, 0.1
TARGETS = torch.randn(NUM, SIZE, generator=generator(0, "targets"))
OPTIMUM = TARGETS.mean(0)
EPOCHS = EpochGossip(topology=complete(NUM), num_rounds=12)
Judgment = Callable[[Tensor], tuple[float, Mapping[str, float]]]


def reached(params: Tensor) -> float:
    """The share of the way from 0 to the optimum, which all averaged models are on."""
    return float(params @ OPTIMUM / (OPTIMUM @ OPTIMUM))


def peaks_at(share: float) -> Judgment:
    """Validation that is best after this share of the way, and then becomes worse."""
    return lambda params: (abs(reached(params) - share), {"accuracy": 1 - params.norm().item()})


def keeping(
    inner: Algorithm[Any] = EPOCHS,
    metric: MetricSpec = LOSS,
    **settings: Any,  # noqa: ANN401
) -> BestByValidation:
    found = with_best(inner, NUM, KeepBest(**settings), [metric])
    assert isinstance(found, BestByValidation)
    return found


def run(
    algorithm: Algorithm[Any],
    evaluate: Judgment = peaks_at(0.5),
    platforms: Sequence[Platform] = uneven(NUM, 10.0),
    **others: Any,  # noqa: ANN401
) -> Simulator[Any]:
    simulator = Simulator(
        algorithm,
        platforms,
        torch.zeros(SIZE),
        lambda rank, _: QuadraticTrainer(TARGETS[rank % NUM], LR),
        evaluate=evaluate,
        evaluation_cost=0.5,
        **others,
    )
    assert simulator.run()
    return simulator


def states(simulator: Simulator[Any]) -> list[BestState]:
    found = [best_state(state) for state in simulator.states]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def alone(num_rounds: int) -> list[Tensor]:
    """The workers' models after so many rounds of the algorithm alone."""
    return [state.params for state in run(replace(EPOCHS, num_rounds=num_rounds)).states]


def after(num_rounds: int) -> Tensor:
    """The mean of these models."""
    return torch.stack(alone(num_rounds)).mean(0)


def best_round(share: float) -> int:
    """The round after which the mean is nearest to this share of the way."""
    return min(range(1, 13), key=lambda k: abs(1 - (1 - LR) ** k - share))


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_validation_that_rises_and_falls_keeps_the_mean_at_its_top(share: float) -> None:
    top = best_round(share)
    assert 1 < top < 12
    for state in states(run(keeping(), peaks_at(share))):
        assert state.record.best_round == state.record.best_check == top
        assert torch.equal(state.best, after(top))
        assert state.record.check == 12  # the last model was considered, too


def test_a_metric_that_must_be_high_is_maximized() -> None:
    def evaluate(params: Tensor) -> tuple[float, Mapping[str, float]]:
        return 0.0, {"accuracy": -abs(reached(params) - 0.5)}

    state = states(run(keeping(metric=ACCURACY), evaluate))[0]
    assert state.record.best_round == best_round(0.5)


def test_of_equal_values_the_earliest_is_kept() -> None:
    for state in states(run(keeping(), lambda params: (1.0, {}))):
        assert state.record.best_check == 1
        assert torch.equal(state.best, after(1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_never_the_best(value: float) -> None:
    for state in states(run(keeping(patience=3), lambda params: (value, {}))):
        assert state.record.best_check == 0
        assert not len(state.best)
        assert state.round == 4  # the record of the third check ends the run there


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("inner", [EPOCHS, EdgeGossip(inner=EPOCHS, block_share=0.5)])
def test_synchronous_workers_stop_early_in_the_same_round(
    inner: Algorithm[Any], patience: int, rounds: int
) -> None:
    found = states(run(keeping(inner, patience=patience, rounds=rounds), peaks_at(0.2)))
    record = found[0].record
    assert record.best_round == record.best_check * rounds
    last = (record.best_check + patience + 1) * rounds
    assert [state.round for state in found] == [last] * NUM
    assert last < 12
    assert all(state.is_over for state in found)


def test_neighbors_on_a_ring_stop_early_in_the_same_round() -> None:
    inner = Gossip(topology=ring(NUM), num_rounds=30, local_steps=1)
    found = states(run(keeping(inner, patience=2, rounds=3), peaks_at(0.2)))
    assert len({state.round for state in found}) == 1
    assert found[0].round < 30


def test_a_late_record_is_waited_for() -> None:
    # No neighbors in the ring, so only the records of the judge are late.
    links = Links(overrides={(0, 2): Link(latency=2.0), (2, 0): Link(latency=0.0)})
    inner = Gossip(topology=ring(NUM), num_rounds=30, local_steps=1)
    found = states(run(keeping(inner, patience=2), peaks_at(0.2), links=links))
    assert len({(state.round, state.record) for state in found}) == 1
    assert found[0].round < 30
    short = run(replace(inner, num_rounds=found[0].round))  # nobody has trained on meanwhile
    for own, whole in zip(found, short.states, strict=True):
        assert torch.equal(own.params, whole.params)


def test_training_is_the_same_to_the_last_bit_while_it_lasts() -> None:
    for whole in (states(run(keeping())), states(run(keeping(patience=2), peaks_at(0.2)))):
        own = alone(whole[0].round)
        assert all(torch.equal(x.params, y) for x, y in zip(whole, own, strict=True))


def test_slow_links_delay_the_run_and_change_nothing() -> None:
    slow = Links(default=Link(latency=0.3, bandwidth=100.0))
    found = states(run(keeping(patience=2), peaks_at(0.2), links=slow))
    fast = states(run(keeping(patience=2), peaks_at(0.2)))
    assert [state.round for state in found] == [state.round for state in fast]
    assert torch.equal(found[0].best, fast[0].best)


# Losses.


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_returns_knows_the_best(victim: int) -> None:
    script = (Crash(rank=victim, at=2.3), Recover(rank=victim, at=3.1))
    inner = replace(EPOCHS, timeout=1.0)
    found = states(run(keeping(inner), peaks_at(0.1), faults=Faults(script=script)))
    # The best came before the crash, so the new process learns it only from the others.
    assert found[victim].record.best_time < 2.3
    assert len({state.record for state in found}) == 1
    assert torch.equal(found[victim].best, found[1].best)
    assert len(found[victim].best)


def test_another_worker_judges_if_the_judge_is_lost() -> None:
    inner = replace(EPOCHS, timeout=1.0)
    faults = Faults(script=(Crash(rank=0, at=1.5),))
    measured = []

    def evaluate(params: Tensor) -> tuple[float, Mapping[str, float]]:
        measured.append(params)
        return peaks_at(0.4)(params)

    found = states(run(keeping(inner, patience=2), evaluate, faults=faults))[1:]
    assert len(measured) == found[0].record.check  # none is left out, or measured twice
    assert len({(state.round, state.record) for state in found}) == 1
    assert found[0].record.best_time > 1.5
    assert found[0].round < 12


@thorough
@pytest.mark.parametrize("seed", range(8))
def test_lost_messages_hold_up_nobody_forever(seed: int) -> None:
    inner = replace(EPOCHS, timeout=1.0)
    faults = Faults(script=(Drop(probability=0.3),), seed=seed)
    found = states(run(keeping(inner, patience=2), peaks_at(0.3), faults=faults))
    assert all(state.is_over or state.round == 12 for state in found)


# Algorithms whose workers do not wait for each other.


@pytest.mark.parametrize("patience", [None, 2])
def test_asynchronous_workers_all_know_the_best_and_stop(patience: int | None) -> None:
    inner = GoSGD(topology=complete(NUM), num_rounds=60, exchange_probability=0.5)
    found = states(run(keeping(inner, patience=patience, rounds=4), peaks_at(0.3)))
    assert len({state.record for state in found}) == 1
    assert found[0].record.check >= 3
    assert all(torch.equal(state.best, found[0].best) for state in found)
    assert abs(reached(found[0].best) - 0.3) == pytest.approx(found[0].record.value)
    if patience is not None:
        assert all(state.is_over and state.round < 60 for state in found)


def test_a_servers_model_is_judged_and_its_workers_stop() -> None:
    inner = BSP(num_workers=NUM, num_rounds=60)
    keep = KeepBest(patience=2, rounds=4)
    whole = with_best(inner, NUM + 1, keep)
    found = states(run(whole, peaks_at(0.3), uneven(NUM + 1, 10.0)))
    assert len({state.record for state in found}) == 1
    assert all(state.is_over for state in found)
    assert max(state.round for state in found) < 60


def test_with_the_final_average_all_end_with_the_last_mean_and_the_best() -> None:
    whole = FinalAverage(inner=keeping(patience=2), num_workers=NUM)
    simulator = run(whole, peaks_at(0.2))
    last = states(simulator)[0].round
    for state in simulator.states:
        assert torch.equal(state.estimate, after(last))
    assert states(simulator)[0].record.best_round == best_round(0.2)


def test_parts_of_models_are_refused() -> None:
    shared = Shards(inner=BSP(num_workers=NUM, num_rounds=3), num_servers=2)
    with pytest.raises(ValueError, match="keep measures whole models"):
        with_best(shared, NUM + 2, KeepBest())


# Messages, one by one.


def pair() -> tuple[BestByValidation, list[BestState]]:
    """Two workers of a run, before it begins."""
    algorithm = keeping()
    return algorithm, [algorithm.init(rank, torch.zeros(SIZE)) for rank in (0, 1)]


def record(best: Tensor, *, check: int, best_check: int, value: float) -> Message:
    times = {"best_round": best_check, "value": value}
    return Message(
        "best record",
        0,
        {"params": best},
        {"check": check, "best_check": best_check, "best_time": 0.0, **times},
    )


def test_a_best_model_that_was_lost_is_asked_for() -> None:
    algorithm, (judge, other) = pair()
    best, nothing = torch.ones(SIZE), torch.zeros(0)
    algorithm.handle(judge, Received(2, record(best, check=2, best_check=1, value=0.5)), 0.0)
    # The record of check 1, with the model, was lost on its way to the other worker.
    late = record(nothing, check=2, best_check=1, value=0.5)
    for _ in range(2):  # a lost question is repeated with the next record
        asked = algorithm.handle(other, Received(0, late), 0.0)
        assert other.record == judge.record
        assert [(each.receiver, each.message.kind) for each in sends(asked)] == [
            (0, "best record")
        ]
    (answer,) = sends(algorithm.handle(judge, Received(1, sends(asked)[0].message), 0.0))
    assert not algorithm.handle(other, Received(0, answer.message), 0.0)
    assert torch.equal(other.best, best)


def test_a_worse_model_of_the_same_check_does_not_stand_in_for_a_lost_one() -> None:
    algorithm, (_, other) = pair()
    nothing, worse = torch.zeros(0), torch.ones(SIZE)
    algorithm.handle(other, Received(0, record(nothing, check=3, best_check=3, value=0.1)), 0.0)
    # Another judge, cut off from the first, measured its own mean in the same check.
    algorithm.handle(other, Received(2, record(worse, check=3, best_check=3, value=0.7)), 0.0)
    assert other.record.value == 0.1
    assert not len(other.best)


def test_a_liar_that_names_many_checks_fills_no_memory() -> None:
    algorithm, (judge, _) = pair()
    for check in range(1, 200):
        model = Message("best model", 0, {"params": torch.ones(SIZE)}, {"check": check})
        algorithm.handle(judge, Received(1, model), 0.0)
    assert len(judge.models) <= 3


def test_a_check_whose_answers_were_lost_is_no_evaluation() -> None:
    algorithm = keeping(GoSGD(topology=complete(NUM), num_rounds=60), patience=2)
    judge = algorithm.init(0, torch.zeros(SIZE))
    numbers = []
    for round in range(1, 30):  # nobody answers, and the judge asks again
        judge.inner.round = round
        asked = sends(algorithm.handle(judge, TimerFired("another"), float(round)))
        numbers += [each.message.numbers["check"] for each in asked if each.receiver == 1]
    assert numbers == [1, 1, 1]


def test_models_that_are_there_when_the_run_ends_are_not_judged() -> None:
    algorithm = keeping(patience=2)
    judge = algorithm.init(0, torch.zeros(SIZE))
    judge.inner.round = 4  # it has sent its model of check 4, and measures that of check 3
    judge.sent, judge.own = 4, torch.zeros(SIZE)
    judge.models = {4: {0: judge.own}}
    ended = record(torch.ones(SIZE), check=3, best_check=1, value=0.5)
    assert Finish() in algorithm.handle(judge, Received(1, ended), 0.0)
    for rank in range(1, NUM):
        late = Message("best model", 0, {"params": torch.zeros(SIZE)}, {"check": 4})
        effects = algorithm.handle(judge, Received(rank, late), 0.0)
        assert not any(isinstance(each, Evaluate) for each in effects)
    assert judge.record.best_check == 1


def sends(effects: Sequence[Effect]) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send)]
