"""Schemas let in what algorithms send, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.algorithms import ALL, NUM_WORKERS, each_of_all, each_synchronous
from tests.schemas import SchemaCheck
from tests.tiers import by_name
from tests.worlds import NUM_PARAMS, make_world

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import (
    Effect,
    Epochs,
    Event,
    Payload,
    Rank,
    Seconds,
    WorkerState,
)
from edgegossip.contract.rounds import RoundBased, RoundState
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.contract.topology import complete, ring
from edgegossip.sim.fault import Crash, Faults, Partition, Recover

PARAMS = torch.zeros(NUM_PARAMS)
FAULTS = Faults(
    script=(
        Crash(at=2.0, rank=1),
        Recover(at=5.0, rank=1),
        Partition(start=3.0, end=6.0, group=(0, 1, 2)),
    ),
    detection_time=0.5,
)


@each_of_all
@pytest.mark.parametrize(
    "faults", by_name({"quiet": Faults(), "troubled": FAULTS}, ["troubled"])
)
def test_all_that_is_sent_is_as_the_schema_says(algorithm: Any, faults: Faults) -> None:  # noqa: ANN401
    check = SchemaCheck.of(algorithm, PARAMS)
    make_world(algorithm, faults=faults, observer=check).run(until=200.0)
    assert sum(check.num_sent.values()) > NUM_WORKERS


@each_synchronous
def test_those_who_come_back_and_their_helpers_stick_to_it(algorithm: RoundBased[Any]) -> None:
    check = SchemaCheck.of(algorithm, PARAMS)
    make_world(algorithm, faults=FAULTS, observer=check).run(until=200.0)
    assert check.num_sent["catch-up"] > 0


@each_of_all
def test_no_message_comes_from_beyond_the_end_of_the_run(algorithm: Algorithm[Any]) -> None:
    num_rounds = algorithm.traits.num_rounds
    for kind, spec in algorithm.schema(PARAMS).items():
        # An acknowledgement counts messages, with those of final rounds.
        extra = 3 if kind == "acknowledged" else 0
        assert num_rounds is not None
        assert spec.max_round is not None, kind
        assert spec.max_round <= num_rounds + extra, kind


def test_spares_and_forecasts_have_their_kinds() -> None:
    inner = ALL["epoch-gossip"]
    algorithm = EdgeGossip(inner=inner, on_failure="reassign", spares=(4,))
    schema = algorithm.schema(PARAMS)
    assert schema.keys() == {"params", "catch-up", "forecast", "spare-joined"}
    negative = {"throughput": -1.0, "epoch_cost": 2.0}
    assert schema["forecast"].mismatch({}, negative) is None
    assert schema["forecast"].bad_values({}, negative) is not None


def test_forecasts_may_ride_on_the_messages_of_the_inner_algorithm() -> None:
    algorithm = ALL["gosgd-balanced-gossip"]
    push = algorithm.schema(PARAMS)["push"]
    weight, forecast = {"weight": 0.5}, {"fastest_seconds": 0.5, "fastest_age": 1}
    assert push.mismatch({"params": PARAMS}, weight) is None
    assert push.mismatch({"params": PARAMS}, {**weight, **forecast}) is None
    assert push.mismatch({"params": PARAMS}, forecast) == "number 'weight' is missing"
    assert push.mismatch({"params": PARAMS}, {**weight, "x": 1}) is not None
    assert push.bad_values({"params": PARAMS}, {**weight, **forecast}) is None
    for bad in ({"weight": 1.5}, {"weight": math.nan}, {**weight, "fastest_age": 0.5}):
        assert push.bad_values({"params": PARAMS}, bad) is not None


@pytest.mark.parametrize("num_params", [7, 10, 2])
def test_the_largest_chunk_of_all_reduce_fits_and_no_larger_one(num_params: int) -> None:
    algorithm, params = ALL["all-reduce"], torch.zeros(num_params)
    spec = algorithm.schema(params)["params"]
    chunks = params.tensor_split(NUM_WORKERS)
    assert all(spec.mismatch({"chunk": chunk}) is None for chunk in chunks)
    assert spec.mismatch({"chunk": torch.zeros(len(chunks[0]) + 1)}) is not None


def test_a_commit_has_no_more_trained_entries_than_the_model_has_entries() -> None:
    commit = ALL["asp"].schema(PARAMS)["commit"]
    numbers = {"number": 1, "num_steps": 1, "version": 0}
    update = {"update": PARAMS}
    assert commit.bad_values(update, {**numbers, "num_trained": NUM_PARAMS}) is None
    assert commit.bad_values(update, {**numbers, "num_trained": NUM_PARAMS + 1}) is not None


# Algorithms without one.


class Silent(Algorithm[WorkerState]):
    """An algorithm that does nothing, and does not say what it would send."""

    @property
    def traits(self) -> Traits:
        return Traits(topology=complete(NUM_WORKERS), num_rounds=1)

    def init(self, rank: Rank, params: torch.Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        return []


@dataclass(frozen=True, kw_only=True)
class Rounds(RoundBased[RoundState]):
    """An algorithm in rounds, with the four methods that it needs."""

    def init(self, rank: Rank, params: torch.Tensor) -> RoundState:
        return RoundState(rank=rank, params=params)

    def work(self, state: RoundState) -> Epochs:
        return Epochs()

    def outgoing(self, state: RoundState, receiver: Rank) -> Payload:
        return {}

    def mix(self, state: RoundState, inbox: object) -> None:
        pass


ROUNDS = Rounds(topology=ring(NUM_WORKERS), num_rounds=2)
WITHOUT: dict[str, tuple[Any, str]] = {
    "none": (Silent(), "Silent does not describe .* give it a `schema` method"),
    "inner": (EdgeGossip(inner=Silent()), "Silent does not describe .* `schema`"),
    "rounds": (ROUNDS, "Rounds does not describe .* `payload_schema`"),
}


@pytest.mark.parametrize(("algorithm", "message"), WITHOUT.values(), ids=WITHOUT)
def test_an_algorithm_without_schema_is_told_so_on_a_network(
    algorithm: Algorithm[Any], message: str
) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        algorithm.schema(PARAMS)


def test_an_algorithm_without_schema_runs_in_the_simulator() -> None:
    assert make_world(ROUNDS).run()


# Tensors.

TENSORS = {
    "other dtype": torch.zeros(2, 3, dtype=torch.float64),
    "other length": torch.zeros(3, 3),
    "a dimension more": torch.zeros(2, 3, 1),
    "a dimension less": torch.zeros(6),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_another_dtype_or_shape_does_not_fit(tensor: torch.Tensor) -> None:
    spec = TensorSpec(torch.float32, (2, 3))
    assert spec.fits(torch.zeros(2, 3))
    assert not spec.fits(tensor)
    assert "instead of torch.float32 [2, 3]" in str(
        MessageSpec({"x": spec}).mismatch({"x": tensor})
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_entry_that_is_not_finite_is_found(dtype: torch.dtype, bad: float, at: int) -> None:
    x = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    spec = TensorSpec.like(x)
    assert spec.allows(x)  # though the sum is infinite
    assert spec.allows(x[:0])
    x[at] = bad
    assert not spec.allows(x)
    x[(at + 1) % 1000] = -bad
    assert not spec.allows(x)


def test_limits_hold_for_all_entries() -> None:
    spec = TensorSpec(torch.int64, (3,), minimum=0, maximum=9)
    assert spec.allows(torch.tensor([0, 5, 9]))
    assert not spec.allows(torch.tensor([0, 5, 10]))
    assert not spec.allows(torch.tensor([-1, 5, 9]))
    assert TensorSpec(torch.int64, (2,)).allows(torch.tensor([-(2**63), 2**63 - 1]))
    assert not TensorSpec(torch.float32, (1,), minimum=0).allows(torch.tensor([math.inf]))


def test_the_largest_message_is_known() -> None:
    spec = MessageSpec(
        {"x": TensorSpec(torch.float32, (None, 3), max_numel=12)},
        optional={"y": TensorSpec(torch.int64, ()), "z": TensorSpec(torch.bool, (5, 2))},
    )
    assert spec.max_num_bytes == 48 + 8 + 10


def test_max_numel_belongs_to_open_lengths() -> None:
    for shape, max_numel in (((None,), None), ((3,), 3)):
        with pytest.raises(ValueError, match="give max_numel where a length is None"):
            TensorSpec(torch.float32, shape, max_numel)


def test_one_look_says_whether_values_may_be_and_how_large_they_are() -> None:
    limited = TensorSpec(torch.int64, (1,), minimum=0)
    spec = MessageSpec({"x": torch.zeros(2), "count": limited})
    payload = {"x": torch.tensor([1.0, -3.0]), "count": torch.tensor([7])}
    assert spec.inspect(payload) == (None, {"x": 3.0, "count": None})
    wrong, sizes = spec.inspect({**payload, "x": torch.tensor([1.0, math.nan])})
    assert wrong is not None
    assert not sizes
