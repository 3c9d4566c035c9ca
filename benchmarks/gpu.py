"""Steps per second on one GPU: those of a learner, and those of hand-written loops.

    python -m benchmarks.gpu                        a table
    python -m benchmarks.gpu --json                 one JSON object
    python -m benchmarks.gpu --torch-device cpu     on a CPU, without graphs

All train with SGD on batches of 64 pictures. Hand-written loops:

- "host": the pictures are in main memory;
- "resident": all pictures are on the GPU, as in the other loops;
- "compiled": the model and the loss are compiled by `torch.compile`;
- "graph": a whole step, from the choice of the pictures to the update, is one CUDA graph.

Learners: "learner" with the default step, "learner graph" with `TrainingStep(cuda_graph=True)`.
All kinds take turns, each after untimed steps; ratios are medians of those within a turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from benchmarks.kept import about, rounded
from benchmarks.simulator import pictures
from torch import Tensor, nn

from edgegossip.contract.protocol import Steps, Train
from edgegossip.data.dataset import Dataset, WorkerData
from edgegossip.models import lenet5, mlp, resnet20
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD
from edgegossip.training.step import PLAIN_STEP, TrainingStep

BATCH_SIZE = 64
NUM_SAMPLES = 4096
NUM_UNTIMED = 20
NUM_WARM = 3
MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, int, int]]] = {
    "mlp": (mlp, (1, 28, 28)),
    "lenet5": (lenet5, (1, 28, 28)),
    "resnet20": (resnet20, (3, 32, 32)),
}
Loop: TypeAlias = Callable[[int], None]
"""Takes so many steps, and waits for the device."""
Kind: TypeAlias = Callable[[nn.Module, Dataset, torch.device], Loop]


# Hand-written loops.


class ByHand:
    """A step as one would write it by hand."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        torch_device: torch.device,
        *,
        is_resident: bool = True,
        is_fused: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        module = copy.deepcopy(model).to(torch_device).train()
        self.module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=0.01, momentum=0.9, fused=is_fused
        )
        x, y = dataset.train.batch(torch.arange(len(dataset.train)))
        self.x, self.y = (x.to(torch_device), y.to(torch_device)) if is_resident else (x, y)
        self.torch_device, self.batch_size = torch_device, batch_size
        self.loss_of = F.cross_entropy

    def draw(self, chosen: Tensor | None = None) -> Tensor:
        """Choose the pictures of a step."""
        device = self.x.device
        return torch.randint(len(self.y), (self.batch_size,), device=device, out=chosen)

    def step(self, chosen: Tensor) -> Tensor:
        """Take a step; return its loss."""
        x = self.x[chosen].to(self.torch_device).float().div_(255).sub_(0.5).div_(0.5)
        x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss_of(self.module(x), self.y[chosen].to(self.torch_device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def by_hand(
    model: nn.Module,
    dataset: Dataset,
    torch_device: torch.device,
    *,
    is_resident: bool = True,
    batch_size: int = BATCH_SIZE,
) -> Loop:
    """A loop in Python."""
    own = ByHand(model, dataset, torch_device, is_resident=is_resident, batch_size=batch_size)
    return lambda number: _wait([own.step(own.draw()) for _ in range(number)])


def compiled(model: nn.Module, dataset: Dataset, torch_device: torch.device) -> Loop:
    """A loop with a compiled model."""
    own = ByHand(model, dataset, torch_device)
    own.module = torch.compile(own.module)
    return lambda number: _wait([own.step(own.draw()) for _ in range(number)])


def graph(
    model: nn.Module,
    dataset: Dataset,
    torch_device: torch.device,
    *,
    batch_size: int = BATCH_SIZE,
) -> Loop:
    """A loop that replays a CUDA graph of a whole step."""
    own = ByHand(model, dataset, torch_device, is_fused=True, batch_size=batch_size)
    chosen = own.draw()
    stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(torch_device))
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM):
            own.step(chosen)
    torch.cuda.current_stream(torch_device).wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = own.step(chosen)

    def run(number: int) -> None:
        losses = []
        for _ in range(number):
            own.draw(chosen)
            captured.replay()
            losses.append(loss.clone())
        _wait(losses)

    return run


def _wait(losses: list[Tensor]) -> None:
    torch.stack(losses).mean().item()


# Learners.


def learner(
    model: nn.Module,
    dataset: Dataset,
    torch_device: torch.device,
    *,
    step: TrainingStep = PLAIN_STEP,
    batch_size: int = BATCH_SIZE,
) -> Loop:
    """A `Learner`, which also returns its parameters to main memory."""
    some = Learner(
        LearnerSettings(
            model=model,
            loss=F.cross_entropy,
            optimizer=SGD(lr=0.01, momentum=0.9),
            batch_size=batch_size,
            torch_device=torch_device,
            step=step,
        ),
        WorkerData(dataset=dataset.training, shard=torch.arange(len(dataset.train))),
    )
    params = some.model.params.cpu().clone()

    def run(number: int) -> None:
        some.train(Train(params, Steps(number)))

    return run


def kinds(torch_device: torch.device, *, compiles: bool) -> dict[str, Kind]:
    """The loops that run on a device."""
    has_graphs = torch_device.type == "cuda"
    graphed = TrainingStep(cuda_graph=True)
    return {
        "host": partial(by_hand, is_resident=False),
        "resident": by_hand,
        **({"compiled": compiled} if compiles else {}),
        **({"graph": graph} if has_graphs else {}),
        "learner": learner,
        **({"learner graph": partial(learner, step=graphed)} if has_graphs else {}),
    }


# Measuring.


def measure(
    name: str, num_steps: int, num_repeats: int, torch_device: torch.device, compiles: bool
) -> dict[str, Any]:
    """Steps per second of each kind, and the learners' shares of the hand-written loops."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, dataset = make(shape, 10), pictures(NUM_SAMPLES, shape)
    made = kinds(torch_device, compiles=compiles)
    loops = {kind: start(model, dataset, torch_device) for kind, start in made.items()}
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for kind in islice(cycle(loops), repeat, repeat + len(loops)):
            loops[kind](NUM_UNTIMED)
            began = time.perf_counter()
            loops[kind](num_steps)
            rates[kind].append(num_steps / (time.perf_counter() - began))
    ours = [kind for kind in rates if kind.startswith("learner")]
    shares = {
        f"{kind} over {rival}": statistics.median(
            a / b for a, b in zip(rates[kind], rates[rival], strict=True)
        )
        for kind in ours
        for rival in rates
        if rival not in ours
    }
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {"steps_per_second": medians, "shares": shares, "turns": dict(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--num-steps", type=int, default=200, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--torch-device", default="cuda", help="device of the models")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="measure torch.compile; by default on a GPU only, as it takes minutes on a CPU",
    )
    options = parser.parse_args()
    origin = about(options)
    torch_device = torch.device(options.torch_device)
    is_gpu = torch_device.type == "cuda"
    card = torch.cuda.get_device_name(torch_device) if is_gpu else None
    compiles = is_gpu if options.compile is None else options.compile
    figures = {
        name: measure(name, options.num_steps, options.repeats, torch_device, compiles)
        for name in options.models
    }
    if options.json:
        print(json.dumps(origin | {"gpu": card, "figures": rounded(figures)}))
        return
    for name, found in figures.items():
        for kind, rate in found["steps_per_second"].items():
            print(f"{name:10} {kind:28} {rate:10,.0f} steps/s")
        for words, share in found["shares"].items():
            print(f"{name:10} {words:28} {share:10.2f}")


if __name__ == "__main__":
    main()
