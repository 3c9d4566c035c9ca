"""Push-sum over slow links, dense and compressed: Sparse-Push and its successors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.compression.compressor import (
    Compressor,
    Identity,
    PartwiseCompressor,
    PerLayer,
    Values,
)
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import BFloat16, Quantize, Sign
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.metrics import payload_num_bytes
from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.contract.topology import directed_ring
from edgegossip.data.dataset import Dataset
from edgegossip.data.partition import IID, BySubject, Dirichlet, LabelSkew, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.data.readers import cifar10, har, mnist
from edgegossip.models import lenet5, resnet20, sensor_cnn, vgg11
from edgegossip.models.flat import FlatModel
from edgegossip.recipes.tasks import default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment, algorithm_name
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Augmentation
from edgegossip.training.optimizer import Constant, Cosine, Schedule, StepDecay, WarmUp
from edgegossip.training.task import Task

Decay: TypeAlias = Literal["constant", "steps", "cosine"]

BYTES_PER_MEGABIT = 125_000
LATENCY = 0.03
"""Latency in seconds, as in a mobile network."""

DENSE = "stochastic-gradient-push"
"""The reference run."""


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Common settings of the Sparse-Push recipes; each recipe has its own defaults.

    Args:
        num_epochs: Epochs of each run; all runs take the same number of steps.
        num_workers: Number of workers on equal platforms, in a directed ring.
        global_batch: Samples per step of all workers together, a multiple of the number of
            workers.
        lr: Learning rate.
        momentum: Momentum of SGD, in [0, 1).
        nesterov: Use Nesterov's momentum, as in the first author's later code.
        weight_decay: Weight decay of SGD.
        decay: Decay of the learning rate after a first epoch at a tenth of the rate: none, to a
            tenth after 1/2 and again after 3/4 of the epochs, or along a cosine.
        skew: Share of the samples to assign in order of class, in [0, 1].
        dirichlet_alpha: Assign classes in random proportions instead; smaller values skew more.
        by_subject: Keep each person's samples together instead.
        keep_ratio: Share of the entries kept in compressed messages, in (0, 1].
        value_bits: Bits of each entry: 1 to 8, 16 or 32.
        per_layer: Keep `keep_ratio` of each layer, as in the first author's later code, and
            not of the whole vector.
        consensus_step: Consensus step of the compressed runs, in (0, 1]; by default
            Sparse-Push's own rule, and three times the kept share for DifferencePush.
        local_steps: Steps between two messages of the compressed runs; the dense run sends
            after each step.
        compensation_rounds: Final rounds of averaging in the skew-compensated run; by default,
            the number that adds a tenth to its bytes.
        compensation_bits: Bits of each entry in these rounds: 1 to 8, 16 or 32.
        link: Bandwidth of each worker's uplink, in Mbit/s.
        throughput: Training samples per second of each platform.
        num_evaluations: Number of evaluations of each run, at least 1.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.

    Raises:
        ValueError: If a number is out of range, or two partitions are requested.
    """

    num_epochs: int = 15
    num_workers: int = 8
    global_batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay: Decay = "cosine"
    skew: float = 0.0
    dirichlet_alpha: float | None = None
    by_subject: bool = False
    keep_ratio: float = 0.1
    value_bits: int = 4
    per_layer: bool = False
    consensus_step: float | None = None
    local_steps: int = 14
    compensation_rounds: int | None = None
    compensation_bits: int = 3
    link: float = 1.0
    throughput: float = 1000.0
    num_evaluations: int = 60
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_workers", "local_steps", "num_evaluations"):
            check_range(name, getattr(self, name), "at least 1")
        if self.global_batch < 1 or self.global_batch % self.num_workers:
            raise ValueError(
                f"global_batch must be a multiple of num_workers={self.num_workers}, got "
                f"{self.global_batch}; {self.num_workers} workers may share "
                f"{self.num_workers * max(1, self.global_batch // self.num_workers)}"
            )
        check_ranges(self, keep_ratio="in (0, 1]")
        for name in ("value_bits", "compensation_bits"):
            if (value := getattr(self, name)) not in (*range(1, 9), 16, 32):
                raise ValueError(f"{name} must be 1 to 8, 16 or 32, got {value}")
        check_ranges(self, link="above 0 Mbit/s")
        if (self.skew > 0) + (self.dirichlet_alpha is not None) + self.by_subject > 1:
            raise ValueError("choose one of skew, dirichlet_alpha and by_subject")

    @property
    def partition(self) -> Partition:
        """Partition of the samples among the workers."""
        if self.by_subject:
            return BySubject()
        if self.dirichlet_alpha is not None:
            return Dirichlet(self.dirichlet_alpha)
        return LabelSkew(self.skew) if self.skew else IID()

    @property
    def schedule(self) -> Schedule:
        """Learning-rate schedule."""
        return schedule(self.decay, self.num_epochs)

    @property
    def compressor(self) -> PartwiseCompressor:
        """Compressor that compressed runs use for whole messages, or for each layer."""
        return compressor(self.keep_ratio, self.value_bits)


def schedule(decay: Decay, num_epochs: int) -> Schedule:
    """Make a schedule for `num_epochs` that begins with an epoch at a tenth of the rate.

    References:
        The code behind Aketi, Singh and Rabaey, "Sparse-Push", arXiv:2102.05715, multiplies the
        rate by 0.1 after 100 and 150 of 200 epochs of ResNet-20.
    """
    warm_up = WarmUp(share=1 / num_epochs) if num_epochs > 1 else None
    match decay:
        case "constant":
            return Constant(warm_up=warm_up)
        case "steps":
            return StepDecay(milestones=(0.5, 0.75), warm_up=warm_up)
        case "cosine":
            return Cosine(warm_up=warm_up)


def per_layer(compressor: PartwiseCompressor, task: Task) -> PerLayer:
    """Make a compressor that treats each layer of the task's model separately."""
    return PerLayer(compressor, layer_sizes(task))


def layer_sizes(task: Task) -> tuple[int, ...]:
    """Number of entries of each tensor in the task's model, in order."""
    with torch.random.fork_rng(devices=[]):
        (model,) = (make() for make in task.models.values())
    return FlatModel(model, has_buffers=task.has_buffers).sizes


def compressor(keep_ratio: float, value_bits: int) -> PartwiseCompressor:
    """Make a compressor of the largest entries, with this many bits for each value.

    >>> compressor(0.01, 4)
    TopK(keep_ratio=0.01, values=Quantize(bits=4))
    """
    exact: dict[int, Values] = {32: Identity(), 16: BFloat16(), 1: Sign()}
    values = exact.get(value_bits) or Quantize(value_bits)
    return values if keep_ratio == 1 else TopK(keep_ratio, values)


def num_steps(task: Task, num_workers: int, num_epochs: float) -> int:
    """Steps of each worker in this many epochs of all workers together."""
    a_step = task.batch_size * num_workers
    return max(1, round(num_epochs * len(task.dataset.train) / a_step))


def compare_pushes(
    dataset: Dataset,
    model: Callable[..., nn.Module],
    settings: PushSettings,
    *,
    augmentation: Augmentation | None = None,
) -> Comparison:
    """Compare dense push-sum, Sparse-Push (with and without compensation) and DifferencePush.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        settings: Settings of the recipe.
        augmentation: Augmentation of the training batches.
    """
    task = make_task(
        dataset,
        model,
        settings,
        schedule=settings.schedule,
        batch_size=settings.global_batch // settings.num_workers,
        partition=settings.partition,
        augmentation=augmentation,
        nesterov=settings.nesterov,
    )
    link = Link(latency=LATENCY, bandwidth=settings.link * BYTES_PER_MEGABIT)

    def experiment(algorithm: Algorithm[Any]) -> Experiment:
        return Experiment(
            task=task,
            algorithm=algorithm,
            platforms=(Platform(throughput=settings.throughput),) * settings.num_workers,
            links=Links(default=link),
            seed=settings.seed,
            evaluation_epochs=settings.num_epochs / settings.num_evaluations,
        )

    steps = num_steps(task, settings.num_workers, settings.num_epochs)
    own = settings.compressor
    algorithms = _algorithms(
        settings, steps, per_layer(own, task) if settings.per_layer else own
    )
    return Comparison(
        experiments={algorithm_name(each): experiment(each) for each in algorithms},
        baseline=DENSE,
        bytes_reference=DENSE,
        target_gap=0.01,
    )


def _algorithms(settings: PushSettings, steps: int, sent: Compressor) -> list[Algorithm[Any]]:
    topology = directed_ring(settings.num_workers)
    num_rounds = max(1, round(steps / settings.local_steps))
    final = compressor(1, settings.compensation_bits)
    final_rounds = settings.compensation_rounds
    if final_rounds is None:
        final_rounds = affordable_rounds(num_rounds, settings.compressor, final)
    compressed: dict[str, Any] = {
        "topology": topology,
        "num_rounds": num_rounds,
        "local_steps": settings.local_steps,
        "compressor": sent,
        "seed": settings.seed,
    }
    step = settings.consensus_step
    return [
        StochasticGradientPush(topology=topology, num_rounds=steps),
        SparsePush(**compressed, consensus_step=step),
        SkewCompensatedSparsePush(
            **compressed,
            consensus_step=step,
            compensation_rounds=final_rounds,
            compensation_compressor=final,
        ),
        DifferencePush(**compressed, consensus_step=step or bold_step(settings.keep_ratio)),
    ]


def affordable_rounds(num_rounds: int, compressor: Compressor, final: Compressor) -> int:
    """Number of rounds of `final`, at least 1, that add a tenth to the bytes of `num_rounds`.

    >>> affordable_rounds(500, TopK(0.1, Quantize(4)), Quantize(4))
    11
    """
    vector = torch.randn(100_000, generator=generator(0))
    push, other = (payload_num_bytes(each.compress(vector, 0)) for each in (compressor, final))
    return max(1, math.floor(num_rounds * push / other / 10))


def bold_step(keep_ratio: float) -> float:
    """A consensus step for DifferencePush with top-k: stable, and faster than the default.

    >>> bold_step(0.25), bold_step(1.0)
    (0.75, 1.0)
    """
    return min(1.0, 3 * keep_ratio)


MNIST_LENET5_SETTINGS = PushSettings(lr=0.05, throughput=2000.0)
HAR_CNN_SETTINGS = PushSettings(
    num_epochs=40, num_workers=7, global_batch=126, lr=0.02, throughput=500.0
)
CIFAR10_LENET5_SETTINGS = PushSettings(num_epochs=30, lr=0.02, throughput=1500.0)
CIFAR10_RESNET20_SETTINGS = PushSettings(num_epochs=30, throughput=200.0)
CIFAR10_VGG11_SETTINGS = PushSettings(num_epochs=30, lr=0.05, throughput=100.0)


def mnist_lenet5(
    settings: PushSettings = MNIST_LENET5_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Push-sum, dense and compressed: MNIST with LeNet-5, 8 workers in a directed ring.

    `compare` takes 25 minutes on one core.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with mnist/*-ubyte.gz; by default $EDGEGOSSIP_DATA.
    """
    return compare_pushes(mnist(data_dir), lenet5, settings)


def har_cnn(
    settings: PushSettings = HAR_CNN_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Push-sum, dense and compressed: activities of 21 people, 7 workers in a directed ring.

    With `--by-subject`, each worker has the data of three people.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
    """
    return compare_pushes(har(data_dir), sensor_cnn, settings)


def cifar10_lenet5(
    settings: PushSettings = CIFAR10_LENET5_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Push-sum, dense and compressed: CIFAR-10 with LeNet-5, 8 workers in a directed ring.

    Pictures are flipped and cropped at random. `compare` takes about an hour on one core.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with cifar-10-batches-bin; by default $EDGEGOSSIP_DATA.
    """
    return compare_pushes(cifar10(data_dir), lenet5, settings, augmentation=flip_and_crop)


def cifar10_resnet20(
    settings: PushSettings = CIFAR10_RESNET20_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Push-sum, dense and compressed: CIFAR-10 with ResNet-20 (hours).

    The model uses EvoNorm, because skew harms the statistics of batch normalization. Pictures
    are flipped and cropped at random.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with cifar-10-batches-bin; by default $EDGEGOSSIP_DATA.
    """
    model = partial(resnet20, normalization="evonorm")
    return compare_pushes(cifar10(data_dir), model, settings, augmentation=flip_and_crop)


def cifar10_vgg11(
    settings: PushSettings = CIFAR10_VGG11_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Push-sum, dense and compressed: CIFAR-10 with VGG11 (days on two cores).

    The model has no normalization. Pictures are flipped and cropped at random.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with cifar-10-batches-bin; by default $EDGEGOSSIP_DATA.
    """
    return compare_pushes(cifar10(data_dir), vgg11, settings, augmentation=flip_and_crop)
