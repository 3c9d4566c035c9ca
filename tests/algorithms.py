"""The one list of algorithms that every general property is tested on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, cast

import pytest
from tests.tiers import by_name

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.alone import Alone
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
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.algorithms.robust.clipping import NormBound, SelfCenteredClipping
from edgegossip.algorithms.robust.coordinates import CoordinateMedian
from edgegossip.algorithms.server.adacomm import ADACOMM
from edgegossip.algorithms.server.adsp import ADSP, ADSPPlus
from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD, FedBuff
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.server.methods import ASP, BSP, SSP, FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.wrappers.averaged_moments import AveragedMoments
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.algorithms.wrappers.clipped_messages import ClippedMessages
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.compression.compressor import Identity, PerChunk
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import Quantize
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.asynchronous import Asynchronous
from edgegossip.contract.rounds import Synchronous
from edgegossip.contract.topology import (
    complete,
    directed_ring,
    from_edges_by_round,
    one_peer_exponential,
    random_matching,
    random_one_peer,
    ring,
)
from edgegossip.recipes.edge_squeeze import edge_squeeze

AnyServer: TypeAlias = ParameterServer | Standby | Shards
AnyAlgorithm: TypeAlias = Synchronous[Any] | Asynchronous[Any] | AnyServer

NUM_WORKERS = 5
NUM_ROUNDS = 6

# Two matchings of which each leaves a worker alone; together they connect everybody.
MATCHINGS = from_edges_by_round(NUM_WORKERS, [[(0, 1), (2, 3)], [(1, 2), (3, 4)]])

COMMITTERS: dict[str, Any] = {"num_workers": NUM_WORKERS - 1, "num_rounds": NUM_ROUNDS}
"""One of the ranks is the server."""

OUTER: dict[str, Any] = {
    "local_steps": 3,
    "buffer_size": 2,
    "activation": 0.25,
    "outer_momentum": 0.5,
}

PARAMETER_SERVERS: dict[str, ParameterServer] = {
    "bsp": BSP(**COMMITTERS),
    "ssp": SSP(**COMMITTERS, slack=2),
    "asp": ASP(**COMMITTERS),
    "asp-robust": ASP(**COMMITTERS, robust=NormBound()),
    "fixed-adacomm": FixedADACOMM(**COMMITTERS, tau=2),
    "adacomm": ADACOMM(**COMMITTERS, tau=4, window=2.0),
    "adsp-plus": ADSPPlus(
        **COMMITTERS, window=6.0, min_interval=1.0, rate=2, waits_for_answer=False
    ),
    "adsp": ADSP(**COMMITTERS, window=6.0, min_interval=1.0),
    "adsp-waiting": ADSP(
        **COMMITTERS, window=6.0, min_interval=1.0, waits_for_answer=True, growth=1.0
    ),
    "async-local-sgd": AsyncLocalSGD(**COMMITTERS, **OUTER),
    "fedbuff": FedBuff(**COMMITTERS, local_steps=2, buffer_size=3),
    "heloco": HeLoCo(**COMMITTERS, local_steps=2),
    "decoupled-diloco": DecoupledDiLoCo(**COMMITTERS, local_steps=3, outer_momentum=0.5),
    "decoupled-diloco-fragments": DecoupledDiLoCo(
        **COMMITTERS, local_steps=3, outer_momentum=0.5, fragments=2
    ),
}

STANDBYS: dict[str, Standby] = {
    "bsp-standby": Standby(inner=PARAMETER_SERVERS["bsp"]),
    "asp-standby": Standby(inner=PARAMETER_SERVERS["asp"], num_standbys=2),
    "adsp-standby": Standby(inner=PARAMETER_SERVERS["adsp"]),
    "async-local-sgd-standby": Standby(
        inner=AsyncLocalSGD(**COMMITTERS, **OUTER, speeds="forecast", look_ahead=1.0)
    ),
    "decoupled-diloco-standby": Standby(inner=PARAMETER_SERVERS["decoupled-diloco"]),
}
"""Their workers elect another server where theirs is lost."""


def shared(algorithm: ParameterServer, num_servers: int = 2) -> Shards:
    """The same for as many ranks, of which so many are servers."""
    inner = replace(algorithm, num_workers=NUM_WORKERS - num_servers)
    return Shards(inner=inner, num_servers=num_servers)


def server_in(algorithm: AnyServer) -> ParameterServer:
    """The parameter server that others may be wrapped around."""
    return algorithm if isinstance(algorithm, ParameterServer) else algorithm.inner


def with_settings(algorithm: AnyAlgorithm, **settings: Any) -> Any:  # noqa: ANN401 - its own type
    """The same with other settings; those of Standby and Shards are of their server."""
    if isinstance(algorithm, Standby | Shards):
        return replace(algorithm, inner=replace(algorithm.inner, **settings))
    return replace(algorithm, **settings)


SEVERAL_SERVERS: dict[str, Shards] = {
    "bsp-servers": shared(PARAMETER_SERVERS["bsp"]),
    "asp-servers": shared(PARAMETER_SERVERS["asp"], 3),
    "adacomm-servers": shared(PARAMETER_SERVERS["adacomm"]),
    "adsp-servers": shared(PARAMETER_SERVERS["adsp"]),
    "async-local-sgd-servers": shared(PARAMETER_SERVERS["async-local-sgd"]),
    "decoupled-diloco-servers": shared(PARAMETER_SERVERS["decoupled-diloco"]),
}
"""Their model is cut into slices, of which each server holds one."""

ALGORITHMS: dict[str, AnyAlgorithm] = {
    **PARAMETER_SERVERS,
    **STANDBYS,
    **SEVERAL_SERVERS,
    "gossip": Gossip(topology=ring(NUM_WORKERS), num_rounds=NUM_ROUNDS, local_steps=2),
    "gossip-open": Gossip(
        topology=ring(NUM_WORKERS).open(), num_rounds=NUM_ROUNDS, local_steps=2
    ),
    "gossip-robust": Gossip(
        topology=complete(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        robust=SelfCenteredClipping(radius_at=2.0),
    ),
    "gossip-varying": Gossip(topology=MATCHINGS, num_rounds=NUM_ROUNDS),
    "epoch-gossip": EpochGossip(topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS),
    "epidemic-learning": EpidemicLearning(
        topology=random_one_peer(NUM_WORKERS, period=NUM_ROUNDS, seed=0),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
    ),
    "all-reduce": AllReduce(topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS),
    "gosgd": GoSGD(
        topology=complete(NUM_WORKERS), num_rounds=3 * NUM_ROUNDS, exchange_probability=0.5
    ),
    "adpsgd": ADPSGD(
        topology=ring(NUM_WORKERS), num_rounds=3 * NUM_ROUNDS, exchange_probability=0.5
    ),
    "swift": SWIFT(topology=ring(NUM_WORKERS), num_rounds=3 * NUM_ROUNDS),
    "div-share": DivShare(
        topology=complete(NUM_WORKERS), num_rounds=3 * NUM_ROUNDS, num_fragments=3
    ),
    "choco-gossip": ChocoGossip(
        topology=ring(NUM_WORKERS), num_rounds=NUM_ROUNDS, compressor=TopK(keep_ratio=0.3)
    ),
    "quasi-global-gossip": QuasiGlobalGossip(
        topology=MATCHINGS, num_rounds=NUM_ROUNDS, local_steps=2
    ),
    "gasloc": GASLoC(topology=MATCHINGS, num_rounds=NUM_ROUNDS, local_steps=2),
    "noloco": NoLoCo(
        topology=random_matching(NUM_WORKERS, period=NUM_ROUNDS, seed=0),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
    ),
    "stochastic-gradient-push": StochasticGradientPush(
        topology=directed_ring(NUM_WORKERS), num_rounds=NUM_ROUNDS, local_steps=2
    ),
    "stochastic-gradient-push-open": StochasticGradientPush(
        topology=directed_ring(NUM_WORKERS).open(), num_rounds=NUM_ROUNDS, local_steps=2
    ),
    "sparse-push": SparsePush(
        topology=one_peer_exponential(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        compressor=TopK(keep_ratio=0.3),
    ),
    "skew-compensated-sparse-push": SkewCompensatedSparsePush(
        topology=directed_ring(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        compressor=TopK(keep_ratio=0.3),
        compensation_rounds=2,
        compensate_every=4,
    ),
    "difference-push": DifferencePush(
        topology=one_peer_exponential(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        compressor=TopK(keep_ratio=0.3),
    ),
    "diloco": DiLoCo(
        topology=directed_ring(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
        compressor=TopK(keep_ratio=0.3),
        repair_rounds=2,
    ),
    "diloco-robust": DiLoCo(
        topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS, robust=CoordinateMedian()
    ),
    "sparseloco": SparseLoCo(
        topology=complete(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
        compressor=PerChunk(TopK(keep_ratio=0.3, values=Quantize(2)), chunk_size=3),
        repair_rounds=2,
    ),
    "double-squeeze": DoubleSqueeze(
        topology=complete(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
        compressor=TopK(keep_ratio=0.3),
    ),
    "double-squeeze-overlapping": DoubleSqueeze(
        topology=complete(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
        compressor=TopK(keep_ratio=0.3),
        overlap=True,
    ),
    "streaming-diloco": StreamingDiLoCo(
        topology=complete(NUM_WORKERS),
        num_rounds=NUM_ROUNDS,
        local_steps=2,
        num_fragments=2,
        local_share=0.5,
    ),
}
"""By name, each for `NUM_WORKERS` workers; `dataclasses.replace` varies them."""

OVERSHOOTING = (
    ADPSGD,
    ADSPPlus,
    ASP,
    AsyncLocalSGD,
    ChocoGossip,
    DecoupledDiLoCo,
    DiLoCo,
    DoubleSqueeze,
    FedBuff,
    HALoS,
    HeLoCo,
    GASLoC,
    NoLoCo,
    PushSum,
    QuasiGlobalGossip,
    SSP,
)
"""Those that may leave the box which targets and start span, if not far.

Momentum leads out of it, and so do late steps and what compression has held back.
"""

PLAIN: dict[type[Algorithm[Any]], dict[str, Any]] = {
    AsyncLocalSGD: {"outer_momentum": 0.0},
    # With fragments, the server's model lacks what waits for its turn.
    DecoupledDiLoCo: {"outer_momentum": 0.0, "fragments": 1},
    FedBuff: {"buffer_size": 1, "outer_lr": 1.0},
    HeLoCo: {"outer_momentum": 0.0},
    QuasiGlobalGossip: {"momentum": 0.0},
    GASLoC: {"outer_momentum": 0.0},
    DiLoCo: {"outer_momentum": 0.0, "compressor": Identity()},
    DoubleSqueeze: {"outer_momentum": 0.0, "compressor": Identity()},
    NoLoCo: {"outer_momentum": 0.0, "outer_lr": 1.0},
    SparseLoCo: {"compressor": Identity()},
    StreamingDiLoCo: {"outer_momentum": 0.0, "local_share": None},
}
"""With what one worker alone is plain SGD, where it is not with everything."""

SYNCHRONOUS: dict[str, Synchronous[Any]] = {
    name: algorithm
    for name, algorithm in ALGORITHMS.items()
    if isinstance(algorithm, Synchronous)
}

UNTIMED = {n: a for n, a in SYNCHRONOUS.items() if n != "double-squeeze-overlapping"}
"""Those whose result does not depend on time: the other one trains beside its exchanges for as
long as they take.
"""

ASYNCHRONOUS: dict[str, Asynchronous[Any]] = {
    name: algorithm
    for name, algorithm in ALGORITHMS.items()
    if isinstance(algorithm, Asynchronous)
}

SPREADS: dict[str, dict[str, Any]] = {
    "exact": {"block_share": 0.5},
    "gossip": {"block_share": 1.0, "spread": "gossip"},
}

EDGE_SQUEEZE = edge_squeeze(NUM_WORKERS, NUM_ROUNDS, local_steps=4)
"""The flagship as it is by default, but for the steps of a round."""

_BALANCED: dict[str, EdgeGossip] = {
    f"{name}-balanced-{spread}": EdgeGossip(inner=algorithm, **settings)
    for name, algorithm in ALGORITHMS.items()
    if not isinstance(algorithm, AnyServer)
    if not isinstance(algorithm, PushSum) or isinstance(algorithm, SparsePush)  # one will do
    for spread, settings in SPREADS.items()
}
_TWIN = "double-squeeze-overlapping-balanced-exact"

# In the place of its twin, so that seeds go on drawing the same others.
BALANCED: dict[str, EdgeGossip] = dict(
    ("edge-squeeze", EDGE_SQUEEZE) if name == _TWIN else (name, algorithm)
    for name, algorithm in _BALANCED.items()
)
"""Each of them with its data balanced; holds what does not depend on how much is trained."""

TUNED: dict[str, BatchTune | EdgeGossip] = {
    **{
        f"{name}-tuned": BatchTune(inner=PARAMETER_SERVERS[name])
        # With a barrier, with settings in answers, without either.
        for name in ("bsp", "adacomm", "adsp")
    },
    "fixed-adacomm-balanced": EdgeGossip(inner=PARAMETER_SERVERS["fixed-adacomm"]),
}
"""Parameter servers whose workers get batches, or shares of their data, by speed."""

_STAGE: dict[str, Any] = {"num_classes": 1, "max_batch": 1}
_THREE: dict[str, Any] = {**_STAGE, "num_first": 3, "boundaries": ((7,), (7,))}
"""Three workers hold the first of three stages."""
_FIRST: dict[str, Any] = {"topology": complete(3), "num_rounds": NUM_ROUNDS}

STAGES: dict[str, Stages] = {
    "decoupled": Decoupled(inner=Gossip(**_FIRST, local_steps=2), **_THREE),
    "decoupled-gosgd": Decoupled(
        inner=GoSGD(**_FIRST, exchange_probability=0.5, local_steps=2),
        **_THREE,
        gradient_every=2,
        max_waiting=2,
    ),
    "pipelined": Pipelined(inner=Gossip(**_FIRST, local_steps=4), **_THREE),
    "pipelined-epochs": Pipelined(inner=EpochGossip(**_FIRST), **_THREE, in_flight=2),
    "pipelined-diloco": Pipelined(
        inner=DiLoCo(**_FIRST, local_steps=2, repair_rounds=2), **_THREE, in_flight=1
    ),
    "pipelined-balanced": Pipelined(
        inner=EdgeGossip(inner=EpochGossip(**_FIRST), block_share=0.5), **_THREE
    ),
    "pipelined-alone": Pipelined(
        inner=Alone(num_rounds=NUM_ROUNDS, local_steps=8), **_STAGE, boundaries=((7,),) * 4
    ),
}
"""One model in stages; see `tests.worlds.StageTrainer`."""

REGIONS: dict[str, HALoS] = {
    "halos": HALoS(
        regions=(0, 1),
        num_rounds=NUM_ROUNDS,
        local_steps=3,
        local_momentum=0.5,
        local_buffer=2,
        commits_per_sum=2,
    ),
}
"""A server in each region, and one above them."""

SERVED: dict[str, TrailingAverage] = {
    f"{name}-trailing": TrailingAverage(inner=inner, window=3)
    for name, inner in {
        "gosgd": ALGORITHMS["gosgd"],
        "sparse-push": ALGORITHMS["sparse-push"],
        "bsp-servers": ALGORITHMS["bsp-servers"],
        "epoch-gossip-balanced": EdgeGossip(inner=ALGORITHMS["epoch-gossip"]),
    }.items()
}
"""Evaluated by an average over their last rounds."""

CONTROLLED: dict[str, ControlVariates] = {
    f"{name}-controlled": ControlVariates(inner=inner)
    for name, inner in {
        "gosgd": ALGORITHMS["gosgd"],
        "epoch-gossip-balanced": EdgeGossip(inner=ALGORITHMS["epoch-gossip"]),
    }.items()
}
"""With control variates, which make vectors and messages twice as long."""

WITH_MOMENTS: dict[str, AveragedMoments] = {
    f"{name}-moments": AveragedMoments(inner=inner, first_period=1, second_period=2)
    for name, inner in {
        "gosgd": ALGORITHMS["gosgd"],
        "double-squeeze": ALGORITHMS["double-squeeze"],
        "epoch-gossip-balanced": EdgeGossip(inner=ALGORITHMS["epoch-gossip"]),
    }.items()
}
"""Some of whose messages carry moments of the optimizer."""
CLAIMED: dict[str, ClaimedWork] = {
    f"{name}-claimed": ClaimedWork(inner=ALGORITHMS[name])
    for name in (
        *("epoch-gossip", "gossip", "gosgd", "swift", "diloco"),
        *("stochastic-gradient-push", "double-squeeze"),
    )
}
"""On shared data, whose units the workers divide among themselves."""
CLIPPED: dict[str, ClippedMessages] = {
    f"{name}-clipped": ClippedMessages(inner=cast("GoSGD | ADPSGD", ALGORITHMS[name]))
    for name in ("adpsgd", "gosgd")
}
"""Their workers clip each model that comes."""

ALONE = Alone(num_rounds=NUM_ROUNDS, local_steps=2)

ALL: dict[str, Algorithm[Any]] = {
    **ALGORITHMS,
    **BALANCED,
    **TUNED,
    **STAGES,
    **REGIONS,
    **SERVED,
    **CONTROLLED,
    **WITH_MOMENTS,
    **CLAIMED,
    **CLIPPED,
}

PEERS = {
    **{n: a for n, a in ALGORITHMS.items() if not isinstance(a, AnyServer)},
    **BALANCED,
}
"""Those of which no worker is missed more than another."""

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
each_synchronous = pytest.mark.parametrize("algorithm", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
each_of_all = pytest.mark.parametrize("algorithm", by_name(ALL))
