"""Copies of a model on which learners train, so that idle workers need no copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from edgegossip.models.dropout import Dropout, replace_dropout
from edgegossip.models.flat import FlatModel
from edgegossip.training.graphs import StepGraphs
from edgegossip.training.optimizer import OptimizerFactory

OptimizerState: TypeAlias = list[dict[str, Any]]
"""State that an optimizer keeps for each tensor that it updates, in order; then, unless the
optimizer is PyTorch's own, the entries of each group."""


Layout: TypeAlias = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides of a tensor."""


class ModelCopy:
    """A copy of a model with its optimizer; one learner works on it at a time.

    Args:
        model: Model to copy.
        optimizer: Makes the optimizer.
        has_buffers: As in `FlatModel`.
        torch_device: Device for the computation.
        cuda_graph: As in `TrainingStep`.

    Raises:
        ValueError: If the optimizer updates tensors that it was not given, or a group of it has
            no learning rate ``lr``.

    Attributes:
        graphs: CUDA graphs of the steps; None if they are not wanted.
        model: The copy.
        optimizer: Updates `trained`.
        trained: The trained tensors; joined into one vector if the optimizer is elementwise.
        dropout: Generator from which dropout layers draw.
        own_buffers: Buffers that are not in the parameter vector, by name.
        stacks: Stacks of learners that have trained together, kept for the next time.
        drawn: The same if there are such layers, otherwise None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        *,
        has_buffers: bool,
        torch_device: torch.device | str,
        cuda_graph: bool = False,
    ) -> None:
        device = torch.device(torch_device)
        self.graphs = StepGraphs(self, device) if cuda_graph else None
        self.dropout = torch.Generator(torch_device)
        module = deepcopy(model)
        replace_dropout(module, self.dropout)
        has_dropout = any(isinstance(layer, Dropout) for layer in module.modules())
        self.drawn = self.dropout if has_dropout else None
        self.model = FlatModel(module, has_buffers=has_buffers, torch_device=torch_device)
        is_elementwise = getattr(optimizer, "is_elementwise", False)
        trainable = [each for each in module.parameters() if each.requires_grad]
        self.trained = [self.model.trained] if is_elementwise else trainable
        self.stacks: dict[Any, Any] = {}
        self._optimizer_factory = optimizer
        self.optimizer = self._make_optimizer()
        moved = {*map(id, self.model.moved_buffers)}
        self.own_buffers = {
            name: buffer for name, buffer in module.named_buffers() if id(buffer) not in moved
        }

    def _make_optimizer(self) -> torch.optim.Optimizer:
        made = self._optimizer_factory(self.trained)
        name = type(made).__name__
        updated = {id(each) for group in made.param_groups for each in group["params"]}
        if not updated or updated - {*map(id, self.trained)}:
            raise ValueError(
                f"optimizer made {name} for tensors that are not the model's own; make it for "
                f"those that it is given, e.g. optimizer=lambda params: {name}(params)"
            )
        if any(group.get("lr") is None for group in made.param_groups):
            raise ValueError(
                f"a group of {name} has no 'lr', which the schedule sets; call the optimizer's "
                "learning rate 'lr'"
            )
        if self.graphs is not None:
            self.graphs.adopt(made)
        return made

    @cached_property
    def compiled(self) -> nn.Module:
        """The same model, compiled by `torch.compile` on first use."""
        return cast("nn.Module", torch.compile(self.model.module))

    def start_over(self) -> None:
        """Discard the state of the optimizer."""
        self.optimizer = self._make_optimizer()

    @property
    def has_own_groups(self) -> bool:
        """Whether the optimizer, which is not PyTorch's own, may keep state in its groups."""
        return not is_own_of_pytorch(self.optimizer)

    def memory(self) -> OptimizerState:
        """The optimizer's state, shared with the optimizer.

        Only plain entries of groups are kept: numbers, text, tensors, and lists, tuples and
        dictionaries of them.
        """
        states = [dict(self.optimizer.state[tensor]) for tensor in self.trained]
        if self.graphs is not None:  # which go on with their own tensors for another learner
            states = [
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
                for state in states
            ]
        groups = self.optimizer.param_groups if self.has_own_groups else []
        return states + [
            {name: each for name, each in group.items() if name != "params" and _is_plain(each)}
            for group in groups
        ]

    def remember(self, memory: OptimizerState | None) -> None:
        """Replace the optimizer's state with `memory`; None means that of a new optimizer."""
        if memory is None:  # not empty: PyTorch 2.4 makes Adagrad's state with the optimizer
            self.start_over()
            return
        if self.graphs is not None:
            self.graphs.release()
        self.optimizer.state.clear()
        num_trained = len(self.trained)
        for tensor, state in zip(self.trained, memory[:num_trained], strict=True):
            if state:
                self.optimizer.state[tensor] = dict(state)
        if self.has_own_groups:
            kept_groups = memory[num_trained:]
            for group, kept in zip(self.optimizer.param_groups, kept_groups, strict=True):
                group.update(kept)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that are not in the parameter vector, by name."""
        return {name: buffer.clone() for name, buffer in self.own_buffers.items()}

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            self.own_buffers[name].copy_(buffer)


def _is_plain(value: object) -> bool:
    """Whether a checkpoint can hold a value, and gives back the same."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def is_own_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class is one of `torch.optim`."""
    # The module of Adafactor and Muon is "torch.optim" itself.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


class ModelCopies:
    """Copies of one model, one for each learner at work; see `ModelCopy` for the arguments.

    Attributes:
        initial_params: [num_params] initial parameters of a learner.
        initial_buffers: Initial buffers that are not in this vector, by name.
        num_trained: Number of trained entries, which come first in the parameters.
        settings: Learning rate and momentum of each group of the optimizer; None for no
            momentum.
        optimizer_name: Name of the optimizer's class.
        most_together: Maximum number of learners whose stack fits into memory, as far as known.
        betas: Decay of both moments of each trained tensor; None for an optimizer without.
        can_be_lent: Whether a learner can return its copy and keep all required state; False if
            the optimizer is not PyTorch's own, because its state is then unknown.
        has_dropout: Whether the model has a dropout layer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        *,
        has_buffers: bool,
        torch_device: torch.device | str,
        cuda_graph: bool = False,
    ) -> None:
        self._model = deepcopy(model)  # the caller's may change
        self._arguments: dict[str, Any] = {
            "optimizer": optimizer,
            "has_buffers": has_buffers,
            "torch_device": torch_device,
            "cuda_graph": cuda_graph,
        }
        first = ModelCopy(self._model, **self._arguments)
        self._idle = [first]
        self.initial_params = first.model.params.clone()
        self.initial_buffers = first.buffers()
        self.num_trained = first.model.num_trained
        groups = first.optimizer.param_groups
        self.settings = [(group["lr"], group.get("momentum")) for group in groups]
        betas = {id(each): group.get("betas") for group in groups for each in group["params"]}
        found = [betas.get(id(each)) for each in first.trained]
        # Others than a pair, as of an optimizer that is not PyTorch's, mean something else.
        self.betas = [each if isinstance(each, tuple) else None for each in found]
        self.optimizer_name = type(first.optimizer).__name__
        self.most_together = sys.maxsize
        # By default, PyTorch keeps the number of steps on the CPU.
        with_steps = [g for g in groups if g.get("fused") or g.get("capturable")]
        moving = {id(each) for group in with_steps for each in group["params"]}
        self._steps_move = [id(each) in moving for each in first.trained]
        self._layouts = [(each.shape, each.stride()) for each in first.trained]
        is_flat = first.trained[0] is first.model.trained
        self._with_gaps = first.model if is_flat and first.model.has_gaps else None
        self.can_be_lent = not first.has_own_groups
        self.has_dropout = first.drawn is not None

    def portable(self, memory: OptimizerState | None) -> OptimizerState | None:
        """An optimizer's state for a checkpoint, without the gaps of a GPU's vectors."""
        flat = self._with_gaps
        if flat is None or memory is None:
            return memory
        return [
            {
                name: flat.without_gaps(value)
                if isinstance(value, Tensor) and value.shape == flat.trained.shape
                else value
                for name, value in state.items()
            }
            for state in memory
        ]

    def restored(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint's state that lets training continue on any copy."""
        optimizer = state["optimizer"]
        return {
            "optimizer": None if optimizer is None else self.on_device(optimizer),
            "dropout": state["dropout"],
            "buffers": state["buffers"],
        }

    def on_device(self, memory: OptimizerState) -> OptimizerState:
        """Put an optimizer's state, from a checkpoint, where PyTorch keeps it."""
        # Behind the state of each tensor, there may be that of groups.
        layouts = chain(self._layouts, repeat(None))
        return [
            {
                name: self._placed(value, layout, steps_move or name != "step")
                for name, value in state.items()
            }
            for state, layout, steps_move in zip(
                memory, layouts, chain(self._steps_move, repeat(False)), strict=False
            )
        ]

    def _placed(self, value: Any, layout: Layout | None, moves: bool) -> Any:  # noqa: ANN401
        if not isinstance(value, Tensor) or not moves:
            return value
        moved = value.to(self._arguments["torch_device"])
        if self._with_gaps is not None and value.shape == (self.num_trained,):
            return self._with_gaps.with_gaps(moved)
        if layout is None or value.shape != layout[0]:
            return moved
        # Checkpoints are contiguous, but fused kernels pair the entries by their places in
        # memory, so a state must have the strides of its tensor.
        return moved.new_empty_strided(*layout).copy_(moved)

    def borrow(self) -> ModelCopy:
        """Return a copy that is not in use; thread-safe."""
        try:  # not `if self._idle`: another thread could take the last copy in between
            return self._idle.pop()
        except IndexError:
            return ModelCopy(self._model, **self._arguments)

    def give_back(self, copy: ModelCopy) -> None:
        """Make `copy` available to other learners."""
        self._idle.append(copy)
