"""A small model in three stages, and its trainers without a driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.small_learners import arguments_of
from tests.small_runs import dataset
from torch import Tensor, nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import Payload, Steps, Train
from edgegossip.contract.randomness import derive_seed
from edgegossip.contract.trainer import TrainingResult
from edgegossip.models.blocks import drawn_from
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.learner import Place
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.teachers import Both, Greedy, LocalLosses, SyntheticGradients
from edgegossip.training.task import Task

SHAPES: tuple[tuple[int, ...], ...] = ((4, 4, 4), (16,), ())
BOUNDARIES = SHAPES[:2]
NUM_STAGES = 3
STAGE_SETTINGS: dict[str, Any] = {"boundaries": BOUNDARIES, "num_classes": 3, "max_batch": 9}
LINKS = Links(default=Link(latency=0.01, bandwidth=1e6))


def layers() -> list[nn.Module]:
    """Dropout in the first stage, batch norm in all but the last."""
    return [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    ]


def whole_model() -> nn.Module:
    return nn.Sequential(*layers())


def part(number: int) -> nn.Module:
    """A stage, with the weights that it has in the whole model."""
    with drawn_from(derive_seed(0, "parts")):
        return layers()[number]


def whole_of_parts() -> nn.Module:
    return nn.Sequential(*(part(number) for number in range(NUM_STAGES)))


def place(number: int) -> Place:
    return Place(
        number=number,
        num_stages=NUM_STAGES,
        shape=SHAPES[number],
        num_classes=3,
        cost=1 / NUM_STAGES,
    )


def staged_task(kind: Callable[..., Any], *, options: Any = None, **changes: Any) -> Task:  # noqa: ANN401
    """The task whose stages are trained by trainers of `kind`, made with `options`."""
    numbers = range(NUM_STAGES)
    settings: dict[str, Any] = {
        "dataset": dataset(),
        "model": {f"stage-{k}": partial(part, k) for k in numbers},
        "trainer": {
            f"stage-{k}": partial(kind, place=place(k), **(options or {})) for k in numbers
        },
        "optimizer": SGD(lr=0.05, momentum=0.9),
        "batch_size": 8,
    }
    return Task(**settings | changes)


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "local losses": (Decoupled, DecoupledStage, {"teacher": LocalLosses()}),
    "greedy": (Decoupled, DecoupledStage, {"teacher": Greedy()}),
    "synthetic gradients": (Decoupled, DecoupledStage, {"teacher": SyntheticGradients()}),
    "both, replayed": (Decoupled, DecoupledStage, {"teacher": Both(), "replay": 2}),
    "pipelined": (Pipelined, PipelinedStage, {"max_passed": 9}),
}
"""The algorithm, the trainer and its options, by name."""


def run_of_kind(name: str, **changes: Any) -> Experiment:  # noqa: ANN401
    """A run of the model in stages of this kind; `changes` are those of the task."""
    algorithm, trainer, options = KINDS[name]
    inner = Alone(num_rounds=6, local_steps=4)
    task = staged_task(trainer, options=options, **changes)
    return staged_run(algorithm(inner=inner, **STAGE_SETTINGS), task)


def staged_run(algorithm: Any, task: Task | None = None, **changes: Any) -> Experiment:  # noqa: ANN401
    """A run of it on as many workers as it has, in the simulator."""
    num_workers = algorithm.num_workers if isinstance(algorithm, Stages) else 1
    settings: dict[str, Any] = {
        "task": task or staged_task(DecoupledStage, options={"teacher": LocalLosses()}),
        "algorithm": algorithm,
        "platforms": (Platform(throughput=400.0),) * num_workers,
        "links": LINKS,
        "seed": 3,
        "evaluation_interval": 0.5,
    }
    return Experiment(**settings | changes)


def arguments(number: int, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """The parts of a stage's trainer."""
    settings: dict[str, Any] = {
        "place": place(number),
        "model": part(number),
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": SGD(lr=0.1, momentum=0.0),
        "dataset": dataset().training,
        "shard": torch.arange(24 if number == 0 else 0),
        "batch_size": 8,
    }
    return arguments_of(settings | changes)


class Trained:
    """A trainer and the parameters that it has come to."""

    def __init__(self, trainer: DecoupledStage | PipelinedStage) -> None:
        self.trainer = trainer
        self.params: Tensor = trainer.model.params.clone()

    def train(self, inputs: Payload | None = None) -> TrainingResult:
        request = Train(self.params, Steps(1), inputs=inputs or {})
        result = self.trainer.train(request)
        self.params = result.params
        return result


def batch_of(number: int, num_samples: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """A batch for stage `number`, drawn at random."""
    random = torch.Generator().manual_seed(seed)
    shape = (num_samples, *SHAPES[number - 1])
    labels = torch.arange(num_samples) % 3
    return {"activations": torch.randn(shape, generator=random), "labels": labels}


def numbered(number: int, *passed: int, **inputs: Tensor) -> dict[str, Tensor]:
    """The inputs of a forward pass, with the batches that wait."""
    waiting = torch.tensor(passed, dtype=torch.int64)
    return {**inputs, "batch": torch.tensor(number), "passed": waiting}
