"""Synchronous rounds: train, exchange with the neighbors, mix, repeat.

`Synchronous` waits for the neighbors' messages, and handles lost messages, lost neighbors and
returning ones. An algorithm derived from `RoundBased` defines its training (`work`), the
payloads to send (`outgoing`) and how to mix the received ones (`mix`). `LocalSteps` provides
`work`, and `NeighborAveraging` (in `edgegossip.contract.averaging`) the rest.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, Traits, with_numbers
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Layout,
    Message,
    Payload,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    Work,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.robust import trust_note
from edgegossip.contract.schema import MessageSpec, TensorSpec, lacks
from edgegossip.contract.topology import Topology
from edgegossip.contract.views import Members, Views


@dataclass(slots=True, kw_only=True)
class RoundState(WorkerState):
    """State of a worker that waits for its neighbors.

    Attributes:
        exchange: Number of completed exchanges; a round has one or more.
        is_exchanging: Whether the worker has sent its messages in this exchange and waits for
            those of its neighbors.
        is_training: Whether a `Train` of `Synchronous.work_beside` is running.
        inbox: Messages of this exchange and later ones, by exchange and sender.
        first_exchange: By neighbor, the first exchange in which the worker waits for that
            neighbor; 0 by default, infinite while the neighbor is lost.
        lost: Workers that cannot be reached, as keys.
        catch_up: Neighbors' answers while the worker catches up; None otherwise.
        ahead: Catch-up messages from neighbors in later rounds, by sender.
        layout: Layout of `params`, from `Started`.
        views: Views of an open run; None otherwise.
        trust: Shares of weight that a robust rule has given to neighbors, not noted yet.
    """

    exchange: int = 0
    is_exchanging: bool = False
    is_training: bool = False
    inbox: dict[int, dict[Rank, Payload]] = field(default_factory=dict)
    first_exchange: dict[Rank, float] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    catch_up: dict[Rank, Message] | None = None
    ahead: dict[Rank, Message] = field(default_factory=dict)
    layout: Layout | None = None
    views: Views | None = None
    trust: dict[Rank, float] = field(default_factory=dict)


S = TypeVar("S", bound=RoundState)


@dataclass(frozen=True, kw_only=True)
class Synchronous(Algorithm[S], Generic[S]):
    """Base of algorithms whose workers wait for all their neighbors in every round.

    A round consists of training and one or more exchanges, in which all workers send, wait for
    their neighbors' messages, and mix. A worker waits for its neighbors only. While no worker
    is lost, neighbors are therefore at most one exchange apart on a constant undirected graph;
    on other graphs, at most `Topology.longest_lead`. Workers do not wait for a lost neighbor,
    and mix without it. A returning worker adopts the parameters and round of its most advanced
    neighbor, and tells all neighbors in which exchange it continues. A worker that was only cut
    off, and is further behind than both that and a round, does the same after its training, and
    the others do not wait for its missed rounds.

    With three or more neighbors, the second-most-advanced neighbor counts, so a single lying
    neighbor cannot send a worker to the end of the run.

    Args:
        topology: Graph of each exchange's messages.
        num_rounds: Number of rounds until a worker finishes.
        timeout: Seconds that a worker waits for its neighbors in one exchange before it
            continues with the arrived messages. None waits indefinitely; safe only on lossless
            links.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.
    """

    topology: Topology
    num_rounds: int
    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        check_counts(self, "num_rounds")
        check_ranges(self, num_rounds="at least 1", timeout="above 0 or None")

    def init(self, rank: Rank, params: Tensor) -> S:
        """Build a `RoundState`; an algorithm whose state has more fields builds its own."""
        return cast("S", RoundState(rank=rank, params=params))

    # For algorithms to define.

    @abstractmethod
    def mix(self, state: S, inbox: Mapping[Rank, Payload]) -> None:
        """Update the state from the arrived payloads, which are keyed and ordered by rank."""

    @abstractmethod
    def work(self, state: S) -> Work | None:
        """Training before the next exchange; None to exchange at once."""

    @abstractmethod
    def send(self, state: S, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        """Send this exchange's messages."""

    @abstractmethod
    def announce(self, state: S, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        """Tell `receivers` in which exchange this worker continues ("catch-up").

        A worker that has come back can continue from this message.
        """

    @abstractmethod
    def catch_up_with(self, state: S, payload: Payload) -> None:
        """Continue from the most advanced neighbor's announcement."""

    @abstractmethod
    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Messages of `send` and `announce`, by kind; `params` ([num_params]) as for `init`."""

    # For algorithms to override.

    def start(self, state: S) -> Tensor:
        """The parameters that training starts from, [num_params]."""
        return state.estimate

    def learn(self, state: S, trained: Trained) -> None:
        """Update the state with the result of training."""
        state.params = trained.params

    def rejoin(self, state: S) -> None:
        """Prepare to catch up; the worker has lost its memory, and `state` is new."""

    def lose(self, state: S, rank: Rank) -> None:
        """Continue without worker `rank`."""

    def forget(self, state: S, rank: Rank) -> None:
        """Drop unused messages of `rank`, which has lied."""
        for box in state.inbox.values():
            box.pop(rank, None)
        if state.catch_up is not None:
            state.catch_up.pop(rank, None)

    def receive(self, state: S, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        """Handle a message of an exchange, or a "catch-up"."""
        if message.kind == "catch-up":
            return self._receive_catch_up(state, sender, message, now)
        if message.kind == "view":
            return self._receive_view(state, sender, message, now)
        return self._receive(state, sender, message, now)

    def remind(self, state: S, receiver: Rank, now: Seconds) -> list[Effect]:
        """Answer a worker that is expected to skip rounds, but does not; nothing by default.

        It may not know that it is far behind, because this worker has gone on without waiting
        since it announced its round. Without an answer, both would train on without each other.
        """
        return []

    def end(self, state: S) -> list[Effect]:
        """Finish after the last round."""
        return [Finish()]

    @property
    def exchanges_per_round(self) -> int:
        """Number of exchanges in a round."""
        return 1

    def wait(self, state: S, now: Seconds) -> list[Effect]:
        """React to a wait for an exchange after the work beside it; nothing by default."""
        return []

    def work_beside(self, state: S) -> Work | None:
        """Training that begins together with the next exchange; None by default.

        The exchange carries what the worker has learned before. `mix` may come before or after
        `learn`, which must add `Trained.delta` to the state as it is by then. The next round
        begins when both have ended.
        """
        return None

    @property
    def total_rounds(self) -> int:
        """Number of rounds until a worker finishes, including final rounds without training."""
        return self.num_rounds

    # Common to all algorithms.

    @property
    def traits(self) -> Traits:
        return Traits(
            topology=self.topology,
            num_rounds=self.total_rounds,
            is_synchronous=True,
        )

    def message(self, kind: str, exchange: int, payload: Payload) -> Message:
        """Make a message for `exchange`, with its round and, after the round's first exchange,
        its place in the round.
        """
        round, place = divmod(exchange, self.exchanges_per_round)
        return Message(kind, round, payload, {"exchange": place} if place else {})

    def exchange_of(self, message: Message) -> int:
        """The exchange of a message, counted from the first round."""
        place = int(message.numbers.get("exchange", 0))
        return message.round * self.exchanges_per_round + place

    def handle(self, state: S, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.layout = event.layout
                self._begin_views(state, event)
                if event.has_rejoined:
                    self.rejoin(state)
                    return self._catch_up(state, now)
                return self._begin_round(state, now)
            case Trained():
                # Before anything else: work that is done counts even if rounds are skipped.
                self.learn(state, event)
                was_beside, state.is_training = state.is_training, False
                if state.catch_up is not None:
                    return []  # the training began before the worker noticed that it is behind
                if self._is_behind(state):
                    return self._skip(state, now)
                if was_beside:
                    if state.is_exchanging:  # from here on, it waits
                        return [*self._set_timeout(now), *self.wait(state, now)]
                    return self._begin_round(state, now)
                return [*self._exchange(state, now), *self._mix_if_complete(state, now)]
            case Received():
                return self.receive(state, event.sender, event.message, now)
            case TimerFired("round"):
                return self._time_out(state, now)
            case WorkerLost():
                self.lose(state, event.rank)
                state.lost[event.rank] = None
                state.first_exchange[event.rank] = math.inf
                state.ahead.pop(event.rank, None)
                if event.has_lied:
                    self.forget(state, event.rank)
                # Messages that it sent before are still mixed: its other neighbors may have
                # mixed them, too. It may have been the last one that this worker waited for.
                return [*self._see(state, event, now), *self._go_on(state, now)]
            case WorkerJoined():
                # It stays out of `first_exchange` until it says where it continues. Waiting
                # for a message of this exchange, which it may never send, would last forever.
                state.lost.pop(event.rank, None)
                if state.views is not None:
                    effects = self._see(state, event, now)
                    # A newcomer's neighbors may be others now, and all of these have answered.
                    return [*effects, *self._go_on(state, now)]
                return self.help_to_catch_up(state, event.rank, now)
        return []

    # One round.

    def _begin_round(self, state: S, now: Seconds) -> list[Effect]:
        """Begin the next round; go through rounds that need neither training nor waiting."""
        effects: list[Effect] = []
        # A loop: a worker without neighbors would otherwise recurse once for each round.
        while state.round < self.total_rounds:
            begins = state.exchange % self.exchanges_per_round == 0
            if begins and state.is_training:
                return effects  # its end begins the round
            if (work := self.work(state)) is not None:
                return [*effects, Train(self.start(state), work)]
            effects += self._exchange(state, now)
            if not self._is_complete(state):
                return effects
            self._mix(state)
            effects += self._note_trust(state)
        # A worker that has skipped to the end may still be training.
        return effects if state.is_training else [*effects, *self.end(state)]

    def _exchange(self, state: S, now: Seconds) -> list[Effect]:
        # Set first, because `announce` names the next exchange once this one's messages are
        # sent: a worker that returns from now on will not get them.
        state.is_exchanging = True
        effects: list[Effect] = []
        if (beside := self.work_beside(state)) is not None:
            effects.append(Train(self.start(state), beside))
            state.is_training = True
        effects += self._bind(state)
        neighbors = self._graph(state).out_neighbors(state.rank, state.exchange)
        present = [j for j in neighbors if j not in state.lost]
        if state.views is not None and self.mixes_symmetrically:
            willing = [j for j in present if self._will_send(state, j)]
            state.views.counted = {j: state.views.of(j, state.exchange)[0] for j in willing}
            effects += [self._put_off(state, j) for j in present if j not in willing]
            sent = self.send(state, willing, now)
            effects += [_with_seen(each, state.views.counted) for each in sent]
        else:
            effects += self.send(state, present, now)
        # While it trains, a worker does not wait.
        return effects if state.is_training else [*effects, *self._set_timeout(now)]

    def _set_timeout(self, now: Seconds) -> list[Effect]:
        # The name is the same in each exchange, so this also cancels the previous timer.
        return [] if self.timeout is None else [SetTimer("round", now + self.timeout)]

    def _is_complete(self, state: S) -> bool:
        """Whether an exchange is under way and all awaited messages have arrived."""
        arrived = state.inbox.get(state.exchange, {})
        return state.is_exchanging and all(
            j in arrived or state.first_exchange.get(j, 0) > state.exchange
            for j in self._expected(state)
        )

    def _expected(self, state: S) -> Iterable[Rank]:
        """In-neighbors of this exchange, in an open run those that send as far as is known."""
        neighbors = self._graph(state).in_neighbors(state.rank, state.exchange)
        if state.views is None:
            return neighbors
        if self.mixes_symmetrically:  # what is put off on this side is not mixed
            neighbors = tuple(j for j in neighbors if j in state.views.counted)
        return [j for j in neighbors if self._will_send(state, j)]

    def _counts(self, state: S, sender: Rank) -> bool:
        """Whether what `sender` sends in this exchange is mixed; see `contract.views`."""
        if state.views is None or not self.mixes_symmetrically:
            return True
        return state.views.counts(sender, state.exchange)

    def _mix_if_complete(self, state: S, now: Seconds) -> list[Effect]:
        return self._mix_and_go_on(state, now) if self._is_complete(state) else []

    def _mix_and_go_on(self, state: S, now: Seconds) -> list[Effect]:
        self._mix(state)
        return [*self._note_trust(state), *self._begin_round(state, now)]

    @staticmethod
    def _note_trust(state: S) -> list[Effect]:
        """Note whom a robust rule has distrusted, if the algorithm has one."""
        if not state.trust:
            return []
        shares, state.trust = state.trust, {}
        return [trust_note(shares)]

    def _mix(self, state: S) -> None:
        arrived = state.inbox.pop(state.exchange, {})
        # Rank order, not arrival order: float sums come out bit-identical everywhere.
        neighbors = self._graph(state).in_neighbors(state.rank, state.exchange)
        # An empty payload is only waited for.
        counting = [j for j in neighbors if arrived.get(j) and self._counts(state, j)]
        self.mix(state, {j: arrived[j] for j in counting})
        state.is_exchanging = False
        self._go_to(state, state.exchange + 1)

    def _go_to(self, state: S, exchange: int) -> None:
        state.exchange, state.round = exchange, exchange // self.exchanges_per_round
        if state.views is not None:
            state.views.pass_by(exchange)

    def _receive(self, state: S, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        exchange = self.exchange_of(message)
        effects: list[Effect] = []
        # While catching up, a worker does not wait for a neighbor that joined later and also
        # catches up, or both would wait for each other.
        if state.catch_up is None and state.first_exchange.get(sender) == math.inf:
            # Its announcement was lost or is late, but this message shows where it continues.
            self._wait_for(state, sender, exchange)
            if sender not in state.lost and state.first_exchange[sender] == math.inf:
                effects = self.remind(state, sender, now)  # it is expected to skip rounds
        neighbors = self._possible_senders(state, exchange)
        # A late message is dropped, because its exchange is mixed. An early one waits: its
        # sender may be ahead by `Topology.longest_lead`. Workers that are not neighbors in that
        # exchange have nothing to say.
        if exchange >= state.exchange and sender in neighbors:
            state.inbox.setdefault(exchange, {})[sender] = message.payload
            if state.views is not None and "seen" in message.numbers:
                seen = int(message.numbers["seen"])
                state.views.seen.setdefault(sender, {})[exchange] = seen
        return [*effects, *self._go_on(state, now)]

    def _wait_for(self, state: S, sender: Rank, first: int) -> None:
        """Wait for `sender`, which is back, from exchange `first` on."""
        if sender in state.lost:
            return  # its message is outdated
        earlier = state.first_exchange.get(sender, 0)
        if earlier == math.inf and self._will_skip(state, sender, first):
            return  # it will announce the round in which it continues
        # If it came back twice, its messages may arrive in the wrong order. Waiting too little
        # does no harm, but waiting for a message that it never sends would last forever.
        is_fresh = earlier == math.inf
        state.first_exchange[sender] = first if is_fresh else max(earlier, first)

    def _time_out(self, state: S, now: Seconds) -> list[Effect]:
        if state.catch_up is not None:
            return self._resume(state, now)
        # A timer may fire during the training after its exchange, which was completed in time.
        waits = state.is_exchanging and not state.is_training
        return self._mix_and_go_on(state, now) if waits else []

    def _go_on(self, state: S, now: Seconds) -> list[Effect]:
        if state.catch_up is not None:
            return self._resume_if_complete(state, now)
        # A worker in training learns that it is behind when the training ends: there is one
        # `Train` at a time, and none can be canceled.
        if state.is_exchanging and self._is_behind(state):
            return self._skip(state, now)
        return self._mix_if_complete(state, now)

    # Coming back.

    def help_to_catch_up(self, state: S, rank: Rank, now: Seconds) -> list[Effect]:
        """Tell a worker that is back where this one is, if they are neighbors."""
        if state.catch_up is not None:
            return []  # it answers after it has caught up itself, with its final round
        is_neighbor = rank in self.graph(state).all_out_neighbors(state.rank)
        return self.announce(state, [rank], now) if is_neighbor else []

    def _catch_up(self, state: S, now: Seconds) -> list[Effect]:
        # Neighbors announce their rounds when they see the worker, without being asked: a
        # request could be lost, or overtaken by the loss of the worker before it.
        state.catch_up = {}
        return [*self._set_timeout(now), *self._resume_if_complete(state, now)]

    def _receive_catch_up(
        self, state: S, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        if sender not in self.topology.all_in_neighbors(state.rank):
            return []
        self._wait_for(state, sender, self.exchange_of(message))
        # A worker that does not catch up keeps it, too: it may not have noticed yet that it
        # was cut off, and is behind.
        answers = state.ahead if state.catch_up is None else state.catch_up
        answers[sender] = message
        return self._go_on(state, now)

    def _resume_if_complete(self, state: S, now: Seconds) -> list[Effect]:
        assert state.catch_up is not None
        for j in self.graph(state).all_in_neighbors(state.rank):
            is_there = j not in state.catch_up and state.first_exchange.get(j, 0) < math.inf
            if is_there and not self._has_declined(state, j):
                return []
        return self._resume(state, now)

    def _resume(self, state: S, now: Seconds) -> list[Effect]:
        """Adopt the most advanced neighbor's parameters and round, if any neighbor answered."""
        answers, state.catch_up = state.catch_up, None
        if answers:
            reached = {j: self.exchange_of(answer) for j, answer in answers.items()}
            enough = min(self._quorum(state), len(answers))
            furthest = sorted(reached.values())[-enough]
            # The lowest rank, so that workers that come back together adopt the same model.
            giver = min(j for j in answers if reached[j] == furthest)
            self.catch_up_with(state, answers[giver].payload)
            self._go_to(state, furthest)
            state.inbox = {k: box for k, box in state.inbox.items() if k >= state.exchange}
        # Only now do the others know from which exchange on they must wait for this worker.
        moved = self._tell_where_it_goes_on(state)
        neighbors = self.graph(state).all_out_neighbors(state.rank)
        announcements = self.announce(state, [j for j in neighbors if j not in state.lost], now)
        return [*moved, *announcements, *self._begin_round(state, now)]

    # Skipping rounds.

    def _is_behind(self, state: S) -> bool:
        """Whether enough neighbors are ahead to show an absence of more than a round."""
        if not state.ahead:
            return False
        state.ahead = {
            j: message
            for j, message in state.ahead.items()
            if self._is_far(state.exchange, self.exchange_of(message))
        }
        return len(state.ahead) >= self._quorum(state)

    def _quorum(self, state: S) -> int:
        neighbors = self.graph(state).all_in_neighbors(state.rank)
        return _enough(sum(j not in state.lost for j in neighbors))

    def _skip(self, state: S, now: Seconds) -> list[Effect]:
        """Join the others as if the worker had just come back."""
        state.catch_up, state.ahead, state.is_exchanging = state.ahead, {}, False
        return self._resume(state, now)

    def _will_skip(self, state: S, other: Rank, exchange: int) -> bool:
        """Whether `other` is so far behind its neighbors that it will skip rounds.

        This applies the rule of `_is_behind` from outside: it counts those neighbors of `other`
        that this worker knows to be as far as itself.
        """
        if not self._is_far(exchange, state.exchange):
            return False
        graph = self.graph(state)
        own = graph.all_in_neighbors(state.rank)
        near = {j for j in own if state.first_exchange.get(j, 0) <= state.exchange} - {other}
        heard = [j for j in graph.all_in_neighbors(other) if j not in state.lost]
        if not heard:
            return True  # nobody tells it where to skip to, so it would do all rounds over
        here = (near | {state.rank}).intersection(heard)
        return len(here) >= _enough(len(heard))

    def _is_far(self, behind: int, ahead: int) -> bool:
        # Neighbors that were never cut off can be as far apart as this.
        return ahead > behind + max(self.exchanges_per_round, self.topology.longest_lead)

    # Open runs: who takes part, and in which exchanges. See `contract.views`.

    def graph(self, state: S) -> Topology:
        """The graph of this moment: in an open run, that of the workers that are present."""
        return self.topology.present(state.lost)

    @property
    def mixes_symmetrically(self) -> bool:
        """Whether a worker may mix a neighbor's message only if that one mixes its own."""
        return False

    def view_schema(self) -> Mapping[str, MessageSpec]:
        """Describe the messages that tell a view; none unless the run is open."""
        if not self.topology.follows_members:
            return {}
        bits = TensorSpec(torch.uint8, (self.topology.num_workers,), minimum=0, maximum=1)
        places = range(1, self.exchanges_per_round)
        spec = MessageSpec(
            {"members": bits},
            optional_numbers={"exchange": places} if places else {},
            max_round=self.total_rounds,
        )
        return {"view": spec}

    def view_of(self, state: S, rank: Rank) -> Topology | None:
        """The graph that `rank` goes by in this exchange; None if it is not known."""
        assert state.views is not None
        _, members = state.views.of(rank, state.exchange)
        return self.topology.among(members) if members else None

    def _begin_views(self, state: S, event: Started) -> None:
        if not self.topology.follows_members:
            return
        own = self._members(state)
        state.views = Views(own=own)
        if not event.has_rejoined:
            # The others most likely begin with the same view, and say so at once if not.
            for j in own:
                state.views.hear(j, 0, own)

    def _members(self, state: S) -> Members:
        return tuple(j for j in range(self.topology.num_workers) if j not in state.lost)

    def _graph(self, state: S) -> Topology:
        """The graph that the current exchange is made under."""
        return self.topology if state.views is None else self.topology.among(state.views.own)

    def _bind(self, state: S) -> list[Effect]:
        """Begin an exchange under the view of this moment, and tell all who do not know it."""
        if state.views is None:
            return []
        state.views.own = members = self._members(state)
        return self._tell(state, [j for j in members if j != state.rank], state.exchange)

    def _tell(self, state: S, receivers: Iterable[Rank], first: int) -> list[Effect]:
        assert state.views is not None
        members, told = self._members(state), state.views.told
        untold = [j for j in receivers if j not in told or told[j][0] != members]
        told.update(dict.fromkeys(untold, (members, first)))
        bits = torch.zeros(self.topology.num_workers, dtype=torch.uint8)
        bits[list(members)] = 1
        message = self.message("view", first, {"members": bits})
        return [Send(j, message) for j in untold]

    def _tell_where_it_goes_on(self, state: S) -> list[Effect]:
        """Tell all that this worker goes on in another exchange; any may wait for it."""
        if state.views is None:
            return []
        state.views.told.clear()
        others = [j for j in self._members(state) if j != state.rank]
        return self._tell(state, others, state.exchange)

    def _put_off(self, state: S, receiver: Rank) -> Send:
        """Tell a new neighbor that it does not count yet, so that it counts this one out."""
        return Send(receiver, self.message("params", state.exchange, {}))

    def _will_send(self, state: S, sender: Rank) -> bool:
        """Whether `sender` sends to this worker in this exchange, by the view it has told."""
        if state.first_exchange.get(sender, 0) > state.exchange:
            return False
        graph = self.view_of(state, sender)
        return graph is not None and state.rank in graph.out_neighbors(sender, state.exchange)

    def _possible_senders(self, state: S, exchange: int) -> Sequence[Rank]:
        if state.views is None:
            return self.topology.in_neighbors(state.rank, exchange)
        return self.topology.all_in_neighbors(state.rank)  # its view may not be known yet

    def _has_declined(self, state: S, sender: Rank) -> bool:
        """Whether `sender` has told a view in which it need not help this worker."""
        if state.views is None or (members := state.views.latest(sender)) is None:
            return False
        return state.rank not in self.topology.among(members).all_out_neighbors(sender)

    def _see(self, state: S, event: WorkerJoined | WorkerLost, now: Seconds) -> list[Effect]:
        """Follow a change of the members: help newcomers that are neighbors now."""
        views = state.views
        if views is None:
            return []
        views.told.pop(event.rank, None)  # what was told lately may be lost
        if isinstance(event, WorkerLost):
            views.newcomers.pop(event.rank, None)
        else:
            if event.has_restarted:
                views.forget(event.rank)
            views.newcomers[event.rank] = False
        if state.catch_up is not None:
            return []  # it helps when it has caught up itself
        return self._help_newcomers(state, now)

    def _help_newcomers(self, state: S, now: Seconds) -> list[Effect]:
        assert state.views is not None
        effects: list[Effect] = []
        for j, has_helped in sorted(state.views.newcomers.items()):
            # First the view: a newcomer waits only for those who take it for a neighbor.
            effects += self._tell(state, [j], state.exchange + state.is_exchanging)
            if not has_helped:
                help_now = self.help_to_catch_up(state, j, now)
                state.views.newcomers[j] = bool(help_now)
                effects += help_now
        return effects

    def _receive_view(
        self, state: S, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        if state.views is None:
            return []
        first = self.exchange_of(message)
        members = {sender, *message.payload["members"].nonzero().flatten().tolist()}
        state.views.hear(sender, first, tuple(sorted(members)))
        if state.catch_up is None:
            self._wait_for(state, sender, first)
        return self._go_on(state, now)


def _with_seen(effect: Effect, counted: Mapping[Rank, int]) -> Effect:
    """Say in the message for which view of its receiver it is made."""
    if not isinstance(effect, Send) or effect.receiver not in counted:
        return effect
    return with_numbers(effect, {"seen": counted[effect.receiver]})


def _enough(num_neighbors: int) -> int:
    """The number of neighbors that must agree: among three or more, one may lie."""
    return 2 if num_neighbors >= 3 else 1


@dataclass(frozen=True, kw_only=True)
class RoundBased(Synchronous[S], Generic[S]):
    """`Synchronous` for algorithms that send tensors and mix the received ones into `params`.

    Late tensors are dropped.
    """

    @abstractmethod
    def outgoing(self, state: S, receiver: Rank) -> Payload:
        """Payload for `receiver` in this exchange; empty to send nothing.

        `receiver` waits for an empty payload too, but its `mix` does not see it.
        """

    def prepare(self, state: S) -> None:
        """Prepare this exchange, before `outgoing` makes its payloads."""

    def handed_over(self, state: S) -> Tensor:
        """The parameters for a returning worker, [num_params]."""
        return state.params

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec | Tensor]:
        """Describe the payloads of `outgoing`, or give an example; needed only over a network.

        Empty payloads are always allowed. An algorithm with optional tensors, or whose payloads
        must not be empty, overrides `schema`.

        Args:
            params: [num_params].
        """
        raise lacks(self, "payload_schema")

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Payloads of `outgoing`, and whole vectors for returning workers."""
        whole = {"params": TensorSpec.like(params)}
        return {
            "params": self.exchanged(self.payload_schema(params), may_be_empty=True),
            "catch-up": self.exchanged(whole),
            **self.view_schema(),
        }

    def exchanged(
        self,
        tensors: Mapping[str, TensorSpec | Tensor],
        optional: Mapping[str, TensorSpec] | None = None,
        *,
        may_be_empty: bool = False,
    ) -> MessageSpec:
        """Describe messages made by `message` that hold these tensors."""
        places = range(1, self.exchanges_per_round)
        numbers = {"exchange": places} if places else {}
        if self.topology.follows_members and self.mixes_symmetrically:
            numbers["seen"] = range(self.total_rounds * self.exchanges_per_round + 1)
        return MessageSpec(
            tensors,
            optional or {},
            optional_numbers=numbers,
            # Not relative to the receiver, which may adopt the round, and whose own messages
            # must then be allowed everywhere.
            max_round=self.total_rounds,
            may_be_empty=may_be_empty,
        )

    def send(self, state: S, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        self.prepare(state)
        return [
            Send(j, self.message("params", state.exchange, self.outgoing(state, j)))
            for j in receivers
        ]

    def announce(self, state: S, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        # The receivers do not get the messages of an exchange that is under way.
        next_sent = state.exchange + state.is_exchanging
        message = self.message("catch-up", next_sent, {"params": self.handed_over(state)})
        return [Send(j, message) for j in receivers]

    def remind(self, state: S, receiver: Rank, now: Seconds) -> list[Effect]:
        # In push-sum, an announcement gives mass away; here it is only a copy.
        return self.announce(state, [receiver], now)

    def catch_up_with(self, state: S, payload: Payload) -> None:
        state.params = payload["params"]


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Synchronous[S], Generic[S]):
    """`Synchronous` for algorithms with the same number of SGD steps in each round.

    If a round has several exchanges, training precedes the first one.

    Args:
        local_steps: SGD steps between two rounds of exchanges, at least 1.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.
    """

    local_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "local_steps")
        check_ranges(self, local_steps="at least 1")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=self.local_steps)

    def work(self, state: S) -> Work | None:
        is_first = state.exchange % self.exchanges_per_round == 0
        return Steps(self.local_steps) if is_first else None
