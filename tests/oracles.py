"""Invariants of the workers' states in any world, simulated or of real hosts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from tests.algorithms import OVERSHOOTING
from tests.worlds import TARGETS, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.mixing import MetropolisHastings
from edgegossip.contract.protocol import Message, Rank, WorkerState
from edgegossip.contract.rounds import RoundState, Synchronous
from edgegossip.contract.topology import CompleteTopology
from edgegossip.sim.platform import Platform

OFFSET = 10.0
"""Workers start here, so that models which shrink leave the box."""
# Steps lead towards targets, mixing takes convex combinations: nobody ever leaves the box that
# the targets and the start span, whatever goes wrong.
_LOWEST = TARGETS.amin(0).clamp(max=0.0) - 1e-4
_HIGHEST = TARGETS.amax(0).clamp(min=0.0) + 1e-4
# Those that are `OVERSHOOTING` do, and EdgeGossip's correction does, but not far.
FAR = 10.0
EQUAL = 1e-5
"""Models are equal if they are at most so far apart in each entry."""


class ViolationError(AssertionError):
    """Something that must hold in every world does not in this one."""


def innermost(algorithm: Any) -> Any:  # noqa: ANN401 - its own type
    """The algorithm that exchanges parameters, or its state."""
    while (inner := getattr(algorithm, "inner", None)) is not None:
        algorithm = inner
    return algorithm


def is_corrected(algorithm: Algorithm[Any]) -> bool:
    """Multiply the change that epochs have made."""
    return (
        isinstance(algorithm, EdgeGossip)
        and isinstance(algorithm.inner, EpochGossip)
        and algorithm.spread == "exact"
        and algorithm.correction > 0
    )


def overshoot(algorithm: Algorithm[Any]) -> float:
    """How far the algorithm may lead workers out of the box."""
    layers = [algorithm]
    while (inner := getattr(layers[-1], "inner", None)) is not None:
        layers.append(inner)
    if any(isinstance(each, DecoupledDiLoCo) and each.outer_momentum for each in layers):
        return math.inf  # but each step is as documented; see `StepsWithMomentum`
    if any(isinstance(each, SparsePush | SkewCompensatedSparsePush) for each in layers):
        return 10 * FAR  # in proportion to the models, as what they send is sparse
    is_far = any(isinstance(each, OVERSHOOTING) or is_corrected(each) for each in layers)
    return FAR if is_far else 0.0


@dataclass(frozen=True)
class Box:
    """Where the entries `held` of estimates can be, around `offset`."""

    algorithm: Algorithm[Any]
    offset: float
    held: slice = field(default_factory=lambda: slice(None))

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        far = overshoot(self.algorithm)
        low, high = _LOWEST[self.held] - far, _HIGHEST[self.held] + far
        return low + self.offset, high + self.offset

    def require(self, rank: Rank, model: Tensor) -> None:
        low, high = self.bounds
        if not bool(((model >= low) & (model <= high)).all()):
            raise ViolationError(f"the model of worker {rank} is outside of all targets")


def has_one_model(algorithm: Algorithm[Any]) -> bool:
    """Whether all workers have the same model after each round in which nobody is missing."""
    inner = innermost(algorithm)
    if getattr(inner, "timeout", None) is not None:
        return False  # who goes on without waiting misses what is late
    if isinstance(inner, AllReduce | DiLoCo | DoubleSqueeze):
        return True
    return (
        isinstance(inner, Gossip | EpochGossip)
        and inner.robust is None
        and isinstance(inner.topology, CompleteTopology)
        and isinstance(inner.mixing, MetropolisHastings)
    )


def require_one_model(models: Mapping[Rank, Tensor]) -> None:
    """Fail if the models of these workers differ."""
    ranks, vectors = [*models], torch.stack([*models.values()])
    far = (vectors - vectors[0]).abs().amax(1)
    if float(far.max()) > EQUAL:
        raise ViolationError(
            f"workers {ranks[0]} and {ranks[int(far.argmax())]} have different models, "
            f"{far.max():.2g} apart"
        )


@dataclass
class RoundModels:
    """The models of all workers by round, of which some must be equal.

    Attributes:
        models: By round and absent workers, each worker's model after its last exchange.
        troubled: Rounds in which somebody is lost, found, not heard, or behind.
    """

    models: dict[tuple[int, frozenset[Rank]], dict[Rank, Tensor]] = field(default_factory=dict)
    troubled: set[int] = field(default_factory=set)

    def note(self, state: WorkerState, before: int, furthest: int) -> None:
        """Note that a worker has come from the round `before` to its present one."""
        if state.round > before + 1:  # it only now takes part again, with another's model
            self.has_trouble(state.round, furthest)
            return
        inner = innermost(state)
        # One that has done its next steps ahead is within the next exchange by now, and an
        # owner of chunks may have moved its own.
        if isinstance(inner, RoundState) and not inner.is_exchanging:
            last = inner.exchange - inner.exchange // inner.round
            back = {rank for rank, first in inner.first_exchange.items() if first > last}
            absent = frozenset({*inner.lost, *back})
            self.models.setdefault((state.round, absent), {})[state.rank] = state.estimate

    def has_trouble(self, *rounds: int) -> None:
        """Note that something happens to workers in these rounds."""
        self.troubled.update(rounds)

    def require(self, algorithm: Algorithm[Any]) -> None:
        """Fail if those differ who mix with the same workers, well after any trouble."""
        troubled, inner = {*self.troubled}, innermost(algorithm)
        if isinstance(inner, DiLoCo) and not isinstance(inner.topology, CompleteTopology):
            # Whoever misses a neighbor passes on nothing of it to those who miss nobody.
            troubled.update(round for round, absent in self.models if absent)
        for (round, absent), models in self.models.items():
            num_before = num_apart(algorithm, round, absent)
            if not any(round - num_before <= each <= round + 1 for each in troubled):
                require_one_model(models)


def num_apart(algorithm: Algorithm[Any], round: int, absent: Collection[Rank]) -> float:
    """For how many rounds models may differ after something happened to workers.

    DiLoCo repairs them part by part, but all that is left in the last round. Around one that
    is absent, updates may need more exchanges than a round has. DoubleSqueeze finds some only
    by its checksums. An average over rounds keeps a part of all differences.
    """
    inner = innermost(algorithm)
    if isinstance(algorithm, TrailingAverage) or isinstance(inner, DoubleSqueeze):
        return math.inf
    if isinstance(inner, DiLoCo) and absent:
        return math.inf
    if not isinstance(inner, DiLoCo):
        return 2
    return 4 + (0 if round == inner.num_rounds else inner.repair_rounds)


def is_steady(algorithm: Algorithm[Any]) -> bool:
    """Whether neither speeds nor delays change the result as long as nobody is missed."""
    if (
        isinstance(algorithm, DoubleSqueeze)
        and not isinstance(algorithm, StreamingDiLoCo)
        and algorithm.overlap
    ):
        # Measured times say which steps run beside an exchange, and from which model.
        return False
    return isinstance(algorithm, Synchronous) and algorithm.timeout is None


@lru_cache(maxsize=256)
def reference(
    algorithm: Algorithm[Any], num_workers: int, size: int | None, lr: float
) -> tuple[Tensor, ...]:
    """The workers' final models, by rank, on a perfect network."""
    platforms = [Platform(throughput=1.0)] * num_workers
    simulator = make_world(algorithm, platforms=platforms, size=size, lr=lr, offset=OFFSET)
    assert simulator.run()
    return tuple(state.estimate for state in simulator.states)


def require_reference(models: Mapping[Rank, Tensor], expected: Sequence[Tensor]) -> None:
    """Fail if a model is not the one of a perfect network, bit for bit."""
    for rank, model in models.items():
        if not torch.equal(model, expected[rank]):
            far = float((model - expected[rank]).abs().max())
            raise ViolationError(f"the model of worker {rank} is {far:.2g} off the reference")


def weight_of(messages: Iterable[Message]) -> float:
    """The weight in GoSGD's messages; other algorithms' messages carry none."""
    return sum(each.numbers.get("weight", 0.0) for each in messages)


def require_sum(what: str, found: float, expected: float) -> None:
    if abs(found - expected) > 1e-9:
        raise ViolationError(f"{what} add up to {found}, not to {expected}")
