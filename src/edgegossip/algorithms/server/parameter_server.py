"""A parameter server and workers that commit to it: base of BSP, SSP, ASP, ADACOMM and ADSP.

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
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from edgegossip.algorithms.server.state import (
    MAX_BELIEVED,
    MAX_COUNT,
    PATIENCE,
    RESEND,
    SERVER,
    CommitterState,
    ServerState,
)
from edgegossip.algorithms.server.worker import Committing, State
from edgegossip.algorithms.wrappers.shards.shards import several_servers
from edgegossip.algorithms.wrappers.standby.standby import Standby, StandbyState
from edgegossip.contract.algorithm import Traits
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
)
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.contract.topology import complete, star


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Committing):
    r"""Base of algorithms in which workers commit updates to a server.

    Worker :math:`i` trains from the server's model :math:`W` and commits the change. The server
    adds a share of the change and answers with its model:

    .. math::
        U_i = x_i - W^{pulled}_i, \qquad W \leftarrow W + \tfrac{1}{M} U_i, \qquad
        x_i \leftarrow W

    A worker has one commit in flight at a time, and by default waits for the answer. Running
    statistics of normalization layers are merged as measured, :math:`W \leftarrow W + \tfrac1M
    (x_i - W)`: adding up stale differences could make a variance negative.

    Ranks 1 to `num_workers` are workers. Rank 0 is the server: it has no data, and its model is
    evaluated.

    **Losses.** A worker that comes back asks for the model (`pull`) and continues in the round
    of the slowest other worker; other workers do not wait for its missed rounds. A worker
    pauses while the server is lost, and gives up after `patience`, as does a server that has
    lost all its workers. A server that restarts asks all workers for their latest model and
    takes the newest. Every answer lists how many commits of each worker the server's model
    holds, so missing commits are resent and nothing is counted twice. While no worker has
    reported a model, the server also waits for lost workers, for at most `patience`.

    **Elections** (`standby` above 0). A worker that misses its server waits 0.1 to 0.5 seconds
    and asks all other ranks for their votes. Only ranks that also miss their server vote, and
    only for a candidate whose model is at least as new as their own. A candidate needs the
    votes of more than half of all ranks; rank 0 counts as one of them. Each message carries its
    sender's *term*; a message with an older term is ignored, so at most one server is ever
    active. A server that cannot reach more than half of all ranks merges nothing; it follows
    the elected server once the network is whole again. A former server that comes back no
    longer serves; rank 0 can then only vote. While no part of the network has more than half of
    the ranks, all ranks wait; after `patience` the run ends with an error and can be resumed.
    The model of the active server is evaluated.

    **Several servers** (`num_servers` above 1). Ranks 0 to `num_servers - 1` are servers, and
    workers have the ranks after them. A worker cuts each commit into one piece per server, and
    has its answer once all pieces of the answer have arrived. Once all servers have confirmed
    their pieces, rank 0 tells them to use the commit. In every answer, all slices therefore
    include the same commits, and `BSP` and `FixedADACOMM` produce the model of a single server,
    bit for bit. A worker that any server has lost counts as lost. If a server restarts, or
    continues from a different point than the others, all servers start again from the newest
    model of any worker, each with its slice. If a server is lost for good, workers end after
    `patience` with an error that names the server's rank. An answer takes two more short
    messages between servers: 10 ms on links with 5 ms latency.

    Args:
        num_workers: :math:`M`, the number of workers that train; the run has `num_servers` more
            ranks.
        num_rounds: Commits that each worker makes before it finishes.
        resend_after: Seconds until an unanswered commit is resent; each further wait is longer
            by the same amount. None never resends; safe only on lossless links.
        patience: Seconds for which a worker waits for a lost server, and for which a server
            that has lost all its workers waits for one to return.
        rate_ratio: Learning rate of the workers relative to the task's, above 0.
        momentum: Explicit momentum of the workers' SGD, in [0, 1); asynchrony adds implicit
            momentum. None keeps the task's.
        standby: Number of most recent committers that are kept up to date, so that one of them
            can be elected server. With 0 there are no elections. 1 costs nothing, because the
            last worker to commit gets the model in its answer; with k, each model goes to k - 1
            more workers. Answered commits are lost only if the server and the last k workers to
            commit are lost at once.
        num_servers: Number of servers that share the model, at least 1; `standby` needs exactly
            1.

    Raises:
        ValueError: If a number is out of range.
    """

    evaluates: ClassVar[bool] = False
    num_workers: int
    standby: int = 0
    num_servers: int = 1

    def __post_init__(self) -> None:
        if self.num_servers > 1 and self.standby:
            raise ValueError(
                f"num_servers must be 1 with standby={self.standby}, got {self.num_servers}; "
                "no worker can be elected for a slice of the model, so set only one of them"
            )
        if not 0 <= self.standby <= self.num_workers:
            raise ValueError(
                f"standby must be within [0, num_workers], got {self.standby} of "
                f"{self.num_workers}; it is the number of workers to keep up to date"
            )
        check_ranges(self, num_workers="at least 1", num_servers="at least 1")
        super().__post_init__()

    # For algorithms to define.

    @abstractmethod
    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Merge and answer the commits of `state.waiting` that are due."""

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401 - of `ServerState`
        """Build the server's initial state from the common fields."""
        return ServerState(**fields)

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Begin as a server."""
        return []

    def judged(self, state: ServerState, loss: float, now: Seconds) -> list[Effect]:
        """Handle the measured loss of the server's model on validation data."""
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
    def traits(self) -> Traits:
        join = complete if self.standby else star
        is_one = self.num_servers == 1
        topology = join(self.num_workers + 1) if is_one else several_servers(self).topology
        return replace(super().traits, topology=topology, changes_roles=bool(self.standby))

    def role(self, rank: Rank) -> Role:
        if self.num_servers > 1:
            return several_servers(self).role(rank)
        if self.standby:  # any rank may come to serve; its state says whether it does
            return Role("worker", has_data=rank != SERVER, evaluates=self.evaluates)
        if rank == SERVER:
            return Role("server", has_data=False, evaluates=self.evaluates)
        return Role("worker", is_evaluated=False)

    @property
    def workers(self) -> range:
        """The ranks that train."""
        return range(self.num_servers, self.num_servers + self.num_workers)

    def init(self, rank: Rank, params: Tensor) -> State:
        if self.num_servers > 1:
            return several_servers(self).init(rank, params)
        if self.standby:
            return Standby(self).init(rank, params)
        return (self.init_server if rank == SERVER else self.init_worker)(rank, params)

    def init_server(self, rank: Rank, params: Tensor) -> ServerState:
        """Build the state of a server."""
        none = dict.fromkeys(self.workers, 0)
        counts = {"num_commits": none, "num_steps": {**none}, "rounds": {**none}}
        return self.make_server(rank=rank, params=params, **counts)

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        """Build the state of a worker."""
        counts = torch.zeros(self.num_workers, dtype=torch.int64)
        return CommitterState(rank=rank, params=params, base=params, counts=counts)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        if self.num_servers > 1:
            return several_servers(self).schema(params)
        messages = self.messages(params)
        return Standby(self).schema(messages) if self.standby else messages

    def messages(self, params: Tensor) -> dict[str, MessageSpec]:
        """Commits, pulls, reports of a worker's newest model, and the server's answers."""
        counts = TensorSpec(torch.int64, (self.num_workers,), minimum=0, maximum=MAX_COUNT)
        ahead = self.num_rounds
        # Answers count each merged commit, so no number may exceed a count.
        numbers, trained = range(MAX_COUNT + 1), range(params.numel() + 1)
        model: dict[str, TensorSpec | Tensor] = {"params": params, "counts": counts}
        memory = {**self.limits, **self.optional_limits}
        return {
            "commit": MessageSpec(
                {"update": params},
                numbers={
                    "number": numbers[1:],
                    "num_steps": numbers,
                    "num_trained": trained,
                    "version": range(MAX_COUNT * self.num_workers + 1),
                },
                max_round=ahead,
            ),
            "pull": MessageSpec(max_round=ahead),
            "show": MessageSpec(max_round=ahead),
            "again": MessageSpec(max_round=ahead),
            "copy": MessageSpec(
                model,
                numbers={"number": numbers},
                optional_numbers=memory,
                max_round=ahead,
            ),
            "params": MessageSpec(
                model,
                numbers=self.limits,
                optional_numbers=self.optional_limits,
                max_round=ahead,
            ),
        }

    def handle(self, state: State, event: Event, now: Seconds) -> list[Effect]:
        match state:
            case StandbyState():
                return Standby(self).handle(state, event, now)
            case ServerState():
                return self.handle_as_server(state, event, now)
            case CommitterState():
                return self.work(state, event, now)
            case _:
                return several_servers(self).handle(state, event, now)

    # The server.

    def handle_as_server(self, state: ServerState, event: Event, now: Seconds) -> list[Effect]:
        """Handle `event` as a server."""
        effects: list[Effect] = []
        match event:
            case Started():
                if event.has_rejoined:
                    effects += self._begin_anew(state, now)
                else:
                    effects += self.start_serving(state, now)
            case Received():
                self._receive(state, event.sender, event.message)
            case Evaluated():
                effects += self.judged(state, event.loss, now)
            case TimerFired(name) if name == RESEND:
                effects += self._ask(state, now)
            case TimerFired(name) if name == PATIENCE:
                if self._is_alone(state) or not state.is_new:
                    return [Finish()]
                effects += self._recover(state, now)
            case TimerFired():
                effects += self.wake(state, event.name, now)
            case WorkerLost():
                self._lose(state, event)
                if self._is_alone(state):
                    effects.append(SetTimer(PATIENCE, now + self.patience))
            case WorkerJoined():
                effects += self._welcome(state, event, now)
        if state.is_new:
            if not (state.may_merge and self._knows_enough(state)):
                return effects
            effects += self._recover(state, now)
        effects += [self.answer(state, j) for j in [*state.pulling]]
        effects += self.serve(state, now) if state.waiting and state.may_merge else []
        has_work = self.training(state) or self._is_alone(state)
        return effects if has_work else [*effects, Finish()]

    def _is_alone(self, state: ServerState) -> bool:
        """Whether all workers are lost and none has finished."""
        return len(state.lost) == self.num_workers and state.round < self.num_rounds

    def _lose(self, state: ServerState, event: WorkerLost) -> None:
        state.lost[event.rank] = None
        if not event.has_lied:
            return
        if state.waiting.pop(event.rank, None):
            state.dropped[event.rank] = None
        if state.copies.pop(event.rank, None):
            state.unseen[event.rank] = None

    def _welcome(self, state: ServerState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        rank = event.rank
        state.lost.pop(rank, None)
        effects = self._ask(state, now)
        if event.has_restarted:
            # A restarted worker reuses its commit numbers, and does not know about this commit.
            state.waiting.pop(rank, None)
            state.dropped.pop(rank, None)
        elif rank in state.dropped:
            del state.dropped[rank]
            effects.append(Send(rank, Message("again", state.round)))
        self._skip(state, rank)
        return effects if state.is_new else [SetTimer(PATIENCE, math.inf), *effects]

    def _receive(self, state: ServerState, sender: Rank, message: Message) -> None:
        if sender not in self.workers:
            return  # a former server does not train
        match message.kind:
            case "copy":
                self._look_at(state, sender, message)
            case "pull":
                self._skip(state, sender)
                state.pulling[sender] = None
                if not state.is_new:  # else an answer of a former life may still reach it
                    state.unseen.pop(sender, None)
            case "commit":
                self._take_commit(state, sender, message)

    def _take_commit(self, state: ServerState, sender: Rank, message: Message) -> None:
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

    # A server that has restarted.

    def _begin_anew(self, state: ServerState, now: Seconds) -> list[Effect]:
        state.unseen, state.is_new = dict.fromkeys(self.workers), True
        return [*self._ask(state, now), SetTimer(PATIENCE, now + self.patience)]

    def _ask(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Ask workers for their newest model, because the server has lost its own model."""
        show = Message("show", state.round)
        effects: list[Effect] = [Send(j, show) for j in state.unseen if j not in state.lost]
        if effects and self.resend_after is not None:
            effects.append(SetTimer(RESEND, now + self.resend_after))
        return effects

    def _look_at(self, state: ServerState, sender: Rank, copy: Message) -> None:
        if sender not in state.unseen:
            return  # no server has asked
        del state.unseen[sender]
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
        # Workers without a model newer than the elected server's own report none.
        if whole := [j for j in counts if "params" in copies[j].payload]:
            # Of two elected servers, the one of the later term has the newer state.
            as_of = {j: copies[j].numbers.get("as_of", 0) for j in counts}
            newest = max(whole, key=lambda j: (as_of[j], sum(counts[j].values())))
            state.params, state.num_commits = copies[newest].payload["params"], counts[newest]
            self.recall(state, copies[newest].numbers)
        for rank in state.pulling:
            self._skip(state, rank)
        effects = self.start_serving(state, now)
        if not self._is_alone(state):
            effects.append(SetTimer(PATIENCE, math.inf))
        known = [j for j in state.waiting if state.is_counted(j)]
        return [*effects, *(self.answer(state, j) for j in known)]

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

    def merge(self, state: ServerState, ranks: list[Rank], share: float) -> None:
        """Add `share` of each waiting commit of `ranks` to the model, in this order."""
        changes = (change(state.waiting[j], state.params) for j in ranks)
        state.params = state.params.add(reduce(torch.add, changes), alpha=share)
        for rank in ranks:
            state.count(rank, self.num_rounds)

    def merge_each(self, state: ServerState) -> list[Effect]:
        """Merge each waiting commit separately, in order of ranks, and answer it."""
        ranks = sorted(state.waiting)
        for rank in ranks:
            self.merge(state, [rank], 1 / self.num_workers)
        return [self.answer(state, rank) for rank in ranks]

    def answer(self, state: ServerState, rank: Rank) -> Send:
        """Give worker `rank` the model and its settings."""
        state.pulling.pop(rank, None)
        if rank in state.waiting and state.is_counted(rank):
            del state.waiting[rank]
        return Send(rank, self.model_message("params", state, rank))

    def model_message(self, kind: str, state: ServerState, rank: Rank) -> Message:
        """Make a message for worker `rank` with the model and its settings."""
        counts = torch.tensor([*state.num_commits.values()], dtype=torch.int64)
        payload = {"params": state.params, "counts": counts}
        return Message(kind, state.rounds[rank], payload, self.settings(state, rank))


# Merging of commits, and of the models that workers report to a restarted server.


def believed(copies: Mapping[Rank, Message], workers: range) -> dict[Rank, dict[Rank, int]]:
    """Return each copy's counts of commits, limited to the number that each worker itself
    counts.

    A higher count is believed if two other workers report it, because a worker that resumes
    from a checkpoint has forgotten some commits.
    """
    counts = {j: copy.payload["counts"].clamp(max=MAX_BELIEVED) for j, copy in copies.items()}
    told = {j: dict(zip(workers, counts[j].tolist(), strict=True)) for j in sorted(counts)}
    most: dict[Rank, int] = {}
    for rank, own in copies.items():
        others = sorted(counts[rank] for j, counts in told.items() if j != rank)
        most[rank] = max([int(own.numbers["number"]), *others[-2:-1]])
    return {
        j: {rank: min(count, most.get(rank, count)) for rank, count in counts.items()}
        for j, counts in told.items()
    }


def change(commit: Message, params: Tensor) -> Tensor:
    """Return a commit's change of `params`, [num_params]; statistics stay as measured."""
    update, num_trained = commit.payload["update"], int(commit.numbers["num_trained"])
    if num_trained == update.numel():
        return update
    return Layout(num_trained).with_statistics(update, update - params)
