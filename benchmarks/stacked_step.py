"""Ways to compute a step of many LeNet-5 models on one core: milliseconds for each model.

    python -m benchmarks.stacked_step                  a table
    python -m benchmarks.stacked_step --json FILE      keep it

`alone`: one model after another, channels last. `vmap`: gradients under `torch.vmap`. `grouped`
and `grouped channels-last`: one convolution in groups for all models, in two memory layouts.
`im2col`: patches and one product for all models. `compiled`: Inductor's kernels for one model,
and `compiled grouped` for all of them. `stack`: edgegossip's `Stack`, a request of ten steps
with all that belongs to it. All ways take their turns in each round, and the table has the
medians; the dense layers of all stacked ways are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.kept import about, rounded
from benchmarks.simulator import pictures
from torch import Tensor
from torch.func import functional_call, grad, vmap

from edgegossip.contract.protocol import Steps, Train
from edgegossip.models import lenet5
from edgegossip.models.flat import FlatModel
from edgegossip.runs.files import write_json
from edgegossip.training.optimizer import SGD
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task, Workload

MOMENTUM, RATE = 0.9, 0.01
SHAPE = (1, 28, 28)
NUM_STEPS = {"stack": 10}
"""Steps in a turn, if more than one."""
TakeStep = Callable[[], object]
Convolve = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Stacked inputs [n, batch, ...], weights, biases and padding to stacked outputs."""


def samples(num_models: int, batch_size: int) -> tuple[Tensor, Tensor]:
    return (
        torch.rand(num_models, batch_size, *SHAPE),
        torch.randint(10, (num_models, batch_size)),
    )


def alone(num_models: int, batch_size: int, *, is_compiled: bool = False) -> TakeStep:
    x, y = samples(num_models, batch_size)
    flat = FlatModel(lenet5(SHAPE, 10))
    optimizer = torch.optim.SGD([flat.trained], lr=RATE, momentum=MOMENTUM)
    module = torch.compile(flat.module) if is_compiled else flat.module

    def step() -> None:
        for inputs, targets in zip(x, y, strict=True):
            flat.zero_grad()
            pictures = inputs.contiguous(memory_format=torch.channels_last)
            F.cross_entropy(module(pictures), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


def stacked_parameters(num_models: int) -> list[Tensor]:
    return [
        torch.stack([each.detach()] * num_models).requires_grad_()
        for each in lenet5(SHAPE, 10).parameters()
    ]


def update(params: list[Tensor], gradients: list[Tensor], velocities: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(velocities, MOMENTUM)
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(params, velocities, alpha=-RATE)


def mapped(num_models: int, batch_size: int) -> TakeStep:
    x, y = samples(num_models, batch_size)
    model = lenet5(SHAPE, 10)
    model._forward_pre_hooks.clear()  # `vmap` has a layout of its own
    names = [name for name, _ in model.named_parameters()]
    params = [each.detach() for each in stacked_parameters(num_models)]
    velocities = [torch.zeros_like(each) for each in params]

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, own, (x,)), y)

    gradient = vmap(grad(loss))

    def step() -> None:
        found = gradient(dict(zip(names, params, strict=True)), x, y)
        update(params, [*found.values()], velocities)

    return step


def in_groups(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, *, layout: torch.memory_format
) -> Tensor:
    beside = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=layout)
    found = F.conv2d(
        beside, weight.flatten(0, 1), bias.flatten(), padding=padding, groups=len(x)
    )
    return torch.unflatten(found, 1, (len(x), -1)).transpose(0, 1)


class Patches(torch.autograd.Function):
    """A convolution as a product of weights and patches, for all models at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:  # noqa: ANN401
        n, batch, channels = x.shape[:3]
        side = weight.shape[-1]
        padded = F.pad(x, (padding,) * 4)
        windows = padded.unfold(3, side, 1).unfold(4, side, 1)  # [n, b, c, h, w, side, side]
        height = windows.shape[3]
        columns = windows.permute(0, 2, 5, 6, 1, 3, 4).reshape(n, channels * side * side, -1)
        ctx.save_for_backward(columns, weight)
        ctx.shape = (batch, channels, padded.shape[-1], height, padding)
        found = torch.baddbmm(bias.unsqueeze(2), weight.flatten(2), columns)
        return found.view(n, -1, batch, height, height).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:  # noqa: ANN401
        columns, weight = ctx.saved_tensors
        batch, channels, padded, height, padding = ctx.shape
        rows = gradient.transpose(1, 2).flatten(2)
        for_weight = torch.bmm(rows, columns.mT).view_as(weight)
        if not ctx.needs_input_grad[0]:
            return None, for_weight, rows.sum(2), None
        side = weight.shape[-1]
        pieces = torch.bmm(weight.flatten(2).mT, rows)
        pieces = pieces.view(-1, channels, side, side, batch, height, height)
        for_x = rows.new_zeros(len(rows), channels, batch, padded, padded)
        for row in range(side):
            for column in range(side):
                window = for_x[..., row : row + height, column : column + height]
                window += pieces[:, :, row, column]
        inner = slice(padding, padded - padding)
        return for_x[..., inner, inner].transpose(1, 2), for_weight, rows.sum(2), None


def by_hand(
    num_models: int, batch_size: int, *, convolve: Convolve, is_compiled: bool = False
) -> TakeStep:
    x, y = samples(num_models, batch_size)
    params = stacked_parameters(num_models)
    velocities = [torch.zeros_like(each) for each in params]

    def pooled(x: Tensor) -> Tensor:
        # Side by side, as the convolution leaves it: no copy in the channels-last layout.
        beside = F.max_pool2d(x.transpose(0, 1).flatten(1, 2), 2).relu()
        return torch.unflatten(beside, 1, (num_models, -1)).transpose(0, 1)

    def loss(x: Tensor, y: Tensor, *own: Tensor) -> Tensor:
        x = pooled(convolve(x, own[0], own[1], 2))
        x = pooled(convolve(x, own[2], own[3], 0)).flatten(2)
        x = torch.baddbmm(own[5].unsqueeze(1), x, own[4].mT).relu()
        x = torch.baddbmm(own[7].unsqueeze(1), x, own[6].mT).relu()
        x = torch.baddbmm(own[9].unsqueeze(1), x, own[8].mT)
        return F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / batch_size

    computed = torch.compile(loss) if is_compiled else loss

    def step() -> None:
        gradients = torch.autograd.grad(computed(x, y, *params), params)
        update(params, [*gradients], velocities)

    return step


def stack(num_models: int, batch_size: int) -> TakeStep:
    task = Task(
        dataset=pictures(num_models * batch_size * NUM_STEPS["stack"]),
        model=partial(lenet5, SHAPE, 10),
        optimizer=SGD(lr=RATE, momentum=MOMENTUM),
        batch_size=batch_size,
        trainer=StackedLearner,
    )
    workload = Workload(task, range(num_models), seed=0)
    learners = [workload.make_trainer(rank) for rank in range(num_models)]
    request = Train(workload.initial_params(), Steps(NUM_STEPS["stack"]))

    def step() -> None:
        work = [learner.prepare(request, 0.0) for learner in learners]
        first, *others = (each for each in work if each is not None)
        first.train_with(others)

    return step


channels_last = partial(in_groups, layout=torch.channels_last)
WAYS: dict[str, Callable[[int, int], TakeStep]] = {
    "alone": alone,
    "vmap": mapped,
    "grouped": partial(by_hand, convolve=partial(in_groups, layout=torch.contiguous_format)),
    "grouped channels-last": partial(by_hand, convolve=channels_last),
    "im2col": partial(by_hand, convolve=Patches.apply),
    "compiled": partial(alone, is_compiled=True),
    "compiled grouped": partial(by_hand, convolve=channels_last, is_compiled=True),
    "stack": stack,
}


def measure(num_models: int, batch_size: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step of one model, each way."""
    steps = {name: make(num_models, batch_size) for name, make in WAYS.items()}
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds = (time.perf_counter() - start) / NUM_STEPS.get(name, 1)
            found[name].append(seconds / num_models * 1e3)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--models", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(4, 16, 64))
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    origin = about(options)
    torch.set_num_threads(1)
    found = {}
    for batch_size in options.batch_sizes:
        found[batch_size] = times = measure(options.models, batch_size, options.repeats)
        for name, each in times.items():
            ratio = times["alone"] / each
            print(f"batch {batch_size:3}  {name:22} {each:7.3f} ms  {ratio:5.2f} times alone")
    if options.json:
        write_json(options.json, rounded({**origin, "milliseconds": found}))


if __name__ == "__main__":
    main()
