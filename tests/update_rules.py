"""Rules for single events of a worker, written a second time, from the documentation.

A run with a fault is compared with one on a perfect network that has the fault as well; these
rules do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.oracles import ViolationError, innermost
from tests.worlds import stages_in

from edgegossip.algorithms.fragments import fragment
from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.divshare import DivShare
from edgegossip.algorithms.gossip.gasloc import GASLoC
from edgegossip.algorithms.gossip.noloco import NoLoCo
from edgegossip.algorithms.gossip.overlap import Overlapping
from edgegossip.algorithms.gossip.swift import SWIFT
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Event,
    Message,
    Rank,
    Received,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.rounds import Synchronous

NEAR = 1e-3
"""Two ways to compute a mean of models around 10 differ by less; in proportion beyond that."""


def require_near(state: Any, expected: torch.Tensor, what: str) -> None:  # noqa: ANN401
    """Fail if a worker's parameters are not `expected`, which is named by `what`."""
    far = float((state.params.double() - expected).abs().max())
    if far > NEAR * max(1.0, float(expected.abs().max()) / 10):
        raise ViolationError(f"rank {state.rank} is {far:.2g} off {what}")


class Rule:
    """Looks at one worker's state before and after each of its events."""

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        """Take note of a state that is about to handle `event`."""

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        """Fail if the event should have done something else."""


@dataclass
class Rejoining(Rule):
    """A returning worker goes on in its most advanced neighbor's round.

    With three or more neighbors it is the second-most-advanced, because one may lie.
    """

    algorithm: Any  # a `Synchronous` one
    answers: dict[Rank, Message] | None = None

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.answers = None
        if state.catch_up is None:
            return
        self.answers = dict(state.catch_up)
        if isinstance(event, Received) and event.message.kind == "catch-up":
            self.answers[event.sender] = event.message
        elif isinstance(event, WorkerLost) and event.has_lied:
            self.answers.pop(event.rank, None)

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        if not self.answers or state.catch_up is not None:
            return
        neighbors = self.algorithm.graph(state).all_in_neighbors(state.rank)
        num_present = sum(j not in state.lost for j in neighbors)
        reached = sorted(map(self.algorithm.exchange_of, self.answers.values()), reverse=True)
        place = 1 if num_present >= 3 and len(reached) > 1 else 0
        if state.exchange < reached[place]:
            raise ViolationError(
                f"worker {state.rank} goes on in exchange {state.exchange}, though its "
                f"neighbors have said that they are in {reached}"
            )


@dataclass
class AveragedOnce(Rule):
    """A repeated request gets the same answer: the worker has moved by it already."""

    averaged: set[tuple[Rank, int]] = field(default_factory=set)
    params: torch.Tensor | None = None

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.params = state.params
        if isinstance(event, WorkerLost):
            self.averaged = {each for each in self.averaged if each[0] != event.rank}

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        match event:
            case Received(sender, Message("request", round)):
                assert self.params is not None
                has_moved = not torch.equal(state.params, self.params)
                if has_moved and (sender, round) in self.averaged:
                    raise ViolationError(
                        f"worker {state.rank} averages once more with worker {sender}, which "
                        f"has repeated its request of round {round}"
                    )
        for rank, answer in state.answers.items():
            if answer.kind == "average":
                self.averaged.add((rank, answer.round))


@dataclass
class LastModels(Rule):
    """Each block mixes with the last models of present neighbors, by the graph's weights.

    The weight of one that is lost, or has not been heard since, goes to the worker's own model.
    """

    algorithm: Any  # SWIFT
    models: dict[Rank, Message] = field(default_factory=dict)
    expected: torch.Tensor | None = None

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.expected = None
        match event:
            case Received() if event.message.kind == "model":
                self.models[event.sender] = event.message
            case WorkerLost():
                self.models.pop(event.rank, None)
            case Trained() if event.has_gone_back:
                self.models = {}
            case Trained() if not state.is_new:
                self.expected = self._mixed(state, event.params)

    def _mixed(self, state: Any, own: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        graph = self.algorithm.graph(state)
        row = self.algorithm.mixing.weights(graph, state.rank, state.round, state.lost)
        mixed = own.double()
        for j, weight in row.items():
            model = self.models.get(j)
            if model is not None and "is_new" not in model.numbers:
                mixed = mixed + weight * (model.payload["params"].double() - own.double())
        return mixed

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        if self.expected is None:
            return
        require_near(
            state,
            self.expected,
            f"the mean of its own model and the last ones of workers {sorted(self.models)}",
        )


@dataclass
class NewestFragments(Rule):
    """After a block, each fragment is the mean of the worker's and the newest of each sender.

    Fragments that a worker which has come back does not know yet are not judged.
    """

    algorithm: Any  # DivShare
    heard: dict[str, dict[Rank, Message]] = field(default_factory=dict)
    expected: torch.Tensor | None = None

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.expected = None
        match event:
            case Received() if event.message.kind == "fragment" and not state.has_finished:
                for name in event.message.payload:
                    known = self.heard.setdefault(name, {}).get(event.sender)
                    if known is None or known.round <= event.message.round:
                        self.heard[name][event.sender] = event.message
            case WorkerLost(has_lied=True):
                for messages in self.heard.values():
                    messages.pop(event.rank, None)
            case Trained():
                heard, self.heard = self.heard, {}
                if not event.has_gone_back and not state.unknown:
                    self.expected = self._mean(event.params, heard)

    def _mean(
        self, own: torch.Tensor, heard: Mapping[str, Mapping[Rank, Message]]
    ) -> torch.Tensor:
        mean, numel, number = own.double(), own.numel(), self.algorithm.num_fragments
        for name, messages in heard.items():
            part = fragment(int(name), number, numel)
            known = [each for each in messages.values() if "is_new" not in each.numbers]
            vectors = [own[part], *(each.payload[name] for each in known)]
            mean[part] = torch.stack(vectors).double().mean(0)
        return mean

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        if self.expected is not None:
            require_near(state, self.expected, "the mean of the newest fragments")


@dataclass
class MixedRounds(Rule):
    """The rounds of GASLoC and NoLoCo in which all neighbors are heard, by their formulas."""

    algorithm: Any
    exchange: int = 0
    own: torch.Tensor | None = None
    last: torch.Tensor | None = None
    start: torch.Tensor | None = None
    inbox: dict[Rank, torch.Tensor] = field(default_factory=dict)

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.exchange = state.exchange
        # Open runs have empty messages, of those that are put off.
        arrived = state.inbox.get(state.exchange, {})
        self.inbox = {j: x["params"] for j, x in arrived.items() if x}
        match event:
            case Received() if event.message.kind == "params" and event.message.payload:
                if self.algorithm.exchange_of(event.message) == state.exchange:
                    self.inbox[event.sender] = event.message.payload["params"]
            case Trained():
                self.start = None if event.has_gone_back else event.before
                self.own = self._proposal(state, event)

    def _proposal(self, state: Any, event: Trained) -> torch.Tensor:  # noqa: ANN401
        """Return what the worker sends; note the vector from which momentum comes."""
        algorithm: GASLoC | NoLoCo = self.algorithm
        if isinstance(algorithm, NoLoCo):
            self.last = state.velocity
            return algorithm.outer_lr * event.delta + algorithm.pull * event.before
        # Unless it goes on from other parameters, this is the last round's proposal.
        self.last = self.own if state.previous is not None else event.before
        return event.before + algorithm.outer_lr * event.delta

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        own, last, start, algorithm = self.own, self.last, self.start, self.algorithm
        neighbors = algorithm.topology.in_neighbors(state.rank, self.exchange)
        if state.catch_up is not None or state.exchange != self.exchange + 1:
            return
        is_whole = not state.lost and state.views is None and self.inbox.keys() == {*neighbors}
        if not is_whole or own is None or last is None or start is None:
            return
        row = algorithm.mixing.weights(algorithm.topology, state.rank, self.exchange)
        pull = sum((row[j] * (self.inbox[j] - own) for j in neighbors), torch.zeros_like(own))
        if isinstance(algorithm, NoLoCo):
            others = own + pull - algorithm.pull * start
            expected = start + algorithm.outer_momentum * last + others
        else:
            momentum = algorithm.outer_momentum * (own - last)
            expected = own + algorithm.consensus_step * pull + momentum
        require_near(state, expected, "the round's formula")


@dataclass
class StepsOfRounds(Rule):
    """A worker that trains beside its exchanges takes each round's steps, and once.

    It may be ahead by the steps of the round that it exchanges and of the next one, or behind
    by those that it takes beside; and it may skip a few rounds.
    """

    algorithm: Any  # an `Overlapping` one
    num_steps: int | None = None  # since it last took another's round
    first: int = 0
    round: int = 0

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.round = state.round

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        went_back = isinstance(event, Trained) and event.has_gone_back
        if self.num_steps is None or state.round > self.round + 1 or went_back:
            self.num_steps, self.first = 0, state.round
            return
        if state.catch_up is not None:
            self.num_steps = None
            return
        self.num_steps += event.num_steps if isinstance(event, Trained) else 0
        local_steps, end = self.algorithm.local_steps, self.algorithm.num_rounds
        num_done = self.num_steps / local_steps
        least, most = (max(0, min(state.round + k, end) - self.first) for k in (-4, 2))
        least /= 2  # as some rounds may be skipped
        most += self.first > 0  # a training that began before it took another's round
        if not least <= num_done <= most:
            raise ViolationError(
                f"worker {state.rank} has taken the steps of {num_done:g} rounds, not of "
                f"{least} to {most}, by round {state.round}"
            )


@dataclass
class StepsWithMomentum(Rule):
    """A merge is a Nesterov step on the mean change; progress in flight is added to an answer.

    Nothing else bounds this model. Where answers take many blocks, several workers make the
    same progress from stale models, and with momentum the model swings ever further.
    """

    algorithm: Any  # DecoupledDiLoCo, by itself
    kept: Any = None
    commit: Message | None = None
    committed: torch.Tensor | None = None
    in_flight: torch.Tensor | float = 0.0

    def before(self, state: Any, event: Event) -> None:  # noqa: ANN401
        self.kept = None
        if state.rank == SERVER:
            if not state.is_new:
                commits = dict(state.waiting)
                if isinstance(event, Received) and event.message.kind == "commit":
                    commits.setdefault(event.sender, event.message)
                self.kept = commits, dict(state.num_commits), state.params, state.velocity
        elif isinstance(event, Received) and event.message.kind == "params":
            is_open = state.commit is not None
            self.kept = state.answer
            self.in_flight = state.params - self.committed if is_open else 0.0

    def require(self, state: Any, event: Event) -> None:  # noqa: ANN401
        expected = self._stepped(state) if state.rank == SERVER else self._rebased(state)
        if expected is not None:
            require_near(state, expected, "the documented step")

    def _rebased(self, state: Any) -> torch.Tensor | None:  # noqa: ANN401
        if state.commit is not self.commit:
            self.commit = state.commit
            part = self._part(state.commit, state.params) if state.commit else slice(None)
            self.committed = state.base.clone()
            self.committed[part] = state.params[part]
        if self.kept is None or state.answer is self.kept:  # it answers another request
            return None
        expected: torch.Tensor = state.base + self.in_flight
        return expected

    def _stepped(self, state: Any) -> torch.Tensor | None:  # noqa: ANN401
        if self.kept is None:
            return None
        commits, counts, params, velocity = self.kept
        merged = [commits[j] for j, n in state.num_commits.items() if n > counts[j]]
        expected: torch.Tensor = params.double()
        mu = self.algorithm.outer_momentum
        parts = {str(self._part(each, params)): self._part(each, params) for each in merged}
        for name, part in parts.items():
            own = [each for each in merged if str(self._part(each, params)) == name]
            weights = [_weight(each) for each in own]
            weights = weights if any(weights) else [1.0] * len(own)
            second = sorted(weights)[-2] if len(weights) > 1 else 0.0
            if second:  # nobody counts more than 8 times as much as the next
                weights = [min(weight, 8 * second) for weight in weights]
            changes = [each.payload["update"].double() for each in own]
            total = sum(w * change for w, change in zip(weights, changes, strict=True))
            mean = total / sum(weights)
            moved = mu * velocity[part] + mean
            expected[part] += self.algorithm.outer_lr * (mean + mu * moved)
        return expected

    def _part(self, commit: Message, params: torch.Tensor) -> slice:
        num_parts = self.algorithm.fragments
        place = (int(commit.numbers["number"]) - 1) % num_parts
        return fragment(place, num_parts, params.numel())


def _weight(commit: Message) -> float:
    numbers = commit.numbers
    num_steps = numbers.get("turn_steps", numbers["num_steps"])
    return numbers["num_samples"] ** 2 / num_steps if num_steps else 0.0


def rules_of(algorithm: Algorithm[Any], state: Any) -> list[Rule]:  # noqa: ANN401
    """The rules that a worker of `algorithm` follows from its innermost `state` on."""
    if stages_in(algorithm):
        return []  # those that hold a later stage have no such state
    match inner := innermost(algorithm):
        case Overlapping(overlap=True) if inner is algorithm:
            return [Rejoining(inner), StepsOfRounds(inner)]
        case GASLoC() | NoLoCo() if inner.robust is None and inner is algorithm:
            return [Rejoining(inner), MixedRounds(inner)]
        case Synchronous():
            return [Rejoining(inner)]
        case DivShare() if inner is algorithm:
            heard = {str(k): dict(each) for k, each in state.inbox.items()}  # of a checkpoint
            return [NewestFragments(inner, heard)]
        case ADPSGD() if inner.resend_after is not None:
            return [AveragedOnce()]
        case SWIFT() if inner.robust is None and inner is algorithm:
            return [LastModels(inner, dict(state.models))]  # those of a checkpoint
        case DecoupledDiLoCo() if inner is algorithm:
            if state.rank == SERVER:
                return [StepsWithMomentum(inner)]
            opened = {"commit": state.commit, "committed": state.committed}
            return [StepsWithMomentum(inner, **opened)]
    return []


@dataclass
class Rules:
    """The rules of one worker from its start until it has a new state."""

    algorithm: Algorithm[Any]
    state: WorkerState | None = None
    rules: list[Rule] = field(default_factory=list)

    def before(self, state: WorkerState, event: Event) -> None:
        if state is not self.state:
            self.state, self.rules = state, rules_of(self.algorithm, innermost(state))
        for rule in self.rules:
            rule.before(innermost(state), event)

    def require(self, state: WorkerState, event: Event) -> None:
        for rule in self.rules:
            rule.require(innermost(state), event)
