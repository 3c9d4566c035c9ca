"""Worlds for real hosts in virtual time, and what must hold in each.

    python -m tests.host_swarm [--kind peers] [--worlds 10000] [--first 0] [--json]

Each seed draws an algorithm, workers of unequal speed, a network, and what goes wrong:
processes that start late, are paused, killed, restarted; cuts of one or both ways; frames that
are late, lost or come twice; full disks; stops of all; one that lies. `check` runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from tests.algorithms import (
    ALL,
    NUM_WORKERS,
    PARAMETER_SERVERS,
    PEERS,
    SEVERAL_SERVERS,
    STAGES,
    STANDBYS,
)
from tests.observers import Silent
from tests.parity import Steady
from tests.virtual import Process, VirtualNetwork, VirtualTime, Wire
from tests.worlds import NUM_PARAMS, ManySamples, StageTrainer, loss_of, stages_in

from edgegossip.algorithms.control_variates import ControlVariates
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.gosgd import GoSGDState
from edgegossip.algorithms.parameter_server.bsp import BSP
from edgegossip.algorithms.parameter_server.halves import StandbyState
from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import SERVER, CommitterState, ServerState
from edgegossip.algorithms.push_sum_state import PushSumState
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.trailing_average import TrailingAverage
from edgegossip.core import topology as topologies
from edgegossip.core.algorithm import Algorithm
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Role,
    Seconds,
    Send,
    Train,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.snapshot import Json, assemble, dismantle
from edgegossip.core.topology import Topology, from_edges_by_round
from edgegossip.core.trainer import TrainingResult
from edgegossip.net.host import Host
from edgegossip.net.host_settings import HostSettings
from edgegossip.net.patience import Patience
from edgegossip.net.status import Phase, WorkerStatus

SIZE = 4
LEASE: Seconds = 1.5
NOTICED: Seconds = 2 * LEASE
"""A worker that hangs is missed after at most this."""
SLACK: Seconds = 2.0
"""Beyond a round: until a link is open again, statuses were exchanged, and a step is done."""
HORIZON: Seconds = 3600.0


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Something that goes wrong.

    Args:
        kind: "pause", "cut", "one way cut", "partition", "kill", "stop all".
        at: When.
        ranks: Whom it befalls; of a partition, one half.
        seconds: For how long; a killed one is started again after it, with infinity never.
        with_disk: A killed one goes on from its last checkpoint.
    """

    kind: str
    at: Seconds
    ranks: tuple[Rank, ...]
    seconds: Seconds = 0.0
    with_disk: bool = True


@dataclass(frozen=True, kw_only=True)
class World:
    """The world that one seed draws."""

    seed: int
    name: str
    algorithm: Algorithm[Any]
    step_seconds: tuple[Seconds, ...]
    start_at: tuple[Seconds, ...]
    wire: Wire
    disturbances: tuple[Disturbance, ...]
    meet_seconds: Seconds
    checkpoint_seconds: Seconds
    disk_fails: float = 0.0
    liar: Rank | None = None
    lie: str = ""

    @property
    def num_workers(self) -> int:
        return len(self.step_seconds)

    @property
    def loses(self) -> bool:
        """Frames are lost without a word, so that somebody waits for a deadline."""
        return self.wire.lost > 0

    @property
    def deadline(self) -> Seconds:
        """How long one that lies can make others wait, as one that is silent can."""
        patience = Patience()
        # Some never send it anything, and it waits for them in turn; or those who come late
        # take its run for one to rejoin, and wait for each other's answers.
        if self.lie == "waiting" or (self.lie and any(self.start_at)):
            return patience.factor * patience.first
        longest = patience.factor * 3 * self.round_seconds + patience.slack
        return 0.0 if self.liar is None else patience.factor * longest

    @property
    def round_seconds(self) -> Seconds:
        """The longest round of anybody: its training and its exchanges."""
        traits = self.algorithm.traits
        is_balanced = isinstance(self.algorithm, EdgeGossip)
        slowest = max(self.step_seconds) * (SIZE if is_balanced else traits.local_steps or SIZE)
        hops = (
            2 * self.num_workers
        )  # an all-reduce takes several exchanges, flooding several hops
        return (
            slowest + hops * (self.wire.latency[1] + 0.01) + (hops / 2 if self.wire.late else 0)
        )

    @property
    def disturbed(self) -> set[Rank]:
        """Workers that something happens to; one side of a partition."""
        late = {rank for rank, at in enumerate(self.start_at) if at > 0}
        hit = {rank for each in self.disturbances for rank in each.ranks}
        # One that began alone waits for the others: what it says of the run nobody confirms.
        is_alone = len(late) == self.num_workers - 1
        alone = set(range(self.num_workers)) if is_alone else set()
        return late | hit | alone | ({self.liar} if self.liar is not None else set())


KINDS = ("pause", "cut", "one way cut", "partition", "kill", "stop all")
LIES = ("elapsed", "resumed", "finished", "waiting", "counts", "furthest")


def draw_world(seed: int, name: str | None = None) -> World:
    draw = random.Random(seed)
    name = name or [*PEERS][seed % len(PEERS)]
    is_liar = draw.random() < 0.15
    # Two honest ones have to contradict one that lies.
    algorithm = smaller(ALL[name], NUM_WORKERS if is_liar else draw.choice([3, 3, 4, 5]))
    num_workers = num_workers_of(algorithm)
    slowest = draw.choice([1, 2, 8])
    step_seconds = tuple(0.2 * slowest ** draw.random() for _ in range(num_workers))
    bad = draw.random()
    wire = Wire(
        latency=(0.001, draw.choice([0.005, 0.05, 0.3])),
        bandwidth=draw.choice([1e7, 1e5]),
        late=0.1 if 0.4 < bad < 0.55 else 0.0,
        lost=0.01 if bad > 0.9 else 0.0,
        twice=0.1 if 0.55 < bad < 0.7 else 0.0,
    )
    has_trouble = not is_liar or draw.random() < 0.3
    return World(
        seed=seed,
        name=name,
        algorithm=longer(algorithm, draw.choice([0.5, 0.5, 1, 2])),
        step_seconds=step_seconds,
        start_at=draw_starts(draw, num_workers),
        wire=wire,
        disturbances=draw_disturbances(draw, num_workers) if has_trouble else (),
        meet_seconds=draw.choice([2.5, 5.0]),
        checkpoint_seconds=draw.choice([2.0, math.inf]),
        disk_fails=draw.choice([0.0, 0.0, 0.5, 1.0]),
        liar=draw.randrange(num_workers) if is_liar else None,
        lie=draw.choice(LIES) if is_liar else "",
    )


def draw_server_world(seed: int) -> World:
    """The world of `seed` for a parameter server; in half of them it is killed, and soon back.

    Nothing else happens to it: all others would wait for it.
    """
    world = draw_world(seed, [*PARAMETER_SERVERS][seed % len(PARAMETER_SERVERS)])
    spared = tuple(each for each in world.disturbances if SERVER not in each.ranks)
    starts = (0.0, *world.start_at[1:])
    draw = random.Random(f"{seed} server")
    if draw.random() < 0.5:
        with_disk = world.checkpoint_seconds < math.inf and draw.random() < 0.7
        away = draw.choice([0.05, 0.8, 4.0])
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(3, 12),
            ranks=(SERVER,),
            seconds=away,
            with_disk=with_disk,
        )
        # Who comes when nobody else is there begins alone, and the server is not there to help.
        spared, starts = (*spared, killed), (0.0,) * len(starts)
    liar = None if world.liar == SERVER else world.liar
    lasting = longer(world.algorithm, 20)  # or the run is over before anything happens
    return replace(
        world,
        algorithm=replace(lasting, resend_after=2.0),  # type: ignore[type-var]
        disturbances=spared,
        start_at=starts,
        liar=liar,
        lie=world.lie if liar else "",
    )


def draw_standby_world(seed: int) -> World:
    """The world of `seed` in which workers elect another server; anything may happen to any.

    In half of them nothing does but that the server is killed, for good or for a while.
    """
    name = [*STANDBYS][seed % len(STANDBYS)]
    world = draw_world(seed, name)
    draw = random.Random(f"{seed} standby")
    lasting: Any = longer(STANDBYS[name], 20)
    changes: dict[str, Any] = {"algorithm": replace(lasting, resend_after=2.0)}
    if draw.random() < 0.5:
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(3, 12),
            ranks=(SERVER,),
            seconds=draw.choice([0.05, 0.8, 4.0, math.inf]),
            with_disk=draw.random() < 0.5,
        )
        calm = Wire(latency=world.wire.latency, bandwidth=world.wire.bandwidth)
        changes |= {
            "disturbances": (killed,),
            "start_at": (0.0,) * world.num_workers,
            "liar": None,
            "lie": "",
            "wire": calm,
        }
    return replace(world, **changes)


def draw_sharing_world(seed: int) -> World:
    """The world of `seed` in which servers share the model; in half, one of them is killed."""
    name = [*SEVERAL_SERVERS][seed % len(SEVERAL_SERVERS)]
    world = draw_world(seed, name)
    draw = random.Random(f"{seed} sharing")
    lasting: Any = longer(SEVERAL_SERVERS[name], 10)
    servers = range(lasting.num_servers)
    spared = tuple(
        each
        for each in world.disturbances
        if each.kind != "stop all" and not {*servers}.intersection(each.ranks)
    )
    if draw.random() < 0.5:
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(3, 12),
            ranks=(draw.choice(servers),),
            seconds=draw.choice([0.05, 0.8, 4.0]),
            with_disk=draw.random() < 0.5,
        )
        spared = (killed,)
    return replace(
        world,
        algorithm=replace(lasting, resend_after=2.0),
        disturbances=spared,
        start_at=(0.0,) * world.num_workers,
        wire=replace(world.wire, lost=0.0),
        liar=None,
        lie="",
    )


def draw_staged_world(seed: int) -> World:
    """The world of `seed` in which one model is trained in stages; anything may be lost."""
    name = [*STAGES][seed % len(STAGES)]
    world = draw_world(seed, "bsp")  # as many ranks
    algorithm = replace(STAGES[name], forget_after=2.0)
    return replace(world, name=name, algorithm=algorithm, liar=None, lie="")


def longer(algorithm: Algorithm[Any], factor: float) -> Algorithm[Any]:
    if isinstance(algorithm, EdgeGossip | TrailingAverage | ControlVariates):
        return replace(algorithm, inner=longer(algorithm.inner, factor))
    varied: Any = algorithm
    found: Algorithm[Any] = replace(varied, num_rounds=int(factor * varied.num_rounds))
    return found


def smaller(algorithm: Algorithm[Any], num_workers: int) -> Algorithm[Any]:
    """The same for fewer workers; as it is where it has no topology."""
    if isinstance(algorithm, EdgeGossip | TrailingAverage | ControlVariates):
        return replace(algorithm, inner=smaller(algorithm.inner, num_workers))
    varied: Any = algorithm
    if not isinstance(getattr(varied, "topology", None), Topology):
        return algorithm
    found: Algorithm[Any] = replace(varied, topology=_cut_down(varied.topology, num_workers))
    return found


@cache
def _cut_down(topology: Topology, num_workers: int) -> Topology:
    factory = getattr(topologies, topology.name.removesuffix(f"({topology.num_workers})"), None)
    if factory is not None:
        made: Topology = factory(num_workers)
        return made
    ranks = range(num_workers)
    edges = [
        [
            (i, j)
            for i in ranks
            for j in topology.out_neighbors(i, round)
            if j in ranks and (topology.is_directed or i < j)
        ]
        for round in range(topology.period)
    ]
    return from_edges_by_round(num_workers, edges, topology.is_directed)


def num_workers_of(algorithm: Algorithm[Any]) -> int:
    algorithm = getattr(algorithm, "inner", algorithm)
    topology = getattr(algorithm, "topology", None)
    return topology.num_workers if isinstance(topology, Topology) else NUM_WORKERS


def draw_starts(draw: random.Random, num_workers: int) -> tuple[Seconds, ...]:
    """Most worlds start together; in others some come later, together or one by one."""
    starts = [draw.uniform(0.0, 0.5) for _ in range(num_workers)]
    if draw.random() < 0.3:
        together = draw.uniform(1.0, 12.0)
        for rank in draw.sample(range(num_workers), draw.randint(1, num_workers - 1)):
            starts[rank] = together + draw.uniform(0.0, draw.choice([0.2, 3.0]))
    return tuple(start if start > 0.5 else 0.0 for start in starts)


def draw_disturbances(draw: random.Random, num_workers: int) -> tuple[Disturbance, ...]:
    everyone = range(num_workers)
    found, at = [], draw.uniform(0.5, 4.0)
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        kind = draw.choice(KINDS)
        seconds = draw.choice([0.3, 2.0, 5.0, 10.0, 30.0])
        ranks: Sequence[Rank] = draw.sample(everyone, 1)
        if kind == "partition":
            ranks = draw.sample(everyone, draw.randint(1, 2))
        elif kind in ("cut", "one way cut"):
            ranks = draw.sample(everyone, 2)
        elif kind == "kill":
            ranks = draw.sample(everyone, draw.choice([1, 1, 2]))
            seconds = draw.choice([0.05, 0.8, 4.0, math.inf])
        elif kind == "stop all":
            ranks, seconds = (), draw.uniform(1.0, 5.0)
        disturbance = Disturbance(
            kind=kind, at=at, ranks=tuple(ranks), seconds=seconds, with_disk=draw.random() < 0.6
        )
        found.append(disturbance)
        at += draw.uniform(0.0, 8.0)
    return tuple(found)


# Running a world.


class Timed(ManySamples):
    """Training that takes virtual time."""

    def __init__(self, rank: Rank, time: VirtualTime, step_seconds: Seconds) -> None:
        super().__init__(rank, 0.1, SIZE)
        self._rank = rank
        self._time, self._step_seconds = time, step_seconds

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._time.sleep(self.cost(request) * self._step_seconds)
        return super().train(request, progress)


class TimedStage(StageTrainer):
    """Training of a stage that takes virtual time; fails on the gradient of another batch."""

    def __init__(
        self, run: Run, rank: Rank, step_seconds: Seconds, stages: Stages, life: int
    ) -> None:
        super().__init__(stages, rank, 0.1, SIZE, life)
        self._time, self._step_seconds = run.time, step_seconds

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._time.sleep(self.cost(request) * self._step_seconds)
        return super().train(request, progress)


class Tally(Timed):
    """Training that counts its steps in the entry of its rank, so that the model shows them."""

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        result = super().train(request, progress)
        params = request.params.clone()
        params[self._rank] += result.num_steps
        return replace(result, params=params)


@dataclass
class Inside(Algorithm[WorkerState]):
    """Does what the algorithm inside does."""

    inner: Algorithm[Any]

    def init(self, rank: Rank, params: torch.Tensor) -> WorkerState:
        state: WorkerState = self.inner.init(rank, params)
        return state

    def role(self, rank: Rank) -> Role:
        return self.inner.role(rank)

    def schema(self, params: torch.Tensor) -> Any:  # noqa: ANN401
        return self.inner.schema(params)

    @property
    def traits(self) -> Any:  # noqa: ANN401
        return self.inner.traits

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        return self.inner.handle(state, event, now)


class Furthest(Inside):
    """Tells those who come back that the run is at its end."""

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        end = int(self.traits.num_rounds or 0)
        effects = self.inner.handle(state, event, now)
        return [
            replace(each, message=replace(each.message, round=end))
            if isinstance(each, Send) and each.message.kind == "catch-up"
            else each
            for each in effects
        ]


@dataclass
class Ledger(Inside):
    """Writes down all commits: by worker and number how many steps went into it.

    One that goes on from a checkpoint may send another commit under the same number. Besides:
    how many commits of each worker were answered, and how often a server has missed it.
    """

    steps: dict[Rank, dict[int, set[int]]] = field(default_factory=dict)
    num_answered: dict[Rank, int] = field(default_factory=dict)
    num_absences: Counter[Rank] = field(default_factory=Counter)
    began: dict[int, Seconds] = field(default_factory=dict)
    lost: list[tuple[int, Rank, int]] = field(default_factory=list)
    clock: Callable[[], Seconds] = lambda: 0.0

    def look(self, state: WorkerState) -> None:
        """Note when each elected server begins, and what it lacks."""
        if not isinstance(state, StandbyState) or not state.is_evaluated:
            return
        term = state.election.term
        if state.server is None or term in self.began:
            return
        self.began[term] = self.clock()
        for rank, num_merged in state.server.num_commits.items():
            self.lost.append((term, rank, self.num_answered.get(rank, 0) - num_merged))

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        server = getattr(state, "server", None)
        steps_before = server.num_steps.get(state.rank, 0) if server else 0
        effects = super().handle(state, event, now)
        self.look(state)
        if isinstance(event, WorkerLost) and (server or isinstance(state, ServerState)):
            self.num_absences[event.rank] += 1
        if server and (more := server.num_steps.get(state.rank, 0) - steps_before):
            # Its own commit, which was merged at once.
            number = server.num_commits[state.rank]
            self.steps.setdefault(state.rank, {}).setdefault(number, set()).add(more)
        state = getattr(state, "worker", state)
        if isinstance(state, CommitterState):
            rank, commits = state.rank, self.steps.setdefault(state.rank, {})
            if state.commit is not None:
                numbers = {name: int(each) for name, each in state.commit.numbers.items()}
                commits.setdefault(numbers["number"], set()).add(numbers["num_steps"])
            self.num_answered[rank] = max(self.num_answered.get(rank, 0), state.num_commits)
        return effects


class Watcher(Silent):
    """Notes when each worker has trained or come to its end."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.trace: list[tuple[Any, ...]] = []
        self.moments: dict[Rank, list[Seconds]] = defaultdict(list)
        self.trained_at: dict[Rank, list[Seconds]] = defaultdict(list)

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self._note(rank, "trained", float(event.params.double().sum()))
        self.trained_at[rank].append(self._time.now)

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        self.trace.append((self._time.now, rank, "received", sender, staleness))

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self._note(rank, what)

    def _note(self, rank: Rank, *what: object) -> None:
        self.trace.append((self._time.now, rank, *what))
        self.moments[rank].append(self._time.now)


@dataclass
class Run:
    """A world as it goes on."""

    world: World
    ledger: Ledger | None = None  # of a parameter server's commits
    processes: dict[Rank, Process] = field(default_factory=dict)
    disks: dict[Rank, tuple[Json, dict[str, torch.Tensor]]] = field(default_factory=dict)
    starts: list[tuple[Seconds, Rank]] = field(default_factory=list)
    num_due: int = 0  # processes that are still to be started

    def __post_init__(self) -> None:
        world = self.world
        self.time = VirtualTime()
        self.draw = random.Random(f"{world.seed} network")
        self.network = VirtualNetwork(self.time, self.draw, world.wire, LEASE)
        self.watcher = Watcher(self.time)
        for rank, at in enumerate(world.start_at):
            self._later(at, rank)
        for each in world.disturbances:
            self.time.at(each.at, partial(self._disturb, each))

    def to_the_end(self) -> bool:
        """Run; says whether everybody came to an end."""
        return self.time.run(
            2 * HORIZON,
            lambda: not self.num_due and not self.network.num_running,
        )

    def _later(self, seconds: Seconds, rank: Rank, with_disk: bool = False) -> None:
        self.num_due += 1
        self.time.at(self.time.now + seconds, lambda: self._start(rank, with_disk))

    def _start(self, rank: Rank, with_disk: bool) -> None:
        world, process = self.world, Process(self.network, rank, self.draw.uniform(0, 1e5))
        self.num_due -= 1
        self.processes[rank] = process
        self.starts.append((self.time.now, rank))
        checkpoint = None
        if with_disk and rank in self.disks:
            plain, tensors = self.disks[rank]
            checkpoint = assemble(plain, {name: x.clone() for name, x in tensors.items()})
        algorithm = self.ledger or world.algorithm
        stages, step_seconds = stages_in(algorithm), world.step_seconds[rank]
        trainer: ManySamples
        if stages is not None:
            life = sum(each == rank for _, each in self.starts)
            trainer = TimedStage(self, rank, step_seconds, stages, life)
        else:
            make_trainer = Timed if self.ledger is None else Tally
            trainer = make_trainer(rank, self.time, step_seconds)
        if rank == world.liar and world.lie == "furthest":
            algorithm = Furthest(algorithm)
        host = Host(
            algorithm,
            rank,
            world.num_workers,
            torch.zeros(NUM_PARAMS),
            trainer,
            self.network.transport(process),
            settings=HostSettings(
                run=b"virtual!",
                meet_seconds=world.meet_seconds,
                max_seconds=HORIZON,
                checkpoint_seconds=min(world.checkpoint_seconds, 1e6),
                quiet_seconds=0.25,  # or statuses at the end would be most of the work
                max_waiting_bytes=2**20,
                runtime=process,
            ),
            forecaster=Steady(1 / world.step_seconds[rank]),
            observer=self.watcher,
            evaluate=loss_of,
            save=self._save if world.checkpoint_seconds < math.inf else None,
            checkpoint=checkpoint,
        )
        if rank == world.liar:
            lie(host, world, self.draw)
        process.run(host)

    def _save(self, checkpoint: dict[str, Any]) -> bool:
        if self.draw.random() < self.world.disk_fails:
            return False
        self.disks[checkpoint["state"].rank] = dismantle(checkpoint)
        return True

    def _disturb(self, each: Disturbance) -> None:
        network, everyone = self.network, range(self.world.num_workers)
        match each.kind:
            case "pause":
                network.pause(each.ranks[0], each.seconds)
            case "cut" | "one way cut":
                a, b = each.ranks
                network.cut(a, b, each.seconds, one_way=each.kind != "cut")
            case "partition":
                for a in each.ranks:
                    for b in everyone:
                        if b not in each.ranks:
                            network.cut(a, b, each.seconds)
            case "kill":
                for rank in each.ranks:
                    self._kill(rank, each)
            case "stop all":
                for process in [*self.processes.values()]:
                    self._stop(process, each)

    def _kill(self, rank: Rank, each: Disturbance) -> None:
        process = self.processes.get(rank)
        if process is None or not process.is_running:
            return
        self.network.kill(rank, machine=self.draw.random() < 0.3)
        if each.seconds < math.inf:
            self._later(each.seconds, rank, each.with_disk)

    def _stop(self, process: Process, each: Disturbance) -> None:
        if not process.is_running:
            return
        process.after(0.0, process.host.stop)
        self.num_due += 1

        def restart() -> None:
            self.num_due -= 1
            if process.reason == "interrupted":
                self._later(0.0, process.rank, each.with_disk)
            elif process.is_running:  # it finishes its step, or is paused
                self.num_due += 1
                self.time.at(self.time.now + 1.0, restart)

        self.time.at(self.time.now + each.seconds, restart)


def lie(host: Host[Any], world: World, draw: random.Random) -> None:
    """Let a host say of itself what is not so."""
    tell = host.peers.status_for

    def told(rank: Rank, phase: Phase, elapsed: Seconds) -> WorkerStatus:
        status = tell(rank, phase, elapsed)
        match world.lie:
            case "elapsed":
                return replace(status, phase=max(phase, Phase.RUNNING), elapsed=1e9)
            case "resumed":
                return replace(status, is_resumed=True)
            case "finished":
                return replace(status, phase=Phase.FINISHED)
            case "waiting":
                return replace(status, phase=Phase.WAITING)
            case "counts":
                sent, received = (
                    tuple(draw.randrange(1000) for _ in status.sent) for _ in range(2)
                )
                return replace(status, sent=sent, received=received)
        return status

    host.peers.status_for = told  # type: ignore[method-assign]


# What must hold.


class ViolationError(AssertionError):
    """Something that must hold in every world does not in this one."""


def check(world: World) -> Run:
    """Run `world` and look at what has come of it; raises a `ViolationError`."""
    run = Run(world)
    has_ended = run.to_the_end()
    honest = {r: p for r, p in run.processes.items() if r != world.liar and p.is_alive}
    for rank, process in honest.items():
        if isinstance(process.reason, BaseException):
            raise ViolationError(f"worker {rank} raised {process.reason!r}") from process.reason
    if not has_ended and any(p.is_running for p in honest.values()):
        rounds = {rank: p.host.state.round for rank, p in honest.items()}
        raise ViolationError(f"hang: rounds {rounds} at {run.time.now:.0f} s")
    for rank, process in honest.items():
        end, total = process.host.state.round, world.algorithm.traits.num_rounds
        if process.reason != "finished" or end != total:
            raise ViolationError(
                f"worker {rank} ended early: {process.reason}, round {end} of {total}"
            )
    if not world.loses:
        require_progress(run)
        require_joining(run)
    require_sums(run)
    require_little_memory(run)
    return run


def check_staged(world: World) -> Run:
    """Run the world of a model in stages.

    Who has data comes to the end, unless it waits for a stage that does not come back; nobody
    keeps more batches than it is to.
    """
    run, stages = Run(world), stages_in(world.algorithm)
    assert stages is not None
    if not run.to_the_end():
        raise ViolationError("it does not come to an end")
    for rank, process in run.processes.items():
        if not process.is_alive:
            continue
        state, total = process.host.state, stages.traits.num_rounds
        if process.reason not in ("finished", "time limit") and not isinstance(
            process.reason, ServerLostError
        ):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
        if process.reason == "finished" and state.inner is not None and state.round != total:
            raise ViolationError(f"worker {rank} ended in round {state.round} of {total}")
        most = stages.max_passed(stages.stage(rank))
        if max(len(state.pending), len(state.answers), len(state.origins) - 1) > most:
            raise ViolationError(f"worker {rank} keeps too much")
    require_little_memory(run)
    return run


def check_server(world: World) -> Run:
    """Run the world of a parameter server; who comes after its end is told so, and only they.

    Barriers hold others up for as long as it takes to notice one that is lost, so nothing is
    said of pauses.
    """
    run = Run(world, Ledger(world.algorithm))
    run.to_the_end()
    server = run.processes[SERVER]
    if server.reason != "finished":
        raise ViolationError(f"the server ended with {server.reason!r}")
    for rank, process in run.processes.items():
        if rank == world.liar or not process.is_alive or process.reason == "finished":
            continue
        if not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    require_commits(run, server.host.state)
    require_little_memory(run)
    return run


def require_progress(run: Run) -> None:
    """Nobody stands still for long because of others."""
    world = run.world
    onsets = [each.at for each in world.disturbances]
    onsets += [each.at + each.seconds for each in world.disturbances if each.seconds < math.inf]
    for rank, moments in run.watcher.moments.items():
        if rank in world.disturbed:
            continue
        for before, after in pairwise(moments):
            noticing = sum(
                NOTICED + 1.0 for at in onsets if before - 2 * NOTICED <= at <= after
            )
            # Its own round, the rest of another's, and one of somebody who came back behind.
            allowed = 3 * world.round_seconds + SLACK + noticing + world.deadline
            if after - before > allowed:
                raise ViolationError(
                    f"worker {rank} stood still from {before:.2f} to {after:.2f} s: "
                    f"{after - before:.2f} s, allowed {allowed:.2f}"
                )


def longest_pause(run: Run, ranks: Sequence[Rank], after: Seconds) -> Seconds:
    """The longest time that one of `ranks` stood still, counted from `after` on."""
    return max(
        max(0.0, end - max(start, after))
        for rank in ranks
        for start, end in pairwise(run.watcher.moments[rank])
    )


def require_joining(run: Run) -> None:
    """Those who come late, or again, train within ten seconds of the last one's start."""
    world = run.world
    last = max(at for at, _ in run.starts)
    hit = [each.at + each.seconds for each in world.disturbances if each.seconds < math.inf]
    begun = max([last, *(at for at in hit)]) + 10.0 + 2 * world.round_seconds
    for at, rank in run.starts:
        process = run.processes[rank]
        if process.started_at != at or not process.is_alive or world.liar is not None:
            continue  # one that rejoins waits for the answers of all, up to a deadline
        moments = [moment for moment in run.watcher.trained_at[rank] if moment > at]
        has_finished = not moments and process.reason == "finished"  # nothing was left
        if not has_finished and (not moments or moments[0] > begun + NOTICED):
            when = f"{moments[0]:.1f} s" if moments else "never"
            raise ViolationError(f"worker {rank} started at {at:.1f} s, went on at {when}")


def require_sums(run: Run) -> None:
    """Weights are conserved where nothing is lost."""
    world = run.world
    if world.loses or world.liar is not None or world.disturbances or any(world.start_at):
        return
    states = [getattr(p.host.state, "inner", p.host.state) for p in run.processes.values()]
    if isinstance(states[0], GoSGDState):
        _require_sum(sum(s.weight for s in states), 1.0)
    elif isinstance(states[0], PushSumState):
        _require_sum(
            sum(s.weight + sum(m.weight for m in s.arrived) for s in states), world.num_workers
        )


def check_standby(world: World) -> Run:
    """Run the world; who is with most comes to the end, with one server that counts all."""
    run = Run(world, Ledger(world.algorithm))
    assert run.ledger is not None
    run.ledger.clock = lambda: run.time.now
    run.to_the_end()
    for rank, process in run.processes.items():
        if rank == world.liar or not process.is_alive or process.reason == "finished":
            continue
        if not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    require_little_memory(run)
    require_succession(run)
    states = [process.host.state for process in run.processes.values() if process.is_alive]
    servers = [state for state in states if state.is_evaluated]
    if servers:
        require_commits(run, max(servers, key=lambda state: state.election.term).server)
    return run


def check_sharing(world: World) -> Run:
    """Run the world; all come to the end, and servers agree on what their slices hold."""
    run = Run(world)
    run.to_the_end()
    servers: Any = range(world.algorithm.num_servers)  # type: ignore[attr-defined]
    for rank, process in run.processes.items():
        if process.is_alive and process.reason != "finished":
            raise ViolationError(f"rank {rank} ended with {process.reason!r}")
    counts = [run.processes[rank].host.state.inner.num_commits for rank in servers]
    if any(each != counts[0] for each in counts):
        raise ViolationError(f"servers count different commits: {counts}")
    require_little_memory(run)
    return run


def require_succession(run: Run) -> None:
    """Where the server alone is killed, there is another soon, with all that was answered."""
    (killed, *others), ledger = run.world.disturbances or (None,), run.ledger
    if killed is None or others or killed.kind != "kill" or killed.ranks != (SERVER,):
        return
    if run.world.liar is not None or any(run.world.start_at) or run.world.loses:
        return
    assert ledger is not None
    for rank, process in run.processes.items():
        if process.is_alive and process.reason != "finished":
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    for term, at in [*ledger.began.items()][1:2]:
        if at > killed.at + NOTICED + 3.0:
            raise ViolationError(f"killed at {killed.at:.2f} s, term {term} from {at:.2f} s")
    if missing := [each for each in ledger.lost if each[2] > 1]:
        raise ViolationError(f"lost (term, worker, commits): {missing}")


def require_commits(run: Run, state: WorkerState) -> None:
    """The server's model has each commit that it counts exactly once, and those it answered."""
    algorithm = run.world.algorithm
    assert isinstance(algorithm, ParameterServer)
    assert isinstance(state, ServerState)
    assert run.ledger is not None
    num_workers = algorithm.num_workers
    # Those who commit behind a barrier share it with all, or with those who are left.
    world = run.world
    is_calm = not (world.disturbances or world.disturbed or world.loses)
    most = 1 / num_workers if is_calm or not isinstance(algorithm, BSP) else 1.0
    for rank in algorithm.workers:
        num_merged, sent = state.num_commits[rank], run.ledger.steps.get(rank, {})
        counted = [sent.get(number, {0}) for number in range(1, num_merged + 1)]
        found = float(state.params[rank])
        low, high = sum(map(min, counted)) / num_workers, most * sum(map(max, counted))
        if isinstance(algorithm, BSP):
            # Whoever is away while a barrier closes comes too late with one commit.
            most_late = run.ledger.num_absences[rank] * max(map(max, counted), default=0)
            low -= most_late / num_workers
        if _may_forget(world):
            low = 0.0  # one that was away goes on numbering where it was
        if not low - 1e-3 <= found <= high + 1e-3:
            raise ViolationError(
                f"the model has {found:g} steps of worker {rank}, not {low:g} to {high:g}: "
                f"{num_merged} commits"
            )
        num_answered = run.ledger.num_answered.get(rank, 0)
        if num_merged < num_answered and not _may_forget(world):
            raise ViolationError(
                f"the server has {num_merged} commits of worker {rank}, and answered "
                f"{num_answered}"
            )


def _may_forget(world: World) -> bool:
    """The server is lost while some workers, who know most, may be away."""
    assert isinstance(world.algorithm, ParameterServer)
    if world.algorithm.standby:  # any may be the server, and be lost
        return bool(world.disturbed - {SERVER} or world.disturbances[1:] or world.loses)
    is_killed = any(SERVER in each.ranks for each in world.disturbances)
    return is_killed and (world.disturbed > {SERVER} or world.loses)


def _require_sum(found: float, expected: float) -> None:
    if abs(found - expected) > 1e-9:
        raise ViolationError(f"weights add up to {found}, not to {expected}")


def require_little_memory(run: Run) -> None:
    """Nothing is kept that nobody needs."""
    for rank, process in run.processes.items():
        held = process.host.post._holding.num_bytes
        if held > 2**20 + run.world.num_workers * 2**16:
            raise ViolationError(f"worker {rank} holds {held} bytes")


def digest(run: Run) -> str:
    """Equal for equal traces only."""
    return hashlib.sha256(repr(run.watcher.trace).encode()).hexdigest()


# Very many worlds.


WORLDS: dict[str, tuple[Callable[[int], World], Callable[[World], Run]]] = {
    "peers": (draw_world, check),
    "servers": (draw_server_world, check_server),
    "standby": (draw_standby_world, check_standby),
    "sharing": (draw_sharing_world, check_sharing),
    "stages": (draw_staged_world, check_staged),
}
"""Who is in a world: how one is drawn, and what must hold in it."""


def try_world(kind: str, seed: int) -> tuple[int, str, Seconds]:
    """Run a world; return its fault, if any, and its wall time."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    draw, check_it = WORLDS[kind]
    began = time.perf_counter()
    try:
        check_it(draw(seed))
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", time.perf_counter() - began
    return seed, "", time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=[*WORLDS], default="peers")
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.worlds)
    began = time.perf_counter()
    with multiprocessing.Pool(options.processes) as pool:
        found = [*pool.imap_unordered(partial(try_world, options.kind), seeds, chunksize=8)]
    seconds = time.perf_counter() - began
    wrong = sorted((seed, what) for seed, what, _ in found if what)
    figures = {
        "worlds": len(found),
        "violations": len(wrong),
        "seconds": seconds,
        "worlds_per_second": len(found) / seconds,
        "median_seconds": statistics.median(each for *_, each in found),
    }
    if options.json:
        print(json.dumps({**figures, "wrong": wrong}))
        return bool(wrong)
    for seed, what in wrong:
        world = WORLDS[options.kind][0](seed)
        print(f"world {seed} ({world.name}, {_in_short(world)}): {what}")
    print(figures)
    return bool(wrong)


def _in_short(world: World) -> str:
    kinds = [each.kind for each in world.disturbances]
    return ", ".join([*kinds, *(["late"] if any(world.start_at) else []), world.lie]).strip(
        ", "
    )


if __name__ == "__main__":
    sys.exit(main())
