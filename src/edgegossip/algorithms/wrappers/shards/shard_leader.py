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

from edgegossip.algorithms.wrappers.shards.shard_server import (
    PIECES,
    TIMERS,
    WHAT,
    LeaderState,
    ShardServer,
    ShardServerState,
    is_possible,
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
class ShardLeader(ShardServer):
    """Server on rank 0, which orders events for all servers."""

    @property
    def others(self) -> range:
        """Ranks of the other servers."""
        return range(1, self.num_servers)

    def init(self, rank: Rank, params: Tensor) -> ShardServerState:
        state = super().init(rank, params)
        state.lead = LeaderState()
        return state

    def handle(self, state: ShardServerState, event: Event, now: Seconds) -> list[Effect]:
        lead = state.lead
        assert lead is not None
        effects = self._account(state, lead, event, now)
        # Any event may have made a piece complete or a worker lost. Without an epoch, nothing
        # can be ordered: the servers would not agree on where to start.
        if state.epoch:
            effects += self._settle(state, lead, now)
        again = self.algorithm.resend_after
        if again is not None and not lead.is_timed and self._is_pending(state, lead):
            lead.is_timed = True
            effects.append(SetTimer(_AGAIN, now + lead.patience(again)))
        return effects

    def _account(
        self, state: ShardServerState, lead: LeaderState, event: Event, now: Seconds
    ) -> list[Effect]:
        match event:
            case Started():
                if not event.has_rejoined:
                    return self._order(state, lead, "started", now)
                # The others know the last epoch; a new one must be higher, so it asks first.
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
                # Networks carry no infinite number; without a loss, it counts as NaN.
                loss = {"loss": event.loss} if math.isfinite(event.loss) else {}
                lead.put_off.append(("evaluated", loss))
            case TimerFired(name) if name == _AGAIN:
                lead.is_timed = False
                return self._send_again(state, lead)
            case TimerFired("resend" | "patience" as name) if state.epoch:
                # If the last such order is still on its way, another one would only lengthen
                # the queue of a link that is full.
                if self._is_under_way(lead, name):
                    return [SetTimer(name, now + lead.patience(self.algorithm.resend_after))]
                return self._order(state, lead, name, now)
            case TimerFired(name) if state.epoch:
                lead.put_off.append((name, {}))
            case WorkerLost(rank):
                state.lost[rank] = None
                # A liar is dropped at once; other losses are ordered by `_settle`, together
                # with those that other servers report.
                if event.has_lied and rank >= self.num_servers and state.epoch:
                    self._drop(lead, rank)
                    return self._order(state, lead, "lied", now, self.inner_rank(rank))
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                return self._welcome(state, lead, event, now)
        return []

    def _welcome(
        self, state: ShardServerState, lead: LeaderState, event: WorkerJoined, now: Seconds
    ) -> list[Effect]:
        rank = event.rank
        if rank < self.num_servers:
            if not state.epoch:
                return self._hail(state, [rank])
            if event.has_restarted:  # and has lost its slice
                return self._begin_anew(state, lead, state.epoch + 1, now)
            lead.held.pop(rank, None)  # after a checkpoint it counts anew
            repeated = self._repeat(state, lead, rank)
            # Workers must report again: the returned server has missed their models.
            return [*repeated, *self._order(state, lead, "resend", now)]
        if not (event.has_restarted and state.epoch):
            return []
        self._drop(lead, rank)
        return self._order(state, lead, "restarted", now, self.inner_rank(rank))

    def _drop(self, lead: LeaderState, rank: Rank) -> None:
        for fresh in lead.fresh.values():
            fresh.pop(self.inner_rank(rank), None)
        lead.ordered.pop(self.inner_rank(rank), None)

    # Messages.

    def _hear_worker(
        self,
        state: ShardServerState,
        lead: LeaderState,
        sender: Rank,
        message: Message,
        now: Seconds,
    ) -> list[Effect]:
        if message.kind == "pull" and state.epoch:
            worker = self.inner_rank(sender)
            if self._is_under_way(lead, "pull", worker):
                return []
            return self._order(state, lead, "pull", now, worker)
        # A report that an earlier epoch has asked for may lack the newest model.
        is_old = message.kind == "copy" and message.numbers["serial"] != state.epoch
        if message.kind in PIECES and not is_old and self.keep(state, sender, message):
            lead.fresh[message.kind][self.inner_rank(sender)] = None
        return []

    def _hear_server(
        self,
        state: ShardServerState,
        lead: LeaderState,
        sender: Rank,
        message: Message,
        now: Seconds,
    ) -> list[Effect]:
        numbers = message.numbers
        if message.kind not in ("holds", "slice"):
            return []
        if not state.epoch:
            if message.kind == "holds" and is_possible(numbers["epoch"], now):
                lead.heard[sender] = int(numbers["epoch"])
            # All of them, because one that is cut off may know the latest epoch.
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
        # Orders that all servers have carried out need no repetition.
        done = min(self._num_done(lead, rank) for rank in self.others)
        for index in [index for index in lead.orders if index < done]:
            del lead.orders[index]
        return []

    def _take_slice(
        self, state: ShardServerState, lead: LeaderState, sender: Rank, message: Message
    ) -> None:
        number, params = int(message.numbers["look"]), message.payload["params"]
        num_held = self.role(sender).num_held(state.num_params)
        if number >= lead.num_looked and len(params) == num_held:
            lead.slices.setdefault(number, {})[sender] = params

    def _num_done(self, lead: LeaderState, rank: Rank) -> int:
        held = lead.held.get(rank)
        return 0 if held is None else int(held.numbers["num_orders"])

    # Orders.

    def _order(
        self,
        state: ShardServerState,
        lead: LeaderState,
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
        # Kept for servers that are lost or miss it, and carried out here last: the other
        # servers must not fall behind while this one works.
        lead.orders[state.num_orders] = order
        sends = [Send(rank, order) for rank in self.others if rank not in state.lost]
        return [*sends, *self.carry_out(state, order, now)]

    def _is_under_way(
        self,
        lead: LeaderState,
        what: str,
        worker: Rank = 0,
        piece: tuple[float, float] = (0.0, 0),
    ) -> bool:
        """Return whether this order already exists and will be resent."""
        found = (WHAT.index(what), worker, *piece)
        names = ("what", "worker", "life", "serial")
        return (
            self.algorithm.resend_after is not None
            and what in ("repeat", "pull", "copy", "resend")
            and any(tuple(o.numbers[n] for n in names) == found for o in lead.orders.values())
        )

    def _settle(self, state: ShardServerState, lead: LeaderState, now: Seconds) -> list[Effect]:
        """Issue orders for all ready events, and evaluate complete models."""
        effects: list[Effect] = []
        # Losses come first: a barrier need not wait for a commit that can no longer be
        # complete. Ranks are sorted, so that the order does not depend on arrival.
        missed = {j for j in self.algorithm.workers if self._is_missed(state, lead, j)}
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
        while lead.put_off and self.algorithm.training(state.inner):
            what, numbers = lead.put_off.pop(0)
            effects += self._order(state, lead, what, now, numbers=numbers)
        return [*effects, *self._evaluate(state, lead)]

    def _tell_of(
        self, state: ShardServerState, lead: LeaderState, kind: str, worker: Rank, now: Seconds
    ) -> list[Effect]:
        """Have all servers use a piece that each of them holds."""
        message = state.pieces[kind][worker]
        piece, what = label(message), kind
        if kind == "copy" and worker not in state.inner.unseen:
            return []
        if kind == "commit":
            # Servers have dropped the tensors of a commit that they have used.
            what = "repeat" if lead.ordered.get(worker) == piece else kind
            lead.ordered[worker] = piece
        if self._is_under_way(lead, what, worker, piece):
            return []
        numbers = dict(zip(("life", "serial"), piece, strict=True))
        numbers |= {"number": message.numbers["number"], "round": message.round}
        return self._order(state, lead, what, now, worker, numbers)

    def _is_missed(self, state: ShardServerState, lead: LeaderState, worker: Rank) -> bool:
        return self.outer(worker) in state.lost or any(
            bool(held.payload["holds"][-1, worker - 1]) for held in lead.held.values()
        )

    def _evaluate(self, state: ShardServerState, lead: LeaderState) -> list[Effect]:
        effects: list[Effect] = []
        # In the order of requests, because the algorithm matches losses with requests in turn.
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
        self, state: ShardServerState, lead: LeaderState, epoch: int, now: Seconds
    ) -> list[Effect]:
        """Begin a new epoch, because a server has lost its slice or its history."""
        again = self.begin_epoch(state, epoch)
        commits = dict.fromkeys(state.pieces["commit"])
        lead.orders, lead.held, lead.heard = {}, {}, {}
        # Evaluations that are running were requested by servers that have forgotten them.
        lead.slices, lead.num_looked, lead.num_stale = {}, 0, lead.num_asked
        lead.ordered, lead.put_off = {}, []
        # Unused commits are still good; reports were made for the last epoch.
        lead.fresh = {"commit": commits, "copy": {}}
        effects: list[Effect] = [SetTimer(name, math.inf) for name in TIMERS]
        # As for an elected server: who is lost must be known before workers are asked.
        for worker in self.algorithm.workers:
            if self.outer(worker) in state.lost:
                effects += self._order(state, lead, "lost", now, worker)
        return [*effects, *self._order(state, lead, "rejoined", now), *again]

    # Orders and slices that are missing at other servers.

    def _is_pending(self, state: ShardServerState, lead: LeaderState) -> bool:
        return not state.epoch or bool(lead.orders or state.looks)

    def _hail(self, state: ShardServerState, ranks: range | list[Rank]) -> list[Effect]:
        """Ask servers to report their pieces."""
        return [Send(j, Message("hail", state.round)) for j in ranks if j not in state.lost]

    def _repeat(
        self, state: ShardServerState, lead: LeaderState, rank: Rank, most: int | None = None
    ) -> list[Effect]:
        """Repeat orders that a server may lack, and ask for missing slices."""
        done = self._num_done(lead, rank)
        lacking = [order for index, order in lead.orders.items() if index >= done]
        owes = any(rank not in lead.slices.get(look, {}) for look in state.looks)
        # Without lacking orders, this server waits for another one, or its report was lost.
        hail = self._hail(state, [rank]) if owes or not lacking else []
        return [*hail, *(Send(rank, order) for order in lacking[:most])]

    def _send_again(self, state: ShardServerState, lead: LeaderState) -> list[Effect]:
        if not self._is_pending(state, lead):
            lead.num_sends = 0
            return []
        lead.slow_down()
        if not state.epoch:
            return self._hail(state, self.others)
        # One order at a time, the oldest: if it was lost, the later ones wait at that server,
        # and if the link is full, repeating all of them would fill it further.
        return [
            each
            for rank in self.others
            if rank not in state.lost
            for each in self._repeat(state, lead, rank, most=1)
        ]


def _holds(lead: LeaderState, rank: Rank, row: int, worker: Rank) -> tuple[float, float] | None:
    """Return the label of the worker's piece that a server has reported."""
    if rank not in lead.held:
        return None
    life, serial = lead.held[rank].payload["holds"][2 * row : 2 * row + 2, worker - 1].tolist()
    return life, serial
