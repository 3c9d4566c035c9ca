"""Monitors of simulated platforms, and their forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.protocol import Rank, Seconds, Span
from edgegossip.contract.randomness import generator
from edgegossip.contract.trainer import Trainer
from edgegossip.machine.contention import Contention
from edgegossip.machine.energy import Energy, machine_energy
from edgegossip.machine.goodput import MachineUse, NodeUse, UsefulSamples, node_use
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import MIN_ROWS, Profile
from edgegossip.machine.watch import Predictor, Watch
from edgegossip.sim.platform import Platform
from edgegossip.sim.pool import MakeTrainer

FORECAST_SECONDS: Seconds = 1e-3
"""Time that a forecast takes: reading counters, accounting for measurements, regression."""

MakePredictor = Callable[[Rank], Predictor]
"""Makes the predictor of each incarnation of a worker."""


class SimulatedMonitor(Watch):
    """Watches one platform and forecasts its throughput.

    It reads the platform's counters at every full second; sensitivity and throttling are hidden
    from it.

    Args:
        platform: Watched platform.
        make_predictor: Called for the first forecast.
        start: Start time.
    """

    __slots__ = ()

    def __init__(
        self, platform: Platform, make_predictor: Callable[[], Predictor], start: Seconds = 0.0
    ) -> None:
        super().__init__(platform, _whole_seconds, make_predictor, start)


def _whole_seconds(after: Seconds, until: Seconds) -> range:
    return range(math.floor(after) + 1, math.floor(until) + 1)


def default_predictor(platform: Platform) -> PerformancePredictor:
    """Make a predictor without a profile.

    The predictor forecasts the idle speed first, and later the last measured speed.
    """
    return PerformancePredictor(platform.executors, seconds_alone=1 / platform.throughput)


def profiled(platforms: Sequence[Platform], profiles: Mapping[Rank, Profile]) -> MakePredictor:
    """Make predictors fitted to the workers' profiles; the default if there is no profile."""

    def make(rank: Rank) -> PerformancePredictor:
        if rank not in profiles:
            return default_predictor(platforms[rank])
        return PerformancePredictor(platforms[rank].executors).fit(profiles[rank])

    return make


def profile(
    platform: Platform, num_samples: int = 100, seed: int = 0, noise: float = 0.02
) -> Profile:
    """Profile `platform` as on a real machine: train under random loads, and measure.

    Args:
        platform: Platform to measure; its trace and throttling are ignored.
        num_samples: Number of loads, at least 10; the first is empty.
        seed: Seed of loads and noise.
        noise: Relative standard deviation of the measured times, in [0, 1).

    Raises:
        ValueError: If a number is out of range.

    >>> from edgegossip.sim.platform import Platform
    >>> round(profile(Platform(throughput=100.0), noise=0.0).seconds[0], 6)
    0.01
    """
    if num_samples < MIN_ROWS or not 0 <= noise < 1:
        raise ValueError(
            f"num_samples must be at least {MIN_ROWS} and noise in [0, 1), got {num_samples} "
            f"and {noise}"
        )
    random = generator(seed, "profile")
    contentions, seconds = [], []
    for number in range(num_samples):
        share = torch.rand(3, generator=random)
        # Jobs often do not use one of the three resources, and one load must be empty.
        is_used = (torch.rand(3, generator=random) > 1 / 3) & (number > 0)
        cores, network, disk = (share * is_used).tolist()
        # A saturated gigabit link and hard disk.
        contention = Contention(0.9 * cores, 125e6 * network, 250e6 * disk)
        error = noise * float(torch.randn(1, generator=random))
        slow_down = platform.sensitivity.slow_down(contention)
        contentions.append(contention)
        seconds.append(slow_down * math.exp(error) / platform.throughput)
    return Profile(tuple(contentions), tuple(seconds))


@dataclass(slots=True)
class Usage:
    """Use of one platform's time.

    Attributes:
        busy: Seconds of work, including scheduled work.
        off: Seconds of outages that are over.
        off_since: Start of the present outage; None if the platform is on.
    """

    busy: Seconds = 0.0
    off: Seconds = 0.0
    off_since: Seconds | None = None

    def off_until(self, now: Seconds) -> Seconds:
        """Seconds of all outages up to `now`."""
        return self.off if self.off_since is None else self.off + now - self.off_since


@dataclass(slots=True)
class Work:
    """Work of one platform, in training samples.

    Attributes:
        until: Time up to which `possible` is known.
        possible: Samples that the platform could have processed by then, outages included.
        missed: Those of them that fell into outages that are over.
        worked: Cost of all work, including scheduled work.
        trained: Cost of all training that has ended.
        samples: Samples of this training.
        useful: The useful ones of these samples.
    """

    until: Seconds = 0.0
    possible: float = 0.0
    missed: float = 0.0
    worked: float = 0.0
    trained: float = 0.0
    samples: int = 0
    useful: UsefulSamples = field(default_factory=UsefulSamples)

    def end_training(self, cost: float, num_samples: int) -> None:
        """Count a training that has ended."""
        self.trained += cost
        self.samples += num_samples
        self.useful.train(num_samples)

    def useful_with(self, ongoing: float) -> float:
        """Useful samples, with those of an ongoing training of which `ongoing` is done."""
        # Choosing samples costs something, and only the first of several stages counts samples.
        per_cost = self.samples / self.trained if self.trained else 1.0
        return self.useful.total + per_cost * ongoing


# The trainer and the monitor on each worker's platform; a crash of the worker ends both.


class Machines:
    """The trainer and the monitor of each worker, and the time until its platform is free.

    Args:
        platforms: One for each worker.
        make_trainer: Makes a worker's trainer at its first training.
        make_predictor: Makes a worker's predictor at its first forecast.

    Attributes:
        knows_energy: Whether `energy` covers the whole run.
        knows_use: Whether `use` covers the whole run.
        pays_for_messages: Whether messages take any platform's time.
        work: Work of each platform.
    """

    def __init__(
        self,
        platforms: Sequence[Platform],
        make_trainer: MakeTrainer,
        make_predictor: MakePredictor | None = None,
    ) -> None:
        self._platforms = platforms
        self._make_trainer = make_trainer
        self._make_predictor = make_predictor
        self._incarnations = [0] * len(platforms)
        # By data preparation, training or evaluation.
        self._busy_until: list[Seconds] = [0.0] * len(platforms)
        # What messages have taken since the last training, which the next one pays.
        self._owed: list[Seconds] = [0.0] * len(platforms)
        self.pays_for_messages = any(
            platform.seconds_per_message or platform.seconds_per_byte for platform in platforms
        )
        self._usage = [Usage() for _ in platforms]
        self.knows_energy = self.knows_use = True
        self.work = [Work() for _ in platforms]
        self._trainers: dict[Rank, Trainer] = {}
        self._monitors = [self._new_monitor(rank) for rank in range(len(platforms))]

    def _new_monitor(self, rank: Rank, start: Seconds = 0.0) -> SimulatedMonitor:
        platform = self._platforms[rank]
        make = self._make_predictor
        make_own = partial(default_predictor, platform) if make is None else partial(make, rank)
        return SimulatedMonitor(platform, make_own, start)

    def trainer(self, rank: Rank) -> Trainer:
        # On first use, because a run of thousands of workers may train only some of them.
        trainer = self._trainers.get(rank)
        if trainer is None:
            trainer = self._make_trainer(rank, self._incarnations[rank])
            self._trainers[rank] = trainer
        return trainer

    def monitor(self, rank: Rank) -> SimulatedMonitor:
        return self._monitors[rank]

    def occupy(self, rank: Rank, now: Seconds, cost: float) -> Span:
        """Schedule work of `cost` samples once the platform is free; return start and end."""
        busy_until = self._busy_until[rank]
        # One task at a time, in the order of requests.
        start = now if now > busy_until else busy_until
        end = start + self._platforms[rank].duration(start, cost)
        self._busy_until[rank] = end
        self._usage[rank].busy += end - start
        self.work[rank].worked += cost
        return start, end

    def begin_training(self, rank: Rank, now: Seconds, cost: float) -> Span:
        """Schedule a training of `cost` samples, as `occupy` does.

        It takes also what its platform needs to begin and end it, and the time that messages
        have taken since the last one: a message meets a training whose end is fixed already.
        """
        platform = self._platforms[rank]
        seconds = platform.seconds_per_training + self._owed[rank]
        self._owed[rank] = 0.0
        # In samples, so that contention slows all alike.
        return self.occupy(rank, now, cost + seconds * platform.total_throughput)

    def handle_message(self, rank: Rank, num_bytes: int) -> None:
        """Let a message that is sent or received take its time from the next training."""
        platform = self._platforms[rank]
        self._owed[rank] += platform.seconds_per_message + num_bytes * platform.seconds_per_byte

    def energy(self, now: Seconds) -> Energy:
        """Energy of all platforms up to `now`, which is not before the last event."""
        total = Energy()
        for rank, platform in enumerate(self._platforms):
            usage = self._usage[rank]
            # Work that is scheduled has no gaps, so all that lies ahead lies after `now`.
            ahead = max(0.0, self._busy_until[rank] - now)
            total += machine_energy(
                platform.idle_watts,
                platform.busy_watts,
                on=now - usage.off_until(now),
                busy=usage.busy - ahead,
            )
        return total

    def use(
        self,
        now: Seconds,
        trains: Sequence[bool],
        training: Mapping[Rank, tuple[Seconds, float]],
    ) -> NodeUse:
        """Use of all platforms up to `now`, which is not before the last event.

        Args:
            now: Present time.
            trains: For each platform, whether it has data of its own. Platforms without data
                count as training once they have trained.
            training: Start and cost of the training in progress, by rank.
        """
        return node_use(
            self._use_of(rank, now, training.get(rank))
            if trains[rank] or self.work[rank].trained
            else MachineUse(on=now - self._usage[rank].off_until(now))
            for rank in range(len(self._platforms))
        )

    def _use_of(
        self, rank: Rank, now: Seconds, training: tuple[Seconds, float] | None
    ) -> MachineUse:
        platform, usage, work = self._platforms[rank], self._usage[rank], self.work[rank]
        # Piece by piece, because a trace of loads may have thousands of steps.
        work.possible += platform.work(work.until, now)
        work.until = now
        outage = 0.0 if usage.off_since is None else platform.work(usage.off_since, now)
        began, cost = training or (now, 0.0)
        return MachineUse(
            on=now - usage.off_until(now),
            possible=work.possible,
            available=work.possible - work.missed - outage,
            worked=work.worked - platform.work(now, self._busy_until[rank]),
            useful=work.useful_with(min(cost, platform.work(began, now))),
        )

    def stop(self, rank: Rank, now: Seconds) -> None:
        """Drop the trainer and the monitor after a crash at `now`; the platform is off."""
        usage, work = self._usage[rank], self.work[rank]
        work.worked -= self._platforms[rank].work(now, self._busy_until[rank])
        work.useful.crash(now)
        usage.busy -= max(0.0, self._busy_until[rank] - now)
        usage.off_since = now
        # A crashed worker loses its optimizer, its random streams and its measurements. The
        # next incarnation draws from streams of its own, or it would repeat the same batches.
        self._trainers.pop(rank, None)
        self._busy_until[rank] = self._owed[rank] = 0.0
        self._incarnations[rank] += 1
        self._monitors[rank] = self._new_monitor(rank)

    def absent(self, rank: Rank) -> None:
        """Count a platform that is not there from the start as off."""
        self._usage[rank].off_since = 0.0

    def restart(self, rank: Rank, now: Seconds) -> None:
        """Watch a new or recovered platform, which is on again from `now` on."""
        usage = self._usage[rank]
        if usage.off_since is not None:
            self.work[rank].missed += self._platforms[rank].work(usage.off_since, now)
        usage.off, usage.off_since = usage.off_until(now), None
        self._monitors[rank] = self._new_monitor(rank, now)

    def state_dict(self) -> dict[str, Any]:
        """All mutable state of these machines."""
        return {
            "incarnations": list(self._incarnations),
            "busy_until": list(self._busy_until),
            "owed": list(self._owed),
            "usage": [replace(each) for each in self._usage],
            "work": [replace(each, useful=each.useful.copy()) for each in self.work],
            "trainers": {rank: each.state_dict() for rank, each in self._trainers.items()},
            "monitors": [monitor.state_dict() for monitor in self._monitors],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of equal machines."""
        self._incarnations = list(state["incarnations"])
        self._busy_until = list(state["busy_until"])
        # Absent from checkpoints of versions in which messages took no time of a platform.
        self._owed = list(state.get("owed", self._owed))
        # Absent from checkpoints of versions without energy, whose runs go on without it.
        self.knows_energy = "usage" in state
        if self.knows_energy:
            self._usage = list(state["usage"])
        self.knows_use = "work" in state
        if self.knows_use:
            self.work = list(state["work"])
        self._trainers = {}
        # Only trainers that were in use; the others are made when they are needed.
        for rank, trainer_state in state["trainers"].items():
            self.trainer(rank).load_state_dict(trainer_state)
        for monitor, monitor_state in zip(self._monitors, state["monitors"], strict=True):
            monitor.load_state_dict(monitor_state)


# Evaluations that workers request.


class Evaluates(Protocol):
    """Measures parameters on a worker's validation data."""

    @property
    def cost(self) -> float:
        """Cost of an evaluation for the platform, in training samples."""

    def evaluate(self, params: Tensor) -> tuple[float, Mapping[str, float]]:
        """Mean loss, and metrics by name."""


MakeEvaluator: TypeAlias = Callable[[Rank], Evaluates | None]
"""Finds the evaluator that answers a worker's `Evaluate`; None if there is none."""


@dataclass(frozen=True, slots=True)
class FunctionEvaluator:
    """An evaluator that calls a function.

    Args:
        measure: Returns the loss and metrics of parameters.
        cost: As in `Evaluates`.
    """

    measure: Callable[[Tensor], tuple[float, Mapping[str, float]]]
    cost: float

    def evaluate(self, params: Tensor) -> tuple[float, Mapping[str, float]]:
        return self.measure(params)


def nothing(rank: Rank) -> None:
    """Find no evaluator."""


def same_for_all(
    evaluate: Callable[[Tensor], tuple[float, Mapping[str, float]]] | None, cost: float
) -> MakeEvaluator:
    """Let one function answer all workers."""
    if evaluate is None:
        return nothing
    evaluator = FunctionEvaluator(evaluate, cost)
    return lambda rank: evaluator
