"""Small simulated worlds: workers on quadratics, each pulled towards a random target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.algorithms import NUM_WORKERS
from torch import Tensor

from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.stages.state import StageState
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import (
    Effect,
    Epochs,
    Event,
    Message,
    Note,
    Payload,
    Rank,
    Role,
    Seconds,
    Steps,
    Train,
    Trained,
    Units,
    WorkerState,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.sim.fault import Faults
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM_PARAMS = 7
# Random, not round, numbers: sums of round numbers come out equal in any order.
TARGETS = torch.randn(16, NUM_PARAMS, generator=generator(0, "targets"))
INITIAL = torch.randn(16, NUM_PARAMS, generator=generator(0, "initial"))
SHAPE = (NUM_PARAMS,)
"""Of what stages hand on."""
_TAGS_A_LIFE = 2000
_SCALE = 2.0**20  # exact, and no larger than what is usual
EVEN = tuple(Platform(throughput=1.0) for _ in range(NUM_WORKERS))
UNEVEN = uneven(NUM_WORKERS, throughput=1.0)


class ManySamples(Trainer):
    """A quadratic for each of some workers' data: `size` samples each, in batches of one.

    Steps towards them in turn, so that who visits less moves less. All targets are moved by
    `offset`.
    """

    def __init__(self, rank: Rank, lr: float, size: int, offset: float = 0.0) -> None:
        self.lr, self.size, self.offset = lr, size, offset
        self.ranks: tuple[Rank, ...] = (rank,)

    @property
    def num_samples(self) -> int:
        return self.size * len(self.ranks)

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        self.ranks = ranks

    def cost(self, request: Train) -> float:
        if isinstance(request.work, Steps):
            return request.work.num_steps
        assert isinstance(request.work, Epochs)  # this data has no units
        return max(
            1, math.ceil(request.work.share * request.keep_ratio * self.num_samples - 1e-9)
        )

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        num_steps, params = int(self.cost(request)), request.params
        for step in range(num_steps):
            target = TARGETS[self.ranks[step % len(self.ranks)]] + self.offset
            params = params + self.lr * (target - params)
        result = TrainingResult(params, num_steps, num_steps, 0.5)
        if request.moments is not None:  # those of an optimizer that forgets them
            moved = params - request.params
            result.moments = {"first": moved, "second": moved.square()}
        return result

    def state_dict(self) -> Mapping[str, Any]:
        return {"ranks": self.ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ranks = tuple(state["ranks"])


class UnitTrainer(ManySamples):
    """The same on shared data, in units of one sample; work that is not shared, too."""

    @property
    def num_units(self) -> int:
        return self.size

    def cost(self, request: Train) -> float:
        if isinstance(request.work, Units):
            assert max(request.work.indices) < self.size
            return len(request.work.indices)
        return super().cost(request)


class StageTrainer(ManySamples):
    """The trainer of worker `rank` in stages: checks whose gradient it gets.

    Each batch has one sample and a tag of its own in its first entry. Stages hand it on, and so
    do gradients; one with another tag than its batch fails the test.
    """

    def __init__(
        self, algorithm: Stages, rank: Rank, lr: float, size: int | None, life: int = 0
    ) -> None:
        has_data = algorithm.stage(rank) == 0
        super().__init__(rank, lr, (size or 1) if has_data else 0)
        self.is_last = algorithm.above(rank) is None
        self.is_pipelined = isinstance(algorithm, Pipelined)
        self.most = algorithm.max_passed(algorithm.stage(rank))
        self.tag = float(_TAGS_A_LIFE * (32 * rank + life))
        self.passed: dict[int, float] = {}

    def cost(self, request: Train) -> float:
        if not request.inputs.keys() & {"batch", "activations"}:
            return 1.0
        return 1.0 if self.is_last else 2 / 3 if "gradient" in request.inputs else 1 / 3

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        inputs = request.inputs
        if "fit_gradient" in inputs:
            assert _tag_of(inputs["fit_activations"]) == _tag_of(inputs["fit_gradient"])
        if "gradient" in inputs:
            tag = self.passed.pop(int(inputs["batch"]))
            assert _tag_of(inputs["gradient"]) == tag, "the gradient of another batch"
            return self._step(request, {"gradient": _tagged(tag)})
        tag = self._draw() if "activations" not in inputs else _tag_of(inputs["activations"])
        up: Payload = {"activations": _tagged(tag), "labels": torch.zeros(1, dtype=torch.int64)}
        if self.is_last:
            return self._step(request, {"gradient": _tagged(tag)})
        if not self.is_pipelined:
            return self._step(request, {**up, "gradient": _tagged(tag)})
        waiting = inputs["passed"].tolist()
        assert {*waiting} <= self.passed.keys(), "a batch was forgotten"
        assert len(waiting) < self.most
        self.passed = {n: each for n, each in self.passed.items() if n in waiting}
        self.passed[int(inputs["batch"])] = tag
        num_samples = 1 if self.num_samples else 0
        return TrainingResult(request.params, num_samples, 1, 0.0, up)

    def _draw(self) -> float:
        assert self.num_samples, "only the first stage has data"
        self.tag += 1
        return self.tag

    def _step(self, request: Train, outputs: Payload) -> TrainingResult:
        done = super().train(replace(request, work=Steps(1), inputs={}))
        is_counted = self.num_samples and not self.is_pipelined
        return TrainingResult(done.params, 1 if is_counted else 0, 1, 0.5, outputs)

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "tag": self.tag, "passed": dict(self.passed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.tag, self.passed = state["tag"], dict(state["passed"])


class ObedientStage(ManySamples):
    """The trainer of worker `rank` in stages, which takes any batch and any gradient.

    With `limit` its loss becomes infinite beyond it, as real ones do.
    """

    def __init__(
        self, algorithm: Stages, rank: Rank, lr: float = 0.1, limit: float = math.inf
    ) -> None:
        super().__init__(rank, lr, 4 if algorithm.stage(rank) == 0 else 0)
        self.limit = limit
        self.waits = isinstance(algorithm, Pipelined) and algorithm.above(rank) is not None

    def cost(self, request: Train) -> float:
        return 1.0

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        inputs = request.inputs
        for x in (request.params, *inputs.values()):
            if not bool((x.abs() <= self.limit).all()):
                raise TrainingError("the loss became nan; try a smaller learning rate")
        labels = inputs.get("labels", torch.zeros(1, dtype=torch.int64))
        values = TARGETS[:1].expand(len(labels), NUM_PARAMS)
        outputs = {"activations": values, "labels": labels, "gradient": values}
        is_first = self.num_samples > 0
        if self.waits and "gradient" not in inputs:  # a forward pass
            return TrainingResult(request.params, len(labels) * is_first, 1, 0.0, outputs)
        done = super().train(replace(request, work=Steps(1), inputs={}))
        num_samples = 1 if is_first and not self.waits else 0
        loss = 0.5 * (request.params - TARGETS[self.ranks[0]]).square().sum().item()
        return TrainingResult(done.params, num_samples, 1, loss, outputs)


def require_bounded(algorithm: Stages, state: StageState) -> None:
    """Fail if a worker keeps more batches than it may."""
    stage = algorithm.stage(state.rank)
    most = algorithm.max_passed(stage)
    assert max(len(state.pending), len(state.answers)) <= most
    assert len(state.origins) <= most + 1
    below = algorithm.num_first if stage == 1 else 1
    assert len(state.waiting) <= below * algorithm.max_passed(max(0, stage - 1))
    assert {*state.ended, *state.lost} <= {*range(algorithm.num_workers)}


def _tagged(tag: float) -> Tensor:
    return torch.cat([torch.tensor([tag / _SCALE]), TARGETS[0, 1:]])[None]


def _tag_of(batch: Tensor) -> float:
    return float(batch[0, 0]) * _SCALE


def stages_in(algorithm: object) -> Stages | None:
    """The algorithm in stages that others are wrapped around, if there is one."""
    while algorithm is not None and not isinstance(algorithm, Stages):
        algorithm = getattr(algorithm, "inner", None)
    return algorithm


def claims_units(algorithm: object) -> bool:
    """Whether the workers divide shared data."""
    while algorithm is not None and not isinstance(algorithm, ClaimedWork):
        algorithm = getattr(algorithm, "inner", None)
    return algorithm is not None


def loss_of(params: Tensor) -> tuple[float, dict[str, float]]:
    """Mean loss over the targets of `params`, [num_params], and no metrics."""
    targets = TARGETS[:NUM_WORKERS, : params.numel()].to(params.dtype)
    return float((targets - params[:NUM_PARAMS]).square().sum(1).mean()) / 2, {}


def joined(estimates: Mapping[Rank, Tensor]) -> Tensor:
    """Stack estimates, [num_workers, num_params]; slices of one model are one row."""
    rows = [*estimates.values()]
    if sum(map(len, rows)) <= max(NUM_PARAMS, len(rows[0])):
        return torch.cat(rows)[None]
    return torch.stack(rows)


def make_world(
    algorithm: Algorithm[Any],
    *,
    size: int | None = None,
    platforms: Sequence[Platform] = EVEN,
    initial: Tensor | None = None,
    lr: float = 0.1,
    links: Links | None = None,
    faults: Faults | None = None,
    observer: Observer | None = None,
    pool: ComputePool | None = None,
    wire: bool = False,
    offset: float = 0.0,
) -> Simulator[Any]:
    """A simulator in which worker i has f(x) = 1/2 ||x - TARGETS[i]||^2.

    All start from 0, or each from its row of `initial`, [num_workers, num_params]. With `size`,
    each has so many samples. An `offset` moves the targets and the start, except for stages.
    """
    num_params = NUM_PARAMS if initial is None else initial.shape[1]

    stages = stages_in(algorithm)

    def make_trainer(rank: Rank, incarnation: int) -> Trainer:
        if stages is not None:
            return StageTrainer(stages, rank, lr, size or 4, incarnation)
        if claims_units(algorithm):
            return UnitTrainer(rank, lr, size or 8, offset)
        if size is not None:
            return ManySamples(rank, lr, size, offset)
        beyond = torch.zeros(max(0, num_params - NUM_PARAMS))
        return QuadraticTrainer(torch.cat([TARGETS[rank, :num_params], beyond]) + offset, lr)

    simulator = Simulator(
        algorithm,
        platforms,
        torch.full((num_params,), 0.0 if stages is not None else offset),
        make_trainer,
        links=links,
        faults=faults,
        observer=observer,
        pool=pool,
        wire=wire,
        evaluate=loss_of,
    )
    if initial is not None:
        for state, row in zip(simulator.states, initial, strict=True):
            state.params = row.clone()
    return simulator


def final_params(simulator: Simulator[Any]) -> Tensor:
    """Run to the end and give all workers' parameters, [num_workers, num_params]."""
    assert simulator.run()
    rows = [state.estimate for state in simulator.states]
    # Slices are shorter than what workers have.
    return torch.stack(rows) if len({*map(len, rows)}) == 1 else torch.cat(rows)


def mix_only(algorithm: Algorithm[Any], initial: Tensor) -> Tensor:
    """Where the algorithm takes `initial` ([num_workers, num_params]) without any training."""
    platforms = [Platform(throughput=1.0)] * len(initial)
    return final_params(make_world(algorithm, platforms=platforms, initial=initial, lr=0.0))


Check = Callable[[Any, Event, Seconds], None]


def _nothing(state: WorkerState, event: Event, now: Seconds) -> None:
    pass


@dataclass(frozen=True)
class Watched(Algorithm[WorkerState]):
    """An algorithm that calls `before` and `after` around each event that it handles."""

    inner: Algorithm[Any]
    before: Check = _nothing
    after: Check = _nothing

    def init(self, rank: Rank, params: Tensor) -> WorkerState:
        state: WorkerState = self.inner.init(rank, params)
        return state

    def role(self, rank: Rank) -> Role:
        return self.inner.role(rank)

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        self.before(state, event, now)
        effects = self.inner.handle(state, event, now)
        self.after(state, event, now)
        return effects


@dataclass
class Recorder:
    """An observer that keeps a trace, and each message with a copy of its payload when sent."""

    trace: list[tuple[Seconds, Rank, str]] = field(default_factory=list)
    messages: list[tuple[Message, dict[str, Tensor]]] = field(default_factory=list)
    undelivered: list[Message] = field(default_factory=list)
    notes: list[tuple[Seconds, Rank, Note]] = field(default_factory=list)

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.trace.append((now, rank, "trained"))

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.trace.append((now, rank, f"sent {num_bytes} bytes to {receiver}"))
        copies = {name: tensor.clone() for name, tensor in message.payload.items()}
        self.messages.append((message, copies))

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        self.trace.append((now, rank, f"received from {sender}"))

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self.trace.append((now, rank, f"{reason} from {sender}"))
        self.undelivered.append(message)

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self.trace.append((now, rank, what))

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        self.notes.append((now, rank, note))

    def require_unchanged_payloads(self) -> None:
        """Fail if anybody has written to what was sent."""
        for message, copies in self.messages:
            for name, copy in copies.items():
                assert torch.equal(message.payload[name], copy), f"{message} was written to"
