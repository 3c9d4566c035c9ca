"""Optimizers of several models at once."""

from __future__ import annotations

import copy as copying
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edgegossip.training.copies import OptimizerState
from edgegossip.training.optimizer import SGD, OptimizerFactory


class Rows:
    """A vector of each model, cut into the tensors of a model.

    Each tensor of all models is one block of memory, as kernels for stacks need it.

    Args:
        like: The tensors of one model, without gaps in memory.
        num_models: Number of models.

    Attributes:
        tensors: The tensors of all models, [num_models, ...].
    """

    def __init__(self, like: Sequence[Tensor], num_models: int) -> None:
        self._blocks = [each.new_zeros(num_models, each.numel()) for each in like]
        self.tensors = [
            block.as_strided((num_models, *each.shape), (each.numel(), *each.stride()))
            for block, each in zip(self._blocks, like, strict=True)
        ]

    @torch.no_grad()
    def fill(self, vectors: Sequence[Tensor | None]) -> None:
        """Take the vector of each model; None for zeros."""
        if all(each is None for each in vectors):
            torch._foreach_zero_(self._blocks)
            return
        like = next(each for each in vectors if each is not None)
        full = [torch.zeros_like(like) if each is None else each for each in vectors]
        stacked = torch.stack(full).to(self._blocks[0].device)
        sizes = [block.shape[1] for block in self._blocks]
        pieces = torch.split(stacked, sizes, dim=1)
        for block, piece in zip(self._blocks, pieces, strict=True):
            block.copy_(piece)

    def vectors(self, torch_device: torch.device | str | None = None) -> list[Tensor]:
        """The vector of each model, on its own device or another."""
        stacked = torch.cat(self._blocks, dim=1).to(torch_device)
        return [row.clone() for row in stacked]  # otherwise each would keep the memory of all


def along(numbers: Tensor, tensor: Tensor) -> Tensor:
    """`numbers`, [num_models], in a shape for a tensor [num_models, ...]."""
    return numbers.view(-1, *(1 for _ in tensor.shape[1:]))


class StackedSGD:
    """Edgegossip's SGD of all models.

    Args:
        sgd: Settings.
        momentum: Momentum; None for that of `sgd`.
        values: Trained tensors of all models.
        needs_gradient: Whether a step changes the gradients before it uses them.

    Attributes:
        gradients: The tensors to which a backward pass adds; the velocities, unless the
            gradients themselves are needed.
        decay: Factor on `gradients` before a backward pass adds to them.
    """

    def __init__(
        self, sgd: SGD, momentum: float | None, values: Sequence[Tensor], needs_gradient: bool
    ) -> None:
        self._sgd, self._values = sgd, values
        self._momentum = sgd.momentum if momentum is None else momentum
        first = [each.detach()[0] for each in values]
        self._kept = Rows(first, len(values[0]))
        self._velocities = self.gradients = self._kept.tensors
        self.decay = self._momentum
        if needs_gradient or sgd.nesterov:
            self.gradients = Rows(first, len(values[0])).tensors
            self.decay = 0.0
        self._lr = values[0].detach().new_empty(len(values[0]))

    def load(self, states: Sequence[OptimizerState | None], factors: Sequence[float]) -> None:
        """Take the state and the factor on the learning rate of each model."""
        rates = [self._sgd.lr * each for each in factors]
        self._lr.copy_(torch.tensor(rates, dtype=self._lr.dtype))
        self._kept.fill([each[0].get("momentum_buffer") if each else None for each in states])

    def states(self) -> list[OptimizerState | None]:
        """The state of each model; None if it has not changed."""
        if not self._momentum:
            return [None] * len(self._lr)  # a later request may have momentum again
        return [[{"momentum_buffer": each}] for each in self._kept.vectors()]

    def step(self) -> None:
        """Move the values."""
        triples = zip(self._values, self.gradients, self._velocities, strict=True)
        for values, gradient, velocity in triples:
            if self._sgd.weight_decay:
                gradient.add_(values, alpha=self._sgd.weight_decay)
            change = gradient
            if velocity is not gradient:
                torch.add(gradient, velocity, alpha=self._momentum, out=velocity)
                change = velocity
            if self._sgd.nesterov:
                change = gradient.add_(velocity, alpha=self._momentum)
            values.addcmul_(change, along(self._lr, values), value=-1)


def _own(value: Any) -> Any:  # noqa: ANN401
    return value.clone() if isinstance(value, Tensor) else value


class JoinedOptimizer:
    """An optimizer of PyTorch's with the parameters of all models.

    There is one group of parameters for each different learning rate, so that its kernels for
    many tensors serve all models. Each model's parameters keep their own state, such as the
    number of steps, because learners may have taken different numbers.

    Args:
        factory: Makes the optimizer.
        momentum: Momentum; None for that of the optimizer.
        values: Trained tensors of all models.

    Attributes:
        gradients: The tensors to which a backward pass adds.
        decay: Factor on `gradients` before that, 0.
    """

    def __init__(
        self, factory: OptimizerFactory, momentum: float | None, values: Sequence[Tensor]
    ) -> None:
        self._momentum = momentum
        self.decay = 0.0
        self.gradients = [torch.zeros_like(each) for each in values]
        self._tensors: list[list[nn.Parameter]] = []
        for number in range(len(values[0])):
            own = [nn.Parameter(each.detach()[number]) for each in values]
            for tensor, gradient in zip(own, self.gradients, strict=True):
                tensor.grad = gradient[number]
            self._tensors.append(own)
        self._apart = [factory(own) for own in self._tensors]
        self._optimizer = factory(self._tensors[0])

    def load(self, states: Sequence[OptimizerState | None], factors: Sequence[float]) -> None:
        """Take the state and the factor on the learning rate of each model."""
        optimizer = self._optimizer
        optimizer.state.clear()
        optimizer.param_groups.clear()
        groups: dict[tuple[int, float], dict[str, Any]] = {}
        for apart, tensors, state, factor in zip(
            self._apart, self._tensors, states, factors, strict=True
        ):
            for tensor, kept in zip(tensors, state or [{}] * len(tensors), strict=True):
                if kept:
                    optimizer.state[tensor] = {n: _own(each) for n, each in kept.items()}
                elif apart.state[tensor]:  # made with the optimizer, as Adagrad's is
                    optimizer.state[tensor] = copying.deepcopy(apart.state[tensor])
            for number, group in enumerate(apart.param_groups):
                lr = factor * group["lr"]
                joined = groups.setdefault((number, lr), {**group, "lr": lr, "params": []})
                joined["params"] += group["params"]
                if self._momentum is not None:
                    joined["momentum"] = self._momentum
        optimizer.param_groups += groups.values()

    def states(self) -> list[OptimizerState]:
        """The state of each model."""
        kept = self._optimizer.state
        return [
            [{name: _own(value) for name, value in kept[each].items()} for each in tensors]
            for tensors in self._tensors
        ]

    def step(self) -> None:
        """Move the values."""
        self._optimizer.step()
