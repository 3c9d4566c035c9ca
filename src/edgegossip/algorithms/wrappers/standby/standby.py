"""Standby: workers of any parameter server that can take the server's place.

Each worker has the model from the server's last answer, and the values that the server must
keep. A newly elected server (see `Election`) acts like one that has restarted: it asks all
ranks for the newest model. A serving worker keeps training, so a rank has up to two *sides*,
one that trains and one that serves. Neither knows about elections: to both, the server is rank
0. Messages to the server go to the rank that currently serves, which may be their own.

All messages state their sender's term. A message from an older term is ignored and answered
with the current term. A server that cannot reach more than half of all ranks merges nothing. If
a cut leaves a server on each side, one of them therefore pauses, and steps down once the cut is
healed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from edgegossip.algorithms.server.parameter_server import (
    ParameterServer,
    ServerState,
    require_server,
    require_whole_answers,
)
from edgegossip.algorithms.server.worker import SERVER, CommitterState
from edgegossip.algorithms.wrappers.standby.election import (
    AGE,
    ELECTION,
    MAX_TERM,
    UNKNOWN,
    Age,
    Election,
    schema as election_schema,
)
from edgegossip.contract.algorithm import Traits, Wrapper
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
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import complete

_SERVING = "serving "
"""Prefix of the names of the serving side's timers."""
_TO_SERVER = ("commit", "pull", "copy")
"""Kinds of messages to the server."""
_NUDGE = TimerFired("resend")
"""Has the serving side do what may have become due; at most it asks for reports again."""


@dataclass(slots=True, kw_only=True)
class StandbyState(WorkerState):
    """State of a rank; `params` and `round` are those of its sides.

    Attributes:
        election: Election, which knows the rank that serves.
        worker: The side that trains; None on rank 0.
        server: The side that serves; None on ranks that do not.
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
            return self.server.estimate
        return self.params if self.worker is None else self.worker.base

    @property
    def is_evaluated(self) -> bool:
        return self.server is not None and not self.server.is_new


@dataclass(frozen=True, kw_only=True)
class Standby(Wrapper[StandbyState]):
    """Let the workers of a parameter server elect another server when theirs is lost.

    A worker that misses its server waits 0.1 to 0.5 seconds and asks all other ranks for their
    votes; a candidate needs those of more than half of all ranks. Each term has one server, and
    only one of them can merge. The model of the rank that serves is evaluated. Rank 0 is the
    first server, and never trains. `docs/parameter-servers.md` describes what may be lost.

    Args:
        inner: Any parameter server.
        num_standbys: Number of most recent committers that are kept up to date, so that one of
            them can be elected, in [1, `num_workers`]. 1 costs nothing, because the last worker
            to commit gets the model in its answer; with k, each model goes to k - 1 more
            workers. Answered commits are lost only if the server and the last k workers to
            commit are lost at once.

    Raises:
        ValueError: If `num_standbys` is out of range, or `inner` is no parameter server.
    """

    keeps_name: ClassVar[bool] = True
    inner: ParameterServer
    num_standbys: int = 1

    def __post_init__(self) -> None:
        require_server("Standby", self.inner)
        require_whole_answers("Standby", self.inner)
        if not 1 <= self.num_standbys <= self.inner.num_workers:
            raise ValueError(
                f"num_standbys must be in [1, num_workers], got {self.num_standbys} of "
                f"{self.inner.num_workers}; it is the number of workers to keep up to date"
            )

    @property
    def traits(self) -> Traits:
        topology = complete(self.inner.num_workers + 1)
        return replace(self.inner.traits, topology=topology, changes_roles=True)

    def role(self, rank: Rank) -> Role:
        """Every rank may come to serve; its state says whether it does."""
        evaluates = self.inner.role(SERVER).evaluates
        return Role("worker", has_data=rank != SERVER, evaluates=evaluates)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Messages of both sides and of elections, each with its sender's term."""
        messages = self.inner.schema(params)
        term = {"term": range(UNKNOWN, MAX_TERM)}
        copy, show = messages["copy"], messages["show"]
        model = copy.specs["params"]
        counts = {name: each for name, each in copy.tensors.items() if name != "params"}
        as_of = {**copy.numbers, "as_of": range(MAX_TERM)}
        kinds = {
            **messages,
            **election_schema(self.inner.num_rounds),
            "copy": replace(copy, tensors=counts, optional={"params": model}, numbers=as_of),
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

    def init(self, rank: Rank, params: Tensor) -> StandbyState:
        return StandbyState(
            rank=rank,
            params=params,
            election=Election(rank=rank, num_ranks=self.inner.num_workers + 1),
            worker=None if rank == SERVER else self.inner.init_worker(rank, params),
            server=self.inner.init_server(params) if rank == SERVER else None,
        )

    def handle(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        was_leading = state.election.is_leading
        effects = self._handle(state, event, now)
        if state.worker is not None:
            state.params, state.round = state.worker.params, state.worker.round
        elif state.server is not None:
            state.params, state.round = state.server.params, state.server.round
        # Rank 0 has nothing to train: once it has stepped down, the run may end without it.
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
                # Evaluations end in the order of their requests, so the stale ones come first.
                state.num_asked -= 1
                if state.num_stale:
                    state.num_stale -= 1
                    return []
                return self._to_server(state, event, now)
            case TimerFired(name) if name == ELECTION:
                # Rank 0 has no side that trains, so it votes but does not stand.
                is_worker = state.worker is not None
                stands = state.election.stand(state.age, now) if is_worker else []
                return self._carry_out(state, stands, now)
            case TimerFired("remind"):
                reminders = self._carry_out(state, [*state.election.remind()], now)
                return [*reminders, *self._remind_later(now)] if reminders else []
            case TimerFired("majority"):
                self._give_up(state)
                return []
            case TimerFired(name) if name.startswith(_SERVING):
                return self._to_server(state, TimerFired(name.removeprefix(_SERVING)), now)
        return self._to_worker(state, event, now)

    def _start(self, state: StandbyState, event: Started, now: Seconds) -> list[Effect]:
        election = state.election
        if not event.has_rejoined:
            election.is_leading = state.rank == SERVER
            return [*self._to_server(state, event, now), *self._to_worker(state, event, now)]
        # A restarted rank knows neither the serving rank nor the model. It may have voted in a
        # term that it has forgotten, which is safe, because no term has two candidates.
        election.term, state.age, state.server = UNKNOWN, (UNKNOWN, 0), None
        found = self._carry_out(state, election.miss_leader(now), now)
        # The side that trains hears of the loss first: it must not pull before there is a
        # server to ask.
        missing = self._to_worker(state, WorkerLost(SERVER), now)
        finish = [] if state.worker is not None else [Finish()]
        return [*found, *missing, *self._to_worker(state, event, now), *finish]

    def _give_up(self, state: StandbyState) -> None:
        server, election = state.server, state.election
        if server is None or election.has_majority:
            return
        if any(round < self.inner.num_rounds for round in server.rounds.values()):
            raise ServerLostError(
                f"rank {state.rank}, which serves, has waited {self.inner.patience:g} s for "
                f"more than half of all {election.num_ranks} ranks; start the others again, "
                "and continue with --resume"
            )

    # Messages.

    def _receive(
        self, state: StandbyState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        election, effects = state.election, []
        numbers = {**message.numbers}
        term = int(numbers.pop("term"))
        # A liar's term must not become ours: no later election could exceed it.
        if not election.is_possible(max(term, int(numbers.get("stands_for", 0))), now):
            return []
        message = replace(message, numbers=numbers)
        # The term comes before the message: what a server of a later term says must meet a rank
        # that follows it, and what one of an earlier term says must change nothing.
        if term > election.term:
            effects = self._follow(state, term, now)
        elif term < election.term:
            return self._carry_out(state, [Send(sender, Message("lead", 0))], now)
        effects += self._hear_follower(state, sender, now)
        # The others follow this rank, which has restarted and no longer has the server's state.
        # Without its word they would wait for it: to them it is there.
        if message.kind in ("lead", *_TO_SERVER) and election.has_forgotten:
            resign = self._carry_out(state, [Send(sender, Message("resign", 0))], now)
            return [*effects, *resign]
        match message.kind:
            case "stand":
                may_stand = state.worker is not None
                answer = election.vote(sender, message, state.age, may_stand, now)
                return [*effects, *self._carry_out(state, answer, now)]
            case "vote":
                elected = election.count(sender, message)
                return [*effects, *(self._lead(state, now) if elected else [])]
            case "promised":
                election.heed(message)
                return effects
            case "lead":
                return [*effects, *self._confirm(state, sender, now)]
            case "resign":
                if sender == election.leader:
                    effects += self._carry_out(state, election.miss_leader(now), now)
                    effects += self._tell_worker(state, now)
                return effects
            case "kept":
                num_kept = message.numbers["num_commits"]
                return [*effects, *self._release(state, sender, now, num_kept)]
            case kind if kind in _TO_SERVER:
                return [*effects, *self._to_server(state, Received(sender, message), now)]
        # Only the server of this term speaks for the server: a liar could hand out any model.
        if sender != election.leader:
            return effects
        return [*effects, *self._hear_server(state, message, now)]

    def _hear_follower(self, state: StandbyState, rank: Rank, now: Seconds) -> list[Effect]:
        waited = state.election.must_confirm
        state.election.hear(rank)
        # Commits that came while most ranks were away may be merged now.
        is_free = waited and not state.election.must_confirm
        return self._to_server(state, _NUDGE, now) if is_free else []

    def _confirm(self, state: StandbyState, leader: Rank, now: Seconds) -> list[Effect]:
        """Confirm to a leading server that this rank follows it."""
        election = state.election
        if leader != election.leader:
            return []
        numbers = {"stands_for": max(election.promised, election.term)}
        followed = Message("promised", 0, numbers=numbers)
        return self._carry_out(state, [Send(leader, followed)], now)

    def _hear_server(self, state: StandbyState, message: Message, now: Seconds) -> list[Effect]:
        """Keep the model in the message, if any, and inform the side that trains."""
        match message.kind:
            case "params" | "keep":
                age = (state.election.term, int(message.payload["counts"].sum()))
                if age >= state.age:  # a repeated answer may come late
                    state.copy, state.age = message, age
                if message.kind == "keep":
                    kept = Message("kept", state.round, numbers={"num_commits": age[1]})
                    return self._carry_out(state, [Send(state.election.leader, kept)], now)
            case "show" if state.copy is not None and state.worker is not None:
                shown = self._report(state, state.worker, state.copy, message)
                return self._carry_out(state, [Send(SERVER, shown)], now)
        return self._to_worker(state, Received(SERVER, message), now)

    def _report(
        self, state: StandbyState, worker: CommitterState, newest: Message, show: Message
    ) -> Message:
        """Report the newest model to a new server, or confirm that the server's own is at least
        as new.
        """
        payload = {**newest.payload}
        # A restarted worker may have received a model, but has no memory of its own state.
        number = max(worker.last_number, int(payload["counts"][state.rank - 1]))
        theirs = (show.numbers.get("as_of", UNKNOWN), show.numbers.get("num_commits", 0))
        if state.age <= theirs:
            del payload["params"]  # sending it may take long
        # The term ranks models before their commits do: an earlier server may have gone on
        # merging commits that the later one does not have.
        numbers = {**newest.numbers, "number": number, "as_of": state.age[0]}
        return Message("copy", worker.round, payload, numbers)

    # The serving rank is lost, comes back, or changes.

    def _lose(self, state: StandbyState, event: WorkerLost, now: Seconds) -> list[Effect]:
        election = state.election
        effects = self._carry_out(state, election.lose(event.rank, now), now)
        effects += self._tell_worker(state, now)
        if election.is_leading and not election.has_majority:
            effects.append(SetTimer("majority", now + self.inner.patience))
        if event.rank != SERVER:  # the serving side takes itself for rank 0
            effects += self._to_server(state, event, now)
        # Nobody waits for a rank that is lost to keep the model.
        return [*effects, *self._release(state, event.rank, now)]

    def _join(self, state: StandbyState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        election, rank = state.election, event.rank
        joined = election.join(rank, event.has_restarted, now)
        effects = self._carry_out(state, joined, now)
        effects += self._remind_later(now) if election.is_leading else []
        effects += self._tell_worker(state, now)
        if election.is_leading and election.has_majority:
            effects.append(SetTimer("majority", math.inf))
        # The serving side does not know of rank 0, but may merge waiting commits again.
        return [*effects, *self._to_server(state, event if rank else _NUDGE, now)]

    def _follow(self, state: StandbyState, term: int, now: Seconds) -> list[Effect]:
        """Follow a new server and stop serving: other ranks have gone on without this one."""
        effects: list[Effect] = [SetTimer(_SERVING + name, math.inf) for name in state.timers]
        if state.election.is_leading:
            effects.append(SetTimer("majority", math.inf))
        # Evaluations still run; the next server on this rank must not get their losses.
        state.num_stale = state.num_asked
        state.server, state.timers, state.recent = None, {}, {}
        # The held answer is dropped, not given: its commit may be unknown to the next server,
        # which must get it from the worker on this rank.
        state.held, state.held_for = None, {}
        effects += self._carry_out(state, state.election.follow(term, now), now)
        return [*effects, *self._change_server(state, now)]

    def _lead(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Begin to serve: like a restarted server, ask all ranks for the newest model."""
        assert state.worker is not None
        election = state.election
        effects = self._carry_out(state, election.lead(), now)
        effects.append(Note("serves", {"term": election.term}))
        state.server = self.inner.init_server(state.worker.base)
        # It must know who is lost before it asks, or it would wait for their reports.
        for rank in election.lost:
            if rank != SERVER:
                effects += self._to_server(state, WorkerLost(rank), now)
        effects += self._to_server(state, Started(has_rejoined=True), now)
        return [*effects, *self._remind_later(now), *self._change_server(state, now)]

    def _remind_later(self, now: Seconds) -> list[Effect]:
        """Plan to repeat the announcement, if messages can be lost."""
        again = self.inner.resend_after
        return [] if again is None else [SetTimer("remind", now + again)]

    def _change_server(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Tell the side that trains that its server is lost and, if the new server is
        reachable, that it has joined.
        """
        # Both, although the server may never have been missed: a new server knows nothing of
        # the open commit, and only a return makes the worker send it again.
        lost = self._to_worker(state, WorkerLost(SERVER), now)
        return [*lost, *self._tell_worker(state, now)]

    # The two sides of a rank.

    def _tell_worker(self, state: StandbyState, now: Seconds) -> list[Effect]:
        """Tell the side that trains whether its server is there, unless it knows."""
        worker, is_there = state.worker, not state.election.misses_leader
        if worker is None or worker.has_server == is_there:
            return []
        news = WorkerJoined(SERVER) if is_there else WorkerLost(SERVER)
        return self._to_worker(state, news, now)

    def _to_worker(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        if state.worker is None:
            return []
        effects = self.inner.handle_as_worker(state.worker, event, now)
        return self._carry_out(state, effects, now)

    def _to_server(self, state: StandbyState, event: Event, now: Seconds) -> list[Effect]:
        server = state.server
        if server is None:
            return []
        server.is_paused = not state.election.may_merge
        before = server.params
        effects = self.inner.handle_as_server(server, event, now)
        # No tensor is ever written to, so another tensor is another model.
        if server.params is not before and not server.is_new:
            effects = self._keep_fresh(state, server, effects)
        return self._carry_out(state, effects, now, of_server=True)

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
        # The worker on this rank does not count: it would be lost together with the server.
        for rank in sorted(answers.keys() - {state.rank}):
            state.recent.pop(rank, None)
            state.recent[rank] = None
        others = [j for j in self.inner.workers if j not in state.recent]
        by_age = [*reversed(state.recent), *others]
        there = [j for j in by_age if j != state.rank and j not in server.lost]
        behind = [j for j in there[: self.num_standbys] if j not in answers]
        make = self.inner.model_message
        keeps = [Send(j, make("keep", server, j)) for j in behind]
        if behind and (own := answers.get(state.rank)):
            effects.remove(own)
            state.held, state.held_for = own.message, dict.fromkeys(behind)
        return [*effects, *keeps]

    def _release(
        self, state: StandbyState, rank: Rank, now: Seconds, num_kept: float = math.inf
    ) -> list[Effect]:
        """Answer this rank's worker if `rank` was the last rank that lacked the held model."""
        if state.held is None or num_kept < int(state.held.payload["counts"].sum()):
            return []
        state.held_for.pop(rank, None)
        if state.held_for:
            return []
        held, state.held = state.held, None
        return self._hear_server(state, held, now)

    def _carry_out(
        self, state: StandbyState, effects: list[Effect], now: Seconds, of_server: bool = False
    ) -> list[Effect]:
        """Carry out the effects of one side: messages to this rank go to the other side."""
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    carried += self._send(state, receiver, message, now, of_server)
                case SetTimer(name, at) if of_server:
                    # Both sides have timers of the same names.
                    state.timers[name] = None
                    carried.append(SetTimer(_SERVING + name, at))
                case Finish() if of_server and state.worker is not None:
                    pass  # the rank finishes with its worker, and serves until the run ends
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
        of_server: bool,
    ) -> list[Effect]:
        election = state.election
        if not of_server and message.kind in _TO_SERVER:
            receiver = election.leader
            # A worker's own report says nothing of terms; `_report` has set that of its model.
            if message.kind == "copy":
                message = replace(message, numbers={"as_of": 0, **message.numbers})
        if receiver != state.rank:
            numbers = {**message.numbers, "term": election.term}
            if message.kind == "show":
                # Workers compare: a model that is no newer is not sent.
                numbers |= {"as_of": state.age[0], "num_commits": state.age[1]}
            return [Send(receiver, replace(message, numbers=numbers))]
        # To itself there is no link, so the other side hears of it within the same event.
        if of_server:
            return self._hear_server(state, message, now)
        return self._to_server(state, Received(state.rank, message), now)
