"""Worlds of real hosts as they go on: their training, their processes, and who watches."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tests.host_oracles import Oracles
from tests.host_worlds import SIZE, Disturbance, World
from tests.host_wrappers import Furthest, Ledger
from tests.observers import Silent
from tests.parity import Steady
from tests.virtual_network import VirtualNetwork, VirtualTransport
from tests.virtual_process import Process
from tests.virtual_time import VirtualTime
from tests.worlds import NUM_PARAMS, ManySamples, StageTrainer, loss_of, stages_in

from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Message, Rank, Seconds, Train, Trained
from edgegossip.contract.snapshot import Json, assemble, dismantle
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices, HostSettings
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.runs.final_average import FinalAverage, ending_seconds

LEASE: Seconds = 1.5
HORIZON: Seconds = 3600.0
LR = 0.1
FUTURE = 10**6
"""A round that no world has."""


class Timed(ManySamples):
    """Training that takes virtual time, and longer while its machine is busy otherwise."""

    def __init__(self, run: Run, rank: Rank, step_seconds: Seconds, offset: float) -> None:
        super().__init__(rank, LR, SIZE, offset)
        self._rank = rank
        self._run, self._step_seconds = run, step_seconds

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        busy_seconds = max(0.0, self._run.busy_until[self._rank] - self._run.time.now)
        self._run.time.sleep(busy_seconds + self.cost(request) * self._step_seconds)
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


class Watcher(Silent):
    """Notes when each worker has trained or come to its end."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.trace: list[tuple[Any, ...]] = []
        self.moments: dict[Rank, list[Seconds]] = defaultdict(list)
        self.trained_at: dict[Rank, list[Seconds]] = defaultdict(list)
        self.finished_at: dict[Rank, Seconds] = {}
        self.at_end: list[Callable[[Rank], None]] = []

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self._note(rank, "trained", float(event.params.double().sum()))
        self.trained_at[rank].append(self._time.now)

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        self.trace.append((self._time.now, rank, "received", sender, staleness))

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self._note(rank, what)
        if what == "finished":
            self.finished_at[rank] = self._time.now
            for action in self.at_end:
                action(rank)

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
    gone: set[Rank] = field(default_factory=set)
    full_disks: set[Rank] = field(default_factory=set)
    busy_until: dict[Rank, Seconds] = field(default_factory=lambda: defaultdict(float))
    num_due: int = 0  # processes that are still to be started

    def __post_init__(self) -> None:
        world = self.world
        self.time = VirtualTime()
        self.draw = random.Random(f"{world.seed} network")
        self.network = VirtualNetwork(self.time, self.draw, world.wire, LEASE)
        self.watcher = Watcher(self.time)
        self.transports: dict[Rank, VirtualTransport] = {}
        self.oracles = Oracles(self)
        for rank, at in enumerate(world.start_at):
            self.start_later(at, rank)
        for each in world.disturbances:
            self.time.at(each.at, partial(self._disturb, each))

    def to_the_end(self) -> bool:
        """Run; says whether everybody came to an end."""
        return self.time.run(
            2 * HORIZON,
            lambda: not self.num_due and not self.network.num_running,
        )

    def start_later(self, seconds: Seconds, rank: Rank, with_disk: bool = False) -> None:
        """Start a process of `rank` after so many seconds."""
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
            trainer = make_trainer(self, rank, step_seconds, world.offset + world.rise)
        if rank == world.liar and world.lie == "furthest":
            algorithm = Furthest(algorithm)
        algorithm = self.oracles.around(process, algorithm)
        self.transports[rank] = transport = self.network.transport(process)
        max_seconds, ending = limits(world.algorithm)
        late_meet_seconds = world.late_meet_seconds if self.time.now > 0 else 0.0
        host = Host(
            algorithm,
            rank,
            world.num_workers,
            torch.full((NUM_PARAMS,), world.offset),
            trainer,
            transport,
            settings=HostSettings(
                run=b"virtual!",
                meet_seconds=late_meet_seconds or world.meet_seconds,
                is_open=world.is_open,
                max_seconds=max_seconds,
                ending_seconds=ending,
                checkpoint_seconds=min(world.checkpoint_seconds, 1e6),
                quiet_seconds=0.25,  # or statuses at the end would be most of the work
                max_waiting_bytes=2**20,
                max_log_bytes=world.log_bytes,
                runtime=process,
            ),
            services=HostServices(
                forecaster=Steady(1 / world.step_seconds[rank]),
                observer=self.watcher,
                evaluate=loss_of,
                save=self._save if world.checkpoint_seconds < math.inf else None,
            ),
            checkpoint=checkpoint,
        )
        if rank == world.liar:
            lie(host, world, self.draw)
        self.oracles.watch(process, host, checkpoint)
        process.run(host)

    def _save(self, checkpoint: dict[str, Any]) -> bool:
        rank = checkpoint["state"].rank
        if self.draw.random() < self.world.disk_fails or rank in self.full_disks:
            return False
        self.disks[rank] = dismantle(checkpoint)
        self.oracles.saved(rank)
        return True

    def _disturb(self, each: Disturbance) -> None:
        network, everyone = self.network, range(self.world.num_workers)
        match each.kind:
            case "pause":
                network.pause(each.ranks[0], each.seconds)
            case "cut" | "one way cut":
                a, b = each.ranks
                network.cut(a, b, each.seconds, one_way=each.kind != "cut")
            case "full":
                self._fill(each)
            case "unheard end":
                self.watcher.at_end.append(partial(self._fill_at_end, each.seconds))
            case "full disk":
                self.full_disks.update(each.ranks)
            case "stall":
                self.busy_until[each.ranks[0]] = each.at + each.seconds
            case "interruption":
                network.interrupt(*each.ranks)
            case "partition":
                for a in each.ranks:
                    for b in everyone:
                        if b not in each.ranks:
                            network.cut(a, b, each.seconds)
            case "kill":
                for rank in each.ranks:
                    self._kill(rank, each)
            case "leave" | "stop":
                if (process := self.processes.get(each.ranks[0])) is not None:
                    self._stop(process, each)
            case "stop all":
                for process in [*self.processes.values()]:
                    self._stop(process, each)

    def _fill(self, each: Disturbance) -> None:
        """Let a worker have no memory for what arrives."""
        [rank] = each.ranks
        process = self.processes.get(rank)
        if process is None or self.time.now < self.busy_until[rank]:
            return
        budget = process.host.receiving.budget
        share, budget.share = budget.share, -1
        most, budget.max_bytes = budget.max_bytes, -1
        self.busy_until[rank] = each.at + each.seconds

        def has_room() -> None:
            budget.share, budget.max_bytes = share, most

        self.time.at(each.at + each.seconds, has_room)

    def _fill_at_end(self, seconds: Seconds, rank: Rank) -> None:
        self._fill(Disturbance(kind="full", at=self.time.now, ranks=(rank,), seconds=seconds))

    def _kill(self, rank: Rank, each: Disturbance) -> None:
        process = self.processes.get(rank)
        if process is None or not process.is_running:
            return
        self.network.kill(rank, machine=self.draw.random() < 0.3)
        if each.seconds < math.inf:
            self.start_later(each.seconds, rank, each.with_disk)

    def _stop(self, process: Process, each: Disturbance) -> None:
        if not process.is_running:
            return
        process.after(0.0, process.host.leave if each.kind == "leave" else process.host.stop)
        if each.seconds == math.inf:
            self.gone.add(process.rank)
            return
        self.num_due += 1

        def restart() -> None:
            self.num_due -= 1
            if process.reason == "interrupted":
                self.start_later(0.0, process.rank, each.with_disk)
            elif process.is_running:  # it finishes its step, or is paused
                self.num_due += 1
                self.time.at(self.time.now + 1.0, restart)

        self.time.at(self.time.now + each.seconds, restart)


def limits(algorithm: Algorithm[Any]) -> tuple[Seconds, Seconds]:
    """The time limit of a world, and the seconds after it for the final models."""
    if not isinstance(algorithm, FinalAverage) or algorithm.ends_at == math.inf:
        return HORIZON, 0.0
    return algorithm.ends_at, ending_seconds(algorithm.ends_at)


def lie(host: Host[Any], world: World, draw: random.Random) -> None:
    """Let a host say of itself what is not so, or send what no honest one does."""
    tell = host.peers.status_for

    def told(rank: Rank, phase: Phase, elapsed: Seconds, num_waiting: int = 0) -> WorkerStatus:
        status = tell(rank, phase, elapsed, num_waiting)
        match world.lie:
            case "elapsed":
                return replace(status, phase=max(phase, Phase.RUNNING), elapsed=1e9)
            case "older":  # but not too old to be true
                return replace(status, phase=max(phase, Phase.RUNNING), elapsed=elapsed + 600)
            case "resumed":
                return replace(status, is_resumed=True)
            case "finished":
                return replace(status, phase=Phase.FINISHED)
            # At its end it would answer each answer to its lie, without an end.
            case "waiting" if phase < Phase.FINISHED:
                return replace(status, phase=Phase.WAITING)
            case "counts":
                sent, received = (
                    tuple(draw.randrange(1000) for _ in status.sent) for _ in range(2)
                )
                return replace(status, left=draw.choice(sent), sent=sent, received=received)
        return status

    pack = host.sending._frame

    def packed(rank: Rank, message: Message, number: int) -> list[Buffer]:
        if number and world.lie == "future":
            message = replace(message, round=FUTURE)
        elif number and world.lie == "not finite":
            message = replace(
                message,
                payload={
                    name: x * math.nan if x.is_floating_point() else x
                    for name, x in message.payload.items()
                },
            )
        return pack(rank, message, number)

    host.peers.status_for = told  # type: ignore[method-assign]
    host.sending._frame = packed  # type: ignore[method-assign,assignment]
