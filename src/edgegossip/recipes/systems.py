"""Systems that the environments compare, each with one setting of its own to tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.divshare import DivShare
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epidemic_learning import EpidemicLearning
from edgegossip.algorithms.gossip.gasloc import GASLoC
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.noloco import NoLoCo
from edgegossip.algorithms.gossip.sparseloco import SparseLoCo
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.gossip.swift import SWIFT
from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD, FedBuff
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.topology import complete, random_matching, random_receivers
from edgegossip.recipes.edge_squeeze import LARGEST, edge_squeeze

Machines: TypeAlias = Literal[
    "all", "all and a server", "all and servers of regions", "the fastest"
]


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The workers of a run, for which an algorithm is built.

    Args:
        num_workers: Number of workers, without a server.
        seconds: Duration of the run.
        layer_sizes: Number of entries of each tensor in the model, in order.
        seed: Seeds random choices of algorithms.
        regions: Region of each worker; empty if there is one region.
    """

    num_workers: int
    seconds: Seconds
    layer_sizes: tuple[int, ...]
    seed: int = 0
    regions: tuple[int, ...] = ()

    @property
    def peers(self) -> dict[str, Any]:
        """Arguments of an algorithm whose workers exchange messages with each other."""
        return {"topology": complete(self.num_workers), "num_rounds": UNTIL_CUT_OFF}

    @property
    def served(self) -> dict[str, Any]:
        """Arguments of an algorithm with a server."""
        return {"num_workers": self.num_workers, "num_rounds": UNTIL_CUT_OFF}


@dataclass(frozen=True)
class System:
    """A system with its own setting.

    Args:
        make: Builds the algorithm for a crew and a value of the setting.
        setting: Name of the setting, which is an argument of the recipes.
        values: Values to try, the default first.
        machines: Machines that the system uses. A server is an additional machine, of rank 0;
            those of regions follow it.
    """

    make: Callable[[Crew, Any], Algorithm[Any]]
    setting: str
    values: tuple[float, ...]
    machines: Machines = "all"

    def build(self, crew: Crew, value: float | None = None) -> Algorithm[Any]:
        """Build the algorithm; None is the default value.

        Raises:
            ValueError: If the algorithm refuses the value.
        """
        return self.make(crew, self.values[0] if value is None else value)


def diloco(crew: Crew, local_steps: int) -> DoubleSqueeze:
    """DiLoCo over an all-reduce: a worker sends `2 (n - 1) / n` models in a round.

    Without compression, `DoubleSqueeze` takes the steps of `DiLoCo`, up to rounding, which
    would send ``n - 1`` models to as many workers.
    """
    return DoubleSqueeze(**crew.peers, local_steps=local_steps)


def squeezed(crew: Crew, local_steps: int) -> DoubleSqueeze:
    """The same with a tenth of the entries, in 4 bits."""
    return DoubleSqueeze(
        **crew.peers, local_steps=local_steps, compressor=LARGEST, seed=crew.seed
    )


def adsp(crew: Crew, windows: int) -> ADSP:
    """ADSP with this number of check periods in the run."""
    window = crew.seconds / windows
    return ADSP(**crew.served, window=window, min_interval=window / 20)


def pushing(crew: Crew, probability: float) -> GoSGD:
    """GoSGD with this probability of a push after a step."""
    return GoSGD(**crew.peers, exchange_probability=probability, seed=crew.seed)


def asking(crew: Crew, probability: float) -> ADPSGD:
    """AD-PSGD with this probability of a request after a step."""
    return ADPSGD(**crew.peers, exchange_probability=probability, seed=crew.seed)


def matched(
    make: Callable[..., Algorithm[Any]], crew: Crew, local_steps: int
) -> Algorithm[Any]:
    """An algorithm over random pairs."""
    pairs = random_matching(crew.num_workers, period=_PERIOD, seed=crew.seed)
    return make(topology=pairs, num_rounds=UNTIL_CUT_OFF, local_steps=local_steps)


def epidemic(crew: Crew, local_steps: int) -> EpidemicLearning:
    """Epidemic Learning, in which each worker sends to two others, if there are so many."""
    number = max(1, min(2, crew.num_workers - 1))
    receivers = random_receivers(crew.num_workers, number, period=_PERIOD, seed=crew.seed)
    return EpidemicLearning(
        topology=receivers, num_rounds=UNTIL_CUT_OFF, local_steps=local_steps
    )


def async_local_sgd(crew: Crew, local_steps: int) -> AsyncLocalSGD:
    """Async Local-SGD as HALoS' authors set it: rate 0.05 N, momentum 0.9, N = 32."""
    return AsyncLocalSGD(
        **crew.served,
        local_steps=local_steps,
        outer_lr=0.05 * crew.num_workers,
        outer_momentum=0.9,
        buffer_size=32,
    )


def halos(crew: Crew, local_steps: int) -> HALoS:
    """HALoS with the published rates, whatever the number of workers and regions."""
    regions = crew.regions or (0,) * crew.num_workers
    in_region = crew.num_workers / (1 + max(regions))
    return HALoS(
        regions=regions,
        num_rounds=UNTIL_CUT_OFF,
        local_steps=local_steps,
        local_lr=0.2 * in_region,
        global_lr=0.15 * (1 + max(regions)),
    )


def served(make: Callable[[Crew, Any], Algorithm[Any]]) -> System:
    """A system with a server that takes outer steps; slow workers take fewer local steps."""
    return System(make, STEPS, (32, 8, 128), "all and a server")


_PERIOD = 1000  # rounds until pairs repeat
STEPS = "local_steps"
PROBABILITY = "exchange_probability"
SYSTEMS: Mapping[str, System] = {
    "all-reduce": System(
        lambda crew, n: AllReduce(**crew.peers, local_steps=n), STEPS, (1, 4, 16)
    ),
    "diloco": System(diloco, STEPS, (16, 4, 64)),
    "streaming-diloco": System(
        lambda crew, n: StreamingDiLoCo(**crew.peers, local_steps=n), STEPS, (4, 1, 16)
    ),
    "edge-gossip-diloco": System(
        lambda crew, n: EdgeGossip(inner=diloco(crew, n)), STEPS, (32, 8, 128)
    ),
    "double-squeeze": System(squeezed, STEPS, (8, 2, 32)),
    "edge-gossip-double-squeeze": System(
        lambda crew, n: EdgeGossip(inner=squeezed(crew, n)), STEPS, (16, 4, 64)
    ),
    "edge-squeeze": System(
        lambda crew, n: edge_squeeze(crew.num_workers, local_steps=n, seed=crew.seed),
        STEPS,
        (16, 4, 64),
    ),
    "sparseloco": System(
        lambda crew, n: SparseLoCo(**crew.peers, local_steps=n, seed=crew.seed),
        STEPS,
        (16, 4, 64),
    ),
    "noloco": System(partial(matched, NoLoCo), STEPS, (16, 4, 64)),
    "gasloc": System(partial(matched, GASLoC), STEPS, (16, 4, 64)),
    "edge-gossip-gasloc": System(
        lambda crew, n: EdgeGossip(inner=matched(GASLoC, crew, n)), STEPS, (32, 8, 128)
    ),
    "epidemic-learning": System(epidemic, STEPS, (16, 4, 64)),
    "div-share": System(
        lambda crew, n: DivShare(**crew.peers, local_steps=n, seed=crew.seed), STEPS, (4, 1, 16)
    ),
    "swift": System(
        lambda crew, n: SWIFT(**crew.peers, local_steps=n, seed=crew.seed), STEPS, (4, 1, 16)
    ),
    "async-local-sgd": served(async_local_sgd),
    "fedbuff": served(lambda crew, n: FedBuff(**crew.served, local_steps=n, speeds="measured")),
    "heloco": served(
        lambda crew, n: HeLoCo(**crew.served, local_steps=n, sizes=crew.layer_sizes)
    ),
    "decoupled-diloco": served(lambda crew, n: DecoupledDiLoCo(**crew.served, local_steps=n)),
    "halos": System(halos, STEPS, (8, 2, 32), "all and servers of regions"),
    "gosgd": System(pushing, PROBABILITY, (0.05, 0.01, 0.2)),
    "ad-psgd": System(asking, PROBABILITY, (0.2, 0.05, 1.0)),
    "adsp": System(adsp, "windows", (20, 8, 50), "all and a server"),
    "alone": System(diloco, STEPS, (16, 4, 64), "the fastest"),
}
"""Systems by name of the run, each with three values to try.

`alone` is a control (SNOO, arXiv:2510.15830): DiLoCo with one worker, on the fastest machine
and with all data. What it gains over plain SGD is the outer optimizer's, not the
communication's.
"""
BASELINE = "diloco"
