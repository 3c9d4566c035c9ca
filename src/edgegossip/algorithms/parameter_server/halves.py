"""The two halves of a rank that may serve: a worker and a server.

Neither half knows about elections: to both, the server is rank 0. Messages to the server go to
the rank that currently serves, which may be this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from edgegossip.algorithms.parameter_server.election import UNKNOWN, Age, Election
from edgegossip.algorithms.parameter_server.states import (
    SERVER,
    CommitterState,
    ServerState,
)
from edgegossip.core.protocol import (
    Effect,
    Evaluate,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    WorkerState,
)

if TYPE_CHECKING:
    from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer

SERVING = "serving "
"""Prefix of the names of the serving half's timers."""
OF_WORKERS = ("commit", "pull", "copy")
"""Kinds of messages to the server."""


@dataclass(slots=True, kw_only=True)
class StandbyState(WorkerState):
    """State of a rank; `params` and `round` are those of its halves.

    Attributes:
        election: Election, which knows the rank that serves.
        worker: The half that trains; None on rank 0.
        server: The half that serves; None on ranks that do not.
        copy: The newest model received from the server; None if there is none.
        age: Age of that model.
        recent: On the server, workers that have committed, as keys, most recent last.
        held: The answer to the worker on this rank, held back until other ranks have its model.
        held_for: The other ranks that must have the model, as keys.
        timers: Active timers of `server`, as keys.
        num_asked: Number of running evaluations.
        num_stale: Number of running evaluations that a server requested before it stepped down.
    """

    election: Election
    worker: CommitterState | None
    server: ServerState | None
    copy: Message | None = None
    age: Age = (0, 0)
    recent: dict[Rank, None] = field(default_factory=dict)
    held: Message | None = None
    held_for: dict[Rank, None] = field(default_factory=dict)
    timers: dict[str, None] = field(default_factory=dict)
    num_asked: int = 0
    num_stale: int = 0

    @property
    def estimate(self) -> Tensor:
        """The newest server model that this rank knows, [num_params]."""
        if self.server is not None:
            return self.server.params
        return self.params if self.worker is None else self.worker.base

    @property
    def is_evaluated(self) -> bool:
        return self.server is not None and not self.server.is_new


@dataclass(frozen=True, slots=True)
class Halves:
    """Dispatches events to the halves of a rank, and carries messages between them.

    Args:
        algorithm: Algorithm of the two halves.
    """

    algorithm: ParameterServer

    def work(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        if state.worker is None:
            return []
        effects = self.algorithm.work(state.worker, event, now)
        return self.carry(state, effects, now)

    def serve(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        server = state.server
        if server is None:
            return []
        server.may_merge = state.election.may_merge
        before = server.params
        effects = self.algorithm.handle_as_server(server, event, now)
        if server.params is not before and not server.is_new:
            effects = self._keep_fresh(state, server, effects)
        return self.carry(state, effects, now, is_server=True)

    def _keep_fresh(
        self, state: StandbyState, server: ServerState, effects: list[Effect]
    ) -> list[Effect]:
        """Send the new model to the most recent committers, even when answering another worker.

        The worker on this rank waits until they have the model, as other workers wait for their
        answers. Otherwise it would commit without pause and starve the other workers.
        """
        answers = {
            each.receiver: each
            for each in effects
            if isinstance(each, Send) and each.message.payload.get("params") is server.params
        }
        answered = answers.keys()
        for rank in sorted(answered - {state.rank}):
            state.recent.pop(rank, None)
            state.recent[rank] = None
        others = [j for j in self.algorithm.workers if j not in state.recent]
        by_age = [*reversed(state.recent), *others]
        there = [j for j in by_age if j != state.rank and j not in server.lost]
        behind = [j for j in there[: self.algorithm.standby] if j not in answered]
        make = self.algorithm.model_message
        keeps = [Send(j, make("keep", server, j)) for j in behind]
        if behind and (own := answers.get(state.rank)):
            effects.remove(own)
            state.held, state.held_for = own.message, dict.fromkeys(behind)
        return [*effects, *keeps]

    def release(
        self, state: StandbyState, rank: Rank, now: Seconds, num_kept: float = math.inf
    ) -> list[Effect]:
        """Answer this rank's worker if `rank` was the last rank that lacked the held model."""
        if state.held is None or num_kept < int(state.held.payload["counts"].sum()):
            return []
        state.held_for.pop(rank, None)
        if state.held_for:
            return []
        held, state.held = state.held, None
        return self.hear_server(state, held, now)

    def carry(
        self, state: StandbyState, effects: list[Effect], now: Seconds, is_server: bool = False
    ) -> list[Effect]:
        """Carry out the effects of a half: messages to this rank go to the other half."""
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    carried += self._send(state, receiver, message, now, is_server)
                case SetTimer(name, at) if is_server:
                    state.timers[name] = None
                    carried.append(SetTimer(SERVING + name, at))
                case Finish():
                    if is_server and state.worker is not None:
                        continue  # it keeps serving until it is told otherwise
                    carried.append(effect)
                case Evaluate():
                    state.num_asked += 1
                    carried.append(effect)
                case _:
                    carried.append(effect)
        return carried

    def _send(
        self,
        state: StandbyState,
        receiver: Rank,
        message: Message,
        now: Seconds,
        is_server: bool,
    ) -> list[Effect]:
        election = state.election
        if not is_server and message.kind in OF_WORKERS:
            receiver = election.leader
            if message.kind == "copy":
                message = replace(message, numbers={"as_of": 0, **message.numbers})
        if receiver != state.rank:
            numbers = {**message.numbers, "term": election.term}
            if message.kind == "show":
                numbers |= {"as_of": state.age[0], "num_commits": state.age[1]}
            return [Send(receiver, replace(message, numbers=numbers))]
        if is_server:
            return self.hear_server(state, message, now)
        return self.serve(state, Received(state.rank, message), now)

    def hear_server(self, state: StandbyState, message: Message, now: Seconds) -> list[Effect]:
        """Keep the model in the message, if any, and inform the worker's half."""
        match message.kind:
            case "params" | "keep":
                age = (state.election.term, int(message.payload["counts"].sum()))
                if age >= state.age:
                    state.copy, state.age = message, age
                if message.kind == "keep":
                    kept = Message("kept", state.round, numbers={"num_commits": age[1]})
                    return self.carry(state, [Send(state.election.leader, kept)], now)
            case "show" if state.copy is not None and state.worker is not None:
                return self._show(state, state.worker, state.copy, message, now)
        return self.work(state, Received(SERVER, message), now)

    def _show(
        self,
        state: StandbyState,
        worker: CommitterState,
        newest: Message,
        show: Message,
        now: Seconds,
    ) -> list[Effect]:
        """Report the newest model to a new server, or confirm that the server's own is at least
        as new.
        """
        payload = {**newest.payload}
        # A restarted worker may have received a model, but has no memory of its own state.
        number = max(worker.last_number, int(payload["counts"][state.rank - 1]))
        theirs = (show.numbers.get("as_of", UNKNOWN), show.numbers.get("num_commits", 0))
        if state.age <= theirs:
            del payload["params"]  # sending it may take long
        numbers = {**newest.numbers, "number": number, "as_of": state.age[0]}
        return self.carry(
            state, [Send(SERVER, Message("copy", worker.round, payload, numbers))], now
        )
