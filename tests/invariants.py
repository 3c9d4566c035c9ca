"""Invariants of simulated worlds: after every event, and of every message."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.oracles import (
    OFFSET,
    Box,
    RoundModels,
    has_one_model,
    is_steady,
    reference,
    require_reference,
)
from tests.update_rules import Rules
from tests.worlds import NUM_PARAMS, Recorder, stages_in

from edgegossip.algorithms.gossip.adpsgd import ADPSGDState
from edgegossip.algorithms.gossip.choco_gossip import ChocoState
from edgegossip.algorithms.gossip.gosgd import GoSGDState
from edgegossip.algorithms.stages.state import StageState
from edgegossip.algorithms.wrappers.clipped_messages import ClippedState
from edgegossip.algorithms.wrappers.standby.standby import StandbyState
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Started,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.sim.simulator import Simulator

MAX_EVENTS = 40_000  # a world needs some hundreds, a slow one half of it
MAX_TRAINED = 400_000  # workers of ADSP train while they wait


@dataclass
class Checks(Recorder):
    """Looks at every worker after every event, and at every message."""

    simulator: Simulator[Any] = field(init=False)
    algorithm: Algorithm[Any] = field(init=False)
    in_flight: list[Message] = field(default_factory=list)
    crashed: set[Rank] = field(default_factory=set)
    waking: set[Rank] = field(default_factory=set)  # recovered, not yet started
    lost_weight: float = 0.0
    num_events: float = 0
    leaders: dict[int, Rank] = field(default_factory=dict)  # by term
    voters: dict[int, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    merged: dict[int, int] = field(default_factory=dict)
    boxes: dict[Rank, Box] = field(default_factory=dict)
    rounds: RoundModels = field(default_factory=RoundModels)
    has_trouble: bool = False  # somebody was lost or found, or a message was
    expected_sum: torch.Tensor | None = None
    answered: set[bytes] = field(default_factory=set)
    seen: dict[Rank, tuple[torch.Tensor, int]] = field(default_factory=dict)
    rules: dict[Rank, Rules] = field(default_factory=dict)
    troubled: set[frozenset[Rank]] = field(default_factory=set)  # pairs, of messages or losses

    def before(self, state: WorkerState, event: Event, now: Seconds) -> None:
        self.num_events += 1 if not isinstance(event, Trained) else MAX_EVENTS / MAX_TRAINED
        assert self.num_events < MAX_EVENTS, "it goes on for ever"
        self.require_total_weight()  # now that the last event's messages are on their way
        self.require_sum(event)
        self.round_before = state.round
        if isinstance(event, Received):
            self.in_flight.remove(event.message)
        if isinstance(event, Started):
            if state.rank in self.waking and not event.has_rejoined:
                # It was not there, but nobody has begun without it, and its weight counts.
                self.lost_weight -= inside(state).weight if is_weighted(state) else 0.0
            self.waking.discard(state.rank)
        if state.rank not in self.rules:
            self.rules[state.rank] = Rules(self.algorithm)
        self.rules[state.rank].before(state, event)

    def after(self, state: WorkerState, event: Event, now: Seconds) -> None:
        assert state is self.simulator.states[state.rank]
        assert state.round >= self.round_before
        if isinstance(state, StageState):
            self.require_bounds(state)
        self.require_in_box(state)
        self.rules[state.rank].require(state, event)
        if isinstance(event, WorkerLost | WorkerJoined):
            self.note_trouble(state.round)
            self.troubled.add(frozenset({state.rank, event.rank}))
        if state.round > self.round_before:
            self.rounds.note(state, self.round_before, self.furthest)
        inner = inside(state)
        if isinstance(inner, GoSGDState):
            assert not (inner.has_finished and inner.queue)
        if isinstance(inner, StandbyState) and inner.election.is_leading:
            self.require_majority(inner)

    def note_trouble(self, *rounds: int) -> None:
        self.has_trouble = True
        self.rounds.has_trouble(*rounds, self.furthest)

    @property
    def furthest(self) -> int:
        furthest: int = max(state.round for state in self.simulator.states)
        return furthest

    def require_models(self, size: int | None, lr: float) -> None:
        """Fail if models differ that must not, or are not those of a perfect network."""
        if has_one_model(self.algorithm) and not stages_in(self.algorithm):
            self.rounds.require(self.algorithm)
        has_run = self.num_events > 0  # somebody has come at all
        if has_run and is_steady(self.algorithm) and not self.has_trouble:
            states = self.simulator.states
            models = {state.rank: state.estimate for state in states}
            require_reference(models, reference(self.algorithm, len(states), size, lr))

    def require_in_box(self, state: WorkerState) -> None:
        """Fail if an estimate is where none can be; one that was looked at is not again."""
        x = state.estimate
        seen, version = self.seen.get(state.rank, (None, 0))
        if x is seen and x._version == version:
            return
        if state.rank not in self.boxes:
            held = self.algorithm.role(state.rank).stretch(NUM_PARAMS)
            offset = 0.0 if stages_in(self.algorithm) else OFFSET
            self.boxes[state.rank] = Box(self.algorithm, offset, held)
        self.boxes[state.rank].require(state.rank, x)
        self.seen[state.rank] = x, x._version

    def require_bounds(self, state: StageState) -> None:
        """Fail if a stage keeps more than it is to, whatever is lost or late."""
        algorithm = stages_in(self.algorithm)
        assert algorithm is not None
        stage = algorithm.stage(state.rank)
        most = algorithm.max_passed(stage)
        assert len(state.pending) <= most
        assert len(state.answers) <= most
        assert len(state.origins) <= most + 1
        if stage > 0:
            num_below = algorithm.num_first if stage == 1 else 1
            assert len(state.waiting) <= num_below * algorithm.max_passed(stage - 1)

    def require_majority(self, state: StandbyState) -> None:
        """Fail if a server serves that most have not voted for, or merges without them."""
        term, num_ranks = state.election.term, len(self.simulator.states)
        assert self.leaders.setdefault(term, state.rank) == state.rank
        if term > 0:
            assert len(self.voters[term] | {state.rank}) > num_ranks // 2
        num_merged = sum(state.server.num_commits.values()) if state.server else 0
        before, self.merged[term] = self.merged.get(term, 0), num_merged
        is_cut_off = len(state.election.lost) >= (num_ranks + 1) // 2
        assert num_merged == before or not is_cut_off

    def require_sum(self, event: Event) -> None:
        """Fail if anything but training has changed the sum of models in AD-PSGD."""
        states = self.simulator.states
        if not isinstance(states[0], ADPSGDState) or self.has_trouble:
            return
        total = sum_of([state.params for state in states])
        # An answer may be sent twice, and counts until it has come once.
        answers = [m.payload["change"] for m in self.in_flight if m.kind == "average"]
        under_way = {each.numpy().tobytes(): each for each in answers}
        total -= sum_of([x for key, x in under_way.items() if key not in self.answered])
        if isinstance(event, Received) and event.message.kind == "average":
            self.answered.add(event.message.payload["change"].numpy().tobytes())
        if self.expected_sum is not None:
            torch.testing.assert_close(total, self.expected_sum, rtol=1e-5, atol=1e-4)
        trained = event.delta.double() if isinstance(event, Trained) else 0.0
        self.expected_sum = total + trained

    def require_settled(self) -> None:
        """Fail if somebody in AD-PSGD waits for an answer at the end.

        It may if a message between the two was lost, or one of them was.
        """
        for state in self.simulator.states:
            if not isinstance(state, ADPSGDState) or state.rank in self.crashed:
                continue
            waiting = [*state.deferred]
            waiting += [] if state.request is None else [state.request.send.receiver]
            assert all(frozenset({state.rank, each}) in self.troubled for each in waiting)

    def require_total_weight(self) -> None:
        """Fail if a GoSGD run has lost or won weight."""
        first = self.simulator.states[0]
        # ClippedMessages lets a weight count for less than its sender says.
        if isinstance(inside(first), GoSGDState) and not isinstance(first, ClippedState):
            assert self.total_weight() == pytest.approx(1.0, abs=1e-12)

    def total_weight(self) -> float:
        """Total weight of all workers, messages in flight, and losses to crashes and links."""
        online = [state for state in self.simulator.states if state.rank not in self.crashed]
        under_way = sum(map(weight_of, self.in_flight))
        held = sum(self.weight_held_by(inside(state)) for state in online if inside(state))
        return held + under_way + self.lost_weight

    def weight_held_by(self, state: GoSGDState) -> float:
        own = 0.0 if state.rank in self.waking else state.weight
        return own + sum(weight_of(message) for _, message in state.queue)

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        super().sent(now, rank, receiver, message, num_bytes, uplink)
        self.in_flight.append(message)
        if message.kind == "vote":
            self.voters[int(message.numbers["stands_for"])].add(rank)

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        super().lost(now, rank, sender, message, reason)
        self.note_trouble(message.round)
        self.troubled.add(frozenset({rank, sender}))
        self.in_flight.remove(message)
        self.lost_weight += weight_of(message)

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        super().changed(now, rank, what)
        own = self.simulator.states[rank]
        state = inside(own)
        self.note_trouble(own.round)
        if what == "crashed":
            if isinstance(state, GoSGDState):
                self.lost_weight += self.weight_held_by(state)
            self.crashed.add(rank)
            self.waking.discard(rank)
        elif what == "recovered":
            self.crashed.discard(rank)
            self.waking.add(rank)


def is_weighted(state: WorkerState) -> bool:
    """Whether its algorithm is GoSGD."""
    return isinstance(inside(state), GoSGDState)


def inside(state: WorkerState) -> Any:  # noqa: ANN401
    """The state of the algorithm that exchanges parameters."""
    return getattr(state, "inner", state)


def sum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in double precision, 0 of none."""
    total = torch.zeros(NUM_PARAMS, dtype=torch.float64)
    for each in vectors:
        total += each
    return total


def weight_of(message: Message) -> float:
    """The weight in a GoSGD message; other algorithms' messages carry none."""
    return message.numbers.get("weight", 0.0)


def require_equal_replicas(states: list[Any]) -> None:
    """Fail if both ends of an edge hold different things for the same, in ChocoGossip."""
    for state in states:
        if isinstance(state, ChocoState):
            for j, replica in state.replicas.items():
                is_complete = replica.round == states[j].round
                assert not is_complete or torch.equal(replica.params, states[j].replica)
