"""Shards: several servers share the model; each has a slice, and every worker uses all servers.

A worker acts as with a single server, but sends commits in pieces, one to each server. An
answer counts once all its pieces have arrived. `ShardServer` makes the servers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from edgegossip.algorithms.server.parameter_server import (
    ParameterServer,
    require_server,
    require_whole_answers,
)
from edgegossip.algorithms.server.worker import MAX_COUNT, SERVER, CommitterState
from edgegossip.algorithms.wrappers.shards.shard_leader import ShardLeader
from edgegossip.algorithms.wrappers.shards.shard_server import (
    EVENTS,
    ShardServer,
    ShardServerState,
    is_possible,
)
from edgegossip.contract.algorithm import Traits, Wrapper
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.contract.topology import from_edges

_MOST = 2**52
_LATEST = 1e12
_EPOCH: Mapping[str, Limits] = {"epoch": range(_MOST)}
_LABELS: Mapping[str, Limits] = {"life": (0.0, _LATEST), "serial": range(_MOST)}


@dataclass(slots=True, kw_only=True)
class ShardWorkerState(WorkerState):
    """State of a worker; `params` and `round` are those of `inner`.

    Attributes:
        inner: State that a worker of a single server would have.
        life: Time of the last return, or 0; pieces from an earlier life count as older.
        serial: Serial number of the worker's last commit.
        epoch: Epoch of the last request for this worker's model; answers from earlier epochs no
            longer count.
        parts: Newest piece of an answer from each server.
        lost: Servers that cannot be reached, as keys.
    """

    inner: CommitterState
    life: Seconds = 0.0
    serial: int = 0
    epoch: int = 0
    parts: dict[Rank, Message] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)


ShardsState: TypeAlias = ShardServerState | ShardWorkerState


@dataclass(frozen=True, kw_only=True)
class Shards(Wrapper[ShardsState]):
    """Cut the model of a parameter server into slices, and give each to a server of its own.

    Ranks 0 to `num_servers - 1` are servers, and the inner algorithm's workers have the ranks
    after them. In every answer, all slices include the same commits, so `BSP` and
    `FixedADACOMM` produce the model of a single server, bit for bit. A worker that any server
    has lost counts as lost. `docs/parameter-servers.md` describes failures and costs.

    Args:
        inner: Any parameter server whose rule is elementwise; that of `HeLoCo` is not.
        num_servers: Number of servers that share the model, at least 2.

    Raises:
        ValueError: If `num_servers` is out of range, or `inner` is no parameter server or not
            elementwise.
    """

    keeps_name: ClassVar[bool] = True
    inner: ParameterServer
    num_servers: int

    def __post_init__(self) -> None:
        require_server("Shards", self.inner)
        require_whole_answers("Shards", self.inner)
        if not self.inner.is_elementwise:
            name = type(self.inner).__name__
            raise ValueError(
                f"Shards needs a parameter server that treats each entry of the model by "
                f"itself, got {name}, which needs whole layers; leave out Shards, or take "
                "AsyncLocalSGD"
            )
        if self.inner.robust is not None:
            raise ValueError(
                "Shards gives each server a slice, and a robust rule judges whole commits; "
                "leave out Shards or robust"
            )
        check_ranges(self, num_servers="at least 2")

    @cached_property
    def _servers(self) -> tuple[ShardServer, ...]:
        """The behavior of each server; rank 0 leads."""
        leader = ShardLeader(self.inner, self.num_servers)
        return leader, *[ShardServer(self.inner, self.num_servers)] * (self.num_servers - 1)

    @property
    def traits(self) -> Traits:
        """Servers reach each other and all workers; workers reach only the servers."""
        num_ranks = self.num_servers + self.inner.num_workers
        edges = [(i, j) for i in range(self.num_servers) for j in range(i + 1, num_ranks)]
        return replace(self.inner.traits, topology=from_edges(num_ranks, edges))

    @property
    def workers(self) -> range:
        """The ranks that train."""
        return self._servers[0].workers

    def role(self, rank: Rank) -> Role:
        return self._servers[0].role(rank)

    def init(self, rank: Rank, params: Tensor) -> ShardsState:
        if rank < self.num_servers:
            return self._servers[rank].init(rank, params)
        inner = self.inner.init_worker(self._servers[0].inner_rank(rank), params)
        return ShardWorkerState(rank=rank, params=params, inner=inner)

    def handle(self, state: ShardsState, event: Event, now: Seconds) -> list[Effect]:
        if state.rank < self.num_servers:
            assert isinstance(state, ShardServerState)
            return self._servers[state.rank].handle(state, event, now)
        assert isinstance(state, ShardWorkerState)
        effects = self._work(state, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        return effects

    # A worker.

    def _work(self, state: ShardWorkerState, event: Event, now: Seconds) -> list[Effect]:
        passed: Event | None = event
        match event:
            case Started():
                # Serial numbers begin anew with a worker that comes back. Its pieces must still
                # count as newer than those that it has forgotten.
                state.life = now if event.has_rejoined else 0.0
            case Received(sender, Message(kind="again")) if 0 < sender < self.num_servers:
                # Another server asks only for its own piece; rank 0 asks for all pieces.
                commit = state.inner.commit
                pieces = [] if commit is None else self._cut(state, Send(SERVER, commit))
                return [each for each in pieces if each.receiver == sender]
            case Received(sender, message):
                passed = self._hear(state, sender, message, now)
            # To the inner worker, the server is there while all servers are: without one of
            # them no answer can be complete.
            case WorkerLost(rank):
                is_first = rank < self.num_servers and not state.lost
                if rank < self.num_servers:
                    state.lost[rank] = None
                passed = WorkerLost(SERVER) if is_first else None
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                is_last = rank < self.num_servers and not state.lost
                passed = WorkerJoined(SERVER, event.has_restarted) if is_last else None
            case TimerFired("patience"):
                passed = None
                if state.lost and state.round < self.inner.num_rounds:
                    whom = f"the server, rank {min(state.lost)}"
                    raise self.inner.gives_up(f"worker {state.rank}", whom)
        if passed is None:
            return []
        before = state.inner.commit
        effects = self.inner.handle_as_worker(state.inner, passed, now)
        # Counted before the pieces are cut: a new commit must have a label of its own, because
        # servers compare labels and not contents.
        if state.inner.commit is not before:
            state.serial += 1
        return [
            each
            for effect in effects
            for each in (self._cut(state, effect) if isinstance(effect, Send) else [effect])
        ]

    def _hear(
        self, state: ShardWorkerState, sender: Rank, message: Message, now: Seconds
    ) -> Received | None:
        """Return the event that a worker with a single server would get, if any."""
        if sender >= self.num_servers or not is_possible(message.numbers.get("epoch", 0), now):
            return None
        match message.kind:
            case "params":
                joined = self._join(state, sender, message)
                return None if joined is None else Received(SERVER, joined)
            case "show" if sender == SERVER:
                # The report states this epoch, so that a late one is not taken for an answer to
                # the next request.
                state.epoch = max(state.epoch, int(message.numbers["epoch"]))
                return Received(SERVER, Message("show", message.round))
        # Rank 0 alone speaks for all servers; the others send only their slices.
        return Received(SERVER, message) if sender == SERVER else None

    def _join(self, state: ShardWorkerState, sender: Rank, part: Message) -> Message | None:
        """Keep a piece of an answer; return the answer when all its pieces have arrived."""
        num_held = self.role(sender).num_held(state.params.numel())
        if part.payload["params"].numel() != num_held:
            return None  # the schema allows the longest slice to any server
        # Servers number their answers alike, so pieces of one answer have the same number. An
        # answer from before the last report is not taken: the servers have begun anew since.
        newest = _answer(state.parts[sender]) if sender in state.parts else (state.epoch, 0)
        if _answer(part) < newest:
            return None
        state.parts[sender] = part
        answers = {_answer(each) for each in state.parts.values()}
        if len(answers) > 1 or len(state.parts) < self.num_servers:
            return None
        parts, state.parts = state.parts, {}
        first = parts[SERVER]
        ordered = [parts[rank].payload["params"] for rank in range(self.num_servers)]
        numbers = {
            name: number
            for name, number in first.numbers.items()
            if name not in ("epoch", "answer")
        }
        payload = {**first.payload, "params": torch.cat(ordered)}
        return replace(first, payload=payload, numbers=numbers)

    def _cut(self, state: ShardWorkerState, effect: Send) -> list[Send]:
        """Cut a message for the server into pieces; a message without pieces goes to rank 0."""
        message, numbers = effect.message, {**effect.message.numbers, "life": state.life}
        match message.kind:
            case "commit":
                name, numbers["serial"] = "update", state.serial
            case "copy":
                name, numbers["serial"] = "params", state.epoch
            case _:  # rank 0 orders a pull for all servers
                return [effect]
        pieces: list[Send] = []
        for rank in range(self.num_servers):
            stretch = self.role(rank).stretch(state.params.numel())
            # A clone, because a view would keep the whole vector alive while it is in flight.
            payload = {**message.payload, name: message.payload[name][stretch].clone()}
            if "num_trained" in numbers:
                # Trained entries come first in the whole vector, so they do in each piece.
                trained = int(message.numbers["num_trained"])
                numbers["num_trained"] = min(max(trained, stretch.start), stretch.stop)
                numbers["num_trained"] -= stretch.start
            pieces.append(Send(rank, replace(message, payload=payload, numbers={**numbers})))
        return pieces

    # Messages.

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Pieces instead of whole messages, and the messages between servers."""
        # Slices differ by one entry. A kind of message has one specification for all receivers,
        # so each receiver checks the exact length itself.
        longest = -(-params.numel() // self.num_servers)
        piece = TensorSpec(params.dtype, (None,), max_numel=longest)
        messages = self.inner.schema(params)
        trained = {"num_trained": range(longest + 1)}

        def with_piece(kind: str, name: str, more: Mapping[str, Limits]) -> MessageSpec:
            spec = messages[kind]
            tensors, numbers = {**spec.tensors, name: piece}, {**spec.numbers, **more}
            return replace(spec, tensors=tensors, numbers=numbers)

        return {
            **messages,
            "commit": with_piece("commit", "update", {**trained, **_LABELS}),
            "copy": with_piece("copy", "params", _LABELS),
            "params": with_piece("params", "params", {**_EPOCH, "answer": range(_MOST)}),
            "show": replace(messages["show"], numbers=_EPOCH),
            **self._between_servers(piece),
        }

    def _between_servers(self, piece: TensorSpec) -> dict[str, MessageSpec]:
        """Orders, reports on the pieces that a server holds, requests to report, and slices."""
        ahead, num_workers = self.inner.num_rounds, self.inner.num_workers
        order: dict[str, Limits] = {
            **_LABELS,
            "number": range(MAX_COUNT + 1),
            "round": range(ahead + 1),
            **_EPOCH,
            "index": range(_MOST),
            "what": range(len(EVENTS)),
            "worker": range(num_workers + 1),
            "at": (0.0, _LATEST),
            "chain": range(2**32),
            "num_looked": range(_MOST),
        }
        held: dict[str, Limits] = {
            **_EPOCH,
            "num_orders": range(_MOST),
            "is_astray": range(2),
            "told": range(_MOST),
        }
        holds = TensorSpec(torch.float64, (5, num_workers), minimum=0, maximum=_MOST)
        return {
            "order": MessageSpec(
                numbers=order, optional_numbers={"loss": (-1e300, 1e300)}, max_round=ahead
            ),
            "hail": MessageSpec(max_round=ahead),
            "holds": MessageSpec({"holds": holds}, numbers=held, max_round=ahead),
            "slice": MessageSpec(
                {"params": piece}, numbers={**_EPOCH, "look": range(_MOST)}, max_round=ahead
            ),
        }


def _answer(part: Message) -> tuple[float, float]:
    return part.numbers["epoch"], part.numbers["answer"]
