"""Steps per second on a GPU: a learner's, and those of a plain loop.

    python -m benchmarks.gpu

Both train with SGD on batches of 64 pictures in main memory. A second loop has all pictures on
the GPU. The learner and the loops alternate, each after 20 untimed steps; medians are printed.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import nn

from edgegossip.contract.protocol import Steps, Train
from edgegossip.data.dataset import ArraySplit, Dataset, WorkerData
from edgegossip.models import lenet5, resnet20
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD

BATCH_SIZE = 64
NUM_UNTIMED = 20
MODELS = {"lenet5": (lenet5, (1, 28, 28)), "resnet20": (resnet20, (3, 32, 32))}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Args:
        num_steps: Steps of a measurement.
        repeats: Measurements of each kind.
        torch_device: Device of the models.
    """

    num_steps: int = 200
    repeats: int = 5
    torch_device: str = "cuda"


def noise(shape: tuple[int, ...], num_samples: int = 4096) -> Dataset:
    """Random pictures and labels."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (num_samples, *shape), generator=random).to(torch.uint8)
    split = ArraySplit(x, torch.randint(10, (num_samples,), generator=random))
    scale = torch.full((shape[0],), 0.5)
    return Dataset(
        "noise", split, split, num_classes=10, input_shape=shape, mean=scale, std=scale
    )


def plain_loop(
    model: nn.Module,
    dataset: Dataset,
    options: Options,
    *,
    resident: bool,
    batch_size: int = BATCH_SIZE,
) -> float:
    """Steps per second of a loop as one would write it by hand."""
    torch_device = torch.device(options.torch_device)
    module = copy.deepcopy(model).to(torch_device).train()
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    x, y = dataset.train.batch(torch.arange(len(dataset.train)))
    if resident:
        x, y = x.to(torch_device), y.to(torch_device)
    losses: list[torch.Tensor] = []
    start = 0.0
    for number in range(NUM_UNTIMED + options.num_steps):
        if number == NUM_UNTIMED:
            torch.stack(losses).mean().item()  # waits for the device
            start = time.perf_counter()
        chosen = torch.randint(len(y), (batch_size,), device=y.device)
        pictures = x[chosen].to(torch_device).float().div_(255).sub_(0.5).div_(0.5)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(module(pictures), y[chosen].to(torch_device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    torch.stack(losses).mean().item()
    return options.num_steps / (time.perf_counter() - start)


def learner(
    model: nn.Module, dataset: Dataset, options: Options, *, batch_size: int = BATCH_SIZE
) -> float:
    """Steps per second of a `Learner`."""
    some = Learner(
        LearnerSettings(
            model=model,
            loss=F.cross_entropy,
            optimizer=SGD(lr=0.01, momentum=0.9),
            batch_size=batch_size,
            torch_device=options.torch_device,
        ),
        WorkerData(dataset=dataset.training, shard=torch.arange(len(dataset.train))),
    )
    params = some.model.params.cpu().clone()
    some.train(Train(params, Steps(NUM_UNTIMED)))
    start = time.perf_counter()
    some.train(Train(params, Steps(options.num_steps)))
    return options.num_steps / (time.perf_counter() - start)


def main(options: Options) -> None:
    for name, (make, shape) in MODELS.items():
        model, dataset = make(shape, 10), noise(shape)
        rows = [
            (
                plain_loop(model, dataset, options, resident=False),
                plain_loop(model, dataset, options, resident=True),
                learner(model, dataset, options),
            )
            for _ in range(options.repeats)
        ]
        plain, resident, ours = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(
            f"{name}: {plain:.0f} steps/s by hand, {resident:.0f} with resident pictures, "
            f"{ours:.0f} by a learner: {ours / plain:.2f} and {ours / resident:.2f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
