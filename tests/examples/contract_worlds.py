"""Small worlds for the systems of `contract_systems`: what they train, send, suffer.

The four systems were written to find the words that the contract lacked; what they led to is
in `docs/contract-design.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.observers import Silent
from tests.schemas import SchemaCheck
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import (
    Epochs,
    Payload,
    Rank,
    Seconds,
    Steps,
    Train,
    Trained,
    Work,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.rounds import RoundState
from edgegossip.contract.schema import TensorSpec
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.sim.fault import Fault, Faults
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM_PARAMS = 12
TARGETS = torch.randn(8, NUM_PARAMS, generator=generator(0, "targets"), dtype=torch.float64)
ORIGIN = torch.zeros(NUM_PARAMS, dtype=torch.float64)


def simulate(
    algorithm: Algorithm[Any],
    speeds: Sequence[float],
    script: Sequence[Fault],
    make_trainer: Callable[[Rank], Trainer],
    *,
    seed: int = 0,
    observer: Observer | None = None,
    evaluate: Callable[[Tensor], tuple[float, Mapping[str, float]]] | None = None,
    initial_params: Tensor | Callable[[Rank], Tensor] = ORIGIN,
) -> Simulator[Any]:
    """A simulator in which a message takes 0.1 s, and goes through the codec.

    Where nobody else observes it, what is sent is compared with the algorithm's schema.
    """
    return Simulator(
        algorithm,
        [Platform(throughput=speed) for speed in speeds],
        initial_params,
        lambda rank, _: make_trainer(rank),
        links=Links(default=Link(latency=0.1)),
        faults=Faults(script=tuple(script), seed=seed),
        observer=observer or SchemaCheck.of(algorithm, ORIGIN),
        evaluate=evaluate,
        wire=True,
    )


class Identity:
    """The compressor that does nothing."""

    def compress(self, tensor: Tensor) -> Payload:
        return {"values": tensor}

    def decompress(self, payload: Payload) -> Tensor:
        return payload["values"]

    def schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return {"values": TensorSpec.like(params)}


@dataclass(frozen=True)
class TopK:
    """Keeps the largest entries by magnitude."""

    num_kept: int

    def compress(self, tensor: Tensor) -> Payload:
        indices = tensor.abs().topk(self.num_kept).indices
        return {"values": tensor[indices], "indices": indices}

    def decompress(self, payload: Payload) -> Tensor:
        dense = torch.zeros(NUM_PARAMS, dtype=payload["values"].dtype)
        dense[payload["indices"]] = payload["values"]
        return dense

    def schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        values = TensorSpec(params.dtype, (self.num_kept,))
        last = params.numel() - 1
        indices = TensorSpec(torch.int64, (self.num_kept,), minimum=0, maximum=last)
        return {"values": values, "indices": indices}


class EpochAllReduce(AllReduce):
    """Exact averaging after each epoch."""

    def work(self, state: RoundState) -> Work | None:
        return None if state.round % 2 else Epochs()


@dataclass(frozen=True)
class ShardTrainer(Trainer):
    """Passes over a shard, in batches of 5; each batch is one step on a quadratic."""

    target: Tensor
    shard_size: int

    @property
    def num_samples(self) -> int:
        return self.shard_size

    def cost(self, request: Train) -> float:
        assert isinstance(request.work, Epochs)
        return 5 * round(request.work.share * request.keep_ratio * self.num_samples / 5)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        num_samples = int(self.cost(request))
        steps = Steps(num_samples // 5)
        shorter = Train(request.params, steps)
        result = QuadraticTrainer(self.target, lr=0.002).train(shorter)
        return TrainingResult(result.params, num_samples, steps.num_steps, result.loss)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class Recorder(Silent):
    """Keeps who trained from when to when, and to what effect."""

    trained_at: list[tuple[Rank, Seconds, Seconds]] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.trained_at.append((rank, start, now))
        self.deltas.append(event.delta)


BATCH_SIZE = 16
NUM_INPUTS, NUM_LABELS = 6, 3
LABELLING = 0.4 * torch.randn(NUM_INPUTS, NUM_LABELS, generator=generator(0, "labelling"))
# The last layer is narrow: it cannot make up for what the others have not learned.
WIDTHS = ((NUM_INPUTS, 12), (12, 3), (3, NUM_LABELS))
"""Entries in and out, by stage."""


@dataclass
class StageTrainer(Trainer):
    """One of three layers, and a linear guess at the gradient at its output.

    The guess is made from output and labels, and begins as zero, as in the paper.

    Args:
        rank: Of the stage.
        losses: Where the last stage puts its loss after each step.
    """

    rank: Rank
    losses: list[float]

    def __post_init__(self) -> None:
        num_in, num_out = WIDTHS[self.rank]
        self.draws = generator(0, "stage", self.rank)
        self.layer = torch.nn.Linear(num_in, num_out)
        self.guess = torch.nn.Linear(num_out + NUM_LABELS, num_out)
        self.parameters = [*self.layer.parameters(), *self.guess.parameters()]
        for parameter in self.parameters:
            torch.nn.init.zeros_(parameter)
        torch.nn.init.normal_(self.layer.weight, std=num_in**-0.5, generator=self.draws)

    @property
    def params(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self.parameters).detach()

    @property
    def num_samples(self) -> int:
        return 10_000

    def cost(self, request: Train) -> float:
        return BATCH_SIZE / (12 if "gradient" in request.inputs else 3)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        inputs = request.inputs
        torch.nn.utils.vector_to_parameters(request.params.clone(), self.parameters)
        optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        optimizer.zero_grad()
        if "gradient" in inputs:
            outputs = {}
            guess = self.guess_gradient(inputs["activations"], inputs["labels"])
            loss = (guess - inputs["gradient"]).square().sum(1).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        elif self.rank == 0:
            samples = torch.randn(BATCH_SIZE, NUM_INPUTS, generator=self.draws)
            outputs = self.train_layer(samples, samples @ LABELLING)
        else:
            outputs = self.train_layer(inputs["activations"], inputs["labels"])
        optimizer.step()
        return TrainingResult(self.params, BATCH_SIZE, 1, 0.0, outputs)

    def train_layer(self, below: Tensor, labels: Tensor) -> dict[str, Tensor]:
        below = below.clone().requires_grad_()
        above = self.layer(below)
        if self.rank == 2:
            loss = (above - labels).square().sum(1).mean()
            self.losses.append(loss.item())
        else:
            above = above.tanh()
            guess = self.guess_gradient(above.detach(), labels).detach()
            # Gradients are per sample, and the loss is the mean of theirs.
            loss = (above * guess).sum(1).mean()
        loss.backward()
        assert below.grad is not None
        gradient = BATCH_SIZE * below.grad
        return {"activations": above.detach(), "labels": labels, "gradient": gradient}

    def guess_gradient(self, activations: Tensor, labels: Tensor) -> Tensor:
        guess: Tensor = self.guess(torch.cat([activations, labels], 1))
        return guess

    def state_dict(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError
