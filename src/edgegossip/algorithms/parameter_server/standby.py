"""One rank of a parameter server whose workers can take the server's place.

Each worker has the server's model as its last answer had it, and what the server has to
remember. Once an `Election` has found another server, that one does what a server does that has
restarted: it asks all for the newest model. So a rank has up to two halves that know nothing of
elections: a worker and, where it serves, a server. For both, the server is rank 0; here is
decided who that is. A worker that serves trains on.

All messages say their sender's term. What is of an older one is not heard, and answered with
the present one; and a server that cannot reach more than half of all ranks merges nothing. So
of two servers on both sides of a cut one stands still, and steps down when the cut is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from edgegossip.algorithms.parameter_server.election import (
    ELECTION,
    MAX_TERM,
    UNKNOWN,
    Age,
    Election,
    schema as election_schema,
)
from edgegossip.algorithms.parameter_server.states import (
    RESEND,
    SERVER,
    CommitterState,
    ServerState,
)
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
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
    WorkerState,
)
from edgegossip.core.schema import MessageSpec

if TYPE_CHECKING:
    from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer

MAJORITY, REMIND = "majority", "remind"
_SERVING = "serving "
"""Begins the names of timers of the half that serves."""
_OF_WORKERS = ("commit", "pull", "copy")
"""Kinds of messages to the server."""


@dataclass(slots=True, kw_only=True)
class StandbyState(WorkerState):
    """State of a rank; `params` and `round` are those of its halves.

    Attributes:
        election: Who serves.
        worker: The half that trains; None on rank 0.
        server: The half that serves, where it does.
        copy: The newest model of the server that it was given; None for none.
        age: How new that is.
        recent: On the server: those who have committed, as keys, the last one last.
        timers: Timers that are set for `server`, as keys.
        num_asked: Evaluations that are under way.
        num_stale: How many of them were for a server that has stepped down.
    """

    election: Election
    worker: CommitterState | None
    server: ServerState | None
    copy: Message | None = None
    age: Age = (0, 0)
    recent: dict[Rank, None] = field(default_factory=dict)
    timers: dict[str, None] = field(default_factory=dict)
    num_asked: int = 0
    num_stale: int = 0

    @property
    def estimate(self) -> Tensor:
        """The server's model, as far as it is known here, [num_params]."""
        if self.server is not None:
            return self.server.params
        return self.params if self.worker is None else self.worker.base

    @property
    def is_evaluated(self) -> bool:
        return self.server is not None and not self.server.is_new


@dataclass(frozen=True, slots=True)
class Standby:
    """Gives each event to the halves of a rank, and carries messages between the two."""

    algorithm: ParameterServer

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
        copy = messages["copy"]
        as_of = {**copy.numbers, "as_of": range(MAX_TERM)}
        kinds = {
            **messages,
            **election_schema(self.algorithm.num_rounds),
            "copy": replace(copy, numbers=as_of),
            "keep": messages["params"],
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
                return self._serve(state, event, now)
            case TimerFired(name) if name == ELECTION:
                is_worker = state.worker is not None
                stands = state.election.stand(state.age, now) if is_worker else []
                return self._carry(state, stands, now)
            case TimerFired(name) if name == REMIND:
                return self._remind(state, now)
            case TimerFired(name) if name == MAJORITY:
                self._give_up(state)
            case TimerFired(name) if name.startswith(_SERVING):
                return self._serve(state, TimerFired(name.removeprefix(_SERVING)), now)
        return self._work(state, event, now)

    def _give_up(self, state: StandbyState) -> None:
        algorithm, election, server = self.algorithm, state.election, state.server
        if server is None or election.has_majority:
            return
        if any(round < algorithm.num_rounds for round in server.rounds.values()):
            raise ServerLostError(
                f"rank {state.rank}, which serves, has waited {algorithm.patience:g} s for "
                f"more than half of all {election.num_ranks} ranks; start the others again, "
                "and go on with --resume"
            )

    def _start(self, state: StandbyState, event: Started, now: Seconds) -> list[Effect]:
        election = state.election
        if not event.has_rejoined:
            election.is_leading = state.rank == SERVER
            return [*self._serve(state, event, now), *self._work(state, event, now)]
        # It knows neither who serves nor the model.
        election.term, state.age, state.server = UNKNOWN, (UNKNOWN, 0), None
        found = self._carry(state, election.miss_leader(now), now)
        missing = self._work(state, WorkerLost(SERVER), now)
        finish = [] if state.worker is not None else [Finish()]
        return [*found, *missing, *self._work(state, event, now), *finish]

    # The halves.

    def _work(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        if state.worker is None:
            return []
        effects = self.algorithm.work(state.worker, event, now)
        return self._carry(state, effects, now)

    def _serve(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        server = state.server
        if server is None:
            return []
        server.may_merge = state.election.may_merge
        before = server.params
        effects = self.algorithm.handle_as_server(server, event, now)
        if server.params is not before and not server.is_new:
            effects += self._keep_fresh(state, server, effects)
        return self._carry(state, effects, now, is_server=True)

    def _keep_fresh(
        self, state: StandbyState, server: ServerState, effects: list[Effect]
    ) -> list[Effect]:
        """Give those that have committed last the new model, whoever it is an answer to."""
        answered = {
            each.receiver
            for each in effects
            if isinstance(each, Send) and each.message.kind == "params"
        }
        for rank in sorted(answered - {state.rank}):
            state.recent.pop(rank, None)
            state.recent[rank] = None
        others = [j for j in self.algorithm.workers if j not in state.recent]
        by_age = [*reversed(state.recent), *others]
        there = [j for j in by_age if j != state.rank and j not in server.lost]
        behind = [j for j in there[: self.algorithm.standby] if j not in answered]
        make = self.algorithm.model_message
        return [Send(j, make("keep", server, j)) for j in behind]

    def _carry(
        self, state: StandbyState, effects: list[Effect], now: Seconds, is_server: bool = False
    ) -> list[Effect]:
        """Carry out what a half wants: hand the other half what is for this rank."""
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    carried += self._send(state, receiver, message, now, is_server)
                case SetTimer(name, at) if is_server:
                    state.timers[name] = None
                    carried.append(SetTimer(_SERVING + name, at))
                case Finish():
                    if is_server and state.worker is not None:
                        continue  # it serves as long as it is asked
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
        if not is_server and message.kind in _OF_WORKERS:
            receiver = election.leader
            message = self._show(state, message)
        if receiver != state.rank:
            numbers = {**message.numbers, "term": election.term}
            return [Send(receiver, replace(message, numbers=numbers))]
        if is_server:
            return self._hear_server(state, message, now)
        return self._serve(state, Received(state.rank, message), now)

    def _show(self, state: StandbyState, message: Message) -> Message:
        """Show a new server the newest model there is here."""
        if message.kind != "copy":
            return message
        number = {"number": message.numbers["number"], "as_of": max(0, state.age[0])}
        newest = state.copy or message
        return replace(message, payload=newest.payload, numbers={**newest.numbers, **number})

    # Messages.

    def _receive(
        self, state: StandbyState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        election, effects = state.election, []
        numbers = {**message.numbers}
        term = int(numbers.pop("term"))
        message = replace(message, numbers=numbers)
        if term > election.term:
            effects = self._follow(state, term, now)
        elif term < election.term:
            return self._carry(state, [Send(sender, Message("lead", 0))], now)
        effects += self._note_follower(state, sender, now)
        if message.kind in ("lead", *_OF_WORKERS) and election.has_forgotten:
            resign = self._carry(state, [Send(sender, Message("resign", 0))], now)
            return [*effects, *resign]
        match message.kind:
            case "stand":
                may_stand = state.worker is not None
                answer = election.vote(sender, message, state.age, may_stand, now)
                return [*effects, *self._carry(state, answer, now)]
            case "vote":
                elected = election.count(sender, message)
                return [*effects, *(self._lead(state, now) if elected else [])]
            case "promised":
                election.heed(message)
                return effects
            case "resign":
                return [*effects, *self._miss(state, now)] if sender == election.leader else []
            case "lead":
                return [*effects, *self._confirm(state, sender, now)]
            case kind if kind in _OF_WORKERS:
                return [*effects, *self._serve(state, Received(sender, message), now)]
        if sender != election.leader:
            return effects
        return [*effects, *self._hear_server(state, message, now)]

    def _note_follower(self, state: StandbyState, rank: Rank, now: Seconds) -> list[Effect]:
        waited = state.election.must_confirm
        state.election.hear(rank)
        # What has waited may be merged now.
        is_free = waited and not state.election.must_confirm
        return self._serve(state, TimerFired(RESEND), now) if is_free else []

    def _confirm(self, state: StandbyState, leader: Rank, now: Seconds) -> list[Effect]:
        """Tell a server that says so that this one follows."""
        election = state.election
        if leader != election.leader:
            return []
        numbers = {"stands_for": max(election.promised, election.term)}
        followed = Message("promised", 0, numbers=numbers)
        return self._carry(state, [Send(leader, followed)], now)

    def _hear_server(self, state: StandbyState, message: Message, now: Seconds) -> list[Effect]:
        """Keep the model, if the message has one, and tell the half that works."""
        if message.kind in ("params", "keep"):
            age = (state.election.term, int(message.payload["counts"].sum()))
            if age >= state.age:
                state.copy, state.age = message, age
        return (
            [] if message.kind == "keep" else self._work(state, Received(SERVER, message), now)
        )

    # Who serves.

    def _miss(self, state: StandbyState, now: Seconds) -> list[Effect]:
        missed = state.election.misses_leader
        effects = self._carry(state, state.election.miss_leader(now), now)
        return effects if missed else [*effects, *self._work(state, WorkerLost(SERVER), now)]

    def _lose(self, state: StandbyState, event: WorkerLost, now: Seconds) -> list[Effect]:
        election = state.election
        missed = election.misses_leader
        effects = self._carry(state, election.lose(event.rank, now), now)
        if election.misses_leader and not missed:
            effects += self._work(state, WorkerLost(SERVER), now)
        if election.is_leading and not election.has_majority:
            effects.append(SetTimer(MAJORITY, now + self.algorithm.patience))
        if event.rank != SERVER:
            effects += self._serve(state, event, now)
        return effects

    def _join(self, state: StandbyState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        election, rank = state.election, event.rank
        missed = election.misses_leader
        joined = election.join(rank, event.has_restarted, now)
        effects = self._carry(state, joined, now)
        if election.is_leading and self.algorithm.resend_after is not None:
            effects.append(SetTimer(REMIND, now + self.algorithm.resend_after))
        if election.misses_leader != missed:
            is_back = not election.misses_leader
            news = WorkerJoined(SERVER) if is_back else WorkerLost(SERVER)
            effects += self._work(state, news, now)
        if election.is_leading and election.has_majority:
            effects.append(SetTimer(MAJORITY, math.inf))
        # The half that serves knows nothing of rank 0, but may merge again what has waited.
        return [*effects, *self._serve(state, event if rank else TimerFired(RESEND), now)]

    def _follow(self, state: StandbyState, term: int, now: Seconds) -> list[Effect]:
        effects = self._step_down(state)
        effects += self._carry(state, state.election.follow(term, now), now)
        return [*effects, *self._change_server(state, now)]

    def _step_down(self, state: StandbyState) -> list[Effect]:
        """Forget what was served; the others have gone on without it."""
        timers = [SetTimer(_SERVING + name, math.inf) for name in state.timers]
        state.num_stale = state.num_asked
        state.server, state.timers, state.recent = None, {}, {}
        return [*timers, SetTimer(MAJORITY, math.inf)] if state.election.is_leading else []

    def _lead(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Serve: ask all for the newest model, as a server that has restarted does."""
        assert state.worker is not None
        election = state.election
        effects = self._carry(state, election.lead(), now)
        state.server = self.algorithm.init_server(state.rank, state.worker.base)
        lost = [j for j in election.lost if j != SERVER]
        for rank in lost:
            effects += self._serve(state, WorkerLost(rank), now)
        effects += self._serve(state, Started(has_rejoined=True), now)
        if self.algorithm.resend_after is not None:
            effects.append(SetTimer(REMIND, now + self.algorithm.resend_after))
        return [*effects, *self._change_server(state, now)]

    def _remind(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Say again who serves: to those who have not answered, where messages can be lost."""
        again = self.algorithm.resend_after
        reminders = self._carry(state, [*state.election.remind()], now)
        if again is None or not reminders:
            return []
        return [*reminders, SetTimer(REMIND, now + again)]

    def _change_server(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Tell the half that works that there is another server, unless that is lost too."""
        effects = self._work(state, WorkerLost(SERVER), now)
        if state.election.misses_leader:
            return effects
        joined = WorkerJoined(SERVER, has_restarted=True)
        return [*effects, *self._work(state, joined, now)]
