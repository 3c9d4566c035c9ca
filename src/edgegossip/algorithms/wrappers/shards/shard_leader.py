"""Rank 0 of several servers: it tells all of them the order of events.

A commit counts as arrived once all servers hold their pieces of it, so no order has to wait. If
its worker is lost before then, no order mentions the commit. A worker counts as lost while any
server has lost it. Only an evaluation needs all slices; the other servers then send theirs to
rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.algorithms.wrappers.shards.shard_server import (
    EVENTS,
    LABELS,
    PIECE_KINDS,
    TIMERS,
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
_GROWTH, _MOST_GROWN = 1.5, 14
"""Factor by which the wait for a confirmation grows per failure, and its largest exponent."""


@dataclass(slots=True, kw_only=True)
class ShardLeaderState(ShardServerState):
    """State of rank 0.

    Attributes:
        orders: Orders that a server may not have carried out yet, by number.
        held: Last report from each of the other servers about its pieces.
        fresh: By kind, the workers (as keys) with a new piece that no order names yet.
        ordered: Label of the last ordered commit of each worker.
        put_off: Evaluations and timers that are ordered only while a worker trains; otherwise
            they would keep the run open forever.
        slices: Slices to evaluate, by evaluation and server.
        num_looked: Number of this epoch's evaluations for which all slices have arrived.
        num_asked: Number of running evaluations.
        num_stale: Number of running evaluations that an earlier epoch requested.
        heard: Epochs that other servers report while rank 0 knows no epoch.
        is_timed: Whether the resend timer is set.
        num_sends: Number of recent repeats, each of which lengthens the wait.
    """

    orders: dict[int, Message] = field(default_factory=dict)
    held: dict[Rank, Message] = field(default_factory=dict)
    fresh: dict[str, dict[Rank, None]] = field(
        default_factory=lambda: {kind: {} for kind in PIECE_KINDS}
    )
    ordered: dict[Rank, tuple[float, float]] = field(default_factory=dict)
    put_off: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    slices: dict[int, dict[Rank, Tensor]] = field(default_factory=dict)
    num_looked: int = 0
    num_asked: int = 0
    num_stale: int = 0
    heard: dict[Rank, int] = field(default_factory=dict)
    is_timed: bool = False
    num_sends: int = 0

    def patience(self, resend_after: Seconds | None) -> Seconds:
        """Return the time to wait for a confirmation."""
        assert resend_after is not None
        # Fixed intervals would repeat messages on a full link faster than the link drains.
        return resend_after * _GROWTH**self.num_sends

    def num_done(self, rank: Rank) -> int:
        """Number of orders that server `rank` has confirmed."""
        return int(self.held[rank].numbers["num_orders"]) if rank in self.held else 0

    def label_at(self, rank: Rank, kind: str, worker: Rank) -> tuple[float, float] | None:
        """Label of the worker's piece of this kind that server `rank` has reported, if any."""
        if rank not in self.held:
            return None
        row = 2 * PIECE_KINDS.index(kind)
        life, serial = self.held[rank].payload["holds"][row : row + 2, worker - 1].tolist()
        return life, serial

    def misses(self, worker: Rank) -> bool:
        """Whether another server has reported that it has lost the worker."""
        return any(bool(held.payload["holds"][-1, worker - 1]) for held in self.held.values())

    def drop(self, worker: Rank) -> None:
        """Forget the worker's pieces, because it has lied or restarted."""
        for fresh in self.fresh.values():
            fresh.pop(worker, None)
        self.ordered.pop(worker, None)


@dataclass(frozen=True)
class ShardLeader(ShardServer):
    """Behavior of rank 0, which orders events for all servers."""

    state_type: ClassVar[type[ShardServerState]] = ShardLeaderState

    @property
    def others(self) -> range:
        """Ranks of the other servers."""
        return range(1, self.num_servers)

    def handle(self, state: ShardServerState, event: Event, now: Seconds) -> list[Effect]:
        """Handle an event as rank 0."""
        assert isinstance(state, ShardLeaderState)
        effects = self._account(state, event, now)
        # Any event may have made a piece complete or a worker lost. Without an epoch, nothing
        # can be ordered: the servers would not agree on where to start.
        if state.epoch:
            effects += self._settle(state, now)
        again = self.algorithm.resend_after
        if again is not None and not state.is_timed and self._is_pending(state):
            state.is_timed = True
            effects.append(SetTimer(_AGAIN, now + state.patience(again)))
        return effects

    def _account(self, state: ShardLeaderState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                if not event.has_rejoined:
                    return self._order(state, "started", now)
                # The others know the last epoch; a new one must be higher, so it asks first.
                state.epoch = 0
                return self._hail(state, self.others)
            case Received(sender, message):
                hear = self._hear_server if sender < self.num_servers else self._hear_worker
                return hear(state, sender, message, now)
            case Evaluated():
                state.num_asked -= 1
                if state.num_stale:
                    state.num_stale -= 1
                    return []
                # Networks carry no infinite number; without a loss, it counts as NaN.
                loss = {"loss": event.loss} if math.isfinite(event.loss) else {}
                state.put_off.append(("evaluated", loss))
            case TimerFired(name) if name == _AGAIN:
                state.is_timed = False
                return self._send_again(state)
            case TimerFired("resend" | "patience" as name) if state.epoch:
                # If the last such order is still on its way, another one would only lengthen
                # the queue of a link that is full.
                if self._is_under_way(state, name):
                    return [SetTimer(name, now + state.patience(self.algorithm.resend_after))]
                return self._order(state, name, now)
            case TimerFired(name) if state.epoch:
                state.put_off.append((name, {}))
            case WorkerLost(rank):
                state.lost[rank] = None
                # A liar is dropped at once; other losses are ordered by `_settle`, together
                # with those that other servers report.
                if event.has_lied and rank >= self.num_servers and state.epoch:
                    state.drop(self.inner_rank(rank))
                    return self._order(state, "lied", now, self.inner_rank(rank))
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                if rank < self.num_servers:
                    return self._welcome_server(state, event, now)
                if event.has_restarted and state.epoch:
                    state.drop(self.inner_rank(rank))
                    return self._order(state, "restarted", now, self.inner_rank(rank))
        return []

    def _welcome_server(
        self, state: ShardLeaderState, event: WorkerJoined, now: Seconds
    ) -> list[Effect]:
        if not state.epoch:
            return self._hail(state, [event.rank])
        if event.has_restarted:  # and has lost its slice
            return self._begin_anew(state, state.epoch + 1, now)
        state.held.pop(event.rank, None)  # after a checkpoint it counts anew
        repeated = self._repeat(state, event.rank)
        # Workers must report again: the returned server has missed their models.
        return [*repeated, *self._order(state, "resend", now)]

    # Messages.

    def _hear_worker(
        self, state: ShardLeaderState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        worker = self.inner_rank(sender)
        if message.kind == "pull" and state.epoch:
            if self._is_under_way(state, "pull", worker):
                return []
            return self._order(state, "pull", now, worker)
        # A report that an earlier epoch has asked for may lack the newest model.
        is_old = message.kind == "copy" and message.numbers["serial"] != state.epoch
        if message.kind in PIECE_KINDS and not is_old and self.keep(state, sender, message):
            state.fresh[message.kind][worker] = None
        return []

    def _hear_server(
        self, state: ShardLeaderState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        numbers = message.numbers
        if message.kind not in ("holds", "slice"):
            return []
        if not state.epoch:
            if message.kind == "holds" and is_possible(numbers["epoch"], now):
                state.heard[sender] = int(numbers["epoch"])
            # All of them, because one that is cut off may know the latest epoch.
            if len(state.heard) < len(self.others):
                return []
            # If all servers have restarted, workers may still know a later epoch.
            newest = max(*state.heard.values(), int(1000 * now))
            return self._begin_anew(state, newest + 1, now)
        if numbers["epoch"] != state.epoch:
            return []
        if message.kind == "slice":
            number, params = int(numbers["look"]), message.payload["params"]
            num_held = self.role(sender).num_held(state.num_params)
            if number >= state.num_looked and len(params) == num_held:
                state.slices.setdefault(number, {})[sender] = params
            return []
        held = state.held.get(sender)
        if held is not None and held.numbers["told"] > numbers["told"]:
            return []
        if held is None or held.numbers["num_orders"] < numbers["num_orders"]:
            # If half of all messages are lost, a confirmation takes four tries on average. The
            # wait therefore shrinks by as many steps as three failures add.
            state.num_sends = max(0, state.num_sends - 3)
        state.held[sender] = message
        # After resuming from a checkpoint it may have carried out other orders.
        first = min(state.orders, default=state.num_orders)
        if numbers["is_astray"] or not first <= numbers["num_orders"] <= state.num_orders:
            return self._begin_anew(state, state.epoch + 1, now)
        # Orders that all servers have carried out need no repetition.
        done = min(map(state.num_done, self.others))
        state.orders = {index: each for index, each in state.orders.items() if index >= done}
        return []

    # Orders.

    def _order(
        self,
        state: ShardLeaderState,
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
                **dict.fromkeys((*LABELS, "number", "round"), 0),
                **numbers,
                "epoch": state.epoch,
                "index": state.num_orders,
                "what": EVENTS.index(what),
                "worker": worker,
                "at": now,
                "chain": state.chain,
                "num_looked": state.num_looked,
            },
        )
        # Kept for servers that are lost or miss it.
        state.orders[state.num_orders] = order
        sends = [Send(rank, order) for rank in self.others if rank not in state.lost]
        return [*sends, *self.carry_out(state, order, now)]

    def _is_under_way(
        self,
        state: ShardLeaderState,
        what: str,
        worker: Rank = 0,
        piece: tuple[float, float] = (0.0, 0),
    ) -> bool:
        """Return whether this order already exists and will be resent."""
        found = (EVENTS.index(what), worker, *piece)
        names = ("what", "worker", *LABELS)
        return (
            self.algorithm.resend_after is not None
            and what in ("repeat", "pull", "copy", "resend")
            and any(tuple(o.numbers[n] for n in names) == found for o in state.orders.values())
        )

    def _settle(self, state: ShardLeaderState, now: Seconds) -> list[Effect]:
        """Issue orders for all ready events, and evaluate complete models."""
        effects: list[Effect] = []
        # Losses come first: a barrier need not wait for a commit that can no longer be
        # complete. Ranks are sorted, so that the order does not depend on arrival.
        workers = self.algorithm.workers
        missed = {j for j in workers if self.outer(j) in state.lost or state.misses(j)}
        for worker in sorted(missed - state.inner.lost.keys()):
            effects += self._order(state, "lost", now, worker)
        for worker in sorted(state.inner.lost.keys() - missed):
            effects += self._order(state, "joined", now, worker)
        for kind in PIECE_KINDS:
            for worker in sorted(state.fresh[kind]):
                piece = label(state.pieces[kind][worker])
                if all(state.label_at(rank, kind, worker) == piece for rank in self.others):
                    del state.fresh[kind][worker]
                    effects += self._order_piece(state, kind, worker, now)
        while state.put_off and self.algorithm.training(state.inner):
            what, numbers = state.put_off.pop(0)
            effects += self._order(state, what, now, numbers=numbers)
        return [*effects, *self._evaluate(state)]

    def _order_piece(
        self, state: ShardLeaderState, kind: str, worker: Rank, now: Seconds
    ) -> list[Effect]:
        """Have all servers use a piece that each of them holds."""
        message = state.pieces[kind][worker]
        piece, what = label(message), kind
        if kind == "copy" and worker not in state.inner.unseen:
            return []
        if kind == "commit":
            # Servers have dropped the tensors of a commit that they have used.
            what = "repeat" if state.ordered.get(worker) == piece else kind
            state.ordered[worker] = piece
        if self._is_under_way(state, what, worker, piece):
            return []
        numbers = {"number": message.numbers["number"], "round": message.round}
        labels = dict(zip(LABELS, piece, strict=True))
        return self._order(state, what, now, worker, {**labels, **numbers})

    def _evaluate(self, state: ShardLeaderState) -> list[Effect]:
        effects: list[Effect] = []
        # In the order of requests, because the algorithm matches losses with requests in turn.
        while (own := state.looks.get(state.num_looked)) is not None:
            slices = state.slices.get(state.num_looked, {})
            if len(slices) < len(self.others):
                break
            whole = torch.cat([own, *(slices[rank] for rank in self.others)])
            effects.append(Evaluate(whole))
            del state.looks[state.num_looked], state.slices[state.num_looked]
            state.num_looked += 1
            state.num_asked += 1
        return effects

    def _begin_anew(self, state: ShardLeaderState, epoch: int, now: Seconds) -> list[Effect]:
        """Begin a new epoch, because a server has lost its slice or its history."""
        again = self.begin_epoch(state, epoch)
        state.orders, state.held, state.heard = {}, {}, {}
        # Evaluations that are running were requested by servers that have forgotten them.
        state.slices, state.num_looked, state.num_stale = {}, 0, state.num_asked
        state.ordered, state.put_off = {}, []
        # Unused commits are still good; reports were made for the last epoch.
        state.fresh = {"commit": dict.fromkeys(state.pieces["commit"]), "copy": {}}
        effects: list[Effect] = [SetTimer(name, math.inf) for name in TIMERS]
        # Who is lost must be known before workers are asked for their models, or the servers
        # would wait for those of lost workers.
        for worker in self.algorithm.workers:
            if self.outer(worker) in state.lost:
                effects += self._order(state, "lost", now, worker)
        return [*effects, *self._order(state, "rejoined", now), *again]

    # Orders and slices that are missing at other servers.

    def _is_pending(self, state: ShardLeaderState) -> bool:
        return not state.epoch or bool(state.orders or state.looks)

    def _hail(self, state: ShardLeaderState, ranks: range | list[Rank]) -> list[Effect]:
        """Ask servers to report their pieces."""
        return [Send(j, Message("hail", state.round)) for j in ranks if j not in state.lost]

    def _repeat(
        self, state: ShardLeaderState, rank: Rank, most: int | None = None
    ) -> list[Effect]:
        """Repeat orders that a server may lack, and ask for missing slices."""
        done = state.num_done(rank)
        lacking = [order for index, order in state.orders.items() if index >= done]
        owes = any(rank not in state.slices.get(look, {}) for look in state.looks)
        # Without lacking orders, this server waits for another one, or its report was lost.
        hail = self._hail(state, [rank]) if owes or not lacking else []
        return [*hail, *(Send(rank, order) for order in lacking[:most])]

    def _send_again(self, state: ShardLeaderState) -> list[Effect]:
        if not self._is_pending(state):
            state.num_sends = 0
            return []
        state.num_sends = min(state.num_sends + 1, _MOST_GROWN)
        if not state.epoch:
            return self._hail(state, self.others)
        # One order at a time, the oldest: if it was lost, the later ones wait at that server,
        # and if the link is full, repeating all of them would fill it further.
        there = [rank for rank in self.others if rank not in state.lost]
        return [each for rank in there for each in self._repeat(state, rank, most=1)]
