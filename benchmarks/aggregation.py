"""How long aggregation takes, how well it divides, and whether `num_flops` foresees it.

    python -m benchmarks.aggregation                      a table of 12,500 CIFAR-10 pictures
    python -m benchmarks.aggregation --dataset har        of another data set
    python -m benchmarks.aggregation --samples 1000       of so many samples
    python -m benchmarks.aggregation --json               one JSON object

Real samples if the folder $EDGEGOSSIP_DATA has them, synthetic ones otherwise. Seconds are
processor time of `fit` on one thread, the median of several runs after a warm-up; other work on
the machine hardly disturbs it. "Predicted" is measured over predicted time: `num_flops` over
the FLOP/s of training LeNet-5 on CIFAR-10, measured at once. "Within" is the share of the
variance within classes that is left within subsets (0: subsets of equal samples, about 0.9:
random ones, at ratio 10).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.kept import about
from sklearn.datasets import make_blobs
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from edgegossip.contract.errors import DataError
from edgegossip.data.readers import DATASETS
from edgegossip.models import lenet5
from edgegossip.training.sampling.aggregation import (
    COMBINATIONS,
    AggregatedData,
    Aggregator,
    aggregator,
)

SHAPES = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "har": (9, 128)}
BATCH_SIZE = 64


def samples(name: str, num_samples: int) -> tuple[str, Tensor, Tensor]:
    """Where samples are from, x and y: the first of the data set, or blobs of its shape."""
    try:
        train = DATASETS[name](Path(os.environ.get("EDGEGOSSIP_DATA", "data"))).train
        x, y = train.batch(torch.arange(min(num_samples, len(train))))
        return name, x, y
    except DataError:
        shape = SHAPES[name]
        points, labels = make_blobs(
            num_samples, torch.Size(shape).numel(), centers=10, random_state=0
        )
        x = torch.from_numpy(points).float().view(-1, *shape)
        return f"synthetic {name}", x, torch.from_numpy(labels)


def seconds(work: Callable[[], object], num_repeats: int) -> float:
    """Median processor time of `work`, after a warm-up."""
    work()
    runs = []
    for _ in range(num_repeats):
        start = time.process_time()
        work()
        runs.append(time.process_time() - start)
    return statistics.median(runs)


def training_speed(num_repeats: int, num_steps: int = 50) -> float:
    """FLOP/s of training LeNet-5 on pictures of CIFAR-10's size, forward and backward."""
    model = lenet5(input_shape=(3, 32, 32), num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.rand(BATCH_SIZE, 3, 32, 32), torch.arange(BATCH_SIZE) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    num_flops: int = counter.get_total_flops()

    def steps() -> None:
        for _ in range(num_steps):
            step()

    return num_flops * num_steps / seconds(steps, num_repeats)


def variance_within(x: Tensor, y: Tensor, aggregated: AggregatedData) -> float:
    """Share of the variance within classes that is left within subsets, in [0, 1]."""
    values, points = x.flatten(1).float(), aggregated.x.flatten(1)
    within = (values - points[aggregated.subset_of]).square().sum()
    classes = [values[y == label] for label in y.unique()]  # type: ignore[no-untyped-call]
    total = sum(float((part - part.mean(dim=0)).square().sum()) for part in classes)
    return float(within) / total


def measure(
    chosen: Aggregator, x: Tensor, y: Tensor, speed: float, num_repeats: int
) -> dict[str, float]:
    """Figures of one aggregator."""
    num_seconds = seconds(lambda: chosen.fit(x, y), num_repeats)
    num_classes = int(y.max()) + 1
    num_flops = chosen.num_flops(len(x), tuple(x.shape[1:]), num_classes)
    return {
        "seconds": num_seconds,
        "measured_over_predicted": num_seconds * speed / num_flops,
        "variance_within": variance_within(x, y, chosen.fit(x, y)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dataset", choices=sorted(SHAPES), default="cifar10")
    parser.add_argument("--samples", type=int, default=12_500, help="at most")
    parser.add_argument("--ratio", type=float, default=10.0, help="samples a point")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    options = parser.parse_args()
    origin = about(options)
    torch.set_num_threads(1)
    with threadpool_limits(1):
        name, x, y = samples(options.dataset, options.samples)
        speed = training_speed(options.repeats)
        figures = {
            kind: measure(aggregator(kind, options.ratio), x, y, speed, options.repeats)
            for kind in COMBINATIONS
        }
    if options.json:
        print(
            json.dumps({**origin, "data": name, "training_flops_per_second": speed, **figures})
        )
        return
    print(f"{len(x):,} samples of {name}, ratio {options.ratio:g}; training {speed:.2e} FLOP/s")
    print(f"{'':18} {'seconds':>8} {'predicted':>10} {'within':>7}")
    for kind, row in figures.items():
        mark = "*" if COMBINATIONS[kind].is_selected else " "
        print(
            f"{kind:16} {mark} {row['seconds']:8.3f} {row['measured_over_predicted']:10.2f} "
            f"{row['variance_within']:7.3f}"
        )
    print("* selected by the paper; predicted: measured over predicted time")


if __name__ == "__main__":
    main()
