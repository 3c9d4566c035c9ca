"""Remedies for shards that are seldom visited: batches, control variates, others' points.

    python -m benchmarks.seldom_visited --data-dir data --json OUT    # three hours on one core

Four workers with equal shards of CIFAR-10, whose speeds differ by a factor of 8, train LeNet-5
in rounds of equal time, like `EpochGossip` and `EdgeGossip` with random shares. Accuracy is
measured on 5,000 held-out training samples, with seeds that no other result uses. All runs but
the baseline process 1.2 times the baseline's samples. After each round, the averaged model's
loss is also measured on 2,000 samples of each shard.

Remedies, with r as a worker's share of its data:
    correction: The present rule; a delta is multiplied by (mean share / r)^beta.
    batches: Batches of size b_i = max(8, b r^g), with learning rates multiplied by
        (b_i / b)^h.
    control: Control variates (SCAFFOLD, arXiv:1910.06378). Each gradient gets `control`
        (c - c_i) added; c_i is the mean gradient of a worker's last round, c the mean of all
        c_i.
    points: A part of each batch is aggregated points of the other workers' shards.
    mixing: Each sample is mixed with an aggregated point, and the loss with that point's class
        (FedMix, arXiv:2107.00233). A worker's own points are the control for regularization.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from benchmarks.kept import about, rounded
from studies.race import imbalanced
from torch import Tensor, nn

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.plan import MOST_BLOCKS
from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import Dataset
from edgegossip.data.readers import DATASETS
from edgegossip.models.blocks import drawn_from
from edgegossip.models.small import lenet5
from edgegossip.runs.files import write_json
from edgegossip.training.loss import prepare_batch
from edgegossip.training.sampling.aggregation import aggregator

NUM_WORKERS = 4
IMBALANCE = 8.0
BATCH = 64
MIN_BATCH = 8
LR = 0.01
MOMENTUM = 0.9
EPOCHS = 24
MAX_WORK = 1.2
NUM_HELD_OUT = 5_000
NUM_OF_SHARD = 2_000
"""Samples of each shard on which the loss is measured."""
WINDOWS = (0.0, 3.0, 8.0)
"""Epochs' worth of samples over which models are averaged before they are measured."""
RATIO = 10
SETTINGS = {
    "imbalance": IMBALANCE,
    "batch": BATCH,
    "min_batch": MIN_BATCH,
    "lr": LR,
    "momentum": MOMENTUM,
    "epochs": EPOCHS,
    "max_work": MAX_WORK,
    "num_held_out": NUM_HELD_OUT,
    "ratio": RATIO,
}


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One way to train.

    Args:
        beta: Exponent of the correction.
        batch_power: Exponent of the batch size.
        rate_power: Exponent of the learning rate.
        falls: Whether small batches give way to the correction in the course of the training.
        control: Weight of the control variates.
        in_blocks: Whether control variates are mean steps, added after each of EdgeGossip's
            blocks, instead of gradients.
        points: Share of each batch that is other workers' points.
        mixing: Weight of the point that is mixed into each sample.
        source: Whose points are mixed in.
        length: Length of a round, as a share of the time that a pass takes the fastest worker.
        is_even: Whether all workers visit all their samples, as in `EpochGossip`.
    """

    beta: float = 0.5
    batch_power: float = 0.0
    rate_power: float = 0.5
    falls: bool = False
    control: float = 0.0
    in_blocks: bool = False
    points: float = 0.0
    mixing: float = 0.0
    source: Literal["others", "own"] = "others"
    is_even: bool = False
    length: float = 1.0


REMEDIES = {
    "epoch-gossip": Remedy(is_even=True),
    "epoch-gossip, half rounds": Remedy(is_even=True, length=0.5),
    "epoch-gossip, control 1 in blocks": Remedy(is_even=True, control=1.0, in_blocks=True),
    "correction 0.5": Remedy(),
    "batches g=0.5 correction 0.25": Remedy(beta=0.25, batch_power=0.5),
    "batches g=1": Remedy(beta=0.0, batch_power=1.0),
    "batches g from 1 to 0": Remedy(beta=0.5, batch_power=1.0, falls=True),
    "control 1": Remedy(control=1.0),
    "mixing 0.2": Remedy(mixing=0.2),
    "points 0.25": Remedy(points=0.25),
    "control 1 in blocks": Remedy(control=1.0, in_blocks=True),
    "control 1 in blocks correction 0": Remedy(control=1.0, in_blocks=True, beta=0.0),
    "control 0.3 in blocks correction 0": Remedy(control=0.3, in_blocks=True, beta=0.0),
    "control 1 in blocks correction 0, half rounds": Remedy(
        control=1.0, in_blocks=True, beta=0.0, length=0.5
    ),
    "control 0.3": Remedy(control=0.3),
    "control 1 correction 0": Remedy(control=1.0, beta=0.0),
    "mixing own 0.2": Remedy(mixing=0.2, source="own"),
    "epoch-gossip mixing 0.2": Remedy(mixing=0.2, is_even=True),
    "batches g=0.5": Remedy(beta=0.0, batch_power=0.5),
    "correction 0": Remedy(beta=0.0),
}


@dataclass(frozen=True)
class Samples:
    """Prepared samples and their classes."""

    x: Tensor
    y: Tensor

    def take(self, indices: Tensor) -> Samples:
        return Samples(self.x[indices], self.y[indices])

    def __len__(self) -> int:
        return len(self.y)


@dataclass
class Worker:
    """A worker's shard, aggregated points and optimizer state."""

    rank: int
    share: float
    shard: Samples
    points: Samples
    velocity: list[Tensor] = field(default_factory=list)
    control: list[Tensor] = field(default_factory=list)


def shares() -> list[float]:
    """Each worker's share of its data, by its speed."""
    return [each.throughput for each in imbalanced(NUM_WORKERS, 1.0, IMBALANCE)]


def prepared(data: Dataset, indices: Tensor) -> Samples:
    x, y = prepare_batch(data.training, data.train.batch(indices), torch.device("cpu"))
    return Samples(x, y)


def workers_of(data: Dataset, seed: int, remedy: Remedy) -> tuple[list[Worker], Samples]:
    """The workers, and the samples that are held out."""
    order = torch.randperm(len(data.train), generator=generator(seed, "shards"))
    held, rest = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    made = []
    for rank, indices in enumerate(rest.chunk(NUM_WORKERS)):
        shard = prepared(data, indices)
        if remedy.points or remedy.mixing:
            found = aggregator("hash-kmeans", ratio=RATIO).fit(shard.x, shard.y)
            points = Samples(found.x, found.y)
        else:
            points = shard.take(torch.empty(0, dtype=torch.int64))
        share = remedy.length * (1.0 if remedy.is_even else shares()[rank])
        made.append(Worker(rank, share, shard, points))
    return made, prepared(data, held)


class Training:
    """Trains by one remedy with one seed."""

    def __init__(self, remedy: Remedy, data: Dataset, seed: int) -> None:
        self.remedy = remedy
        self.workers, self.held_out = workers_of(data, seed, remedy)
        self._seed = seed
        with drawn_from(seed):
            model: nn.Module = lenet5(data.input_shape, data.num_classes)
        self._model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._params = list(self._model.parameters())
        self.current = [each.detach().clone() for each in self._params]
        for worker in self.workers:
            worker.velocity = [torch.zeros_like(each) for each in self.current]
            worker.control = [torch.zeros_like(each) for each in self.current]
        self.num_samples = 0
        self.num_train = sum(len(each.shard) for each in self.workers)
        self.limit = EPOCHS * self.num_train * (1.0 if remedy.is_even else MAX_WORK)

    @property
    def progress(self) -> float:
        """Completed share of the training, in [0, 1]."""
        return self.num_samples / self.limit

    def round(self, number: int) -> None:
        """Let each worker train on its share, and average the deltas."""
        mean_share = statistics.mean(each.share for each in self.workers)
        mean_control = _mean([each.control for each in self.workers])
        moved, controls = [], []
        for worker in self.workers:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self.current)
            draws = generator(self._seed, "round", number, worker.rank)
            controls.append(self._train(worker, mean_control, draws))
            beta = self.remedy.beta * (self.progress if self.remedy.falls else 1)
            factor = (mean_share / worker.share) ** beta
            pairs = zip(self._params, self.current, strict=True)
            moved.append([factor * (new.detach() - old) for new, old in pairs])
        for worker, control in zip(self.workers, controls, strict=True):
            worker.control = control
        self.current = [
            x + change for x, change in zip(self.current, _mean(moved), strict=True)
        ]

    def _train(
        self, worker: Worker, mean_control: list[Tensor], draws: torch.Generator
    ) -> list[Tensor]:
        """Train one worker; return its next control variate."""
        remedy = self.remedy
        power = remedy.batch_power * (1 - self.progress if remedy.falls else 1)
        size = max(MIN_BATCH, round(BATCH * worker.share**power))
        lr = LR * (size / BATCH) ** remedy.rate_power
        offset = torch._foreach_sub(mean_control, worker.control)
        torch._foreach_mul_(offset, remedy.control)
        total, num_steps = [torch.zeros_like(each) for each in self.current], 0
        most = math.ceil(worker.share * len(worker.shard) / size)
        left_in_block, in_block = _block(most, most), 0
        for batch, point, weight in self._batches(worker, size, draws):
            loss = (1 - weight) * F.cross_entropy(outputs := self._model(batch.x), batch.y)
            if weight:
                loss = loss + weight * F.cross_entropy(outputs, point.y)
            grads = list(torch.autograd.grad(loss, self._params))
            with torch.no_grad():
                if not remedy.in_blocks:
                    torch._foreach_add_(total, grads)
                    torch._foreach_add_(grads, offset)
                torch._foreach_mul_(worker.velocity, MOMENTUM)
                torch._foreach_add_(worker.velocity, grads)
                torch._foreach_add_(self._params, worker.velocity, alpha=-lr)
                num_steps, in_block = num_steps + 1, in_block + 1
                if remedy.in_blocks:
                    torch._foreach_add_(total, worker.velocity, alpha=-lr)
                    if in_block == left_in_block or num_steps == most:
                        torch._foreach_add_(self._params, offset, alpha=in_block)
                        left_in_block, in_block = _block(most - num_steps, most), 0
        return list(torch._foreach_div(total, num_steps))

    def _batches(
        self, worker: Worker, size: int, draws: torch.Generator
    ) -> Iterator[tuple[Samples, Samples, float]]:
        """Yield batches, the points mixed into them, and the points' weight."""
        remedy = self.remedy
        budget = round(worker.share * len(worker.shard))
        self.num_samples += budget
        num_points = round(remedy.points * size)
        order = torch.randperm(len(worker.shard), generator=draws)
        for indices in torch.split(order[:budget], size):
            batch = worker.shard.take(indices)
            points = self._points(worker, len(indices), draws)
            if num_points and len(indices) == size:
                x = torch.cat([batch.x[num_points:], points.x[:num_points]])
                y = torch.cat([batch.y[num_points:], points.y[:num_points]])
                yield Samples(x, y), points, 0.0
            elif remedy.mixing:
                x = (1 - remedy.mixing) * batch.x + remedy.mixing * points.x
                yield Samples(x, batch.y), points, remedy.mixing
            else:
                yield batch, batch, 0.0

    def _points(self, worker: Worker, number: int, draws: torch.Generator) -> Samples:
        """Draw points of the other workers' shards; the less a shard is visited, the more."""
        remedy = self.remedy
        if not (remedy.points or remedy.mixing):
            return worker.points
        sources = self.workers if remedy.source == "others" else [worker]
        sources = [each for each in sources if (each is worker) == (remedy.source == "own")]
        weights = torch.tensor([1 / each.share for each in sources])
        chosen = torch.multinomial(weights, number, replacement=True, generator=draws)
        place = torch.rand(number, generator=draws)
        taken = [
            sources[i].points.take((place[chosen == i] * len(sources[i].points)).long())
            for i in range(len(sources))
        ]
        return Samples(
            torch.cat([each.x for each in taken]), torch.cat([each.y for each in taken])
        )

    @torch.no_grad()
    def accuracy(self, params: list[Tensor]) -> float:
        torch._foreach_copy_(self._params, params)
        right = sum(
            int((outputs.argmax(1) == y).sum()) for outputs, y in self._outputs(self.held_out)
        )
        return right / len(self.held_out)

    @torch.no_grad()
    def shard_losses(self) -> list[float]:
        """Mean loss of the averaged model on some samples of each worker's shard."""
        torch._foreach_copy_(self._params, self.current)
        found = []
        for worker in self.workers:
            some = worker.shard.take(torch.arange(min(NUM_OF_SHARD, len(worker.shard))))
            losses = (F.cross_entropy(*pair, reduction="sum") for pair in self._outputs(some))
            found.append(float(sum(losses)) / len(some))
        return found

    def _outputs(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in torch.split(torch.arange(len(samples)), 500):
            batch = samples.take(indices)
            yield self._model(batch.x), batch.y


def _block(left: int, total: int) -> int:
    """Number of steps in EdgeGossip's next block."""
    return max(1, min(left, round(EdgeGossip.block_share * max(left, total / MOST_BLOCKS))))


def _mean(vectors: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*vectors, strict=True)]


def curves(remedy: Remedy, data: Dataset, seed: int) -> dict[str, Any]:
    """Accuracy after each round, by window, and the loss on each shard."""
    training = Training(remedy, data, seed)
    models: deque[tuple[float, list[Tensor]]] = deque()
    epochs: list[float] = []
    shard_losses: list[list[float]] = []
    found: dict[str, list[float]] = {f"{window:g}": [] for window in WINDOWS}
    number, began = 0, time.perf_counter()
    while training.progress < 1 - 1e-6:
        training.round(number)
        number += 1
        now = training.num_samples / training.num_train
        epochs.append(now)
        models.append((now, training.current))
        shard_losses.append(training.shard_losses())
        while models and models[0][0] <= now - max(WINDOWS):
            models.popleft()
        for window in WINDOWS:
            recent = [model for at, model in models if at > now - window] or [models[-1][1]]
            found[f"{window:g}"].append(training.accuracy(_mean(recent)))
    return {
        "epochs": epochs,
        "accuracies": found,
        "shard_losses": shard_losses,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--only", nargs="+", choices=REMEDIES, default=list(REMEDIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    origin = about(args)
    torch.set_num_threads(1)
    data = DATASETS["cifar10"](args.data_dir)
    rows: list[dict[str, Any]] = []
    told = {**origin, "settings": SETTINGS}
    for seed in args.seeds:
        for name in args.only:
            row = curves(REMEDIES[name], data, seed)
            rows.append({"remedy": name, **asdict(REMEDIES[name]), "seed": seed, **row})
            ends = [f"{100 * v[-1]:.1f} {100 * max(v):.1f}" for v in row["accuracies"].values()]
            print(seed, name, *ends, f"{row['seconds']:.0f} s", sep="  ", flush=True)
            if args.json:
                write_json(args.json, {**told, "rows": rounded(rows)})


if __name__ == "__main__":
    main()
