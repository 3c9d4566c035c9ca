"""Hundreds of random worlds: speeds, links, loss, crashes. Nobody hangs, invariants hold.

A failure names its world. To run that one alone, for every algorithm::

    EDGEGOSSIP_SWARM_SEED=17 pytest -m "not slow" tests/swarm

The fast tests see one world of each algorithm, the thorough ones the next four, and the slow
ones a thousand, from seed `EDGEGOSSIP_SWARM_FIRST` on.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.algorithms import ALL, ALONE, OVERSHOOTING, AnyAlgorithm
from tests.tiers import by_name, thorough
from tests.worlds import SHAPE, TARGETS, Recorder, Watched, joined, make_world, stages_in

from edgegossip.algorithms.adpsgd import ADPSGD
from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.alone import Alone
from edgegossip.algorithms.choco_gossip import ChocoGossip, ChocoState
from edgegossip.algorithms.control_variates import ControlVariates
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGDState
from edgegossip.algorithms.parameter_server.batch_tune import BatchTune
from edgegossip.algorithms.parameter_server.halves import StandbyState
from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import SERVER
from edgegossip.algorithms.push_sum import PushSum
from edgegossip.algorithms.rounds import RoundBased
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stage_state import StageState
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.trailing_average import TrailingAverage
from edgegossip.core.algorithm import Algorithm
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Event,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Started,
    Trained,
    WorkerState,
)
from edgegossip.core.snapshot import assemble, dismantle
from edgegossip.core.topology import (
    Topology,
    complete,
    from_edges_by_round,
    random_regular,
    ring,
    star,
)
from edgegossip.sim.fault import Crash, Delay, Drop, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

EACH = {**ALL, "alone": ALONE}
ONE_SEED = os.environ.get("EDGEGOSSIP_SWARM_SEED")
SEEDS = range(5) if ONE_SEED is None else [int(ONE_SEED)]
FIRST_SEED = int(os.environ.get("EDGEGOSSIP_SWARM_FIRST", "5"))
MANY_SEEDS = range(FIRST_SEED, FIRST_SEED + 995)
MAX_EVENTS = 40_000  # a world needs some hundreds, a slow one half of it
MAX_TRAINED = 400_000  # workers of ADSP train while they wait

# Steps lead towards targets, mixing takes convex combinations: nobody ever leaves the box that
# the targets and the start span, whatever goes wrong.
LOWEST = TARGETS.amin(0).clamp(max=0.0) - 1e-5
HIGHEST = TARGETS.amax(0).clamp(min=0.0) + 1e-5
# Those that are `OVERSHOOTING` do, and EdgeGossip's correction does, but not far.
FAR = 10.0


def is_corrected(algorithm: Algorithm[Any]) -> bool:
    """Multiply the change that epochs have made."""
    return (
        isinstance(algorithm, EdgeGossip)
        and isinstance(algorithm.inner, EpochGossip)
        and algorithm.spread == "exact"
        and algorithm.correction > 0
    )


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
            inner = getattr(algorithm, "inner", algorithm)
            overshoots = isinstance(inner, OVERSHOOTING) or is_corrected(algorithm)
            overshoots = overshoots or is_corrected(inner)
            checks.overshoot, checks.role = FAR if overshoots else 0.0, algorithm.role
            algorithm = Watched(algorithm, before=checks.before, after=checks.after)
        simulator = make_world(
            algorithm,
            platforms=self.platforms,
            links=self.links,
            faults=self.faults,
            observer=checks,
            wire=self.wire,
            lr=0.3,
            size=self.size,
        )
        if checks is not None:
            checks.simulator, checks.algorithm = simulator, self.algorithm
        return simulator


def draw_world(algorithm: Any, seed: int) -> World:  # noqa: ANN401
    """The world of `seed`: half of them lose messages, and have a timeout."""
    if isinstance(algorithm, Stages):
        return draw_staged_world(algorithm, seed)
    if isinstance(algorithm, EdgeGossip | BatchTune | TrailingAverage | ControlVariates):
        inner: Any = algorithm.inner
        world = draw_world(inner, seed)
        return replace(world, algorithm=replace(algorithm, inner=world.algorithm))
    draw = random.Random(seed)
    num_workers = draw.randint(2, 6)
    is_lossy = draw.random() < 0.5
    faults = draw_faults(draw, num_workers, is_lossy)
    overrides = {
        (i, j): Link(latency=draw.uniform(0, 5), bandwidth=10 ** draw.uniform(1.5, 4))
        for i in range(num_workers)
        for j in range(num_workers)
        if draw.random() < 0.2
    }
    default = Link(latency=draw.choice([0.0, 0.1, 1.0]), bandwidth=10 ** draw.uniform(2, 6))
    if isinstance(algorithm, ParameterServer) and not algorithm.standby:
        faults = with_server_back(faults, algorithm.num_servers)
    varied = vary(algorithm, draw, num_workers, is_lossy)
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
    algorithm: AnyAlgorithm | Alone, draw: random.Random, num_workers: int, is_lossy: bool
) -> AnyAlgorithm | Alone:
    """The algorithm for so many workers, with what the seed draws for it."""
    topology = draw_topology(draw, num_workers)
    num_rounds = draw.randint(1, 8)
    if isinstance(algorithm, Alone):
        return replace(algorithm, num_rounds=num_rounds)
    if isinstance(algorithm, ParameterServer):
        again = draw.uniform(0.1, 2) if is_lossy else None
        num_servers = min(algorithm.num_servers, num_workers - 1)
        return replace(
            algorithm,
            num_servers=num_servers,
            num_workers=num_workers - num_servers,
            num_rounds=num_rounds,
            resend_after=again,
            standby=min(algorithm.standby, num_workers - 1),
        )
    if isinstance(algorithm, AllReduce):
        topology = complete(num_workers)
    if isinstance(algorithm, ChocoGossip) and topology.period > 1:
        topology = ring(num_workers)
    varied = replace(algorithm, topology=topology, num_rounds=num_rounds)
    if isinstance(varied, PushSum) and draw.random() < 0.7:
        varied = replace(varied, topology=draw_directed(draw, num_workers))
    if isinstance(varied, RoundBased) and is_lossy:
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


@dataclass
class Checks(Recorder):
    """Looks at every worker after every event, and at every message."""

    simulator: Simulator[Any] = field(init=False)
    algorithm: Algorithm[Any] = field(init=False)
    role: Callable[[Rank], Role] = field(init=False)
    in_flight: list[Message] = field(default_factory=list)
    crashed: set[Rank] = field(default_factory=set)
    waking: set[Rank] = field(default_factory=set)  # recovered, not yet started
    lost_weight: float = 0.0
    overshoot: float = 0.0
    num_events: float = 0
    leaders: dict[int, Rank] = field(default_factory=dict)  # by term
    voters: dict[int, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    merged: dict[int, int] = field(default_factory=dict)
    boxes: dict[Rank, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    seen: dict[Rank, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def before(self, state: WorkerState, event: Event, now: Seconds) -> None:
        self.num_events += 1 if not isinstance(event, Trained) else MAX_EVENTS / MAX_TRAINED
        assert self.num_events < MAX_EVENTS, "it goes on for ever"
        self.require_total_weight()  # now that the last event's messages are on their way
        self.round_before = state.round
        if isinstance(event, Received):
            self.in_flight.remove(event.message)
        if isinstance(event, Started):
            self.waking.discard(state.rank)

    def after(self, state: WorkerState, event: Event, now: Seconds) -> None:
        assert state is self.simulator.states[state.rank]
        assert state.round >= self.round_before
        if isinstance(state, StageState):
            self.require_bounds(state)
        self.require_in_box(state)
        inner = inside(state)
        if isinstance(inner, GoSGDState):
            assert not (inner.has_finished and inner.queue)
        if isinstance(inner, StandbyState) and inner.election.is_leading:
            self.require_majority(inner)

    def require_in_box(self, state: WorkerState) -> None:
        """Fail if an estimate is where none can be; one that was looked at is not again."""
        x = state.estimate
        seen, version = self.seen.get(state.rank, (None, 0))
        if x is seen and x._version == version:
            return
        if state.rank not in self.boxes:
            held = self.role(state.rank).stretch(len(LOWEST))
            self.boxes[state.rank] = (
                LOWEST[held] - self.overshoot,
                HIGHEST[held] + self.overshoot,
            )
        low, high = self.boxes[state.rank]
        assert bool((x >= low).all() and (x <= high).all())
        self.seen[state.rank] = x, x._version

    def require_bounds(self, state: StageState) -> None:
        """Fail if a stage keeps more than it is to, whatever is lost or late."""
        algorithm = stages_in(self.algorithm)
        assert algorithm is not None
        stage = algorithm.stage(state.rank)
        most = algorithm.max_passed(stage)
        assert len(state.pending) <= most
        assert len(state.answers) <= most
        assert len(state.origins) <= most + 1
        if stage > 0:
            num_below = algorithm.num_first if stage == 1 else 1
            assert len(state.waiting) <= num_below * algorithm.max_passed(stage - 1)

    def require_majority(self, state: StandbyState) -> None:
        """Fail if a server serves that most have not voted for, or merges without them."""
        term, num_ranks = state.election.term, len(self.simulator.states)
        assert self.leaders.setdefault(term, state.rank) == state.rank
        if term > 0:
            assert len(self.voters[term] | {state.rank}) > num_ranks // 2
        num_merged = sum(state.server.num_commits.values()) if state.server else 0
        before, self.merged[term] = self.merged.get(term, 0), num_merged
        is_cut_off = len(state.election.lost) >= (num_ranks + 1) // 2
        assert num_merged == before or not is_cut_off

    def require_total_weight(self) -> None:
        """Fail if a GoSGD run has lost or won weight."""
        if isinstance(inside(self.simulator.states[0]), GoSGDState):
            assert self.total_weight() == pytest.approx(1.0, abs=1e-12)

    def total_weight(self) -> float:
        """Total weight of all workers, messages in flight, and losses to crashes and links."""
        online = [state for state in self.simulator.states if state.rank not in self.crashed]
        under_way = sum(map(weight_of, self.in_flight))
        held = sum(self.weight_held_by(inside(state)) for state in online if inside(state))
        return held + under_way + self.lost_weight

    def weight_held_by(self, state: GoSGDState) -> float:
        own = 0.0 if state.rank in self.waking else state.weight
        return own + sum(weight_of(message) for _, message in state.queue)

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        super().sent(now, rank, receiver, message, num_bytes, uplink)
        self.in_flight.append(message)
        if message.kind == "vote":
            self.voters[int(message.numbers["stands_for"])].add(rank)

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        super().lost(now, rank, sender, message, reason)
        self.in_flight.remove(message)
        self.lost_weight += weight_of(message)

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        super().changed(now, rank, what)
        state = inside(self.simulator.states[rank])
        if what == "crashed":
            if isinstance(state, GoSGDState):
                self.lost_weight += self.weight_held_by(state)
            self.crashed.add(rank)
            self.waking.discard(rank)
        elif what == "recovered":
            self.crashed.discard(rank)
            self.waking.add(rank)


def inside(state: WorkerState) -> Any:  # noqa: ANN401
    """The state of the algorithm that exchanges parameters."""
    return getattr(state, "inner", state)


def weight_of(message: Message) -> float:
    """The weight in a GoSGD message; other algorithms' messages carry none."""
    return message.numbers.get("weight", 0.0)


def check_world(world: World) -> None:
    checks = Checks()
    simulator = world.simulator(checks)
    if isinstance(world.algorithm, ParameterServer) and world.algorithm.standby:
        check_standby(world, checks)
        return
    assert simulator.run()
    checks.require_unchanged_payloads()
    assert not checks.in_flight
    checks.require_total_weight()
    # What was sent before a crash may arrive when the sender has begun anew.
    if not any(isinstance(fault, Crash) for fault in world.faults.script):
        require_equal_replicas([inside(state) for state in simulator.states])
    algorithm = getattr(world.algorithm, "inner", world.algorithm)
    is_left = isinstance(algorithm, ParameterServer) and checks.crashed >= {*algorithm.workers}
    for rank, state in enumerate(simulator.states):
        is_above = isinstance(state, StageState) and state.inner is None
        if rank not in checks.crashed and not is_left and not is_above:
            assert state.round == algorithm.traits.num_rounds


def check_standby(world: World, checks: Checks) -> None:
    """Run it; unless most have crashed for good, all come to the end with one server."""
    simulator = checks.simulator
    try:
        assert simulator.run()
    except ServerLostError:
        assert len(checks.crashed) >= len(simulator.states) / 2
        return
    workers = [state for state in simulator.states if state.rank not in checks.crashed]
    for state in workers:
        assert state.rank == SERVER or state.round == world.algorithm.traits.num_rounds
    cuts = [each for each in world.faults.script if isinstance(each, Partition)]
    if simulator.now > max((cut.end for cut in cuts), default=0.0) + 100.0:
        assert len([state for state in workers if inside(state).server is not None]) <= 1


def require_equal_replicas(states: list[Any]) -> None:
    """Fail if both ends of an edge hold different things for the same, in ChocoGossip."""
    for state in states:
        if isinstance(state, ChocoState):
            for j, replica in state.replicas.items():
                is_complete = replica.round == states[j].round
                assert not is_complete or torch.equal(replica.params, states[j].replica)


@contextmanager
def replayable(name: str, seed: int) -> Iterator[None]:
    """Say in a failure which world it was, and how to see it again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{name} in world {seed}: {draw_world(EACH[name], seed)}")
        error.add_note(
            f"again: EDGEGOSSIP_SWARM_SEED={seed} pytest -m 'not slow' tests/swarm -k {name}"
        )
        raise


def check_worlds(name: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        with replayable(name, seed):
            check_world(draw_world(EACH[name], seed))


@pytest.mark.parametrize("name", by_name([*EACH]))
def test_no_world_breaks_it(name: str) -> None:
    check_worlds(name, SEEDS[:1])


@thorough
@pytest.mark.parametrize("name", EACH)
def test_none_of_some_more_worlds_breaks_it(name: str) -> None:
    check_worlds(name, SEEDS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_none_of_very_many_worlds_breaks_it(name: str) -> None:
    check_worlds(name, MANY_SEEDS)


@pytest.mark.parametrize("name", by_name([*EACH]))
def test_run_resumed_from_a_checkpoint_ends_with_the_same_bits(name: str) -> None:
    for seed in SEEDS[:2]:
        with replayable(name, seed):
            world = draw_world(EACH[name], seed)
            whole, first, second = (world.simulator() for _ in range(3))
            whole.run()
            first.run(until=whole.now / 2)
            second.load_state_dict(assemble(*dismantle(first.state_dict())))
            assert second.run()
            assert second.num_events == whole.num_events
            assert torch.equal(joined(second.estimates()), joined(whole.estimates()))
