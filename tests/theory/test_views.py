"""Workers whose views of the members differ: nobody waits in vain, and nothing is lost."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import ALL
from tests.tiers import first, thorough
from tests.trained import trained_event
from tests.worlds import make_world

from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.algorithm import Algorithm, opened
from edgegossip.contract.base_graph import base_graph
from edgegossip.contract.mixing import EdgeWeights, MetropolisHastings
from edgegossip.contract.protocol import (
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Send,
    Started,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    one_peer_exponential,
    random_matching,
    ring,
    star,
    torus,
)
from edgegossip.sim.fault import Arrival, Faults, Partition
from edgegossip.sim.platform import Platform

PLATFORMS = (Platform(throughput=1.0),) * 16
NUM_LIVE, NUM_GHOSTS = 7, 5
RANKS = NUM_LIVE + NUM_GHOSTS
"""Live workers stand among ghosts: ranks that some take for present, and others do not."""
GRAPHS: list[Callable[[int], Topology]] = [
    ring,
    star,
    lambda n: torus(3, n // 3),
    lambda n: random_matching(n, period=12, seed=3),
    lambda n: base_graph(n, max_degree=1),
]
DIRECTED: list[Callable[[int], Topology]] = [
    directed_ring,
    directed_exponential,
    one_peer_exponential,
]


class Haunted:
    """Live workers that exchange without training, while each hears of ghosts at other times.

    Messages between two workers arrive in order; else chance decides what happens next.
    """

    def __init__(
        self, algorithm: Algorithm[Any], seed: int, dtype: torch.dtype = torch.float64
    ) -> None:
        self.algorithm, self.draw = algorithm, random.Random(seed)
        self.live = sorted(self.draw.sample(range(RANKS), NUM_LIVE))
        self.ghosts = [rank for rank in range(RANKS) if rank not in self.live]
        numbers = torch.Generator().manual_seed(seed)
        start = torch.randn(RANKS, 3, generator=numbers).to(dtype)
        self.states = {rank: algorithm.init(rank, start[rank]) for rank in self.live}
        self.before = start[self.live].sum(0)
        self.links: dict[tuple[Rank, Rank], deque[Message]] = defaultdict(deque)
        self.training: dict[Rank, Train] = {}
        self.finished: set[Rank] = set()
        self.haunts = {rank: set(self.ghosts) for rank in self.live}
        self.num_haunts = 150
        for rank in self.live:
            self.on(rank, Started())

    def on(self, rank: Rank, event: Event) -> None:
        for effect in self.algorithm.handle(self.states[rank], event, 0.0):
            match effect:
                case Send(receiver, message):
                    self.links[rank, receiver].append(message)
                case Train():
                    self.training[rank] = effect
                case Finish():
                    self.finished.add(rank)

    def haunt(self) -> None:
        """Let a worker lose or find a ghost."""
        rank, ghost = self.draw.choice(self.live), self.draw.choice(self.ghosts)
        is_there = ghost in self.haunts[rank]
        self.on(rank, WorkerLost(ghost) if is_there else WorkerJoined(ghost, True))
        self.haunts[rank] ^= {ghost}

    def run(self, *, settles: bool = False) -> None:
        while len(self.finished) < NUM_LIVE or self.waiting:
            if settles and self.num_haunts == 0:
                self.settle()
            if self.num_haunts > 0 and self.draw.random() < 0.3:
                self.num_haunts -= 1
                self.haunt()
                continue
            steps: list[Any] = [*self.training, *self.waiting]
            if not steps:
                self.settle()
                steps = [*self.training, *self.waiting]
                assert steps or len(self.finished) == NUM_LIVE, "they wait for ever"
                continue
            step = self.draw.choice(steps)
            if isinstance(step, tuple):
                self.on(step[1], Received(step[0], self.links[step].popleft()))
            else:
                before = self.training.pop(step).params
                self.on(step, trained_event(before, before))

    def settle(self) -> None:
        """All have lost all ghosts: from now on the views agree."""
        self.num_haunts = 0
        for rank in self.live:
            for ghost in sorted(self.haunts[rank]):
                self.on(rank, WorkerLost(ghost))
            self.haunts[rank] = set()

    @property
    def total(self) -> torch.Tensor:
        return torch.stack([state.params for state in self.states.values()]).sum(0)

    @property
    def waiting(self) -> list[tuple[Rank, Rank]]:
        return [link for link, queue in self.links.items() if queue and link[1] in self.states]


def averaging(make: Callable[[int], Topology], num_rounds: int) -> Gossip:
    graph = make(RANKS)
    is_weighted = graph.name.startswith("base")
    rule = EdgeWeights() if is_weighted else MetropolisHastings()
    return Gossip(topology=graph.open(), num_rounds=num_rounds, mixing=rule)


@pytest.mark.parametrize("seed", first(2, range(12)))
@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make(RANKS).name)
def test_averaging_keeps_the_mean_however_the_views_differ(
    make: Callable[[int], Topology], seed: int
) -> None:
    haunted = Haunted(averaging(make, 40), seed)
    haunted.run()
    assert torch.allclose(haunted.total, haunted.before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", first(1, range(6)))
def test_workers_with_several_kinds_of_views_come_to_agree(seed: int) -> None:
    haunted = Haunted(averaging(ring, 300), seed)
    haunted.run(settles=True)
    mean = haunted.before / NUM_LIVE
    for state in haunted.states.values():
        assert torch.allclose(state.params, mean, atol=1e-6)


@pytest.mark.parametrize("seed", first(2, range(12)))
@pytest.mark.parametrize("make", DIRECTED, ids=lambda make: make(RANKS).name)
def test_push_sum_keeps_its_mass_however_the_views_differ(
    make: Callable[[int], Topology], seed: int
) -> None:
    algorithm = StochasticGradientPush(
        topology=make(RANKS).open(), num_rounds=60, resend_after=1e9
    )
    haunted = Haunted(algorithm, seed)
    haunted.run()
    haunted.settle()
    states = haunted.states.values()
    assert sum(state.weight for state in states) == pytest.approx(NUM_LIVE, abs=1e-9)
    assert torch.allclose(haunted.total, haunted.before, rtol=0, atol=1e-9)


# In a simulation.


@pytest.mark.parametrize("make", [ring, directed_ring, one_peer_exponential])
def test_few_members_of_many_ranks_agree_on_their_mean(make: Callable[[int], Topology]) -> None:
    is_directed = make(16).is_directed
    kind: Any = StochasticGradientPush if is_directed else Gossip
    script = tuple(
        Arrival(at=float("inf"), rank=rank) for rank in range(16) if rank not in (2, 5, 9, 14)
    )
    algorithm = opened(kind(topology=make(16), num_rounds=60))
    start = torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    world = make_world(
        algorithm, platforms=PLATFORMS, initial=start, lr=0.0, faults=Faults(script=script)
    )
    assert world.run()
    estimates = world.estimates()
    assert sorted(estimates) == [2, 5, 9, 14]
    mean = torch.stack([start[rank] for rank in estimates]).mean(0)
    for estimate in estimates.values():
        assert torch.allclose(estimate, mean, atol=1e-5)


def test_halves_go_on_apart_and_have_one_mean_again_after_the_cut() -> None:
    """Nothing is under way when the network is cut, so the mean of all is kept to rounding."""
    cut = Partition(start=5.5, end=20.5, group=tuple(range(0, 16, 2)))
    start = torch.randn(16, 7, generator=torch.Generator().manual_seed(2))

    def run(until: float) -> dict[Rank, torch.Tensor]:
        world = make_world(
            Gossip(topology=ring(16).open(), num_rounds=400),
            platforms=PLATFORMS,
            initial=start,
            lr=0.0,
            faults=Faults(script=(cut,), detection_time=0.0),
        )
        world.run(until)
        return world.estimates()

    apart, together = run(20.2), run(400.0)
    for estimates in (apart, together):
        assert torch.allclose(
            torch.stack([*estimates.values()]).mean(0), start.mean(0), atol=1e-5
        )
    halves = [torch.stack([apart[rank] for rank in range(k, 16, 2)]) for k in (0, 1)]
    # A ring of each half: they come closer to a mean of their own, which a ring of 16 without
    # every second worker cannot.
    for half in halves:
        assert (half - half.mean(0)).norm() < 0.3 * (start - start.mean(0)).norm()
    for estimate in together.values():
        assert torch.allclose(estimate, start.mean(0), atol=1e-4)


# What a false view can do, and what closed runs are spared.


def test_a_false_view_gives_its_author_no_more_weight_than_a_true_one() -> None:
    algorithm = Gossip(topology=star(8).open(), num_rounds=5)
    for members in ([1, 0], [1, 0, 2], range(8), [1], []):
        state = algorithm.init(0, torch.zeros(3, dtype=torch.float64))
        algorithm.handle(state, Started(), 0.0)
        bits = torch.zeros(8, dtype=torch.uint8)
        bits[list(members)] = 1
        algorithm.handle(state, Received(1, Message("view", 0, {"members": bits})), 0.0)
        algorithm.handle(state, trained_event(state.params, state.params), 0.0)
        for j in range(1, 8):
            x = {"params": torch.full((3,), float(j == 1), dtype=torch.float64)}
            algorithm.handle(state, Received(j, Message("params", 0, x, {"seen": 0})), 0.0)
        assert state.round == 1  # a worker that denies the edge is not waited for
        assert 0 <= float(state.params[0]) <= 1 / 8 + 1e-12


def test_closed_runs_have_no_views_and_complete_graphs_need_none() -> None:
    closed = Gossip(topology=ring(4), num_rounds=2)
    assert "view" not in closed.schema(torch.zeros(3))
    assert "view" in opened(closed).schema(torch.zeros(3))
    whole = Gossip(topology=complete(4), num_rounds=2)
    assert opened(whole) == whole


@thorough
@pytest.mark.parametrize("name", ["gasloc", "sparse-push", "difference-push"])
@pytest.mark.parametrize("seed", range(3))
def test_others_of_their_kind_come_to_an_end_among_ghosts(name: str, seed: int) -> None:
    algorithm: Any = ALL[name]
    graph = (
        random_matching(RANKS, period=12, seed=3) if name == "gasloc" else directed_ring(RANKS)
    )
    more = {"resend_after": 1e9} if isinstance(algorithm, PushSum) else {}
    algorithm = opened(replace(algorithm, topology=graph, num_rounds=20, **more))
    Haunted(algorithm, seed, torch.float32).run()


def test_replicas_of_fixed_neighbors_cannot_follow_members() -> None:
    choco = ChocoGossip(topology=ring(4), num_rounds=2)
    with pytest.raises(ValueError, match="cannot follow members"):
        opened(choco)
