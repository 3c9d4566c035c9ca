"""The two halves of a rank that may serve: a worker and a server.

Neither half knows about elections: to both, the server is rank 0. Messages to the server go to
the rank that currently serves, which may be this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from edgegossip.algorithms.server.state import RESEND, SERVER, CommitterState, ServerState
from edgegossip.algorithms.wrappers.standby.election import (
    AGE,
    ELECTION,
    MAX_TERM,
    UNKNOWN,
    Age,
    Election,
    schema as election_schema,
)
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Note,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec

if TYPE_CHECKING:
    from edgegossip.algorithms.server.parameter_server import ParameterServer


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


# One rank of a parameter server whose workers can take the server's place.
#
# Each worker has the model from the server's last answer, and the values that the server must
# keep. A newly elected server (see `Election`) acts like one that has restarted: it asks all
# ranks for the newest model. A serving worker keeps training, so a rank has up to two halves.
#
# All messages state their sender's term. A message from an older term is ignored and answered
# with the current term. A server that cannot reach more than half of all ranks merges
# nothing. If
# a cut leaves a server on each side, one of them therefore pauses, and steps down once the
# cut is
# healed.


MAJORITY, REMIND = "majority", "remind"


@dataclass(frozen=True, slots=True)
class Standby(Halves):
    """Dispatches each event to the right half of a rank and decides which rank serves."""

    def init(self, rank: Rank, params: Tensor) -> StandbyState:
        algorithm = self.algorithm
        return StandbyState(
            rank=rank,
            params=params,
            election=Election(rank=rank, num_ranks=algorithm.num_workers + 1),
            worker=None if rank == SERVER else algorithm.init_worker(rank, params),
            server=algorithm.init_server(rank, params) if rank == SERVER else None,
        )

    def schema(self, messages: Mapping[str, MessageSpec]) -> dict[str, MessageSpec]:
        """Messages of the halves and of elections, each with its sender's term."""
        term = {"term": range(UNKNOWN, MAX_TERM)}
        copy, show = messages["copy"], messages["show"]
        params = copy.specs["params"]
        counts = {name: each for name, each in copy.tensors.items() if name != "params"}
        as_of = {**copy.numbers, "as_of": range(MAX_TERM)}
        kinds = {
            **messages,
            **election_schema(self.algorithm.num_rounds),
            "copy": replace(copy, tensors=counts, optional={"params": params}, numbers=as_of),
            "show": replace(show, numbers=AGE),
            "keep": messages["params"],
            "kept": MessageSpec(
                numbers={"num_commits": AGE["num_commits"]}, max_round=show.max_round
            ),
        }
        return {
            kind: replace(spec, numbers={**spec.numbers, **term})
            for kind, spec in kinds.items()
        }

    def handle(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        was_leading = state.election.is_leading
        effects = self._handle(state, event, now)
        if state.worker is not None:
            state.params, state.round = state.worker.params, state.worker.round
        elif state.server is not None:
            state.params, state.round = state.server.params, state.server.round
        if state.worker is None and was_leading and not state.election.is_leading:
            effects.append(Finish())
        return effects

    def _handle(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return self._start(state, event, now)
            case Received():
                return self._receive(state, event.sender, event.message, now)
            case WorkerLost():
                return self._lose(state, event, now)
            case WorkerJoined():
                return self._join(state, event, now)
            case Evaluated():
                state.num_asked -= 1
                if state.num_stale:
                    state.num_stale -= 1
                    return []
                return self.serve(state, event, now)
            case TimerFired(name) if name == ELECTION:
                is_worker = state.worker is not None
                stands = state.election.stand(state.age, now) if is_worker else []
                return self.carry(state, stands, now)
            case TimerFired(name) if name == REMIND:
                return self._remind(state, now)
            case TimerFired(name) if name == MAJORITY:
                self._give_up(state)
            case TimerFired(name) if name.startswith(SERVING):
                return self.serve(state, TimerFired(name.removeprefix(SERVING)), now)
        return self.work(state, event, now)

    def _give_up(self, state: StandbyState) -> None:
        algorithm, election, server = self.algorithm, state.election, state.server
        if server is None or election.has_majority:
            return
        if any(round < algorithm.num_rounds for round in server.rounds.values()):
            raise ServerLostError(
                f"rank {state.rank}, which serves, has waited {algorithm.patience:g} s for "
                f"more than half of all {election.num_ranks} ranks; start the others again, "
                "and continue with --resume"
            )

    def _start(self, state: StandbyState, event: Started, now: Seconds) -> list[Effect]:
        election = state.election
        if not event.has_rejoined:
            election.is_leading = state.rank == SERVER
            return [*self.serve(state, event, now), *self.work(state, event, now)]
        # A restarted worker knows neither the serving rank nor the model.
        election.term, state.age, state.server = UNKNOWN, (UNKNOWN, 0), None
        found = self.carry(state, election.miss_leader(now), now)
        missing = self.work(state, WorkerLost(SERVER), now)
        finish = [] if state.worker is not None else [Finish()]
        return [*found, *missing, *self.work(state, event, now), *finish]

    # Messages.

    def _receive(
        self, state: StandbyState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        election, effects = state.election, []
        numbers = {**message.numbers}
        term = int(numbers.pop("term"))
        if not election.is_possible(max(term, int(numbers.get("stands_for", 0))), now):
            return []
        message = replace(message, numbers=numbers)
        if term > election.term:
            effects = self._follow(state, term, now)
        elif term < election.term:
            return self.carry(state, [Send(sender, Message("lead", 0))], now)
        effects += self._note_follower(state, sender, now)
        if message.kind in ("lead", *OF_WORKERS) and election.has_forgotten:
            resign = self.carry(state, [Send(sender, Message("resign", 0))], now)
            return [*effects, *resign]
        match message.kind:
            case "stand":
                may_stand = state.worker is not None
                answer = election.vote(sender, message, state.age, may_stand, now)
                return [*effects, *self.carry(state, answer, now)]
            case "vote":
                elected = election.count(sender, message)
                return [*effects, *(self._lead(state, now) if elected else [])]
            case "kept":
                num_kept = message.numbers["num_commits"]
                return [*effects, *self.release(state, sender, now, num_kept)]
            case "promised":
                election.heed(message)
                return effects
            case "resign":
                return [*effects, *self._miss(state, now)] if sender == election.leader else []
            case "lead":
                return [*effects, *self._confirm(state, sender, now)]
            case kind if kind in OF_WORKERS:
                return [*effects, *self.serve(state, Received(sender, message), now)]
        if sender != election.leader:
            return effects
        return [*effects, *self.hear_server(state, message, now)]

    def _note_follower(self, state: StandbyState, rank: Rank, now: Seconds) -> list[Effect]:
        waited = state.election.must_confirm
        state.election.hear(rank)
        # Waiting commits may be merged now.
        is_free = waited and not state.election.must_confirm
        return self.serve(state, TimerFired(RESEND), now) if is_free else []

    def _confirm(self, state: StandbyState, leader: Rank, now: Seconds) -> list[Effect]:
        """Confirm to a leading server that this rank follows it."""
        election = state.election
        if leader != election.leader:
            return []
        numbers = {"stands_for": max(election.promised, election.term)}
        followed = Message("promised", 0, numbers=numbers)
        return self.carry(state, [Send(leader, followed)], now)

    # The serving rank.

    def _miss(self, state: StandbyState, now: Seconds) -> list[Effect]:
        missed = state.election.misses_leader
        effects = self.carry(state, state.election.miss_leader(now), now)
        return effects if missed else [*effects, *self.work(state, WorkerLost(SERVER), now)]

    def _lose(self, state: StandbyState, event: WorkerLost, now: Seconds) -> list[Effect]:
        election = state.election
        missed = election.misses_leader
        effects = self.carry(state, election.lose(event.rank, now), now)
        if election.misses_leader and not missed:
            effects += self.work(state, WorkerLost(SERVER), now)
        if election.is_leading and not election.has_majority:
            effects.append(SetTimer(MAJORITY, now + self.algorithm.patience))
        if event.rank != SERVER:
            effects += self.serve(state, event, now)
        return [*effects, *self.release(state, event.rank, now)]

    def _join(self, state: StandbyState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        election, rank = state.election, event.rank
        missed = election.misses_leader
        joined = election.join(rank, event.has_restarted, now)
        effects = self.carry(state, joined, now)
        if election.is_leading and self.algorithm.resend_after is not None:
            effects.append(SetTimer(REMIND, now + self.algorithm.resend_after))
        if election.misses_leader != missed:
            is_back = not election.misses_leader
            news = WorkerJoined(SERVER) if is_back else WorkerLost(SERVER)
            effects += self.work(state, news, now)
        if election.is_leading and election.has_majority:
            effects.append(SetTimer(MAJORITY, math.inf))
        # The serving half does not know of rank 0, but may merge waiting commits again.
        return [*effects, *self.serve(state, event if rank else TimerFired(RESEND), now)]

    def _follow(self, state: StandbyState, term: int, now: Seconds) -> list[Effect]:
        effects = self._step_down(state)
        effects += self.carry(state, state.election.follow(term, now), now)
        return [*effects, *self._change_server(state, now)]

    def _step_down(self, state: StandbyState) -> list[Effect]:
        """Drop the server's state, because other ranks have continued without this server."""
        timers = [SetTimer(SERVING + name, math.inf) for name in state.timers]
        state.num_stale = state.num_asked
        state.server, state.timers, state.recent = None, {}, {}
        state.held, state.held_for = None, {}
        return [*timers, SetTimer(MAJORITY, math.inf)] if state.election.is_leading else []

    def _lead(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Begin to serve: like a restarted server, ask all ranks for the newest model."""
        assert state.worker is not None
        election = state.election
        effects = self.carry(state, election.lead(), now)
        effects.append(Note("serves", {"term": election.term}))
        state.server = self.algorithm.init_server(state.rank, state.worker.base)
        lost = [j for j in election.lost if j != SERVER]
        for rank in lost:
            effects += self.serve(state, WorkerLost(rank), now)
        effects += self.serve(state, Started(has_rejoined=True), now)
        if self.algorithm.resend_after is not None:
            effects.append(SetTimer(REMIND, now + self.algorithm.resend_after))
        return [*effects, *self._change_server(state, now)]

    def _remind(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Repeat the announcement to ranks that have not answered, if messages can be lost."""
        again = self.algorithm.resend_after
        reminders = self.carry(state, [*state.election.remind()], now)
        if again is None or not reminders:
            return []
        return [*reminders, SetTimer(REMIND, now + again)]

    def _change_server(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Tell the worker's half that its server is lost and, if the new server is reachable,
        that it has joined.
        """
        effects = self.work(state, WorkerLost(SERVER), now)
        if state.election.misses_leader:
            return effects
        joined = WorkerJoined(SERVER, has_restarted=True)
        return [*effects, *self.work(state, joined, now)]
