"""A server, and workers that commit at a searched rate, in the words of the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, TensorSpec

SERVER: Rank = 0


@dataclass(slots=True, kw_only=True)
class CommitterState(WorkerState):
    """A worker that trains without waiting, and now and then sends the sum of its updates.

    Attributes:
        base: Parameters that the server knows of: `params - base` has not been sent yet. The
            reply to a commit may arrive in the middle of a step.
        interval: Seconds between two commits.
        is_due: The next step ends with a commit.
    """

    base: Tensor
    interval: Seconds
    is_due: bool = False


@dataclass(slots=True, kw_only=True)
class ServerState(WorkerState):
    """The server, which searches the rate of commits.

    Attributes:
        num_commits: Commits by rank.
        target: Commits of each worker by the end of the window.
        rate: Commits in a window, under trial.
        loss: Validation loss at the end of the last window.
        best_gain: Largest decrease of the loss in this search.
        is_searching: The next window tries one more commit.
    """

    num_commits: dict[Rank, int]
    target: int = 0
    rate: int = 1
    loss: float = math.inf
    best_gain: float = -math.inf
    is_searching: bool = True


@dataclass(frozen=True, kw_only=True)
class ADSP(Algorithm[CommitterState | ServerState]):
    """Workers that commit at a searched rate (Hu, Wang and Wu, AAAI 2020, arXiv:1911.06949).

    The server tries one more commit per window for as long as the loss falls faster, and asks
    more of workers that are behind. The run ends at a time in the hyperparameters, because a
    "stop" message could be lost.
    """

    num_workers: int
    window: Seconds
    epoch: Seconds
    duration: Seconds
    min_interval: Seconds

    def role(self, rank: Rank) -> Role:
        if rank == SERVER:
            return Role("server", has_data=False)
        return Role("worker", is_evaluated=False)

    def init(self, rank: Rank, params: Tensor) -> CommitterState | ServerState:
        if rank == SERVER:
            num_commits = dict.fromkeys(range(1, self.num_workers + 1), 0)
            return ServerState(rank=rank, params=params, num_commits=num_commits)
        return CommitterState(rank=rank, params=params, base=params, interval=self.window)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        whole = TensorSpec.like(params)
        return {
            "commit": MessageSpec({"update": whole}),
            "params": MessageSpec({"params": whole}),
            "target": MessageSpec(numbers={"num_commits": range(1, 2**31)}),
        }

    def handle(
        self, state: CommitterState | ServerState, event: Event, now: Seconds
    ) -> list[Effect]:
        if isinstance(state, ServerState):
            return self.serve(state, event, now)
        return self.work(state, event, now)

    def work(self, state: CommitterState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined):
                # One that comes back commits at once: the reply brings the server's parameters.
                state.is_due = has_rejoined
                return [Train(state.params, Steps(1)), SetTimer("commit", now + state.interval)]
            case Trained():
                state.params = state.params + event.delta
                is_done = now >= self.duration
                commit = self.commit(state, now) if state.is_due or is_done else []
                return [*commit, Finish() if is_done else Train(state.params, Steps(1))]
            case TimerFired("commit"):
                state.is_due = True
            case Received(_, Message("target", numbers=numbers)):
                interval = self.window / numbers["num_commits"]
                state.interval = max(self.min_interval, interval)
                return [SetTimer("commit", now + state.interval)]
            case Received(_, Message("params", payload=payload)):
                unsent, state.base = state.params - state.base, payload["params"]
                state.params = state.base + unsent
        return []

    def commit(self, state: CommitterState, now: Seconds) -> list[Effect]:
        message = Message("commit", state.round, {"update": state.params - state.base})
        state.base, state.is_due = state.params, False
        state.round += 1
        return [Send(SERVER, message), SetTimer("commit", now + state.interval)]

    def serve(self, state: ServerState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return [Evaluate(state.params), SetTimer("epoch", now + self.epoch)]
            case TimerFired("window"):
                return [Evaluate(state.params)]
            case TimerFired("epoch"):
                state.is_searching, state.best_gain = True, -math.inf
                return [SetTimer("epoch", now + self.epoch)]
            case Evaluated():
                return self.begin_window(state, event.loss, now)
            case Received(sender, Message("commit", payload=payload)):
                state.params = state.params + payload["update"] / self.num_workers
                if sender in state.num_commits:
                    state.num_commits[sender] += 1
                return [Send(sender, Message("params", state.round, {"params": state.params}))]
            case WorkerLost(rank):
                state.num_commits.pop(rank, None)
            case WorkerJoined(rank):
                state.num_commits[rank] = state.target
        return []

    def begin_window(self, state: ServerState, loss: float, now: Seconds) -> list[Effect]:
        gain, state.loss = state.loss - loss, loss
        if state.is_searching and state.round > 0:
            state.is_searching = gain > state.best_gain
            state.best_gain = max(gain, state.best_gain)
            state.rate = max(1, state.rate + (1 if state.is_searching else -1))
        if now >= self.duration:
            return [Finish()]
        state.round += 1
        state.target += state.rate
        sends: list[Effect] = []
        for rank, num_commits in sorted(state.num_commits.items()):
            num_due = {"num_commits": max(1, state.target - num_commits)}
            sends.append(Send(rank, Message("target", state.round, numbers=num_due)))
        return [*sends, SetTimer("window", now + self.window)]
