"""A parameter server and workers that commit to it: base of BSP, ADSP and all others.

Rank 0 is the server. Workers train from the server's model, *commit* their change, and get the
new model in return. The base class delivers each commit, counts it exactly once, and survives
lost messages, network cuts and restarts. A derived algorithm decides when a worker commits
(`is_due`), and when and how the server merges and answers (`serve`).

Each answer states how many commits of each worker its model includes. These counts suffice to
continue after the server has lost its memory. The server then asks all workers for their latest
model and takes the newest. Workers resend the commits that this model lacks. A worker is the
authority on its own commits: a higher count is believed only if two other workers report it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from edgegossip.algorithms.server.worker import MAX_COUNT, SERVER, Committer, CommitterState
from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Evaluated,
    Event,
    Finish,
    Layout,
    Message,
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
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.robust import RobustRule, robust_field, trust_note
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.contract.topology import star

_LONGEST_WAIT = 10.0
"""Wait for a commit, as a multiple of the run until the last one."""
_MAX_BELIEVED = MAX_COUNT // 2
"""Largest count that a restarted server believes, so that numbers are left for all commits."""


@dataclass(slots=True, kw_only=True)
class ServerState(WorkerState):
    """State of the server; `params` is the model, and `round` is the most advanced worker's.

    Attributes:
        num_commits: Number of merged commits of each worker, by rank.
        num_steps: Number of steps in these commits, by rank.
        rounds: The round of each worker, by rank; a returning worker skips its missed rounds.
        waiting: Unanswered commits, by sender.
        pulling: Workers that ask for the model, as keys.
        lost: Workers that cannot be reached, as keys.
        dropped: Workers whose commit was dropped because they lied, as keys.
        unseen: Workers that have not yet reported their latest model to the restarted server,
            as keys.
        open: Workers whose report has told of an open commit that has not come since, as keys.
        copies: Reported models, by sender.
        is_new: Whether the server has restarted and does not know the model yet.
        latest: With a robust rule, the last merged commit of each worker.
        trust: Shares that a robust rule has given to workers, not noted yet.
        is_paused: Whether a wrapper has told the server to keep its model as it is for now.
        heard_at: Time of the last message from a worker.
        quiet_at: Time of the timer that is set while no worker waits for another; infinity
            without one.
    """

    num_commits: dict[Rank, int]
    num_steps: dict[Rank, int]
    rounds: dict[Rank, int]
    waiting: dict[Rank, Message] = field(default_factory=dict)
    pulling: dict[Rank, None] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    dropped: dict[Rank, None] = field(default_factory=dict)
    unseen: dict[Rank, None] = field(default_factory=dict)
    open: dict[Rank, None] = field(default_factory=dict)
    copies: dict[Rank, Message] = field(default_factory=dict)
    is_new: bool = False
    latest: dict[Rank, Message] = field(default_factory=dict)
    trust: dict[Rank, float] = field(default_factory=dict)
    is_paused: bool = False
    heard_at: Seconds = 0.0
    quiet_at: Seconds = math.inf

    @property
    def version(self) -> int:
        """Number of commits that the model includes."""
        return sum(self.num_commits.values())

    def newest(self, rank: Rank) -> float:
        """Number of the newest known commit of worker `rank`."""
        waiting = self.waiting.get(rank)
        return self.num_commits[rank] if waiting is None else waiting.numbers["number"]

    def is_counted(self, rank: Rank) -> bool:
        """Return whether the waiting commit of worker `rank` is counted."""
        return self.waiting[rank].numbers["number"] <= self.num_commits[rank]

    def count(self, rank: Rank, num_rounds: int) -> None:
        """Count the waiting commit of worker `rank` once, and a round of that worker."""
        if self.is_counted(rank):
            return
        commit = self.waiting[rank].numbers
        # Not one more than before: a server that has forgotten commits must follow the
        # worker's numbers, or it would take the next commit for a repetition.
        self.num_commits[rank] = int(commit["number"])
        self.num_steps[rank] += int(commit["num_steps"])
        self.rounds[rank] = min(self.rounds[rank] + 1, num_rounds)
        self.round = max(self.round, self.rounds[rank])


CommitState: TypeAlias = ServerState | CommitterState


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Committer, Algorithm[CommitState]):
    r"""Base of algorithms in which workers commit updates to a server.

    Worker :math:`i` trains from the server's model :math:`W` and commits the change. The server
    adds a share of the change and answers with its model:

    .. math::
        U_i = x_i - W^{pulled}_i, \qquad W \leftarrow W + \tfrac{1}{M} U_i, \qquad
        x_i \leftarrow W

    A worker has one commit in flight at a time, and by default waits for the answer. Running
    statistics of normalization layers are merged as measured, :math:`W \leftarrow W + \tfrac1M
    (x_i - W)`: adding up stale differences could make a variance negative.

    Rank 0 is the server: it has no data, and its model is evaluated. Ranks 1 to `num_workers`
    are workers. No commit is counted twice, and none that was answered is lost while the server
    or the last worker to commit is there. `docs/parameter-servers.md` describes failures;
    `Standby` and `Shards` wrap this algorithm for elections and for several servers.

    Args:
        num_workers: :math:`M`, the number of workers that train; the run has one more rank.
        num_rounds: Commits that each worker makes before it finishes.
        resend_after: Seconds until an unanswered commit is resent; each further wait is longer
            by the same amount. None never resends; safe only on lossless links.
        patience: Seconds for which a worker waits for a lost server, and for which a server
            that has lost all its workers waits for one to return. While no worker waits for
            another, a server waits at least so long for the next commit, and at least ten
            times the duration of the run until the last one.
        rate_ratio: Learning rate of the workers relative to the task's, above 0.
        momentum: Explicit momentum of the workers' SGD, in [0, 1); asynchrony adds implicit
            momentum. None keeps the task's.
        robust: Rule that limits what false commits do; None adds all. See
            :doc:`Robust mixing </docs/robust>`.
        is_open: Whether workers come and go: :math:`M` is then the number of those that are
            present. Set by `opened`.

    Raises:
        ValueError: If a number is out of range.
    """

    evaluates: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = True
    """Whether an entry of the model depends only on the same entry of commits."""
    num_workers: int
    robust: RobustRule | None = robust_field()
    is_open: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, num_workers="at least 1")
        super().__post_init__()

    # For algorithms to define.

    @abstractmethod
    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Merge and answer the commits of `state.waiting` that are due."""

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401 - of `ServerState`
        """Build the server's initial state from the common fields."""
        return ServerState(**fields)

    def is_held_up(self, state: ServerState) -> bool:
        """Whether workers wait for the commits of others."""
        return bool(state.waiting)

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Begin as a server."""
        return []

    def judged(self, state: ServerState, loss: float, now: Seconds) -> list[Effect]:
        """Handle the measured loss of the server's model on validation data."""
        return []

    def wake_server(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Handle the algorithm's own timer."""
        return []

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        """Settings for worker `rank` in each answer, and values that the worker keeps for
        `recall`.

        They include all names in `limits`, and may include those in `optional_limits`.
        """
        return {}

    @property
    def limits(self) -> Mapping[str, Limits]:
        """Limits on the required numbers in `settings`."""
        return {}

    @property
    def optional_limits(self) -> Mapping[str, Limits]:
        """Limits on the optional numbers in `settings`."""
        return {}

    def recall(self, state: ServerState, numbers: Mapping[str, float]) -> None:
        """After a restart, restore the `settings` that a worker has kept; any of them may be
        missing.
        """

    # Common to all algorithms.

    @property
    def answers_whole(self) -> bool:
        """Whether every answer has the whole model."""
        return True

    @property
    def traits(self) -> Traits:
        topology = star(self.num_workers + 1)
        return Traits(topology=topology, num_rounds=self.num_rounds, takes_repeats=True)

    def role(self, rank: Rank) -> Role:
        if rank == SERVER:
            return Role("server", has_data=False, evaluates=self.evaluates)
        return Role("worker", is_evaluated=False)

    @property
    def workers(self) -> range:
        """The ranks that train."""
        return range(1, 1 + self.num_workers)

    def init(self, rank: Rank, params: Tensor) -> CommitState:
        return self.init_server(params) if rank == SERVER else self.init_worker(rank, params)

    def init_server(self, params: Tensor) -> ServerState:
        """Build the state of the server."""
        none = dict.fromkeys(self.workers, 0)
        counts = {"num_commits": none, "num_steps": {**none}, "rounds": {**none}}
        return self.make_server(rank=SERVER, params=params, **counts)

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        """Build the state of a worker."""
        return CommitterState(rank=rank, params=params, answer=self.no_answer(params))

    def no_answer(self, params: Tensor) -> Message:
        """Make what a worker that starts from `params` has before the first answer."""
        counts = torch.zeros(self.num_workers, dtype=torch.int64)
        return Message("params", 0, {"params": params, "counts": counts})

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Commits, pulls, reports of a worker's newest model, and the server's answers."""
        counts = TensorSpec(torch.int64, (self.num_workers,), minimum=0, maximum=MAX_COUNT)
        model: dict[str, TensorSpec | Tensor] = {"params": params, "counts": counts}
        # Answers count each merged commit, so no number may exceed a count.
        numbers = range(MAX_COUNT + 1)
        commit: dict[str, Limits] = {
            "number": numbers[1:],
            "num_steps": numbers,
            "num_trained": range(params.numel() + 1),
            "version": range(MAX_COUNT * self.num_workers + 1),
        }
        required, optional = self.limits, self.optional_limits
        # A report repeats what the answer of an earlier server said, if there was one.
        memory = {**required, **optional}
        specs = {
            "commit": MessageSpec({"update": params}, numbers=commit),
            "pull": MessageSpec(),
            "show": MessageSpec(),
            "again": MessageSpec(),
            "copy": MessageSpec(model, numbers={"number": numbers}, optional_numbers=memory),
            "params": MessageSpec(model, numbers=required, optional_numbers=optional),
        }
        return {kind: replace(spec, max_round=self.num_rounds) for kind, spec in specs.items()}

    def handle(self, state: CommitState, event: Event, now: Seconds) -> list[Effect]:
        if state.rank == SERVER:
            assert isinstance(state, ServerState)
            return self.handle_as_server(state, event, now)
        assert isinstance(state, CommitterState)
        return self.handle_as_worker(state, event, now)

    # The server.

    def handle_as_server(self, state: ServerState, event: Event, now: Seconds) -> list[Effect]:
        """Handle `event` as a server."""
        effects: list[Effect] = []
        match event:
            case Started(has_rejoined=True):
                state.unseen, state.is_new = dict.fromkeys(self.workers), True
                patience = SetTimer("patience", now + self.patience)
                effects += [*self._ask(state, now), patience]
            case Started():
                effects += self.start_serving(state, now)
            case Received():
                self._receive(state, event.sender, event.message, now)
            case Evaluated():
                effects += self.judged(state, event.loss, now)
            case TimerFired("resend"):
                effects += self._ask(state, now)
            case TimerFired("patience"):
                if self._is_alone(state) or not state.is_new:
                    return [Finish()]
                # Lost workers may know a newer model, but the server waits no longer for them.
                effects += self._recover(state, now)
            case TimerFired("quiet"):
                state.quiet_at = math.inf
            case TimerFired():
                effects += self.wake_server(state, now)
            case WorkerLost():
                self._lose(state, event)
                if self._is_alone(state):
                    effects.append(SetTimer("patience", now + self.patience))
            case WorkerJoined():
                effects += self._welcome(state, event, now)
        # Every event may have been the last that was missing: a report, a loss, a commit. What
        # it makes due is therefore done here, once, and in this order: the model before any
        # answer, and pulls before commits, because answering a commit may end the run.
        if state.is_new:
            if state.is_paused or not self._knows_enough(state):
                return effects
            effects += self._recover(state, now)
        effects += [self.answer(state, j) for j in [*state.pulling]]
        effects += self.serve(state, now) if state.waiting and not state.is_paused else []
        effects += self._wait_for_workers(state, now)
        # A server without reachable workers stays: they may return while its patience lasts.
        if state.trust:
            effects.append(trust_note(state.trust))
            state.trust = {}
        has_work = self.training(state) or self._is_alone(state)
        return effects if has_work else [*effects, Finish()]

    def _wait_for_workers(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Keep a timer while no worker waits for another, unless none has sent for long.

        The timer tells a host that this server waits for living workers, however long they
        train, and not for messages that may have been lost. The host would judge silence by the
        server's rounds, which are those of the fastest worker.
        """
        last = state.heard_at
        until = last + max(self.patience, _LONGEST_WAIT * last)
        if self.is_held_up(state):
            until = math.inf
        # A timer that comes too early is set again when it fires, so that not every commit
        # sets one.
        if (state.quiet_at < math.inf) == (now < until < math.inf):
            return []
        state.quiet_at = until if now < until else math.inf
        return [SetTimer("quiet", state.quiet_at)]

    def _is_alone(self, state: ServerState) -> bool:
        """Whether all workers are lost and none has finished."""
        return len(state.lost) == self.num_workers and state.round < self.num_rounds

    def _lose(self, state: ServerState, event: WorkerLost) -> None:
        state.lost[event.rank] = None
        state.latest.pop(event.rank, None)
        # The commit of a worker that is merely lost stays, and is merged. The contract asks for
        # a liar's unused messages to be dropped.
        if not event.has_lied:
            return
        if state.waiting.pop(event.rank, None):
            state.dropped[event.rank] = None
        if state.copies.pop(event.rank, None):
            state.unseen[event.rank] = None

    def _welcome(self, state: ServerState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        rank = event.rank
        state.lost.pop(rank, None)
        # The worker may not have heard the question, so the server asks again without waiting
        # for the timer.
        effects = self._ask(state, now)
        if event.has_restarted:
            # A restarted worker reuses its commit numbers, and does not know about this commit.
            state.waiting.pop(rank, None)
            state.latest.pop(rank, None)
            state.dropped.pop(rank, None)
        elif rank in state.dropped:
            # The worker waits for an answer to the commit that was dropped.
            del state.dropped[rank]
            effects.append(Send(rank, Message("again", state.round)))
        self._skip(state, rank)
        # A new server's patience also covers reports, so it keeps running.
        return effects if state.is_new else [SetTimer("patience", math.inf), *effects]

    def _receive(
        self, state: ServerState, sender: Rank, message: Message, now: Seconds
    ) -> None:
        state.heard_at = now
        if sender not in self.workers:
            return  # a rank that does not train has nothing to commit
        match message.kind:
            case "copy":
                self._take_report(state, sender, message)
            case "pull":
                self._skip(state, sender)
                state.pulling[sender] = None
                state.open.pop(sender, None)
                if not state.is_new:  # else an answer of a former life may still reach it
                    state.unseen.pop(sender, None)
            case "commit":
                self._take_commit(state, sender, message)

    def _take_commit(self, state: ServerState, sender: Rank, message: Message) -> None:
        state.open.pop(sender, None)
        number = message.numbers["number"]
        # Only a server that has forgotten commits knows fewer than the number minus one, and
        # a worker makes at most `num_rounds`. A higher number is a lie: once counted, none of
        # the sender's later commits would count, nor those of an honest successor.
        if number > state.num_commits[sender] + self.num_rounds:
            return
        if number > state.newest(sender):
            state.waiting[sender] = message
        elif sender not in state.waiting:
            state.pulling[sender] = None  # the answer was lost
            self._know_merged(state, sender, message)

    # A server that has restarted.

    def _ask(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Ask workers for their newest model, because the server has lost its own model.

        Reports that arrive after the model was chosen still tell the rounds of their senders,
        so the server asks until all workers have reported. An answer of an earlier server may
        end a worker after its report, so the server asks again for a commit that was open.
        """
        show, asked = Message("show", state.round), state.unseen | state.open
        effects: list[Effect] = [Send(j, show) for j in asked if j not in state.lost]
        if effects and self.resend_after is not None:
            effects.append(SetTimer("resend", now + self.resend_after))
        return effects

    def _take_report(self, state: ServerState, sender: Rank, copy: Message) -> None:
        # The first report may be one that an earlier server has asked for, so later ones count.
        state.unseen.pop(sender, None)
        state.open.pop(sender, None)
        if copy.numbers["number"] > max(
            int(copy.payload["counts"][sender - 1]), state.newest(sender)
        ):
            state.open[sender] = None
        if state.is_new:
            state.copies[sender] = copy
        state.rounds[sender] = max(state.rounds[sender], min(copy.round, self.num_rounds))
        state.round = max(state.round, state.rounds[sender])

    def _knows_enough(self, state: ServerState) -> bool:
        """Return whether all reachable workers have reported their model.

        A worker that pulls has restarted, and has no model. A lost worker may have a newer
        model than the others, but the server waits for it only if no other worker has reported
        a model.
        """
        if len(state.pulling) == self.num_workers:
            return True
        mute = state.lost.keys() | state.pulling.keys()
        return bool(state.copies) and state.unseen.keys() <= mute

    def _recover(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Adopt the newest reported model, and begin to serve."""
        copies, state.copies, state.is_new = state.copies, {}, False
        counts = believed(copies, self.workers)
        # A wrapper may leave out models that are not newer than the server's own. It may also
        # rank them by a number of its own before the number of commits.
        if whole := [j for j in counts if "params" in copies[j].payload]:
            as_of = {j: copies[j].numbers.get("as_of", 0) for j in counts}
            newest = max(whole, key=lambda j: (as_of[j], sum(counts[j].values())))
            state.params, state.num_commits = copies[newest].payload["params"], counts[newest]
            self.recall(state, copies[newest].numbers)
        # Rounds are known only now, so workers that pulled before skip their missed rounds now.
        for rank in state.pulling:
            self._skip(state, rank)
        effects = self.start_serving(state, now)
        if not self._is_alone(state):
            effects.append(SetTimer("patience", math.inf))
        # The adopted model may include commits that arrived before it. They are answered here,
        # because `serve` would merge them a second time.
        known = [j for j in state.waiting if state.is_counted(j)]
        for rank in known:
            self._know_merged(state, rank, state.waiting[rank])
        return [*effects, *(self.answer(state, j) for j in known)]

    def _know_merged(self, state: ServerState, rank: Rank, commit: Message) -> None:
        """Count the round of a commit that the model includes, as an earlier server did.

        The worker may have reported before that server's answer came. After its last round it
        then sends nothing more, and this server would wait for it forever.
        """
        if state.rounds[rank] == commit.round < self.num_rounds:
            state.rounds[rank] += 1
            state.round = max(state.round, state.rounds[rank])

    def _skip(self, state: ServerState, rank: Rank) -> None:
        """Let a returned worker continue in the round of the slowest other worker.

        A worker that has not reported its model to a restarted server has an unknown round.
        """
        known = [j for j in self.training(state) if j != rank and j not in state.unseen]
        others = [state.rounds[j] for j in known]
        state.rounds[rank] = max([state.rounds[rank], *([min(others)] if others else [])])

    # Rounds and commits.

    def training(self, state: ServerState) -> list[Rank]:
        """List the reachable workers that have not finished."""
        rounds = state.rounds
        return [j for j in self.workers if j not in state.lost and rounds[j] < self.num_rounds]

    def num_present(self, state: ServerState) -> int:
        """The number of workers that commits are divided by, :math:`M`."""
        num_lost = len(state.lost) if self.is_open else 0
        return max(1, self.num_workers - num_lost)

    def merge(self, state: ServerState, ranks: list[Rank], share: float) -> None:
        """Add `share` of each waiting commit of `ranks` to the model, in this order."""
        if self.robust is None:
            total = reduce(
                torch.add, (change_of(state.waiting[j], state.params) for j in ranks)
            )
        else:
            total = len(ranks) * self._robust_mean(state, ranks, self.robust)
        # A new tensor: answers that are in flight and evaluations have the old one.
        state.params = state.params.add(total, alpha=share)
        for rank in ranks:
            state.count(rank, self.num_rounds)

    def _robust_mean(self, state: ServerState, ranks: list[Rank], rule: RobustRule) -> Tensor:
        """Combine the waiting commits of `ranks` by the rule.

        A single commit is combined with the last one of each other worker, because a server
        that merges each commit when it comes has nothing else to judge it by.
        """
        state.latest |= {j: state.waiting[j] for j in ranks}
        judged = ranks if len(ranks) > 1 else sorted(state.latest)
        changes = {j: change_of(state.latest[j], state.params) for j in judged}
        nothing = torch.zeros_like(state.params)
        mix = rule.combine(nothing, changes, dict.fromkeys(changes, 1 / len(changes)))
        state.trust = mix.shares
        return mix.params

    def merge_each(self, state: ServerState) -> list[Effect]:
        """Merge each waiting commit separately, in order of ranks, and answer it."""
        ranks = sorted(state.waiting)
        # All are merged before the first answer: commits that wait together get one model.
        for rank in ranks:
            self.merge(state, [rank], 1 / self.num_present(state))
        return [self.answer(state, rank) for rank in ranks]

    def answer(self, state: ServerState, rank: Rank) -> Send:
        """Give worker `rank` the model and its settings."""
        state.pulling.pop(rank, None)
        # A pull may be answered while the same worker's commit still waits to be merged.
        if rank in state.waiting and state.is_counted(rank):
            del state.waiting[rank]
        return Send(rank, self.model_message("params", state, rank))

    def model_message(self, kind: str, state: ServerState, rank: Rank) -> Message:
        """Make a message for worker `rank` with the model and its settings."""
        counts = torch.tensor([*state.num_commits.values()], dtype=torch.int64)
        payload = {"params": state.params, "counts": counts}
        return Message(kind, state.rounds[rank], payload, self.settings(state, rank))


def require_server(wrapper: str, inner: object) -> None:
    """Raise `ValueError` unless `inner`, in the algorithm `wrapper`, is a parameter server."""
    if not isinstance(inner, ParameterServer):
        name = type(inner).__name__
        raise ValueError(
            f"{wrapper} needs a parameter server such as BSP inside, got {name}; leave out "
            f"{name} or {wrapper}"
        )


def require_whole_answers(wrapper: str, inner: ParameterServer) -> None:
    """Raise `ValueError` if `inner`, in the algorithm `wrapper`, answers with fragments."""
    if not inner.answers_whole:
        raise ValueError(
            f"{wrapper} needs a server whose answers have the whole model, got "
            f"{type(inner).__name__} with fragments; leave out fragments or {wrapper}"
        )


def believed(copies: Mapping[Rank, Message], workers: range) -> dict[Rank, dict[Rank, int]]:
    """Return each copy's counts of commits, limited to the number that each worker itself
    counts.

    A higher count is believed if two other workers report it, because a worker that resumes
    from a checkpoint has forgotten some commits.
    """
    counts = {j: copy.payload["counts"].clamp(max=_MAX_BELIEVED) for j, copy in copies.items()}
    told = {j: dict(zip(workers, counts[j].tolist(), strict=True)) for j in sorted(counts)}
    most: dict[Rank, int] = {}
    for rank, own in copies.items():
        # The second highest report: one liar alone can be the highest.
        others = sorted(counts[rank] for j, counts in told.items() if j != rank)
        most[rank] = max([int(own.numbers["number"]), *others[-2:-1]])
    return {
        j: {rank: min(count, most.get(rank, count)) for rank, count in counts.items()}
        for j, counts in told.items()
    }


def change_of(commit: Message, params: Tensor) -> Tensor:
    """Return a commit's change of `params`, [num_params]; statistics stay as measured."""
    update, num_trained = commit.payload["update"], int(commit.numbers["num_trained"])
    if num_trained == update.numel():
        return update
    return Layout(num_trained).with_statistics(update, update - params)
