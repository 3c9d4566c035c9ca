"""Several servers that share the model: each has a slice, and every worker uses all servers.

A worker acts as with a single server, but sends commits in pieces, one to each server. An
answer counts once all its pieces have arrived. `Sharing` makes the servers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from edgegossip.algorithms.server.state import (
    MAX_COUNT,
    PATIENCE,
    SERVER,
    CommitterState,
    is_possible,
)
from edgegossip.algorithms.wrappers.shards.shard_leader import Leading
from edgegossip.algorithms.wrappers.shards.shard_server import WHAT, Sharing, SharingState
from edgegossip.contract.errors import ServerLostError
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
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.contract.topology import Topology, from_edges

if TYPE_CHECKING:
    from edgegossip.algorithms.server.parameter_server import ParameterServer

_MOST = 2**52
_LATEST = 1e12
_EPOCH: Mapping[str, Limits] = {"epoch": range(_MOST)}
_LABELS: Mapping[str, Limits] = {"life": (0.0, _LATEST), "serial": range(_MOST)}


@dataclass(slots=True, kw_only=True)
class SeveralServersState(WorkerState):
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


SharedState: TypeAlias = SharingState | SeveralServersState


class SeveralServers:
    """Dispatches each event of a rank to the behavior of a server or a worker.

    Args:
        algorithm: Algorithm with `num_servers` above 1.
    """

    def __init__(self, algorithm: ParameterServer) -> None:
        self.algorithm = algorithm
        self._sharing, self._leading = Sharing(algorithm), Leading(algorithm)
        self._single = self._sharing.single
        self._servers = range(algorithm.num_servers)

    @property
    def topology(self) -> Topology:
        """Servers reach each other and all workers; workers reach only the servers."""
        num_ranks = len(self._servers) + self.algorithm.num_workers
        edges = [(i, j) for i in self._servers for j in range(i + 1, num_ranks)]
        return from_edges(num_ranks, edges)

    def role(self, rank: Rank) -> Role:
        return self._sharing.role(rank)

    def init(self, rank: Rank, params: Tensor) -> SharedState:
        if rank in self._servers:
            return (self._sharing if rank else self._leading).init(rank, params)
        inner = self._single.init_worker(self._sharing.inner(rank), params)
        return SeveralServersState(rank=rank, params=params, inner=inner)

    def handle(self, state: SharedState, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(state, SharingState):
            return (self._sharing if state.rank else self._leading).handle(state, event, now)
        effects = self._work(state, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        return effects

    # A worker.

    def _work(self, state: SeveralServersState, event: Event, now: Seconds) -> list[Effect]:
        passed: Event | None = event
        match event:
            case Started():
                state.life = now if event.has_rejoined else 0.0
            case Received(sender, Message(kind="again")) if sender in self._servers[1:]:
                # Another server asks only for its own piece; rank 0 asks for all pieces.
                commit = state.inner.commit
                pieces = [] if commit is None else self._cut(state, Send(SERVER, commit))
                return [each for each in pieces if each.receiver == sender]
            case Received(sender, message):
                passed = self._hear(state, sender, message, now)
            case WorkerLost(rank):
                is_first = rank in self._servers and not state.lost
                if rank in self._servers:
                    state.lost[rank] = None
                passed = WorkerLost(SERVER) if is_first else None
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                is_last = rank in self._servers and not state.lost
                passed = WorkerJoined(SERVER, event.has_restarted) if is_last else None
            case TimerFired(name) if name == PATIENCE:
                passed = None
                self._give_up(state)
        if passed is None:
            return []
        before = state.inner.commit
        effects = self._single.work(state.inner, passed, now)
        if state.inner.commit is not before:
            state.serial += 1
        return [
            each
            for effect in effects
            for each in (self._cut(state, effect) if isinstance(effect, Send) else [effect])
        ]

    def _give_up(self, state: SeveralServersState) -> None:
        if state.lost and state.round < self.algorithm.num_rounds:
            raise ServerLostError(
                f"worker {state.rank} has waited {self.algorithm.patience:g} s for the server, "
                f"rank {min(state.lost)}, which is lost; start it again, and continue with "
                "--resume"
            )

    def _hear(
        self, state: SeveralServersState, sender: Rank, message: Message, now: Seconds
    ) -> Received | None:
        """Return the event that a worker with a single server would get, if any."""
        if sender not in self._servers or not is_possible(message.numbers.get("epoch", 0), now):
            return None
        match message.kind:
            case "params":
                joined = self._join(state, sender, message)
                return None if joined is None else Received(SERVER, joined)
            case "show" if sender == SERVER:
                state.epoch = max(state.epoch, int(message.numbers["epoch"]))
                return Received(SERVER, Message("show", message.round))
        return Received(SERVER, message) if sender == SERVER else None

    def _join(self, state: SeveralServersState, sender: Rank, part: Message) -> Message | None:
        """Keep a piece of an answer; return the answer when all its pieces have arrived."""
        num_held = self.role(sender).num_held(state.params.numel())
        if part.payload["params"].numel() != num_held:
            return None
        newest = _answer(state.parts[sender]) if sender in state.parts else (state.epoch, 0)
        if _answer(part) < newest:
            return None
        state.parts[sender] = part
        if len({_answer(each) for each in state.parts.values()}) > 1 or len(state.parts) < len(
            self._servers
        ):
            return None
        parts, state.parts = state.parts, {}
        first = parts[SERVER]
        params = torch.cat([parts[rank].payload["params"] for rank in self._servers])
        numbers = {
            name: number
            for name, number in first.numbers.items()
            if name not in ("epoch", "answer")
        }
        return replace(first, payload={**first.payload, "params": params}, numbers=numbers)

    def _cut(self, state: SeveralServersState, effect: Send) -> list[Send]:
        """Cut a message for the server into pieces; a message without pieces goes to rank 0."""
        message, numbers = effect.message, {**effect.message.numbers, "life": state.life}
        match message.kind:
            case "commit":
                name, numbers["serial"] = "update", state.serial
            case "copy":
                name, numbers["serial"] = "params", state.epoch
            case _:
                return [effect]
        pieces: list[Send] = []
        for rank in self._servers:
            stretch = self.role(rank).stretch(state.params.numel())
            payload = {**message.payload, name: message.payload[name][stretch].clone()}
            if "num_trained" in numbers:
                trained = int(message.numbers["num_trained"])
                numbers["num_trained"] = min(max(trained, stretch.start), stretch.stop)
                numbers["num_trained"] -= stretch.start
            pieces.append(Send(rank, replace(message, payload=payload, numbers={**numbers})))
        return pieces

    # Messages.

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Pieces instead of whole messages, and the messages between servers."""
        longest = -(-params.numel() // len(self._servers))
        piece = TensorSpec(params.dtype, (None,), max_numel=longest)
        messages = self._single.messages(params)
        commit, copy, answer = (messages[kind] for kind in ("commit", "copy", "params"))
        trained = {"num_trained": range(longest + 1)}
        return {
            **messages,
            "commit": replace(
                commit,
                tensors={"update": piece},
                numbers={**commit.numbers, **trained, **_LABELS},
            ),
            "copy": replace(
                copy,
                tensors={**copy.tensors, "params": piece},
                numbers={**copy.numbers, **_LABELS},
            ),
            "params": replace(
                answer,
                tensors={**answer.tensors, "params": piece},
                numbers={**answer.numbers, **_EPOCH, "answer": range(_MOST)},
            ),
            "show": replace(messages["show"], numbers=_EPOCH),
            **self._between_servers(piece),
        }

    def _between_servers(self, piece: TensorSpec) -> dict[str, MessageSpec]:
        """Orders, reports on the pieces that a server holds, requests to report, and slices."""
        ahead, num_workers = self.algorithm.num_rounds, self.algorithm.num_workers
        order: dict[str, Limits] = {
            **_LABELS,
            "number": range(MAX_COUNT + 1),
            "round": range(self.algorithm.num_rounds + 1),
            **_EPOCH,
            "index": range(_MOST),
            "what": range(len(WHAT)),
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


@cache
def several_servers(algorithm: ParameterServer) -> SeveralServers:
    """Build the behavior of `algorithm`'s ranks; cached."""
    return SeveralServers(algorithm)
