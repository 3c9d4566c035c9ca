"""Rank 0 of several servers: it tells all of them the order of events.

A commit counts as arrived once all servers hold their pieces of it, so no order has to wait. If
its worker is lost before then, no order mentions the commit. A worker counts as lost while any
server has lost it. Only an evaluation needs all slices; the other servers then send theirs to
rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from edgegossip.algorithms.server.state import PATIENCE, RESEND, is_possible
from edgegossip.algorithms.wrappers.shards.shard_server import (
    PIECES,
    TIMERS,
    WHAT,
    Lead,
    Sharing,
    SharingState,
    label,
)
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)

_AGAIN = "again"
"""Timer for messages that other servers have not confirmed."""


@dataclass(frozen=True)
class Leading(Sharing):
    """Server on rank 0, which orders events for all servers."""

    @property
    def others(self) -> range:
        """Ranks of the other servers."""
        return range(1, self.num_servers)

    def init(self, rank: Rank, params: Tensor) -> SharingState:
        state = super().init(rank, params)
        state.lead = Lead()
        return state

    def handle(self, state: SharingState, event: Event, now: Seconds) -> list[Effect]:
        lead = _lead(state)
        effects = self._account(state, lead, event, now)
        if state.epoch:
            effects += self._settle(state, lead, now)
        again = self.algorithm.resend_after
        if again is not None and not lead.is_timed and self._is_pending(state, lead):
            lead.is_timed = True
            effects.append(SetTimer(_AGAIN, now + lead.patience(again)))
        return effects

    def _account(
        self, state: SharingState, lead: Lead, event: Event, now: Seconds
    ) -> list[Effect]:
        match event:
            case Started():
                if not event.has_rejoined:
                    return self._order(state, lead, "started", now)
                state.epoch = 0
                return self._hail(state, self.others)
            case Received(sender, message):
                if sender < self.num_servers:
                    return self._hear_server(state, lead, sender, message, now)
                return self._hear_worker(state, lead, sender, message, now)
            case Evaluated():
                lead.num_asked -= 1
                if lead.num_stale:
                    lead.num_stale -= 1
                    return []
                loss = {"loss": event.loss} if math.isfinite(event.loss) else {}
                lead.put_off.append(("evaluated", loss))
            case TimerFired(name) if name == _AGAIN:
                lead.is_timed = False
                return self._send_again(state, lead)
            case TimerFired(name) if name in (RESEND, PATIENCE) and state.epoch:
                if self._is_under_way(lead, name):
                    return [SetTimer(name, now + lead.patience(self.algorithm.resend_after))]
                return self._order(state, lead, name, now)
            case TimerFired(name) if state.epoch:
                lead.put_off.append((name, {}))
            case WorkerLost(rank):
                state.lost[rank] = None
                if event.has_lied and rank >= self.num_servers and state.epoch:
                    self._drop(lead, rank)
                    return self._order(state, lead, "lied", now, self.inner(rank))
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                return self._welcome(state, lead, event, now)
        return []

    def _welcome(
        self, state: SharingState, lead: Lead, event: WorkerJoined, now: Seconds
    ) -> list[Effect]:
        rank = event.rank
        if rank < self.num_servers:
            if not state.epoch:
                return self._hail(state, [rank])
            if event.has_restarted:
                return self._begin_anew(state, lead, state.epoch + 1, now)
            lead.held.pop(rank, None)  # after a checkpoint it counts anew
            repeated = self._repeat(state, lead, rank)
            # Workers must report again: the returned server has missed their models.
            return [*repeated, *self._order(state, lead, RESEND, now)]
        if not (event.has_restarted and state.epoch):
            return []
        self._drop(lead, rank)
        return self._order(state, lead, "restarted", now, self.inner(rank))

    def _drop(self, lead: Lead, rank: Rank) -> None:
        for fresh in lead.fresh.values():
            fresh.pop(self.inner(rank), None)
        lead.ordered.pop(self.inner(rank), None)

    # Messages.

    def _hear_worker(
        self, state: SharingState, lead: Lead, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        if message.kind == "pull" and state.epoch:
            worker = self.inner(sender)
            if self._is_under_way(lead, "pull", worker):
                return []
            return self._order(state, lead, "pull", now, worker)
        is_old = message.kind == "copy" and message.numbers["serial"] != state.epoch
        if message.kind in PIECES and not is_old and self.keep(state, sender, message):
            lead.fresh[message.kind][self.inner(sender)] = None
        return []

    def _hear_server(
        self, state: SharingState, lead: Lead, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        numbers = message.numbers
        if message.kind not in ("holds", "slice"):
            return []
        if not state.epoch:
            if message.kind == "holds" and is_possible(numbers["epoch"], now):
                lead.heard[sender] = int(numbers["epoch"])
            if len(lead.heard) < len(self.others):
                return []
            # If all servers have restarted, workers may still know a later epoch.
            newest = max(*lead.heard.values(), int(1000 * now))
            return self._begin_anew(state, lead, newest + 1, now)
        if numbers["epoch"] != state.epoch:
            return []
        if message.kind == "slice":
            self._take_slice(state, lead, sender, message)
            return []
        held = lead.held.get(sender)
        if held is not None and held.numbers["told"] > numbers["told"]:
            return []
        if held is None or held.numbers["num_orders"] < numbers["num_orders"]:
            lead.hasten()
        lead.held[sender] = message
        # After resuming from a checkpoint it may have carried out other orders.
        first = min(lead.orders, default=state.num_orders)
        if numbers["is_astray"] or not first <= numbers["num_orders"] <= state.num_orders:
            return self._begin_anew(state, lead, state.epoch + 1, now)
        done = min(self._num_done(lead, rank) for rank in self.others)
        for index in [index for index in lead.orders if index < done]:
            del lead.orders[index]
        return []

    def _take_slice(
        self, state: SharingState, lead: Lead, sender: Rank, message: Message
    ) -> None:
        number, params = int(message.numbers["look"]), message.payload["params"]
        num_held = self.role(sender).num_held(state.num_params)
        if number >= lead.num_looked and len(params) == num_held:
            lead.slices.setdefault(number, {})[sender] = params

    def _num_done(self, lead: Lead, rank: Rank) -> int:
        held = lead.held.get(rank)
        return 0 if held is None else int(held.numbers["num_orders"])

    # Orders.

    def _order(
        self,
        state: SharingState,
        lead: Lead,
        what: str,
        now: Seconds,
        worker: Rank = 0,
        numbers: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Effect]:
        """Tell all servers, including this one, about an event."""
        order = Message(
            "order",
            state.round,
            numbers={
                **dict.fromkeys(("life", "serial", "number", "round"), 0),
                **numbers,
                "epoch": state.epoch,
                "index": state.num_orders,
                "what": WHAT.index(what),
                "worker": worker,
                "at": now,
                "chain": state.chain,
                "num_looked": lead.num_looked,
            },
        )
        lead.orders[state.num_orders] = order
        sends = [Send(rank, order) for rank in self.others if rank not in state.lost]
        return [*sends, *self.carry_out(state, order, now)]

    def _is_under_way(
        self, lead: Lead, what: str, worker: Rank = 0, piece: tuple[float, float] = (0.0, 0)
    ) -> bool:
        """Return whether this order already exists and will be resent."""
        found = (WHAT.index(what), worker, *piece)
        names = ("what", "worker", "life", "serial")
        return (
            self.algorithm.resend_after is not None
            and what in ("repeat", "pull", "copy", RESEND)
            and any(tuple(o.numbers[n] for n in names) == found for o in lead.orders.values())
        )

    def _settle(self, state: SharingState, lead: Lead, now: Seconds) -> list[Effect]:
        """Issue orders for all ready events, and evaluate complete models."""
        effects: list[Effect] = []
        missed = {j for j in self.single.workers if self._is_missed(state, lead, j)}
        for worker in sorted(missed - state.inner.lost.keys()):
            effects += self._order(state, lead, "lost", now, worker)
        for worker in sorted(state.inner.lost.keys() - missed):
            effects += self._order(state, lead, "joined", now, worker)
        for row, kind in enumerate(PIECES):
            for worker in sorted(lead.fresh[kind]):
                piece = label(state.pieces[kind][worker])
                if all(_holds(lead, rank, row, worker) == piece for rank in self.others):
                    del lead.fresh[kind][worker]
                    effects += self._tell_of(state, lead, kind, worker, now)
        while lead.put_off and self.single.training(state.inner):
            what, numbers = lead.put_off.pop(0)
            effects += self._order(state, lead, what, now, numbers=numbers)
        return [*effects, *self._evaluate(state, lead)]

    def _tell_of(
        self, state: SharingState, lead: Lead, kind: str, worker: Rank, now: Seconds
    ) -> list[Effect]:
        """Have all servers use a piece that each of them holds."""
        message = state.pieces[kind][worker]
        piece, what = label(message), kind
        if kind == "copy" and worker not in state.inner.unseen:
            return []
        if kind == "commit":
            what = "repeat" if lead.ordered.get(worker) == piece else kind
            lead.ordered[worker] = piece
        if self._is_under_way(lead, what, worker, piece):
            return []
        numbers = dict(zip(("life", "serial"), piece, strict=True))
        numbers |= {"number": message.numbers["number"], "round": message.round}
        return self._order(state, lead, what, now, worker, numbers)

    def _is_missed(self, state: SharingState, lead: Lead, worker: Rank) -> bool:
        return self.outer(worker) in state.lost or any(
            bool(held.payload["holds"][-1, worker - 1]) for held in lead.held.values()
        )

    def _evaluate(self, state: SharingState, lead: Lead) -> list[Effect]:
        effects: list[Effect] = []
        while (own := state.looks.get(lead.num_looked)) is not None:
            slices = lead.slices.get(lead.num_looked, {})
            if len(slices) < len(self.others):
                break
            whole = torch.cat([own, *(slices[rank] for rank in self.others)])
            effects.append(Evaluate(whole))
            del state.looks[lead.num_looked], lead.slices[lead.num_looked]
            lead.num_looked += 1
            lead.num_asked += 1
        return effects

    def _begin_anew(
        self, state: SharingState, lead: Lead, epoch: int, now: Seconds
    ) -> list[Effect]:
        """Begin a new epoch, because a server has lost its slice or its history."""
        again = self.begin_epoch(state, epoch)
        commits = dict.fromkeys(state.pieces["commit"])
        lead.orders, lead.held, lead.heard = {}, {}, {}
        lead.slices, lead.num_looked, lead.num_stale = {}, 0, lead.num_asked
        lead.ordered, lead.put_off = {}, []
        lead.fresh = {"commit": commits, "copy": {}}
        effects: list[Effect] = [SetTimer(name, math.inf) for name in TIMERS]
        for worker in self.single.workers:
            if self.outer(worker) in state.lost:
                effects += self._order(state, lead, "lost", now, worker)
        return [*effects, *self._order(state, lead, "rejoined", now), *again]

    # Orders and slices that are missing at other servers.

    def _is_pending(self, state: SharingState, lead: Lead) -> bool:
        return not state.epoch or bool(lead.orders or state.looks)

    def _hail(self, state: SharingState, ranks: range | list[Rank]) -> list[Effect]:
        """Ask servers to report their pieces."""
        return [Send(j, Message("hail", state.round)) for j in ranks if j not in state.lost]

    def _repeat(
        self, state: SharingState, lead: Lead, rank: Rank, most: int | None = None
    ) -> list[Effect]:
        """Repeat orders that a server may lack, and ask for missing slices."""
        done = self._num_done(lead, rank)
        lacking = [order for index, order in lead.orders.items() if index >= done]
        owes = any(rank not in lead.slices.get(look, {}) for look in state.looks)
        hail = self._hail(state, [rank]) if owes or not lacking else []
        return [*hail, *(Send(rank, order) for order in lacking[:most])]

    def _send_again(self, state: SharingState, lead: Lead) -> list[Effect]:
        if not self._is_pending(state, lead):
            lead.num_sends = 0
            return []
        lead.slow_down()
        if not state.epoch:
            return self._hail(state, self.others)
        return [
            each
            for rank in self.others
            if rank not in state.lost
            for each in self._repeat(state, lead, rank, most=1)
        ]


def _lead(state: SharingState) -> Lead:
    assert state.lead is not None
    return state.lead


def _holds(lead: Lead, rank: Rank, row: int, worker: Rank) -> tuple[float, float] | None:
    """Return the label of the worker's piece that a server has reported."""
    if rank not in lead.held:
        return None
    life, serial = lead.held[rank].payload["holds"][2 * row : 2 * row + 2, worker - 1].tolist()
    return life, serial
