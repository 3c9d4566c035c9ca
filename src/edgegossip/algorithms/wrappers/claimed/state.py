"""State of a worker that claims its work, and what it sends to the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from edgegossip.algorithms.wrappers.claimed.claims import (
    Ledger,
    limited,
    packed,
    rendezvous,
    unpacked,
)
from edgegossip.algorithms.wrappers.pieces import Pieces
from edgegossip.contract import (
    Message,
    Rank,
    Seconds,
    WrapperState,
)

PATIENCE = 2
"""Epochs for which the units of a worker that cannot be reached are left to it."""
MOST_LEDGERS = PATIENCE + 6  # a worker is seldom further from another than an epoch


@dataclass(slots=True)
class Weight:
    """A worker's weight in the division of an epoch, which all must know before they begin it.

    Attributes:
        now: Weight before the epoch `since`.
        next: Weight from that epoch on.
        since: An epoch that no worker had begun when this was announced.
    """

    now: float = 0.0
    next: float = 0.0
    since: int = 0

    def at(self, epoch: int) -> float:
        """The weight in an epoch."""
        return self.next if epoch >= self.since else self.now


@dataclass(slots=True, kw_only=True)
class ClaimedState(WrapperState):
    """State of one worker.

    Attributes:
        num_units: Units in an epoch; 0 if the data is not shared.
        unit_cost: Mean cost of a unit, in training samples.
        epoch: The epoch that this worker is in.
        first: The first epoch that may have undone units.
        ledgers: Claims of this epoch and those close to it, by epoch.
        weight: This worker's weight.
        weights: Weights of the others, as announced.
        rates: Last forecast of each worker, in training samples per second; 0 for one that has
            finished.
        heard_at: Time of the last report of each worker.
        epochs: Epoch of the last report of each worker.
        lost: Workers that cannot be reached, and the epoch in which they were lost.
        given_up: Those of them, as keys, whose units others claim.
        progress: The training under way; None if the inner algorithm has requested none.
        held: Epoch and units that are being trained on.
        unit_steps: Steps in a unit, as last measured; 0 before.
        is_predicting: Whether a forecast has been requested.
        is_new: Whether the others' weights are still awaited.
        has_rejoined: Whether the worker came back without its state.
        is_waiting: Whether it waits for the others, until a timer fires.
        asked_at: When it asked the others, while it waits, what they have done; None if it has
            not.
        num_twice: Units of the others that this worker has done, too.
    """

    num_units: int = 0
    unit_cost: float = 0.0
    epoch: int = 0
    first: int = 0
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    weight: Weight = field(default_factory=Weight)
    weights: dict[Rank, Weight] = field(default_factory=dict)
    rates: dict[Rank, float] = field(default_factory=dict)
    heard_at: dict[Rank, Seconds] = field(default_factory=dict)
    epochs: dict[Rank, int] = field(default_factory=dict)
    lost: dict[Rank, int] = field(default_factory=dict)
    given_up: dict[Rank, None] = field(default_factory=dict)
    progress: Pieces | None = None
    held: tuple[int, tuple[int, ...]] | None = None
    unit_steps: float = 0.0
    is_predicting: bool = False
    is_new: bool = True
    has_rejoined: bool = False
    is_waiting: bool = False
    asked_at: Seconds | None = None
    num_twice: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether the worker trains or awaits a forecast."""
        return self.held is not None or self.is_predicting

    @property
    def away(self) -> set[Rank]:
        """Workers that will do nothing: those given up, and those that have finished."""
        finished = (j for j, rate in self.rates.items() if not rate)
        return {*self.given_up, *finished} - {self.rank}

    @property
    def awaited(self) -> set[Rank]:
        """Lost workers that may go on with their units out of reach."""
        return self.lost.keys() - self.away

    def ledger(self, epoch: int) -> Ledger:
        """The ledger of an epoch, made on demand."""
        if epoch < self.first:
            return Ledger.settled(epoch, self.num_units)
        if epoch not in self.ledgers:
            self.ledgers[epoch] = Ledger.empty(epoch, self.num_units)
            if len(self.ledgers) > MOST_LEDGERS:  # the one that matters least
                del self.ledgers[max(self.ledgers, key=lambda e: (abs(e - self.epoch), -e))]
        return self.ledgers.get(epoch) or Ledger.empty(epoch, self.num_units)

    def forget_unknown(self) -> None:
        """Take for done what comes before the first epoch of which anybody has told."""
        told = [e for e, ledger in self.ledgers.items() if not ledger.undone().all()]
        self.first = min([*told, self.epoch])
        self.ledgers = {e: each for e, each in self.ledgers.items() if e >= self.first}

    def open(self, epoch: int, seed: int, max_ratio: float, now: Seconds) -> Ledger:
        """Begin an epoch, unless it has begun: divide it by the weights that all know."""
        ledger = self.ledger(epoch)
        if ledger.base is None:
            ledger.weights = self.weights_at(epoch, max_ratio)
            ledger.base = rendezvous(seed, epoch, self.num_units, ledger.weights)
            ledger.opened_at = now
            self.divide_again(ledger, seed)
            # Only now is it known which units are this worker's own.
            others = ledger.owners(self.away) != self.rank
            ledger.reports = {j: each & others for j, each in ledger.reports.items()}
        return ledger

    def divide_again(self, ledger: Ledger, seed: int) -> None:
        """Divide the units of absent workers among the present ones."""
        for giver in ledger.gone.keys() & ledger.given.keys():
            # Newcomers do not know of these gifts, and would count on somebody else.
            kept = {u: j for u, j in ledger.given[giver].items() if j not in self.lost}
            ledger.given[giver] = kept
        absent = {*self.away, *ledger.gone}
        present = {j: w for j, w in ledger.weights.items() if w > 0 and j not in absent}
        if not present:
            # Only newcomers are left, of which each has other weights for this epoch.
            here = {*ledger.weights, self.rank} - self.away - self.lost.keys()
            here -= ledger.late.keys()  # they had their chance
            present = dict.fromkeys(sorted(here), 1.0)
        ledger.spare = rendezvous(seed, ledger.epoch, self.num_units, present)

    def weights_at(self, epoch: int, max_ratio: float) -> dict[Rank, float]:
        """Weight of each worker that has announced one, in an epoch."""
        announced = {**self.weights, self.rank: self.weight}
        return limited({j: each.at(epoch) for j, each in announced.items()}, max_ratio)

    def limited_rates(self, ranks: Iterable[Rank], max_ratio: float) -> dict[Rank, float]:
        """Rates of these workers, limited as weights are."""
        return limited({j: self.rates[j] for j in ranks}, max_ratio)

    def announce_weight(self, throughput: float) -> None:
        """Let the weight follow the forecast, from an epoch on that nobody has begun."""
        weight = self.weight
        if self.is_new:
            # The others do not count on one that has come back until it has said so.
            self.weight = Weight() if self.has_rejoined else Weight(throughput, throughput)
        elif self.epoch >= weight.since:
            first = not weight.next
            if first or abs(throughput - weight.next) > 0.1 * weight.next:
                newest = max([self.epoch, *self.ledgers])
                self.weight = Weight(weight.next, throughput, newest + 2)

    def report(
        self, ledger: Ledger, *, with_others: bool = False, asks: bool = False
    ) -> Message:
        """Tell what this worker has done of an epoch, its transfers, weight and forecast."""
        payload = {"done": packed(ledger.done)}
        if mine := ledger.given.get(self.rank):
            payload["given"] = torch.tensor([[*mine.keys()], [*mine.values()]])
        if with_others:
            known = [ledger.done, ledger.merged, *ledger.reports.values()]
            payload["merged"] = packed(torch.stack(known).any(0))
        numbers = {
            "throughput": self.rates.get(self.rank, 0.0),
            "own_weight": self.weight.now,
            "next_weight": self.weight.next,
            "since": self.weight.since,
        }
        numbers |= {"asks": 1} if asks else {}
        older = [e for e in self.ledgers if e < ledger.epoch and self.ledgers[e].undone().any()]
        numbers |= {"first": min(older)} if older else {}
        return Message("claims", ledger.epoch, payload, numbers)

    def hear(
        self, sender: Rank, message: Message, ranks: Collection[Rank], now: Seconds
    ) -> None:
        """Read a worker's report."""
        numbers, payload = message.numbers, message.payload
        self.rates[sender], self.heard_at[sender] = numbers["throughput"], now
        since = int(numbers["since"])
        self.weights[sender] = Weight(numbers["own_weight"], numbers["next_weight"], since)
        self.epochs[sender] = message.round
        ledger = self.ledger(message.round)
        done = unpacked(payload["done"], self.num_units)
        num_twice = ledger.believe(self.rank, sender, done, self.away)
        if sender > self.rank:  # otherwise the other one counts it
            self.num_twice += num_twice
        if "merged" in payload:
            merged = unpacked(payload["merged"], self.num_units)
            if ledger.base is not None:
                merged &= ledger.owners(self.away) != self.rank
            ledger.merged = ledger.merged | merged
        if "given" in payload:
            units, takers = payload["given"].tolist()
            gifts = {u: j for u, j in zip(units, takers, strict=True) if j in ranks}
            ledger.given[sender] = {
                **ledger.given.get(sender, {}),
                **{u: j for u, j in gifts.items() if u < self.num_units and j != sender},
            }

    @staticmethod
    def first_undone_of(message: Message) -> int:
        """The first epoch that the sender of a report does not know to be done."""
        return min(int(message.numbers.get("first", message.round)), message.round)

    def catch_up(self, sender: Rank, epoch: int) -> None:
        """Take the epochs before `epoch` for done, of all of which `sender` knows this.

        Workers that train by epochs leave one when it is done, and soon forget it, so they
        cannot tell one that was alone for longer which units are left. As in
        `Ledger.believe`, only one that was apart is believed about this worker's own units.
        """
        for ledger in self.ledgers.values():
            is_left = ledger.base is not None and ledger.epoch < epoch
            if is_left and ledger.undone().any():  # else the owners cost time for nothing
                others = ledger.owners(self.away) != self.rank
                ledger.merged = ledger.merged | others | (sender in ledger.parted)

    @property
    def pending(self) -> list[Ledger]:
        """The epochs, oldest first, that have units which somebody here has to do."""
        begun = (self.ledgers[e] for e in sorted(self.ledgers))
        awaited, away = self.awaited, self.away
        return [
            each
            for each in begun
            if each.base is not None and each.pending(awaited, away).any()
        ]

    def own(self, ledger: Ledger) -> list[int]:
        """The units that this worker still has to do."""
        mine = ledger.owners(self.away) == self.rank
        units: list[int] = (ledger.undone() & mine).nonzero()[:, 0].tolist()
        return units

    def remaining(self, ledger: Ledger, now: Seconds) -> dict[Rank, float]:
        """Estimate the units that each present worker still has to do."""
        owners = ledger.owners(self.away)
        left = torch.bincount(owners[ledger.undone()]).tolist()
        found: dict[Rank, float] = {}
        absent = {*self.away, *self.lost, *ledger.late, *ledger.awaited}
        for j, rate in self.rates.items():
            if j in absent:
                continue
            num = left[j] if j < len(left) else 0
            if j != self.rank and num:
                # It has gone on since its last report.
                seconds = now - max(self.heard_at.get(j, now), ledger.opened_at)
                num = max(0.5, num - seconds * rate / self.unit_cost)
            found[j] = num
        return found
