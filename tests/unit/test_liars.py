"""No message of one certified liar ends an honest worker, or speaks in another's name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import liars
from tests.liars import HONEST, LIAR, NUM_WORKERS, Careful, Lie, Outcome, run
from tests.tiers import by_name, first, thorough
from tests.trained import trained_event
from tests.worlds import NUM_PARAMS, TARGETS, ObedientStage

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.divshare import DivShare
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epidemic_learning import EpidemicLearning
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gasloc import GASLoC
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.noloco import NoLoCo
from edgegossip.algorithms.gossip.quasi_global_gossip import QuasiGlobalGossip
from edgegossip.algorithms.gossip.sparseloco import SparseLoCo
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.gossip.swift import SWIFT
from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD, FedBuff
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.algorithms.stages import stages
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.compression.compressor import Compressor, Identity
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import BFloat16, Sign
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import (
    Event,
    Message,
    Predict,
    Predicted,
    Rank,
    Started,
    Train,
    WorkerLost,
)
from edgegossip.contract.topology import complete, directed_ring
from edgegossip.net.guard.seals import SEAL
from edgegossip.recipes.edge_squeeze import edge_squeeze

NUM_ROUNDS = 8
COMPLETE = complete(NUM_WORKERS)
ROUNDS: dict[str, Any] = {"topology": COMPLETE, "num_rounds": NUM_ROUNDS}
HUGE = 3e38

ALGORITHMS: dict[str, Algorithm[Any]] = {
    "gossip": Gossip(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "gosgd": GoSGD(topology=COMPLETE, num_rounds=4 * NUM_ROUNDS, exchange_probability=0.5),
    "adpsgd": ADPSGD(topology=COMPLETE, num_rounds=4 * NUM_ROUNDS, exchange_probability=0.5),
    "swift": SWIFT(topology=COMPLETE, num_rounds=4 * NUM_ROUNDS),
    "div-share": DivShare(topology=COMPLETE, num_rounds=4 * NUM_ROUNDS, num_fragments=3),
    "choco": ChocoGossip(**ROUNDS, compressor=TopK(0.5, Sign())),
    "push": StochasticGradientPush(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "sparse-push": SparsePush(**ROUNDS, compressor=TopK(0.5, BFloat16())),
    "difference-push": DifferencePush(**ROUNDS, compressor=TopK(0.5)),
    "skew-compensated": SkewCompensatedSparsePush(
        topology=COMPLETE,
        num_rounds=NUM_ROUNDS,
        compressor=TopK(0.5),
        compensation_rounds=2,
        compensate_every=4,
    ),
    "gasloc": GASLoC(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "quasi-global": QuasiGlobalGossip(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "noloco": NoLoCo(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "epidemic-learning": EpidemicLearning(topology=COMPLETE, num_rounds=NUM_ROUNDS),
    "edge-gossip": EdgeGossip(inner=Gossip(topology=COMPLETE, num_rounds=NUM_ROUNDS)),
    "edge-gossip-epochs": EdgeGossip(
        inner=EpochGossip(topology=COMPLETE, num_rounds=NUM_ROUNDS), block_share=0.5
    ),
    "diloco": DiLoCo(topology=COMPLETE, num_rounds=NUM_ROUNDS, compressor=TopK(0.5)),
    "sparseloco": SparseLoCo(**ROUNDS, compressor=TopK(0.5)),
    "double-squeeze": DoubleSqueeze(**ROUNDS, compressor=TopK(0.5)),
    "overlapping": DoubleSqueeze(**ROUNDS, compressor=TopK(0.5), local_steps=2, overlap=True),
    "edge-squeeze": edge_squeeze(NUM_WORKERS, NUM_ROUNDS, local_steps=4),
    "streaming-diloco": StreamingDiLoCo(**ROUNDS, compressor=TopK(0.5), num_fragments=2),
}
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
some_algorithms = pytest.mark.parametrize("algorithm", by_name(ALGORITHMS, ["gosgd", "diloco"]))


def with_values(algorithm: Algorithm[Any], value: float | Callable[[int], float]) -> Lie:
    """Whatever is sent, plain or compressed, has `value` in all places, maybe by its round."""
    inner = getattr(algorithm, "inner", algorithm)
    compressor: Compressor = getattr(inner, "compressor", Identity())
    size_of: Callable[[int], int] = getattr(inner, "turn_size", lambda numel: numel)

    def lie(receiver: Rank, message: Message) -> Message:
        size = value(message.round) if callable(value) else value
        compressed = compressor.compress(torch.full((size_of(NUM_PARAMS),), size), 0)

        def lie_about(name: str, x: torch.Tensor) -> torch.Tensor:
            if x.is_floating_point():
                return torch.full_like(x, size)
            return compressed.get(name.rpartition(".")[2], x)

        payload = {name: lie_about(name, x) for name, x in message.payload.items()}
        return replace(message, payload=payload)

    return lie


def require_unharmed(outcome: Outcome) -> None:
    """All honest have finished, about where they would be without the liar."""
    assert outcome.reasons == dict.fromkeys(outcome.honest, "finished")
    low, high = TARGETS[:NUM_WORKERS].aminmax(dim=0)
    assert (outcome.estimates >= low.clamp(max=0) - 1).all()
    assert (outcome.estimates <= high.clamp(min=0) + 1).all()


@some_algorithms
@pytest.mark.parametrize("size", [HUGE, 1e20])
def test_no_finite_value_ends_an_honest_worker(algorithm: Algorithm[Any], size: float) -> None:
    outcome = run(algorithm, with_values(algorithm, size))
    require_unharmed(outcome)
    assert "with values far beyond what is usual" in outcome.refusals()


@some_algorithms
def test_nobody_who_is_honest_is_refused_anything(algorithm: Algorithm[Any]) -> None:
    outcome = run(algorithm)
    assert outcome.reasons == dict.fromkeys(HONEST, "finished")
    assert [host.refusals for host in outcome.hosts] == [{}] * NUM_WORKERS


# Training that fails all the same.


@some_algorithms
def test_lies_that_are_not_too_large_do_not_end_one_whose_training_they_break(
    algorithm: Algorithm[Any],
) -> None:
    """Whoever stands out is heard no longer, and training goes on from where it was sound."""
    outcome = run(
        algorithm,
        with_values(algorithm, 900.0),
        make_trainer=lambda rank: Careful(rank, limit=50.0),
    )
    # What came after the last training nobody can judge.
    assert outcome.reasons == dict.fromkeys(HONEST, "finished")
    assert outcome.estimates.isfinite().all()
    assert LIAR in outcome.muted


@thorough
def test_a_lie_that_grows_slowly_ends_nobody() -> None:
    gossip = Gossip(topology=COMPLETE, num_rounds=40)
    creep = with_values(gossip, lambda round: min(3.0**round, 1e30))
    outcome = run(gossip, creep, make_trainer=lambda rank: Careful(rank, limit=1e6))
    require_unharmed(outcome)


def test_one_whose_own_training_fails_blames_nobody() -> None:
    gossip = Gossip(topology=COMPLETE, num_rounds=NUM_ROUNDS)
    outcome = run(gossip, make_trainer=lambda rank: Careful(rank, limit=0.1))
    assert {type(reason) for reason in outcome.reasons.values()} == {TrainingError}
    assert not outcome.muted


# Weights.


@pytest.mark.parametrize("weight", first(1, [1.0, 1e308]))
@pytest.mark.parametrize("name", ["gosgd", "push"])
def test_a_weight_that_nobody_can_have_makes_nobody_refuse_the_honest(
    name: str, weight: float
) -> None:
    algorithm = ALGORITHMS[name]
    most = 1.0 if name == "gosgd" else 1024.0 * NUM_WORKERS

    def lie(receiver: Rank, message: Message) -> Message:
        if "weight" not in message.numbers:
            return message
        return replace(message, numbers={**message.numbers, "weight": weight * most})

    outcome = run(algorithm, lie)
    require_unharmed(outcome)
    honest = [f"worker {rank}" for rank in HONEST]
    refused = [key for rank in HONEST for key in outcome.hosts[rank].refusals]
    assert not [key for key in refused if key.partition(":")[0] in honest]
    assert all(0 <= outcome.hosts[rank].state.weight <= most for rank in HONEST)


# What an algorithm makes of it.


@each_algorithm
def test_one_that_is_lost_may_be_lost_again_for_a_lie(algorithm: Algorithm[Any]) -> None:
    state = algorithm.init(2, torch.zeros(NUM_PARAMS))
    effects = algorithm.handle(state, Started(num_samples=4, epoch_cost=4.0), 0.0)
    for now in (1.0, 2.0, 3.0):
        answers: list[Event] = []
        for effect in effects:
            if isinstance(effect, Train):
                answers.append(trained_event(effect.params + 1, effect.params, cost=4.0))
            elif isinstance(effect, Predict):
                answers.append(Predicted(100.0))
        effects = [each for event in answers for each in algorithm.handle(state, event, now)]
        algorithm.handle(state, WorkerLost(LIAR), now)
        before = state.round, state.params
        assert algorithm.handle(state, WorkerLost(LIAR, has_lied=True), now) == []
        assert state.round == before[0]
        assert torch.equal(state.params, before[1])


# One model in stages, or on several servers.

_STAGES: dict[str, Any] = {
    # Without these, a liar whose batches nobody answers says nothing more, and the others wait.
    "forget_after": 0.1,
    "inner": GoSGD(
        topology=complete(2), num_rounds=NUM_ROUNDS, exchange_probability=0.5, local_steps=2
    ),
    "num_first": 2,
    "boundaries": ((NUM_PARAMS,), (NUM_PARAMS,)),
    "num_classes": 1,
    "max_batch": 4,
}
DECOUPLED, PIPELINED = Decoupled(**_STAGES), Pipelined(**_STAGES)
STAGES = {
    "decoupled": DECOUPLED,
    "decoupled-int8": replace(DECOUPLED, precision="int8"),
    "decoupled-bfloat16": replace(DECOUPLED, precision="bfloat16", gradient_every=2),
    "pipelined": PIPELINED,
    "pipelined-int8": replace(PIPELINED, precision="int8"),
}
MIDDLE, TOP = 2, 3
TOO_MUCH = {"with bad values", "with values far beyond what is usual"}
each_staged = pytest.mark.parametrize("algorithm", by_name(STAGES, ["decoupled"]))
each_decoupled = pytest.mark.parametrize(
    "algorithm",
    by_name(
        {each.precision: each for each in STAGES.values() if isinstance(each, Decoupled)},
        ["float32"],
    ),
)
# A status that follows a refused commit brings the liar back; then it lies again, until nobody
# waits for it.
COMMITS: dict[str, Any] = {"num_workers": 3, "num_rounds": NUM_ROUNDS, "resend_after": 0.05}
SERVED: dict[str, Algorithm[Any]] = {
    "bsp-servers": Shards(inner=BSP(num_workers=2, num_rounds=NUM_ROUNDS), num_servers=2),
    "asp-servers": Shards(inner=ASP(num_workers=2, num_rounds=NUM_ROUNDS), num_servers=2),
    "async-local-sgd": AsyncLocalSGD(**COMMITS, local_steps=2),
    "fedbuff": FedBuff(**COMMITS, local_steps=2, buffer_size=2),
    "heloco": HeLoCo(**COMMITS, local_steps=2),
    "decoupled-diloco": DecoupledDiLoCo(**COMMITS, local_steps=2, fragments=2),
}
"""Rank 3 is a worker of each."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten minutes for one that is lost, as a liar is."""
    monkeypatch.setattr(stages, "_PATIENCE", 0.15)


@thorough
@each_staged
@pytest.mark.parametrize("size", first(1, [HUGE, 9e5]))
@pytest.mark.usefixtures("soon")
def test_no_finite_value_of_a_first_stage_ends_those_above(
    algorithm: Stages, size: float
) -> None:
    lie = with_values(algorithm, size)
    outcome = run(algorithm, lie, make_trainer=partial(ObedientStage, algorithm))
    require_unharmed(outcome)
    assert outcome.refusals() & TOO_MUCH


@thorough
@pytest.mark.parametrize(
    "name", first(1, ["decoupled", "decoupled-int8", "decoupled-bfloat16"])
)
@pytest.mark.parametrize("liar", first(1, [MIDDLE, TOP]))
@pytest.mark.usefixtures("soon")
def test_no_finite_value_of_a_stage_ends_those_below_or_above(name: str, liar: Rank) -> None:
    algorithm = STAGES[name]
    lie = with_values(algorithm, 9e5)
    outcome = run(algorithm, lie, make_trainer=partial(ObedientStage, algorithm), liar=liar)
    require_unharmed(outcome)
    assert outcome.refusals() & TOO_MUCH


@thorough
@each_decoupled
@pytest.mark.usefixtures("soon")
def test_activations_that_break_training_are_gone_back_from(algorithm: Stages) -> None:
    lie = with_values(algorithm, 900.0)
    make_trainer = partial(ObedientStage, algorithm, limit=50.0)
    outcome = run(algorithm, lie, make_trainer=make_trainer)
    assert outcome.reasons == dict.fromkeys(HONEST, "finished")
    assert outcome.estimates.isfinite().all()
    assert LIAR in outcome.muted


@thorough
@each_decoupled
@pytest.mark.parametrize("liar", first(1, [LIAR, MIDDLE]))
@pytest.mark.usefixtures("soon")
def test_numbers_of_batches_that_there_are_not_harm_nobody(
    algorithm: Stages, liar: Rank
) -> None:
    count = itertools.count()

    def lie(receiver: Rank, message: Message) -> Message:
        if "batch" not in message.numbers:
            return message
        number = (0, 2**53 - 1, message.numbers["batch"])[next(count) % 3]
        return replace(message, numbers={**message.numbers, "batch": number})

    outcome = run(algorithm, lie, make_trainer=partial(ObedientStage, algorithm), liar=liar)
    require_unharmed(outcome)


@thorough
@pytest.mark.parametrize("algorithm", by_name(SERVED, ["asp-servers"]))
@pytest.mark.parametrize("size", first(1, [HUGE, 1e5]))
def test_no_finite_value_of_a_worker_ends_a_server(
    algorithm: Algorithm[Any], size: float
) -> None:
    outcome = run(algorithm, with_values(algorithm, size), liar=3)
    assert outcome.reasons == dict.fromkeys([0, 1, 2], "finished")
    assert "with values far beyond what is usual" in outcome.refusals()


@thorough
def test_a_huge_number_of_a_commit_makes_nobody_refuse_the_honest_server() -> None:
    def lie(receiver: Rank, message: Message) -> Message:
        if message.kind != "commit":
            return message
        return replace(message, numbers={**message.numbers, "number": 2**52 + 1})

    algorithm = ASP(**COMMITS)
    outcome = run(algorithm, lie, liar=3)
    assert outcome.reasons == dict.fromkeys([0, 1, 2], "finished")
    for rank in (1, 2):
        assert outcome.hosts[rank].refusals.keys() == set()


# In another's name.

RING = DiLoCo(topology=directed_ring(NUM_WORKERS), num_rounds=NUM_ROUNDS, local_steps=2)


def in_all_names(receiver: Rank, message: Message) -> Message:
    """Every update that the liar passes on, and some that it makes up, are its own."""
    if message.kind != "params":
        return message
    made_up = {f"{rank}.values": torch.full((NUM_PARAMS,), 50.0) for rank in HONEST}
    seals = {name: x for name, x in message.payload.items() if name.endswith(SEAL)}
    return replace(message, payload={**message.payload, **seals, **made_up})


@thorough
@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "ring"])
def test_no_certificate_speaks_for_another_rank(is_complete: bool, tmp_path: Path) -> None:
    algorithm = replace(RING, topology=COMPLETE) if is_complete else RING
    outcome = run(algorithm, in_all_names, security=liars.certificates(tmp_path))
    require_unharmed(outcome)
    assert "in another's name" in outcome.refusals()


@thorough
def test_without_certificates_a_neighbor_is_believed_rather_than_what_is_said_of_it() -> None:
    outcome = run(replace(RING, topology=COMPLETE), in_all_names)
    fair = run(replace(RING, topology=COMPLETE))
    require_unharmed(outcome)
    torch.testing.assert_close(outcome.estimates, fair.estimates)


@thorough
@pytest.mark.parametrize("place", ["round", "origin"])
def test_a_seal_counts_nowhere_but_where_it_was_made_for(place: str, tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    def replay(receiver: Rank, message: Message) -> Message:
        """Worker 2's first update again, in later rounds or as that of worker 3."""
        if message.kind != "params":
            return message
        for name, tensor in message.payload.items():
            if name.startswith("2."):
                kept.setdefault(name, tensor)
        origin = 2 if place == "round" else 3
        again = {name.replace("2.", f"{origin}.", 1): x for name, x in kept.items()}
        return replace(message, payload={**message.payload, **again})

    outcome = run(RING, replay, security=liars.certificates(tmp_path))
    require_unharmed(outcome)
    assert "in another's name" in outcome.refusals()


@thorough
def test_seals_change_nothing_among_the_honest(tmp_path: Path) -> None:
    sealed = run(RING, security=liars.certificates(tmp_path))
    plain = run(RING)
    assert torch.equal(sealed.estimates, plain.estimates)
    assert [host.refusals for host in sealed.hosts] == [{}] * NUM_WORKERS
