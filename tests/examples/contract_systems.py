"""Four very different systems, written in the words of the contract to find those it lacked.

They are a parameter server, compressed push-sum over lossy links, EdgeGossip as a wrapper, and
one model split over three machines. `docs/contract-design.md` says what they led to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol

import torch
from torch import Tensor

from edgegossip.core.algorithm import Algorithm
from edgegossip.core.protocol import (
    Effect,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Payload,
    Predict,
    Predicted,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    State,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.schema import MessageSpec, TensorSpec
from edgegossip.core.topology import Topology

SERVER: Rank = 0


class Compressor(Protocol):
    def compress(self, tensor: Tensor) -> Payload: ...

    def decompress(self, payload: Payload) -> Tensor: ...

    def schema(self, params: Tensor) -> Mapping[str, TensorSpec]: ...


# 1. A server, and workers that commit at a searched rate.


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


# 2. Compressed push-sum over links that lose messages.


@dataclass(slots=True, kw_only=True)
class SparsePushState(WorkerState):
    """A numerator `params` and its `weight`.

    Attributes:
        error: Entries that compression has held back; only the sender remembers them, so the
            graph may change from round to round.
        weight: Push-sum weight.
        num_sent: Number of the next message.
        unacknowledged: Messages by receiver and number.
        merged: Sender and number of each message that arrived.
        lost: Workers that cannot be reached.
        is_waiting: It has rejoined and waits for a model.
    """

    error: Tensor
    weight: float = 1.0
    num_sent: int = 0
    unacknowledged: dict[tuple[Rank, int], Message] = field(default_factory=dict)
    merged: dict[tuple[Rank, int], None] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    is_waiting: bool = False

    @property
    def estimate(self) -> Tensor:
        return self.params if self.is_waiting else self.params / self.weight


@dataclass(frozen=True, kw_only=True)
class SparsePush(Algorithm[SparsePushState]):
    """Compressed push-sum over lossy links (Aketi, Singh and Rabaey, arXiv:2102.05715).

    The sums of numerators and weights, over workers and messages in flight, never change. A
    timer sends again what was not acknowledged; mass is taken back only from a lost receiver.
    """

    topology: Topology
    compressor: Compressor
    consensus_step: float
    num_rounds: int
    timeout: Seconds

    def init(self, rank: Rank, params: Tensor) -> SparsePushState:
        return SparsePushState(rank=rank, params=params, error=torch.zeros_like(params))

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        optional = {**self.compressor.schema(params), "params": TensorSpec.like(params)}
        return {
            "mass": MessageSpec(
                optional=optional,
                numbers={"share": (0, 1), "weight": (0, math.inf)},
                optional_numbers={"round": range(self.num_rounds + 1)},
            ),
            "acknowledged": MessageSpec(),
        }

    def handle(self, state: SparsePushState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined=True):
                # The initial parameters are out of date, so they weigh nothing.
                state.params, state.weight = torch.zeros_like(state.params), 0.0
                state.is_waiting = True
            case Started():
                return self.train_or_finish(state)
            case Trained():
                # The weight may have changed meanwhile; so x / w moves by exactly delta.
                state.params = state.params + state.weight * event.delta
                return [*self.push(state, now), *self.train_or_finish(state)]
            case Received(sender, Message("mass") as message):
                return self.accept(state, sender, message)
            case Received(sender, Message("acknowledged", number)):
                state.unacknowledged.pop((sender, number), None)
                return self.finish_if_done(state)
            case TimerFired("resend") if state.unacknowledged:
                again = [Send(j, message) for (j, _), message in state.unacknowledged.items()]
                return [*again, SetTimer("resend", now + self.timeout)]
            case WorkerLost(rank):
                state.lost[rank] = None
                for key in [key for key in state.unacknowledged if key[0] == rank]:
                    self.merge(state, state.unacknowledged.pop(key))
                return self.finish_if_done(state)
            case WorkerJoined(rank, has_restarted):
                state.lost.pop(rank, None)
                if has_restarted:
                    return self.welcome(state, rank, now)
        return []

    def train_or_finish(self, state: SparsePushState) -> list[Effect]:
        if state.round < self.num_rounds:
            return [Train(state.estimate, Steps(1))]
        return self.finish_if_done(state)

    def finish_if_done(self, state: SparsePushState) -> list[Effect]:
        is_done = state.round == self.num_rounds and not state.unacknowledged
        return [Finish()] if is_done else []

    def push(self, state: SparsePushState, now: Seconds) -> list[Effect]:
        neighbors = self.topology.out_neighbors(state.rank, state.round)
        receivers = [j for j in neighbors if j not in state.lost]
        share = self.consensus_step / (len(receivers) + 1)
        packed = self.compressor.compress(state.params + state.error)
        state.error = state.params + state.error - self.compressor.decompress(packed)
        state.round += 1
        return self.give(state, receivers, share, packed, now)

    def welcome(self, state: SparsePushState, rank: Rank, now: Seconds) -> list[Effect]:
        state.merged = {key: None for key in state.merged if key[0] != rank}  # it counts anew
        if state.is_waiting or rank not in self.topology.all_out_neighbors(state.rank):
            return []
        model, round = {"params": state.params}, {"round": state.round}
        return self.give(state, [rank], 0.5, model, now, **round)

    def give(
        self,
        state: SparsePushState,
        receivers: list[Rank],
        share: float,
        x: Payload,
        now: Seconds,
        **more: float,
    ) -> list[Effect]:
        mass = {"share": share, "weight": share * state.weight, **more}
        message = Message("mass", state.num_sent, x, mass)
        effects: list[Effect] = [Send(j, message) for j in receivers]
        if not state.unacknowledged:
            effects.append(SetTimer("resend", now + self.timeout))
        for j in receivers:
            state.unacknowledged[j, state.num_sent] = message
            self.merge(state, message, sign=-1)
        state.num_sent += 1
        return effects

    def accept(self, state: SparsePushState, sender: Rank, message: Message) -> list[Effect]:
        effects: list[Effect] = [Send(sender, Message("acknowledged", message.round))]
        if (sender, message.round) in state.merged:
            return effects
        state.merged[sender, message.round] = None
        self.merge(state, message)
        if state.is_waiting and "round" in message.numbers:
            state.is_waiting, state.round = False, int(message.numbers["round"])
            effects += self.train_or_finish(state)
        return effects

    def merge(self, state: SparsePushState, mass: Message, sign: int = 1) -> None:
        is_model = "params" in mass.payload
        x = mass.payload["params"] if is_model else self.compressor.decompress(mass.payload)
        state.params = state.params + sign * mass.numbers["share"] * x
        state.weight += sign * mass.numbers["weight"]


# 3. A wrapper around any epoch-wise algorithm.


@dataclass(slots=True, kw_only=True)
class BalancedState(WorkerState, Generic[State]):
    """A wrapped state.

    Attributes:
        inner: State of the wrapped algorithm.
        num_samples: Samples of this worker.
        waiting: The training that waits for forecasts.
        forecasts: Round and duration of a pass, by rank.
        lost: Workers that cannot be reached.
    """

    inner: State
    num_samples: int = 0
    waiting: Train | None = None
    forecasts: dict[Rank, tuple[int, Seconds]] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)

    @property
    def estimate(self) -> Tensor:
        return self.inner.estimate


@dataclass(frozen=True, kw_only=True)
class EdgeGossip(Algorithm[BalancedState[State]], Generic[State]):
    """Shares of work by predicted speed (Han et al., IEEE TPDS 32(7), 2021), around `inner`.

    Each worker tells the others how long its whole data would take, and trains on the share
    `T_min / T_i`. The wrapped algorithm asks for `Epochs(1)` and does not notice. A lost
    forecast costs up to `timeout`, after which the last one is used.
    """

    inner: Algorithm[State]
    num_workers: int
    timeout: Seconds

    def role(self, rank: Rank) -> Role:
        return self.inner.role(rank)

    def init(self, rank: Rank, params: Tensor) -> BalancedState[State]:
        return BalancedState(rank=rank, params=params, inner=self.inner.init(rank, params))

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        forecast = MessageSpec(numbers={"seconds": (0, math.inf)})
        return {**self.inner.schema(params), "forecast": forecast}

    def handle(self, state: BalancedState[State], event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.num_samples = event.num_samples
            case Predicted(throughput):
                return self.announce(state, state.num_samples / throughput, now)
            case Received(sender, Message("forecast", round, numbers=numbers)):
                state.forecasts[sender] = (round, numbers["seconds"])
                return self.train_if_complete(state)
            case TimerFired("forecast"):
                return self.train(state)
            case WorkerLost(rank):
                state.lost[rank] = None
                return [*self.pass_on(state, event, now), *self.train_if_complete(state)]
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
        return self.pass_on(state, event, now)

    def pass_on(self, state: BalancedState[State], event: Event, now: Seconds) -> list[Effect]:
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        for i, effect in enumerate(effects):
            match effect:
                case Train(work=Epochs(1.0)):
                    state.waiting, effects[i] = effect, Predict()
        return effects

    def announce(
        self, state: BalancedState[State], seconds: Seconds, now: Seconds
    ) -> list[Effect]:
        state.forecasts[state.rank] = (state.round, seconds)
        message = Message("forecast", state.round, numbers={"seconds": seconds})
        others = [j for j in range(self.num_workers) if j != state.rank]
        timer = SetTimer("forecast", now + self.timeout)
        return [*(Send(j, message) for j in others), timer, *self.train_if_complete(state)]

    def train_if_complete(self, state: BalancedState[State]) -> list[Effect]:
        for j in range(self.num_workers):
            if j not in state.lost and state.forecasts.get(j, (-1, 0.0))[0] < state.round:
                return []
        return self.train(state)

    def train(self, state: BalancedState[State]) -> list[Effect]:
        if state.waiting is None or state.rank not in state.forecasts:
            return []
        times = {
            j: seconds for j, (_, seconds) in state.forecasts.items() if j not in state.lost
        }
        keep_ratio = min(times.values()) / times[state.rank]
        train, state.waiting = replace(state.waiting, keep_ratio=keep_ratio), None
        return [SetTimer("forecast", math.inf), train]


# 4. Three stages of one model.


@dataclass(slots=True, kw_only=True)
class StageState(WorkerState):
    """A stage of one model. A batch's number is the `round` of every message about it.

    Attributes:
        jobs: Messages still to be processed.
        job: The one in training.
        unanswered: Payloads that were passed up and have no gradient yet, by batch.
    """

    jobs: list[Message] = field(default_factory=list)
    job: Message | None = None
    unanswered: dict[int, Payload] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stages(Algorithm[StageState]):
    """Stages that train on synthetic gradients (Jaderberg et al., ICML 2017, arXiv:1608.05343).

    A stage passes its activations up and the gradient at its input down, from which the
    predicting network below learns. At most `depth` batches are unanswered, so that a fast
    stage does not flood a slow one; after `timeout` they are given up.
    """

    num_stages: int
    num_rounds: int
    depth: int
    timeout: Seconds

    def role(self, rank: Rank) -> Role:
        return Role(f"stage-{rank}", has_data=rank == 0)

    def init(self, rank: Rank, params: Tensor) -> StageState:
        return StageState(rank=rank, params=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        # A stage knows neither the widths of the others nor the size of a batch.
        batch = TensorSpec(torch.float32, (None, None), max_numel=2**20)
        return {
            "activations": MessageSpec({"activations": batch, "labels": batch}),
            "gradient": MessageSpec({"gradient": batch}),
        }

    def handle(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Started() if state.rank > 0:
                effects = [Finish()]  # no work of its own; it answers what comes from below
            case Received(_, Message("activations") as message):
                state.jobs.append(message)
            case Received(_, Message("gradient", batch, payload)) if batch in state.unanswered:
                passed_up = state.unanswered.pop(batch)
                state.jobs.append(Message("gradient", batch, {**passed_up, **payload}))
            case TimerFired("unanswered"):
                state.unanswered.clear()
            case Trained():
                state.params = event.params
                effects = self.pass_on(state, event.outputs, now)
        return [*effects, *self.next_job(state)]

    def pass_on(self, state: StageState, outputs: Payload, now: Seconds) -> list[Effect]:
        job, state.job = state.job, None
        if job is None or job.kind == "gradient":
            return []  # the guessing network has learned; nobody waits for that
        state.round += 1
        effects: list[Effect] = []
        if state.rank < self.num_stages - 1:
            up = {name: outputs[name] for name in ("activations", "labels")}
            state.unanswered[job.round] = up
            effects.append(Send(state.rank + 1, Message("activations", job.round, up)))
            effects.append(SetTimer("unanswered", now + self.timeout))
        if state.rank > 0:
            down = {"gradient": outputs["gradient"]}
            effects.append(Send(state.rank - 1, Message("gradient", job.round, down)))
        elif state.round == self.num_rounds:
            effects.append(Finish())
        return effects

    def next_job(self, state: StageState) -> list[Effect]:
        may_draw = state.rank == 0 and state.round < self.num_rounds
        if state.job is None and state.jobs:
            state.job = state.jobs.pop(0)
        elif state.job is None and may_draw and len(state.unanswered) < self.depth:
            state.job = Message("batch", state.round)
        else:
            return []
        return [Train(state.params, Steps(1), inputs=state.job.payload)]
