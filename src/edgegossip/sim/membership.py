"""Online workers, their reachability, and their beliefs about each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import and_
from typing import TypeAlias

from edgegossip.contract.protocol import (
    Rank,
    Role,
    Seconds,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.sim.agenda import Delivery
from edgegossip.sim.fault import Partition

Notice: TypeAlias = tuple[Rank, WorkerLost | WorkerJoined]
"""A rank, and an event for it."""


@dataclass(slots=True, kw_only=True)
class Membership:
    """The true state of the workers, and their beliefs about it.

    Attributes:
        is_online: Whether each rank is online.
        offline_since: Time at which each offline rank crashed.
        partitions: All partitions of the run, in the order of their starts.
        believed_lost: For each pair (believing worker, worker believed lost), whether the lost
            worker has restarted since.
    """

    is_online: list[bool]
    offline_since: dict[Rank, Seconds] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    believed_lost: dict[tuple[Rank, Rank], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # `_separated_since` joins partitions that follow each other without a gap.
        self.partitions = tuple(sorted(self.partitions, key=lambda partition: partition.start))

    def evaluated(
        self, role_of: Callable[[Rank], Role], states: Sequence[WorkerState]
    ) -> list[Rank]:
        """List the ranks whose parameters count.

        For each role and slice, these are the online ranks whose state says that they count. If
        no state says so, all online ranks count; if no rank is online, all ranks count.
        """
        roles = [role_of(rank) for rank in range(len(states))]
        holds = [(role.name, role.slice_index) for role in roles]
        says_so = [state.is_evaluated for state in states]
        ranks = [rank for rank, role in enumerate(roles) if role.is_evaluated]
        # Each pass narrows the choice only where somebody remains, so that no part of a model
        # is ever without a rank.
        for is_right in (self.is_online, [*map(and_, self.is_online, says_so)]):
            is_there = {holds[rank] for rank in ranks if is_right[rank]}
            ranks = [rank for rank in ranks if is_right[rank] or holds[rank] not in is_there]
        return ranks

    @property
    def has_begun(self) -> bool:
        """Whether any worker is there or has been."""
        return any(self.is_online) or max(self.offline_since.values()) > -math.inf

    def are_separated(
        self, one: Rank, other: Rank, now: Seconds, since: Seconds | None = None
    ) -> bool:
        """Whether a partition has separated two workers at any time from `since` to `now`."""
        since = now if since is None else since
        return any(
            p.start <= now and since < p.end and p.separates(one, other)
            for p in self.partitions
        )

    def loss(self, delivery: Delivery, now: Seconds) -> str | None:
        """Reason why a message cannot be received at `now`; None if it can."""
        one, other = delivery.sender, delivery.receiver
        if delivery.is_cut_off or not self.is_online[other]:
            return "crashed"
        if not self.partitions:
            return None
        # At any moment of its way: a cable that was cut for a moment has lost its bytes.
        is_separated = self.are_separated(one, other, now, since=delivery.start)
        return "partitioned" if is_separated else None

    def absent(self, ranks: Collection[Rank]) -> Iterator[Notice]:
        """Report to all others, before they start, that `ranks` are not there."""
        for rank in sorted(ranks):
            self.is_online[rank] = False
            self.offline_since[rank] = -math.inf
        for one, is_online in enumerate(self.is_online):
            for rank in sorted(ranks) if is_online else ():
                self.believed_lost[one, rank] = False
                yield one, WorkerLost(rank)

    def leave(self, rank: Rank, now: Seconds) -> Iterator[Notice]:
        """Let `rank` leave, and report it to all that it can tell."""
        self.crash(rank, now)
        for one, is_online in enumerate(self.is_online):
            is_known = (one, rank) in self.believed_lost
            if is_online and not is_known and not self.are_separated(one, rank, now):
                self.believed_lost[one, rank] = False
                yield one, WorkerLost(rank)

    def crash(self, rank: Rank, now: Seconds) -> None:
        self.is_online[rank] = False
        self.offline_since[rank] = now
        # Its beliefs are gone with its memory; those of the others about it are not.
        known = self.believed_lost.items()
        self.believed_lost = {pair: back for pair, back in known if pair[0] != rank}

    def recover(self, rank: Rank, now: Seconds) -> Iterator[Notice]:
        """Bring `rank` back: report lost workers to it, and its return to the other workers."""
        self.is_online[rank] = True
        del self.offline_since[rank]
        yield from self.detect(now, of=rank)
        for other, is_online in enumerate(self.is_online):
            if other == rank or not is_online:
                continue
            if (other, rank) not in self.believed_lost:
                # It came back before anyone noticed, but its state is lost all the same.
                yield other, WorkerLost(rank)
            # Kept while a partition is between them: `heal` reports the return later, and that
            # the worker has restarted.
            self.believed_lost[other, rank] = True
            if not self.are_separated(other, rank, now):
                del self.believed_lost[other, rank]
                yield other, WorkerJoined(rank, has_restarted=True)

    def changes(self, now: Seconds, lasting: Seconds) -> Iterator[Notice]:
        """Report newly lost and newly reachable workers to all workers."""
        yield from self.detect(now, lasting)
        yield from self.heal(now)

    def detect(
        self, now: Seconds, lasting: Seconds = 0.0, of: Rank | None = None
    ) -> Iterator[Notice]:
        """Report losses to all workers that do not know of them, or only to worker `of`.

        Only losses that have lasted at least `lasting` seconds are reported.
        """
        everyone = range(len(self.is_online))
        is_divided = any(p.start <= now < p.end for p in self.partitions)
        # Of thousands of workers, few are offline at a time, so only pairs with an offline
        # worker are checked.
        offline = [rank for rank in everyone if not self.is_online[rank]]
        for one in everyone if of is None else [of]:
            if not self.is_online[one]:
                continue
            for other in everyone if is_divided else offline:
                is_lost = other != one and self._is_lost(one, other, now, lasting)
                if is_lost and (one, other) not in self.believed_lost:
                    self.believed_lost[one, other] = False
                    yield one, WorkerLost(other)

    def _is_lost(self, one: Rank, other: Rank, now: Seconds, lasting: Seconds) -> bool:
        since = self.offline_since.get(other, math.inf)
        return min(since, self._separated_since(one, other, now)) + lasting <= now

    def _separated_since(self, one: Rank, other: Rank, now: Seconds) -> Seconds:
        """Time since which two workers have been separated; infinity if they are not."""
        since, until = math.inf, -math.inf
        for p in self.partitions:
            if p.start <= now and p.separates(one, other):
                since = p.start if p.start > until else since
                until = max(until, p.end)
        return since if now < until else math.inf

    def heal(self, now: Seconds) -> Iterator[Notice]:
        """Report workers that are reachable again to the workers that believe them lost."""
        for one, other in list(self.believed_lost):
            can_reach = self.is_online[one] and self.is_online[other]
            if can_reach and not self.are_separated(one, other, now):
                has_restarted = self.believed_lost.pop((one, other))
                yield one, WorkerJoined(other, has_restarted)
