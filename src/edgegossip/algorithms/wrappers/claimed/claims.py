"""Owners of the units of an epoch, by hashing and transfers, and the units that are done."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgegossip.contract import Rank, Seconds
from edgegossip.contract.randomness import generator


def rendezvous(seed: int, epoch: int, num_units: int, weights: Mapping[Rank, float]) -> Tensor:
    r"""Choose each unit's owner by weighted rendezvous hashing, int64 [num_units].

    Worker :math:`i` with weight :math:`w_i` has the score :math:`-w_i / \ln h(u, i)` for unit
    :math:`u`, where the hash :math:`h` is uniform in (0, 1), and the highest score wins. A
    worker so owns units in proportion to its weight, on average. If it goes, only its own units
    move, to the others in proportion to theirs.

    Args:
        seed: Seed of the hash.
        epoch: The epoch; each hashes anew.
        num_units: Number of units.
        weights: Weight of each worker that takes part; those with weight 0 own nothing unless
            all have weight 0.

    >>> both = rendezvous(0, epoch=0, num_units=10, weights={0: 1.0, 1: 2.0, 2: 1.0})
    >>> rest = rendezvous(0, epoch=0, num_units=10, weights={0: 1.0, 1: 2.0})
    >>> bool((both == rest)[both != 2].all())
    True
    """
    ranks = sorted(rank for rank in weights if weights[rank] > 0) or sorted(weights)
    scores = torch.stack(
        [
            (weights[rank] or 1.0)
            / -torch.rand(
                num_units, generator=generator(seed, "claims", epoch, rank), dtype=torch.float64
            ).log()
            for rank in ranks
        ]
    )
    return torch.tensor(ranks)[scores.argmax(0)]


def limited(values: Mapping[Rank, float], max_ratio: float) -> dict[Rank, float]:
    """Limit values to `max_ratio` times their median, so that no worker may claim them all."""
    positive = [value for value in values.values() if value > 0]
    most = max_ratio * statistics.median_high(positive) if positive else 0.0
    return {rank: min(value, most) for rank, value in values.items()}


def receivers(
    rank: Rank, remaining: Mapping[Rank, float], rates: Mapping[Rank, float]
) -> list[Rank]:
    """Find the worker that takes over each unit which `rank` will not finish in time.

    All workers finish at the same time if each has units in proportion to its rate. A worker
    with more gives the surplus to those with less, if they would finish the unit sooner. Every
    worker computes all transfers, and carries out its own.

    Args:
        rank: The worker that may give.
        remaining: Units that each worker still has to do; fractions for units in progress.
        rates: Units per second of each worker, above 0.

    >>> receivers(1, remaining={0: 2.0, 1: 4.0}, rates={0: 2.0, 1: 1.0})
    [0, 0]
    """
    ranks = sorted(rates)
    seconds = sum(remaining[j] for j in ranks) / sum(rates[j] for j in ranks)
    wanted = {j: int(seconds * rates[j]) for j in ranks}
    rest = round(sum(remaining[j] for j in ranks)) - sum(wanted.values())
    heap = [((wanted[j] + 1) / rates[j], j) for j in ranks]
    heapq.heapify(heap)
    for _ in range(rest):  # at most one for each worker
        _, j = heap[0]
        wanted[j] += 1
        heapq.heapreplace(heap, ((wanted[j] + 1) / rates[j], j))
    free = [j for j in ranks for _ in range(round(wanted[j] - remaining[j]))]
    surplus = [j for j in ranks for _ in range(round(remaining[j] - wanted[j]))]
    given: list[Rank] = []
    held = dict(remaining)
    for giver, receiver in zip(surplus, free, strict=False):
        held[receiver] += 1
        if held[receiver] / rates[receiver] < held[giver] / rates[giver]:
            held[giver] -= 1
            given += [receiver] * (giver == rank)
        else:
            held[receiver] -= 1
    return given


def packed(bits: Tensor) -> Tensor:
    """Pack booleans [n] into bytes, uint8 [(n + 7) // 8].

    >>> packed(torch.tensor([True, False, True])).tolist()
    [5]
    """
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def unpacked(data: Tensor, num_bits: int) -> Tensor:
    """Undo `packed`; what is missing is False."""
    bits = np.unpackbits(data.numpy(), count=num_bits, bitorder="little")
    return torch.from_numpy(bits).bool()


@dataclass(slots=True, kw_only=True, eq=False)
class Ledger:
    """One epoch, as one worker knows it.

    Attributes:
        epoch: The epoch.
        done: [num_units] units that this worker has done.
        base: [num_units] owners by agreement, from the weights of all workers; None until this
            worker begins the epoch.
        spare: [num_units] owners among the present workers alone, which take the place of
            absent ones.
        weights: Weight of each worker when this one began the epoch.
        reports: [num_units] of each other worker: the units that it has done.
        merged: [num_units] units that somebody has done, by the word of those that this worker
            has met again.
        given: By giver, its units that another worker does, and that worker.
        gone: Workers, as keys, that have lost what they owned by agreement.
        late: Those of them, as keys, that get no gifts either.
        awaited: Silent workers, as keys, whose units are left to them for some epochs.
        parted: Workers, as keys, that this one could not reach for a time.
        opened_at: When this worker began the epoch.
        is_noted: Whether its units have been counted in the log.
    """

    epoch: int
    done: Tensor
    base: Tensor | None = None
    spare: Tensor | None = None
    weights: dict[Rank, float] = field(default_factory=dict)
    reports: dict[Rank, Tensor] = field(default_factory=dict)
    merged: Tensor
    given: dict[Rank, dict[int, Rank]] = field(default_factory=dict)
    gone: dict[Rank, None] = field(default_factory=dict)
    late: dict[Rank, None] = field(default_factory=dict)
    awaited: dict[Rank, None] = field(default_factory=dict)
    parted: dict[Rank, None] = field(default_factory=dict)
    opened_at: Seconds = 0.0
    is_noted: bool = False

    @classmethod
    def empty(cls, epoch: int, num_units: int) -> Ledger:
        """A ledger in which nothing has happened."""
        nothing = torch.zeros(num_units, dtype=torch.bool)
        return cls(epoch=epoch, done=nothing, merged=nothing)

    @classmethod
    def settled(cls, epoch: int, num_units: int) -> Ledger:
        """A ledger of an epoch that is done."""
        ledger = cls.empty(epoch, num_units)
        ledger.merged = torch.ones(num_units, dtype=torch.bool)
        return ledger

    def owners(self, lost: Collection[Rank]) -> Tensor:
        """The worker that each unit belongs to, int64 [num_units]; `lost` ones own nothing."""
        assert self.base is not None
        assert self.spare is not None
        away = torch.tensor([*lost, *self.gone], dtype=torch.int64)
        owners = torch.where(torch.isin(self.base, away), self.spare, self.base)
        absent = {*lost, *self.late}
        # What a worker gave away before it was lost is in good hands.
        for unit in {unit for units in self.given.values() for unit in units}:
            for first in (int(self.base[unit]), int(owners[unit])):
                here = [j for j in self.given_to(unit, first) if j not in absent]
                if here:
                    owners[unit] = here[-1]
                    break
        return owners

    def given_to(self, unit: int, first: Rank) -> list[Rank]:
        """The workers to which a unit of `first` has been given, one after another.

        Only who has a unit can give it away, and nobody gets back what it has given.
        """
        found: list[Rank] = []
        giver = first
        while (giver := self.given.get(giver, {}).get(unit, first)) not in {first, *found}:
            found.append(giver)
        return found

    def undone(self) -> Tensor:
        """The units that this worker takes for undone, bool [num_units]."""
        known = torch.stack([self.done, self.merged, *self.reports.values()])
        return ~known.any(0)

    def pending(self, awaited: Collection[Rank], away: Collection[Rank]) -> Tensor:
        """The undone units that somebody here has to do, bool [num_units].

        Those of the `awaited` and of `self.awaited` can wait.
        """
        undone = self.undone()
        if (awaited or self.awaited) and undone.any():
            absent = torch.tensor([*awaited, *self.awaited], dtype=torch.int64)
            undone &= ~torch.isin(self.owners(away), absent)
        return undone

    def believe(self, rank: Rank, sender: Rank, done: Tensor, lost: Collection[Rank]) -> int:
        """Add what `sender` says that it has done; count the units that both have done.

        Nobody is believed about the units of this worker, so a liar can only hide its own, and
        those of workers that are lost. While two workers were apart, both claimed the same.
        """
        before = self.reports.get(sender, torch.zeros_like(self.done))
        num_twice = int((done & self.done & ~before).sum())
        if self.base is not None and sender not in self.parted:
            done = done & ((self.owners(lost) != rank) | self.done)
        self.reports[sender] = before | done  # messages may overtake each other
        return num_twice

    def forget_gifts(self, rank: Rank) -> None:
        """Drop the transfers to `rank`, which does not know of them any more.

        What it has given on stays with the worker that it gave it to.
        """
        onward = self.given.get(rank, {})
        for giver, units in self.given.items():
            kept = {u: onward.get(u, j) if j == rank else j for u, j in units.items()}
            self.given[giver] = {u: j for u, j in kept.items() if j not in (rank, giver)}
