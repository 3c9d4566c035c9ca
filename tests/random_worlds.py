"""Random simulated worlds: speeds, links, loss, crashes."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.algorithms import AnyAlgorithm, AnyServer, server_in, with_settings
from tests.invariants import Checks
from tests.oracles import OFFSET
from tests.worlds import NUM_PARAMS, SHAPE, Watched, make_world

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.epidemic_learning import EpidemicLearning
from edgegossip.algorithms.gossip.owned_chunks import OwnedChunks
from edgegossip.algorithms.gossip.paced import Paced
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.parameter_server import ParameterServer
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
from edgegossip.contract.algorithm import Algorithm, opened
from edgegossip.contract.rounds import RoundBased
from edgegossip.contract.topology import (
    Topology,
    complete,
    from_edges_by_round,
    random_regular,
    ring,
    star,
)
from edgegossip.sim.fault import (
    Arrival,
    Crash,
    Delay,
    Drop,
    Fault,
    Faults,
    Leave,
    Partition,
    Recover,
)
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

LR = 0.3
ONE_SEED = os.environ.get("EDGEGOSSIP_SWARM_SEED")
SEEDS = range(5) if ONE_SEED is None else [int(ONE_SEED)]
FIRST_SEED = int(os.environ.get("EDGEGOSSIP_SWARM_FIRST", "5"))
MANY_SEEDS = range(FIRST_SEED, FIRST_SEED + 995)


@dataclass(frozen=True, kw_only=True)
class World:
    """The world that one seed draws."""

    algorithm: Any
    platforms: tuple[Platform, ...]
    links: Links
    faults: Faults

    wire: bool
    size: int | None = None

    def simulator(self, checks: Checks | None = None) -> Simulator[Any]:
        """A simulator of it, watched by `checks`."""
        algorithm: Algorithm[Any] = self.algorithm
        if checks is not None:
            algorithm = Watched(algorithm, before=checks.before, after=checks.after)
        simulator = make_world(
            algorithm,
            platforms=self.platforms,
            links=self.links,
            faults=self.faults,
            observer=checks,
            wire=self.wire,
            lr=LR,
            offset=OFFSET,
            size=self.size,
        )
        if checks is not None:
            checks.simulator, checks.algorithm = simulator, self.algorithm
        return simulator


AnyWrapper: TypeAlias = (
    AveragedMoments
    | BatchTune
    | ClaimedWork
    | ClippedMessages
    | ControlVariates
    | EdgeGossip
    | TrailingAverage
)


def draw_world(algorithm: Any, seed: int) -> World:  # noqa: ANN401
    """The world of `seed`: half of them lose messages, and have a timeout."""
    if isinstance(algorithm, Stages):
        return draw_staged_world(algorithm, seed)
    if isinstance(algorithm, AnyWrapper):
        inner: Any = algorithm.inner
        world = draw_world(inner, seed)
        return replace(world, algorithm=replace(algorithm, inner=world.algorithm))
    draw = random.Random(seed)
    num_workers = draw.randint(3 if isinstance(algorithm, HALoS) else 2, 6)
    is_lossy = draw.random() < 0.5
    faults = draw_faults(draw, num_workers, is_lossy)
    overrides = {
        (i, j): Link(latency=draw.uniform(0, 5), bandwidth=10 ** draw.uniform(1.5, 4))
        for i in range(num_workers)
        for j in range(num_workers)
        if draw.random() < 0.2
    }
    default = Link(latency=draw.choice([0.0, 0.1, 1.0]), bandwidth=10 ** draw.uniform(2, 6))
    if isinstance(algorithm, ParameterServer | Shards):
        faults = with_server_back(faults, getattr(algorithm, "num_servers", 1))
    varied = vary(algorithm, draw, num_workers, is_lossy)
    if isinstance(varied, AnyServer) and isinstance(server_in(varied), DecoupledDiLoCo):
        # Not drawn, so that all else in the world of a seed stays as it was.
        varied = with_settings(varied, waits_for_answer=seed % 2 == 0)
    if isinstance(varied, HALoS):
        faults = with_server_back(faults, 1 + varied.num_regions)
    world = World(
        algorithm=varied,
        platforms=tuple(
            Platform(throughput=10 ** draw.uniform(-0.5, 1)) for _ in range(num_workers)
        ),
        links=Links(default=default, overrides=overrides),
        faults=faults,
        wire=draw.random() < 0.3,
    )
    downlinks = [draw.choice([math.inf, 10 ** draw.uniform(2, 5)]) for _ in world.platforms]
    limited = zip(world.platforms, downlinks, strict=True)
    platforms = tuple(replace(each, downlink=downlink) for each, downlink in limited)
    return replace(world, platforms=platforms)


def draw_staged_world(algorithm: Stages, seed: int) -> World:
    """The world of `seed`, in which as many as are left over hold further stages.

    Where one of these crashes in `Pipelined`, it comes back: without it there is no run.
    """
    world = draw_world(algorithm.inner, seed)
    draw = random.Random(f"{seed} stages")
    num_above = draw.randint(1, 3)
    topology = world.algorithm.traits.topology
    num_first = draw.randint(1, 3) if topology is None else topology.num_workers
    num_workers = num_first + num_above
    is_lossy = bool(world.faults.drops)
    above = tuple(Platform(throughput=10 ** draw.uniform(-0.5, 1)) for _ in range(num_workers))
    faults = draw_faults(draw, num_workers, is_lossy)
    # A batch goes up and down through all stages: with half of the messages, hardly any does.
    script = [
        replace(each, probability=each.probability / 3) if isinstance(each, Drop) else each
        for each in faults.script
    ]
    faults = replace(faults, script=tuple(script))
    varied: Any = algorithm
    if isinstance(algorithm, Pipelined):
        faults = with_stages_back(faults, num_first)
        varied = replace(varied, in_flight=draw.choice([None, 1, 2, 6]))
    else:
        varied = replace(varied, max_waiting=draw.randint(1, 5))
    return replace(
        world,
        algorithm=replace(
            varied,
            inner=world.algorithm,
            num_first=num_first,
            boundaries=(SHAPE,) * num_above,
            forget_after=draw.uniform(0.5, 10) if is_lossy else None,
        ),
        platforms=(*world.platforms, *above)[:num_workers],
        faults=faults,
    )


def with_stages_back(faults: Faults, num_first: int) -> Faults:
    """Let all that hold a stage alone come back wherever they crash."""
    crashes = [f for f in faults.script if isinstance(f, Crash) and f.rank >= num_first]
    back = [Recover(at=f.at + 1.0, rank=f.rank) for f in crashes]
    return replace(faults, script=(*faults.script, *back))


def vary(
    algorithm: AnyAlgorithm | Alone | HALoS,
    draw: random.Random,
    num_workers: int,
    is_lossy: bool,
) -> AnyAlgorithm | Alone | HALoS:
    """The algorithm for so many workers, with what the seed draws for it."""
    topology = draw_topology(draw, num_workers)
    num_rounds = draw.randint(1, 8)
    if isinstance(algorithm, Alone):
        return replace(algorithm, num_rounds=num_rounds)
    if isinstance(algorithm, HALoS):
        num_regions = 1 if num_workers < 5 else 2
        return replace(
            algorithm,
            regions=tuple(k % num_regions for k in range(num_workers - 1 - num_regions)),
            num_rounds=num_rounds,
            resend_after=draw.uniform(0.1, 2) if is_lossy else None,
        )
    if isinstance(algorithm, AnyServer):
        again = draw.uniform(0.1, 2) if is_lossy else None
        num_servers = min(getattr(algorithm, "num_servers", 1), num_workers - 1)
        server = replace(
            server_in(algorithm),
            num_workers=num_workers - num_servers,
            num_rounds=num_rounds,
            resend_after=again,
        )
        if isinstance(algorithm, Standby):
            num_standbys = min(algorithm.num_standbys, server.num_workers)
            return Standby(inner=server, num_standbys=num_standbys)
        return Shards(inner=server, num_servers=num_servers) if num_servers > 1 else server
    if isinstance(algorithm, OwnedChunks):
        topology = complete(num_workers)
    if isinstance(algorithm, ChocoGossip) and topology.period > 1:
        topology = ring(num_workers)
    varied = replace(algorithm, topology=topology, num_rounds=num_rounds)
    if isinstance(varied, StreamingDiLoCo):  # each worker owns an entry of each fragment
        most = -(-NUM_PARAMS // num_workers)
        varied = replace(varied, num_fragments=min(varied.num_fragments, most))
    if isinstance(varied, PushSum | EpidemicLearning) and draw.random() < 0.7:
        varied = replace(varied, topology=draw_directed(draw, num_workers))
    if isinstance(varied, RoundBased | Paced) and is_lossy:
        varied = replace(varied, timeout=draw.uniform(0.1, 10))
    if isinstance(varied, ADPSGD | PushSum) and is_lossy:
        varied = replace(varied, resend_after=draw.uniform(0.1, 10))
    return varied


def with_server_back(faults: Faults, num_servers: int) -> Faults:
    """Let each server come back wherever it crashes: without it there is no run."""
    crashes = [f for f in faults.script if isinstance(f, Crash) and f.rank < num_servers]
    back = [Recover(at=f.at + 1.0, rank=f.rank) for f in crashes]
    return replace(faults, script=(*faults.script, *back))


def draw_topology(draw: random.Random, num_workers: int) -> Topology:
    matchings = [[(i, i + 1) for i in range(start, num_workers - 1, 2)] for start in range(2)]
    regular = min(num_workers - 1, 4 if num_workers > 4 else 2)
    return draw.choice(
        [
            ring(num_workers),
            star(num_workers),
            complete(num_workers),
            random_regular(num_workers, regular, seed=0),
            from_edges_by_round(num_workers, matchings),
        ]
    )


def draw_directed(draw: random.Random, num_workers: int) -> Topology:
    """Links that come and go; over a period they go around and join all."""
    cycle = draw.sample(range(num_workers), num_workers)
    edges = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    period = draw.randint(1, 4)
    phases = [{edge for edge in edges if draw.random() < 0.5} for _ in range(period)]
    for number, edge in enumerate(edges):
        phases[number % period].add(edge)
    for phase in phases:
        pairs = (draw.sample(range(num_workers), 2) for _ in range(draw.randint(0, 3)))
        phase.update((i, j) for i, j in pairs)
    return from_edges_by_round(num_workers, map(sorted, phases), directed=True)


def draw_faults(draw: random.Random, num_workers: int, is_lossy: bool) -> Faults:
    detection_time = draw.choice([0.0, 0.5, 3.0])
    script: list[Fault] = []
    for _ in range(draw.randint(0, 4)):
        rank, at = draw.randrange(num_workers), draw.uniform(0, 15)
        if draw.random() < 0.3:
            rank, at = num_workers - 1, 2.0  # some crash together
        script.append(Crash(at=at, rank=rank))
        if draw.random() < 0.9:
            script.append(Recover(at=at + draw.choice([0.0, 0.1, 1.0, 10.0]), rank=rank))
    if draw.random() < 0.4:
        script.append(Delay(seconds=draw.choice([1.0, 10.0])))
    if draw.random() < 0.4:
        start = draw.uniform(0, 10)
        group = tuple(draw.sample(range(num_workers), draw.randint(1, num_workers - 1)))
        # One that ends before it is noticed loses messages silently.
        shortest = 0.0 if is_lossy else detection_time + 0.01
        end = start + shortest + draw.choice([0.1, 1.0, 10.0])
        script.append(Partition(start=start, end=end, group=group))
    if is_lossy:
        script.append(Drop(probability=draw.choice([0.0, 0.1, 0.5])))
    return Faults(script=tuple(script), detection_time=detection_time, seed=draw.randrange(99))


def draw_changing_world(algorithm: Any, seed: int) -> World:  # noqa: ANN401
    """A world of `seed` with up to 16 workers, most of which come and go.

    Nobody loses messages silently, so that no algorithm needs a timeout.
    """
    if isinstance(algorithm, AnyWrapper):
        inner: Any = algorithm.inner
        world = draw_changing_world(inner, seed)
        return replace(world, algorithm=replace(algorithm, inner=world.algorithm))
    draw = random.Random(f"{seed} changing")
    num_workers = draw.randint(3, 16)
    varied = vary(algorithm, draw, num_workers, is_lossy=False)
    if draw.random() < 0.7 and not isinstance(varied, ChocoGossip):
        varied = opened(varied)  # type: ignore[assignment]
    num_servers = getattr(varied, "num_servers", 1) if isinstance(varied, AnyServer) else 0
    if isinstance(varied, HALoS):
        num_servers = 1 + varied.num_regions
    if isinstance(varied, Standby):
        num_servers = num_workers // 2 + 1  # a majority must stay to elect one
    script: list[Fault] = []
    for rank in range(num_servers, num_workers):
        now = 0.0
        if draw.random() < 0.5:
            now = draw.choice([draw.uniform(0.1, 15), 2.0, math.inf])
            script.append(Arrival(at=now, rank=rank))
        while now < math.inf and draw.random() < 0.5:
            now += draw.uniform(0.1, 10)
            gone: Fault = Crash(at=now, rank=rank)
            script.append(draw.choice([gone, Leave(at=now, rank=rank)]))
            now += draw.choice([0.1, 1.0, 5.0]) if draw.random() < 0.8 else math.inf
            if now < math.inf:
                script.append(Recover(at=now, rank=rank))
    detection_time = draw.choice([0.0, 0.5, 3.0])
    if draw.random() < 0.4:
        start = draw.uniform(0, 10)
        group = tuple(draw.sample(range(num_workers), draw.randint(1, num_workers - 1)))
        end = start + detection_time + draw.choice([0.2, 1.0, 10.0])
        script.append(Partition(start=start, end=end, group=group))
    return World(
        algorithm=varied,
        platforms=tuple(
            Platform(throughput=10 ** draw.uniform(-0.5, 1)) for _ in range(num_workers)
        ),
        links=Links(default=Link(latency=draw.choice([0.0, 0.1, 1.0]), bandwidth=1e4)),
        faults=Faults(script=tuple(script), detection_time=detection_time, seed=seed),
        wire=draw.random() < 0.3,
    )
