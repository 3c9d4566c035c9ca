"""Split learning: devices hold the lower layers of a model, a cloud the upper ones.

Gupta and Raskar, "Distributed learning of deep neural network over multiple agents", 2018,
arXiv:1810.06060, with several devices that are averaged in the end. It is here to show that
the roles of a run may hold different models.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.small_runs import dataset
from torch import Tensor, nn

from edgegossip.contract import (
    Algorithm,
    Effect,
    Event,
    Finish,
    Layout,
    Message,
    MessageSpec,
    Payload,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    Started,
    Steps,
    TensorSpec,
    Train,
    Trained,
    Trainer,
    TrainingResult,
    WorkerLost,
    WorkerState,
)
from edgegossip.data.dataset import WorkerData
from edgegossip.models.flat import FlatModel
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import LearnerSettings
from edgegossip.training.loss import prepare_batch
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task

BATCH_SIZE = 8
NUM_DEVICES = 2
LEARNING_RATE = 0.05
DEVICES = (Platform(throughput=100.0), Platform(throughput=60.0))


@dataclass(slots=True, kw_only=True)
class SplitState(WorkerState):
    """The step that a worker is at; `batch` is a device's, whose gradient is awaited."""

    batch: Payload | None = None
    waiting: list[tuple[Rank, Message]]
    device: Rank | None = None


@dataclass(frozen=True, kw_only=True)
class SplitLearning(Algorithm[SplitState]):
    """Devices send activations to the cloud, the worker of the last rank, and get gradients."""

    num_devices: int = NUM_DEVICES
    num_rounds: int = 6

    def role(self, rank: Rank) -> Role:
        return Role("cloud", has_data=False) if rank == self.num_devices else Role("device")

    def init(self, rank: Rank, params: Tensor) -> SplitState:
        return SplitState(rank=rank, params=params, waiting=[])

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        rows = TensorSpec(torch.float32, (None, None), max_numel=2**16)
        labels = TensorSpec(torch.int64, (None,), max_numel=2**16)
        return {
            "activations": MessageSpec({"activations": rows, "labels": labels}),
            "gradient": MessageSpec({"gradient": rows}),
        }

    def handle(self, state: SplitState, event: Event, now: Seconds) -> list[Effect]:
        is_cloud = state.rank == self.num_devices
        match event:
            case Started():
                return [Finish()] if is_cloud else self.next_batch(state)
            case Received(sender, Message("activations") as message):
                state.waiting.append((sender, message))
                return self.serve(state)
            case Received(_, Message("gradient") as message):
                inputs = {**(state.batch or {}), **message.payload}
                return [Train(state.params, Steps(1), inputs=inputs)]
            case Trained():
                state.params = event.params
                return self.pass_on(state, event)
            case WorkerLost(rank) if rank == self.num_devices:
                return [Finish()]
        return []

    def next_batch(self, state: SplitState) -> list[Effect]:
        is_over = state.round == self.num_rounds
        return [Finish()] if is_over else [Train(state.params, Steps(1))]

    def serve(self, state: SplitState) -> list[Effect]:
        if state.device is not None or not state.waiting:
            return []
        state.device, message = state.waiting.pop(0)
        return [Train(state.params, Steps(1), inputs=message.payload)]

    def pass_on(self, state: SplitState, event: Trained) -> list[Effect]:
        outputs = event.outputs
        if state.device is not None:
            receiver, state.device = state.device, None
            state.round += 1
            answer = Message("gradient", state.round, {"gradient": outputs["gradient"]})
            return [Send(receiver, answer), *self.serve(state)]
        if "activations" in outputs:
            up = {name: outputs[name] for name in ("activations", "labels")}
            state.batch = {"x": outputs["x"]}
            return [Send(self.num_devices, Message("activations", state.round, up))]
        state.round += 1
        return self.next_batch(state)


class PartTrainer(Trainer):
    """Trains one part; made from the arguments of `Learner`, of which it uses few."""

    def __init__(self, settings: LearnerSettings, data: WorkerData, **others: Any) -> None:  # noqa: ANN401
        model = copy.deepcopy(settings.model)
        self.model = FlatModel(model, has_buffers=settings.has_buffers)
        self.data, self.shard = data.dataset, data.shard
        self.batch_size = settings.batch_size
        self.position = 0

    @property
    def num_samples(self) -> int:
        return len(self.shard)

    @property
    def layout(self) -> Layout:
        return Layout(self.model.num_trained)

    def cost(self, request: Train) -> float:
        return self.batch_size / 3

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self.model.load(request.params)
        self.model.zero_grad()
        inputs, loss = request.inputs, 0.0
        if "labels" in inputs:
            below = inputs["activations"].clone().requires_grad_()
            error = F.cross_entropy(self.model.module(below), inputs["labels"])
            error.backward()  # type: ignore[no-untyped-call]
            assert below.grad is not None
            outputs, loss = {"gradient": below.grad}, error.item()
            self.step()
        elif "gradient" in inputs:
            self.model.module(inputs["x"]).backward(inputs["gradient"])
            outputs = {}
            self.step()
        else:
            outputs = self.draw()
        return TrainingResult(self.model.params.clone(), self.batch_size, 1, loss, outputs)

    def draw(self) -> dict[str, Tensor]:
        chosen = torch.arange(self.position, self.position + self.batch_size)
        self.position += self.batch_size
        samples = self.data.train.batch(self.shard[chosen % len(self.shard)])
        x, y = prepare_batch(self.data, samples, torch.device("cpu"))
        with torch.no_grad():
            return {"x": x, "activations": self.model.module(x), "labels": y}

    @torch.no_grad()
    def step(self) -> None:
        assert self.model.trained.grad is not None
        self.model.trained.sub_(self.model.trained.grad, alpha=LEARNING_RATE)

    def state_dict(self) -> Mapping[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def device_part() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


def cloud_part() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(10, 3))


def split_task(**changes: Any) -> Task:  # noqa: ANN401
    settings: dict[str, Any] = {
        "dataset": dataset(),
        "model": {"device": device_part, "cloud": cloud_part},
        "trainer": PartTrainer,
        "optimizer": SGD(lr=LEARNING_RATE),
        "batch_size": BATCH_SIZE,
    }
    return Task(**settings | changes)


def split_run(num_devices: int = NUM_DEVICES, **changes: Any) -> Experiment:  # noqa: ANN401
    settings: dict[str, Any] = {
        "task": split_task(),
        "algorithm": SplitLearning(num_devices=num_devices),
        "platforms": (*DEVICES[:num_devices], Platform(throughput=400.0)),
        "links": Links(default=Link(latency=0.01, bandwidth=1e6)),
        "seed": 3,
        "evaluation_interval": 0.5,
    }
    return Experiment(**settings | changes)
