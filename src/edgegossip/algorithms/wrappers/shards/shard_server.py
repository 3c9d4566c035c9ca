"""One of several servers: it holds a slice of the model and handles events in rank 0's order.

All servers run the same algorithm, each on its own slice. No server decision depends on the
entries of the model. Servers that receive the same events in the same order therefore make the
same decisions: which workers to merge in a round, when to answer, and with which numbers. Rank
0 puts events in order (`ShardLeader`) and sends each as an *order*, which has no tensors; the
pieces of commits and copies come from the workers themselves.

An *epoch* is a sequence of orders from a common start. If a server has lost its slice, rank 0
begins a new epoch. All servers then act like a single restarted server: each takes its slice of
the newest model that any worker has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.algorithms.server.parameter_server import ParameterServer, ServerState
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)

TIMERS = ("resend", "patience", "window", "quiet")
"""Timers of the algorithms that the servers run."""
EVENTS = (
    *("started", "rejoined", "commit", "repeat", "pull", "copy", "evaluated"),
    *("lost", "lied", "joined", "restarted", *TIMERS),
)
"""Events that an order can name, by index in this tuple."""
PIECE_KINDS = ("commit", "copy")
"""Kinds of messages that are sent to each server in pieces."""
LABELS = ("life", "serial")
"""Numbers that a piece has in addition to those of the whole message."""
_IDLE = "idle"
"""An idle timer; without any timer, a host would consider slow workers silent."""
_EPOCHS_A_SECOND = 1e6
_CLOCKS_DIFFER: Seconds = 60.0


@dataclass(slots=True, kw_only=True)
class ShardServerState(WorkerState):
    """State of a server that holds a slice; `params` is the evaluated slice.

    Attributes:
        inner: State of the algorithm, as if this were the only server and its slice were the
            model.
        first: Slice of the initial model.
        num_params: Number of entries of the whole model.
        epoch: The current epoch; 0 while none is known.
        num_orders: Number of orders carried out in this epoch.
        chain: Digest of these orders.
        early: Orders that arrived before their predecessors, by number.
        num_answers: Number of answers given in this epoch.
        num_looks: Number of evaluations requested in this epoch.
        pieces: The newest piece of each worker, by kind; its tensors are dropped after use.
        looks: Slices for evaluation that rank 0 may lack, by number of the evaluation.
        lost: Unreachable ranks, as keys.
        num_told: Number of reports sent to rank 0.
        is_astray: Whether the server cannot carry out an order, so that rank 0 must begin a new
            epoch.
        has_finished: Whether the algorithm has finished.
    """

    inner: ServerState
    first: Tensor
    num_params: int
    epoch: int = 1
    num_orders: int = 0
    chain: int = 0
    early: dict[int, Message] = field(default_factory=dict)
    num_answers: int = 0
    num_looks: int = 0
    pieces: dict[str, dict[Rank, Message]] = field(
        default_factory=lambda: {kind: {} for kind in PIECE_KINDS}
    )
    looks: dict[int, Tensor] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    num_told: int = 0
    is_astray: bool = False
    has_finished: bool = False


@dataclass(frozen=True)
class ShardServer:
    """Behavior of a server that is not rank 0.

    Two numberings meet here: the ranks of the run, in which `num_servers` servers come first,
    and those of the inner algorithm, in which its only server is rank 0.

    Args:
        algorithm: The inner algorithm.
        num_servers: Number of servers that share the model.
    """

    state_type: ClassVar[type[ShardServerState]] = ShardServerState
    algorithm: ParameterServer
    num_servers: int

    @property
    def workers(self) -> range:
        """The ranks in the run that train."""
        return range(self.num_servers, self.num_servers + self.algorithm.num_workers)

    def outer(self, worker: Rank) -> Rank:
        """The rank in the run of a worker in the inner algorithm."""
        return worker + self.num_servers - 1

    def inner_rank(self, rank: Rank) -> Rank:
        """The rank of a worker in the inner algorithm; below 1 for a server."""
        return rank - self.num_servers + 1

    def role(self, rank: Rank) -> Role:
        """See `Algorithm.role`."""
        if rank >= self.num_servers:
            return Role("worker", is_evaluated=False)
        # Rank 0 evaluates the whole model for all servers.
        evaluates = self.algorithm.role(SERVER).evaluates and rank == SERVER
        return Role(
            "server",
            has_data=False,
            evaluates=evaluates,
            slice_index=rank,
            num_slices=self.num_servers,
        )

    def init(self, rank: Rank, params: Tensor) -> ShardServerState:
        """Build the state of server `rank`; `params` is the whole vector."""
        num_params = params.numel()
        own = params[self.role(rank).stretch(num_params)].clone()
        inner = self.algorithm.init_server(own)
        return self.state_type(
            rank=rank, params=own, inner=inner, first=own, num_params=num_params
        )

    # A server that follows.

    def handle(self, state: ShardServerState, event: Event, now: Seconds) -> list[Effect]:
        """Handle an event as a server other than rank 0."""
        match event:
            case Started():
                # A restarted server does not know the epoch, and rank 0 does not know of its
                # loss yet: the report, of epoch 0, tells it.
                state.epoch = 0 if event.has_rejoined else state.epoch
                report = self._report(state) if event.has_rejoined else []
                return [*report, SetTimer(_IDLE, now + self.algorithm.patience)]
            case TimerFired(name) if name == _IDLE:
                again = SetTimer(_IDLE, now + self.algorithm.patience)
                return [] if state.has_finished else [again]
            case Received():
                return self._hear(state, event.sender, event.message, now)
            case TimerFired() if SERVER in state.lost and not state.has_finished:
                raise self.algorithm.gives_up(f"server {state.rank}", f"rank {SERVER}")
            case WorkerLost(rank):
                state.lost[rank] = None
                if rank == SERVER:
                    return [SetTimer("patience", now + self.algorithm.patience)]
                return self._report(state) if rank >= self.num_servers else []
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                if rank == SERVER:
                    return [SetTimer("patience", math.inf), *self._report(state, again=True)]
                return self._report(state) if rank >= self.num_servers else []
        return []

    def _hear(
        self, state: ShardServerState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        if message.kind in PIECE_KINDS and sender >= self.num_servers:
            # Rank 0 orders a commit once all servers hold their pieces, so it hears of each.
            return self._report(state) if self.keep(state, sender, message) else []
        if sender != SERVER:
            return []
        if message.kind == "hail":
            return self._report(state, again=True)
        return self._obey(state, message, now) if message.kind == "order" else []

    def keep(self, state: ShardServerState, sender: Rank, piece: Message) -> bool:
        """Keep a piece; return False if its form is wrong or a newer piece is known."""
        kept, worker = state.pieces[piece.kind], self.inner_rank(sender)
        content = piece.payload["update" if piece.kind == "commit" else "params"]
        # The schema allows pieces of any length up to the longest; only this server knows its
        # own, and a liar's piece must not end it.
        if content.shape != state.first.shape or content.dtype != state.first.dtype:
            return False
        old = kept.get(worker)
        if old is None or label(old) < label(piece):
            kept[worker] = piece
        elif label(old) > label(piece):
            return False
        elif not old.payload:  # it was used, and may be needed again
            kept[worker] = piece
        return True

    def _obey(self, state: ShardServerState, order: Message, now: Seconds) -> list[Effect]:
        """Carry out an order, and the orders that have waited for it."""
        numbers = order.numbers
        if numbers["epoch"] < state.epoch or not is_possible(numbers["epoch"], now):
            return []
        effects: list[Effect] = []
        if numbers["epoch"] > state.epoch:
            effects += self.begin_epoch(state, int(numbers["epoch"]))
        if numbers["index"] < state.num_orders:
            # A repetition: the report that confirmed it was lost, or is still on its way.
            return self._report(state)
        state.early[int(numbers["index"])] = order
        # Rank 0 has these slices; until it says so they may have to be sent again.
        for look in [look for look in state.looks if look < numbers["num_looked"]]:
            del state.looks[look]
        while not state.is_astray and (ready := state.early.pop(state.num_orders, None)):
            effects += self.carry_out(state, ready, now)
        return [*effects, *self._report(state)]

    def _report(self, state: ShardServerState, again: bool = False) -> list[Effect]:
        """Report this server's pieces to rank 0; with `again`, also slices that rank 0 may
        lack.

        A report confirms orders, names the newest piece of each worker by its label, and tells
        which workers this server has lost.
        """
        if SERVER in state.lost:
            return []  # its return has the report sent
        none = Message("", 0, {}, {"life": 0.0, "serial": 0})
        rows = [
            [label(state.pieces[kind].get(j, none))[i] for j in self.algorithm.workers]
            for kind in PIECE_KINDS
            for i in range(2)
        ]
        missed = [float(rank in state.lost) for rank in self.workers]
        # Numbered, because an old report that arrives late must not undo a newer one.
        state.num_told += 1
        numbers = {
            "epoch": state.epoch,
            "num_orders": state.num_orders,
            "is_astray": int(state.is_astray),
            "told": state.num_told,
        }
        holds = torch.tensor([*rows, missed], dtype=torch.float64)
        report = Send(SERVER, Message("holds", state.round, {"holds": holds}, numbers))
        looks = state.looks if again else {}
        return [report, *(self._slice(state, number) for number in looks)]

    def _slice(self, state: ShardServerState, number: int) -> Send:
        numbers = {"epoch": state.epoch, "look": number}
        payload = {"params": state.looks[number]}
        return Send(SERVER, Message("slice", state.round, payload, numbers))

    # Common to all servers.

    def begin_epoch(self, state: ShardServerState, epoch: int) -> list[Effect]:
        """Forget the model, as a restarted server would."""
        state.inner = self.algorithm.init_server(state.first)
        state.epoch, state.num_orders, state.chain = epoch, 0, 0
        state.num_answers, state.num_looks = 0, 0
        state.early, state.looks, state.is_astray = {}, {}, False
        # The model that is adopted next may lack commits that the last epoch has used. Their
        # tensors are gone, so workers must send these pieces again.
        commits = state.pieces["commit"]
        state.pieces["commit"] = {j: piece for j, piece in commits.items() if piece.payload}
        again = Message("again", state.round)
        return [Send(j, again) for j in self.workers if j not in state.lost]

    def carry_out(self, state: ShardServerState, order: Message, now: Seconds) -> list[Effect]:
        """Pass the order's event to the algorithm if all required pieces are present."""
        # The chain tells whether this server has carried out the same orders before. Equal
        # numbers are not enough after a checkpoint.
        is_next = order.numbers["chain"] == state.chain
        event = self._event(state, order.numbers) if is_next else None
        if event is None:
            # A newer piece has arrived, or a server has resumed from a checkpoint.
            state.is_astray = True
            return []
        state.num_orders += 1
        state.chain = next_chain(order)
        # Rank 0's time, not this server's: all servers must set the same timers.
        at = order.numbers["at"]
        effects = self.algorithm.handle_as_server(state.inner, event, at)
        # In a new epoch the old slice is still the best estimate, until a model is adopted.
        if not state.inner.is_new:
            state.params = state.inner.estimate
        state.round = max(state.round, state.inner.round)
        return [each for effect in effects for each in self._pass_on(state, effect)]

    def _event(self, state: ShardServerState, numbers: Mapping[str, float]) -> Event | None:
        """The event that an order names; None if there can be no such event here."""
        what, worker = EVENTS[int(numbers["what"])], int(numbers["worker"])
        if what in TIMERS:
            return TimerFired(what)
        match what:
            case "started" | "rejoined":
                return Started(has_rejoined=what == "rejoined")
            case "evaluated":
                return Evaluated(numbers.get("loss", math.nan))
            case _ if worker not in self.algorithm.workers:
                return None
            case "pull":
                return Received(worker, Message("pull", 0))
            case "lost" | "lied":
                return WorkerLost(worker, has_lied=what == "lied")
            case "joined" | "restarted":
                return WorkerJoined(worker, has_restarted=what == "restarted")
            case "repeat" if numbers["number"] <= state.inner.newest(worker):
                # A known commit asks for its answer again.
                number = {"number": numbers["number"]}
                return Received(worker, Message("commit", 0, numbers=number))
            case "commit" | "copy":
                piece = state.pieces[what].get(worker)
                wanted = numbers["life"], numbers["serial"]
                if piece is None or not piece.payload or label(piece) != wanted:
                    return None
                # The label stays, so that the piece is known when it comes again.
                state.pieces[what][worker] = replace(piece, payload={})
                own = {name: n for name, n in piece.numbers.items() if name not in LABELS}
                # The same model may be reported twice, with different counts. Servers may hold
                # different ones, so the order says which counts.
                own["number"], round = numbers["number"], int(numbers["round"])
                return Received(worker, replace(piece, round=round, numbers=own))
        return None

    def _pass_on(self, state: ShardServerState, effect: Effect) -> list[Effect]:
        """Carry out an effect: each server acts for its slice, and rank 0 does everything
        else.
        """
        is_leading = state.rank == SERVER
        match effect:
            case Send(worker, Message(kind="params") as answer):
                numbers = {
                    **answer.numbers,
                    "epoch": state.epoch,
                    "answer": state.num_answers,
                }
                state.num_answers += 1
                return [Send(self.outer(worker), replace(answer, numbers=numbers))]
            case Send(worker, message) if is_leading:
                if message.kind == "show":
                    message = replace(message, numbers={"epoch": state.epoch})
                return [Send(self.outer(worker), message)]
            case Evaluate(params):
                # Kept until rank 0 has the slices of all servers: a slice may be lost.
                number, state.num_looks = state.num_looks, state.num_looks + 1
                state.looks[number] = params
                return [] if is_leading else [self._slice(state, number)]
            case Finish():
                state.has_finished = True
                return [effect]
        return [effect] if is_leading else []


def label(piece: Message) -> tuple[float, float]:
    """Key for comparing pieces of one worker: a newer piece has a larger key."""
    return piece.numbers["life"], piece.numbers["serial"]


def next_chain(order: Message) -> int:
    """Compute the digest of an order and all its predecessors."""
    fields = sorted(item for item in order.numbers.items() if item[0] != "num_looked")
    return zlib.crc32(repr(fields).encode())


def is_possible(epoch: float, now: Seconds) -> bool:
    """Whether rank 0 can have begun so many epochs by now.

    It counts from the milliseconds of its clock, and each event begins at most one epoch. After
    a liar's higher epoch, no server and no worker would accept an honest one.
    """
    return epoch <= _EPOCHS_A_SECOND * (now + _CLOCKS_DIFFER)
