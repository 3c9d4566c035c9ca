"""Faults of a run, as a script: who comes and goes, partitions, lost, late, false messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.randomness import uniform
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.sim.attack import Attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """Worker `rank` stops at time `at` and forgets everything.

    Its current training is lost, and so are messages that have not completely left its uplink,
    and messages that reach it while it is down.
    """

    at: Seconds
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Worker `rank` restarts at time `at`, with only the initial parameters.

    The worker starts again from `init`, with a new optimizer and new random streams. Its event
    is ``Started(has_rejoined=True)``, and the algorithm decides how to react.
    """

    at: Seconds
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Worker `rank` is not there from the start, and appears at time `at` for the first time.

    Until then nobody waits for it: the others learn before their start that it is lost. It
    joins like a worker that recovers, with ``Started(has_rejoined=True)``; the first of all
    begins the run. At infinity, it never comes.
    """

    at: Seconds
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Worker `rank` leaves at time `at`, or at the end of its training; it may `Recover`.

    Unlike a crash, the others know at once, and what it has sent arrives.
    """

    at: Seconds
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """From `start` to `end`, nothing passes between the workers in `group` and all others.

    A message is lost if the partition separates its sender and receiver at any moment between
    the start of its transmission and its arrival.
    """

    start: Seconds
    end: Seconds
    group: tuple[Rank, ...]

    def separates(self, one: Rank, other: Rank) -> bool:
        return (one in self.group) != (other in self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Each message sent between `start` and `end` is lost with `probability`, in [0, 1].

    `sender` and `receiver` limit the fault to messages from or to one worker.
    """

    probability: float
    start: Seconds = 0.0
    end: Seconds = math.inf
    sender: Rank | None = None
    receiver: Rank | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Messages sent between `start` and `end` take up to `seconds` longer, drawn uniformly.

    `sender` and `receiver` limit the fault as in `Drop`.
    """

    seconds: Seconds
    start: Seconds = 0.0
    end: Seconds = math.inf
    sender: Rank | None = None
    receiver: Rank | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """From `start` to `end`, what worker `rank` sends passes through `attack`.

    The worker trains and mixes like an honest one; only its messages are false. Several faults
    for one worker apply in turn. Averaged models and their evaluation leave poisoned workers
    out, from the beginning.
    """

    rank: Rank
    attack: Attack
    start: Seconds = 0.0
    end: Seconds = math.inf

    def applies(self, now: Seconds) -> bool:
        """Whether messages sent at `now` are false."""
        return self.start <= now < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipLabels:
    """Worker `rank` trains on false labels: the last class for the first one, and so on.

    Averaged models leave it out, as with `Poison`.
    """

    rank: Rank


@dataclass(slots=True)
class Detection:
    """The time at which workers notice losses or the end of a partition."""


Fault: TypeAlias = (
    Crash | Recover | Arrival | Leave | Partition | Drop | Delay | Poison | FlipLabels
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The script of a run's faults.

    Args:
        script: Faults, in any order.
        detection_time: Seconds until other workers learn that a worker is lost.
        seed: Seed for drops and delays.

    Raises:
        ValueError: If a time or probability is out of range.
    """

    script: tuple[Fault, ...] = ()
    detection_time: Seconds = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, detection_time="in [0, inf)")
        for fault in self.script:
            _check(fault)

    def schedule(
        self,
    ) -> Iterator[tuple[Seconds, Rank, Crash | Recover | Arrival | Leave | Detection]]:
        """Time, rank (-1 for all ranks) and event of each scheduled fault."""
        for fault in self.script:
            match fault:
                # Drops, delays and poison have no event: each message looks for those that
                # apply to it.
                case Crash() | Recover() | Leave():
                    yield fault.at, fault.rank, fault
                case Arrival() if fault.at < math.inf:
                    yield fault.at, fault.rank, fault
                case Partition():
                    # Messages are lost from the start on, but workers notice it later. They
                    # notice the end at once.
                    yield fault.start + self.detection_time, -1, Detection()
                    if fault.end < math.inf:
                        yield fault.end, -1, Detection()

    @property
    def drops(self) -> tuple[Drop, ...]:
        return tuple(fault for fault in self.script if isinstance(fault, Drop))

    @property
    def delays(self) -> tuple[Delay, ...]:
        return tuple(fault for fault in self.script if isinstance(fault, Delay))

    @property
    def absent(self) -> set[Rank]:
        """Workers that are not there from the start."""
        return {fault.rank for fault in self.script if isinstance(fault, Arrival)}

    @property
    def poisons(self) -> tuple[Poison, ...]:
        return tuple(fault for fault in self.script if isinstance(fault, Poison))

    @property
    def flipped(self) -> set[Rank]:
        """Workers that train on false labels."""
        return {fault.rank for fault in self.script if isinstance(fault, FlipLabels)}

    @property
    def liars(self) -> set[Rank]:
        """Poisoned workers, which count in no averaged model."""
        return self.flipped | {fault.rank for fault in self.poisons}

    @property
    def ranks(self) -> set[Rank]:
        """All workers that the script names."""
        named: set[Rank | None] = set()
        for fault in self.script:
            match fault:
                case Crash() | Recover() | Arrival() | Leave() | Poison() | FlipLabels():
                    named.add(fault.rank)
                case Partition():
                    named.update(fault.group)
                case Drop() | Delay():
                    named.update((fault.sender, fault.receiver))
        return {rank for rank in named if rank is not None}

    @classmethod
    def random(
        cls,
        *,
        num_workers: int,
        horizon: Seconds,
        seed: int,
        num_crashes: int = 1,
        drop_probability: float = 0.0,
        detection_time: Seconds = 1.0,
    ) -> Faults:
        """Make crashes at random times before `horizon`, with recovery within `horizon / 2`.

        >>> faults = Faults.random(num_workers=4, horizon=10.0, seed=0, num_crashes=2)
        >>> [type(fault).__name__ for fault in faults.script]
        ['Crash', 'Recover', 'Crash', 'Recover']
        """
        script: list[Fault] = []
        # Each crash has its own draws, so that more crashes leave the first ones as they were.
        for k in range(num_crashes):
            rank = int(uniform(seed, "crash", k, "rank") * num_workers)
            at = uniform(seed, "crash", k, "at") * horizon
            downtime = uniform(seed, "crash", k, "downtime") * horizon / 2
            script += [Crash(at=at, rank=rank), Recover(at=at + downtime, rank=rank)]
        if drop_probability > 0:
            script.append(Drop(probability=drop_probability))
        return cls(script=tuple(script), detection_time=detection_time, seed=seed)

    @classmethod
    def churn(
        cls,
        *,
        num_workers: int,
        horizon: Seconds,
        mean_up: Seconds,
        mean_down: Seconds,
        seed: int = 0,
        detection_time: Seconds = 1.0,
    ) -> Faults:
        """Let each worker fail after exponential times, and return after exponential times.

        Each draw is keyed by worker and failure, so more workers or a later horizon leave the
        other failures as they were.

        Args:
            num_workers: Number of workers.
            horizon: Time after which no worker fails.
            mean_up: Mean seconds from a start or return to the next failure, above 0.
            mean_down: Mean seconds from a failure to the return, above 0.
            seed: Seed of the draws.
            detection_time: As in `Faults`.

        Raises:
            ValueError: If a time is out of range.

        >>> faults = Faults.churn(num_workers=100, horizon=10.0, mean_up=5.0, mean_down=0.1)
        >>> 150 < sum(isinstance(fault, Crash) for fault in faults.script) < 250
        True
        """
        check_range("mean_up", mean_up, "above 0 and finite")
        check_range("mean_down", mean_down, "above 0 and finite")
        script: list[Fault] = []
        for rank in range(num_workers):
            back = 0.0
            for k in itertools.count():
                at = back - mean_up * math.log1p(-uniform(seed, "churn", rank, k, "up"))
                if at >= horizon:
                    break
                back = at - mean_down * math.log1p(-uniform(seed, "churn", rank, k, "down"))
                script += [Crash(at=at, rank=rank), Recover(at=back, rank=rank)]
        return cls(script=tuple(script), detection_time=detection_time, seed=seed)

    @classmethod
    def available(
        cls,
        spans: Sequence[Sequence[tuple[Seconds, Seconds]]],
        *,
        detection_time: Seconds = 1.0,
        seed: int = 0,
    ) -> Faults:
        """Make workers come and go as machines do that their owner takes back without notice.

        Args:
            spans: For each worker, the beginning and end of each time for which it is there,
                ascending; see `sim.traces.availability`. An end may be infinite.
            detection_time: As in `Faults`.
            seed: As in `Faults`.

        Raises:
            ValueError: If spans overlap, or a time is out of range.

        >>> Faults.available([[(0.0, 5.0)], [(2.0, 4.0), (6.0, math.inf)]]).script[1:3]
        (Arrival(at=2.0, rank=1), Crash(at=4.0, rank=1))
        """
        script: list[Fault] = []
        for rank, each in enumerate(spans):
            if not each:
                script.append(Arrival(at=math.inf, rank=rank))
            past = 0.0
            for number, (begin, end) in enumerate(each):
                if not past <= begin < end:
                    raise ValueError(
                        f"spans of worker {rank} must be ascending and apart, got {[*each]}"
                    )
                if number > 0:
                    script.append(Recover(at=begin, rank=rank))
                elif begin > 0:
                    script.append(Arrival(at=begin, rank=rank))
                if end < math.inf:
                    script.append(Crash(at=end, rank=rank))
                past = end
        return cls(script=tuple(script), detection_time=detection_time, seed=seed)


def _check(fault: Fault) -> None:
    match fault:
        case Crash() | Recover() | Leave() if not 0 <= fault.at < math.inf:
            raise ValueError(f"{fault} must be at a time >= 0")
        case Arrival() if not fault.at > 0:
            raise ValueError(
                f"{fault} must be at a time above 0; a worker that is there from the start "
                "needs no arrival"
            )
        case Partition() | Drop() | Delay() | Poison() if not (
            0 <= fault.start <= fault.end and fault.start < math.inf
        ):
            raise ValueError(f"{fault} must start at a time >= 0, and end after that")
        case Drop():
            check_range("drop probability", fault.probability, "in [0, 1]")
        case Delay():
            check_range("delay", fault.seconds, "in [0, inf) seconds")


def applies(fault: Drop | Delay, now: Seconds, sender: Rank, receiver: Rank) -> bool:
    """Whether `fault` applies to a message sent at `now`."""
    return (
        fault.start <= now < fault.end
        and fault.sender in (None, sender)
        and fault.receiver in (None, receiver)
    )
