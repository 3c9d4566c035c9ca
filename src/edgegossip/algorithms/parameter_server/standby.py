"""One rank of a parameter server whose workers can take the server's place.

Each worker has the model from the server's last answer, and the values that the server must
keep. A newly elected server (see `Election`) acts like one that has restarted: it asks all
ranks for the newest model. A serving worker keeps training, so a rank has up to two halves.

All messages state their sender's term. A message from an older term is ignored and answered
with the current term. A server that cannot reach more than half of all ranks merges nothing. If
a cut leaves a server on each side, one of them therefore pauses, and steps down once the cut is
healed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from edgegossip.algorithms.parameter_server.election import (
    AGE,
    ELECTION,
    MAX_TERM,
    UNKNOWN,
    Election,
    schema as election_schema,
)
from edgegossip.algorithms.parameter_server.halves import (
    OF_WORKERS,
    SERVING,
    Halves,
    StandbyState,
)
from edgegossip.algorithms.parameter_server.states import RESEND, SERVER
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Effect,
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
)
from edgegossip.core.schema import MessageSpec

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
