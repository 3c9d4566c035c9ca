"""Cutting a model into stages that run in sequence, and naming the joined tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import unknown_name
from edgegossip.models.blocks import channels_last, hooks, is_channels_last
from edgegossip.models.dropout import replace_dropout

Cuttable: TypeAlias = nn.Module | Sequence[nn.Module]
"""An `nn.Sequential`, a list of modules, or a module whose blocks are named."""

_ROLE = re.compile(r"stage-\d+\.")


def blocks(
    module: Cuttable,
    names: Sequence[str] | None = None,
    *,
    sample: Tensor | None = None,
    is_flat: bool = False,
) -> list[nn.Module]:
    """List the blocks of a model, between which it can be cut, in execution order.

    Args:
        module: An `nn.Sequential`, whose children are the blocks; a list of modules, or an
            `nn.ModuleList`; or any other module, with `names`.
        names: The blocks of a module with its own `forward`, such as ``("conv", "fc.0")``. This
            `forward` must run them in sequence and do nothing else.
        sample: [batch, ...] inputs, required with `names`. For these inputs, the blocks must
            give the module's outputs bit for bit, in evaluation and in training mode.
        is_flat: Also split each block that is an `nn.Sequential`.

    Raises:
        ValueError: If there are no blocks, or the module has more than blocks: other
            parameters, a skip connection past a block, an activation between two blocks, or
            hooks.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    >>> len(blocks(model)), len(blocks(model, is_flat=True))
    (2, 3)
    """
    named = _named_blocks(module, names, is_flat)
    if names is not None:
        cut(module, (), names, sample=sample)  # only for its checks
    return [*named.values()]


def cut(
    module: Cuttable,
    at: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    sample: Tensor | None = None,
    is_flat: bool = False,
) -> list[nn.Sequential]:
    """Cut a model into ``len(at) + 1`` stages that compute the same result in sequence.

    Stages hold the model's own layers, not copies, under their names in the model. An
    activation at the beginning of a stage is changed so that it does not overwrite its input
    (``inplace``), which is the output of another stage. Stages use the model's memory layout
    for pictures.

    Args:
        module: As in `blocks`.
        at: Index of the first block of each stage except the first; empty for a single stage.
        names: As in `blocks`.
        sample: As in `blocks`.
        is_flat: As in `blocks`.

    Raises:
        ValueError: If the model cannot be cut in this way.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [[*stage.state_dict()] for stage in cut(model, [1])]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    """
    named = [*_named_blocks(module, names, is_flat).items()]
    _require_cut_points(at, len(named))
    stages = [_sequence(named[i:j]) for i, j in pairwise((0, *at, len(named)))]
    _require_apart(stages)
    for stage in stages:
        if isinstance(module, nn.Module) and is_channels_last(module):
            channels_last(stage)
    for stage in stages[1:]:
        _leave_input_alone(stage)
    if names is not None and isinstance(module, nn.Module):
        _require_same(module, stages, sample)
    return stages


@dataclass(frozen=True)
class StageMaker:
    """Makes one stage of a model; see `stage_models`.

    Args:
        make: Makes the whole model.
        stage: Number of the stage, from 0.
        at: Cut points; this and the following arguments are as in `cut`.
        names: Names of the blocks.
        sample: Inputs for the check.
        is_flat: Whether to split each block that is an `nn.Sequential`.
    """

    make: Callable[[], Cuttable]
    stage: int
    at: tuple[int, ...]
    names: tuple[str, ...] | None = None
    sample: Tensor | None = field(default=None, compare=False)
    is_flat: bool = False

    def __call__(self) -> nn.Module:
        # Each maker draws the whole model anew from the generator's initial seed, so no maker
        # depends on the draws of another, and none keeps a model.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())
            whole = self.make()
        stages = cut(whole, self.at, self.names, sample=self.sample, is_flat=self.is_flat)
        stage = stages[self.stage]
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ValueError(
                f"cut at {[*self.at]}, stage {self.stage} has nothing to train; give it a "
                "block with parameters"
            )
        return stage


def stage_models(
    make: Callable[[], Cuttable],
    at: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    sample: Tensor | None = None,
    is_flat: bool = False,
) -> dict[str, StageMaker]:
    """Return makers of the stages for a `Task`'s `model`, by role: ``stage-0``, ...

    All stages come from one model, which `make` draws anew from the same seed. Joined in
    sequence, they equal that model, with its parameters in the same order. The names of a
    stage's tensors begin with its role, which `whole_names` removes.

    Args:
        make: Makes the whole model; called once for each stage.
        at: Cut points; this and the following arguments are as in `cut`.
        names: Names of the blocks of a module with its own `forward`.
        sample: [batch, ...] inputs, required with `names`.
        is_flat: Also split each block that is an `nn.Sequential`.

    Raises:
        ValueError: When a stage is made, if the model cannot be cut in this way, or the stage
            has nothing to train.

    >>> models = stage_models(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), [1])
    >>> {role: make() for role, make in models.items()}["stage-1"]
    Sequential(
      (1): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    fixed_names = None if names is None else tuple(names)
    return {
        f"stage-{stage}": StageMaker(make, stage, tuple(at), fixed_names, sample, is_flat)
        for stage in range(len(at) + 1)
    }


def whole_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors of joined stages their names in the original model's `state_dict`.

    >>> [*whole_names({"stage-0.conv.weight": torch.ones(1), "stage-1.fc.bias": torch.ones(1)})]
    ['conv.weight', 'fc.bias']
    """
    return {_ROLE.sub("", name, count=1): tensor for name, tensor in tensors.items()}


def activations(modules: Sequence[nn.Module], sample: Tensor) -> list[Tensor]:
    """Run blocks or stages in sequence in evaluation mode; return all outputs.

    Modes, buffers and `sample` are not changed.

    Raises:
        ValueError: If a module returns anything but a tensor.
    """
    outputs = []
    with _evaluation(modules):
        for index, module in enumerate(modules):
            sample = module(sample.clone())  # a module may write to its input
            if not isinstance(sample, Tensor):
                raise ValueError(
                    f"block {index} gives a {type(sample).__name__}; a stage passes one tensor "
                    "on, so join it with the next block"
                )
            outputs.append(sample)
    return outputs


def boundaries(stages: Sequence[nn.Module], sample: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of a sample's activations at each boundary between stages.

    Args:
        stages: Stages from `cut`; their modes and buffers are not changed.
        sample: [batch, ...] inputs.

    >>> boundaries(cut(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), [1]), torch.zeros(1, 4))
    ((3,),)
    """
    return tuple(tuple(each.shape[1:]) for each in activations(stages, sample)[:-1])


def _named_blocks(
    module: Cuttable, names: Sequence[str] | None, is_flat: bool
) -> dict[str, nn.Module]:
    if not isinstance(module, nn.Module):
        module = nn.ModuleList(module)
    _require_no_hooks(module)
    if names is not None and isinstance(module, nn.ModuleList):
        raise ValueError(f"a list of modules runs in its order; leave out names {tuple(names)}")
    if names is not None:
        named = _chosen(module, names)
    elif isinstance(module, nn.ModuleList) or _runs_in_order(module):
        named = dict(_children(module, is_flat))
    else:
        raise ValueError(
            f"a {type(module).__name__} has a forward of its own; name its blocks in the order "
            "in which they run, or give an nn.Sequential or a list of modules"
        )
    if not named:
        raise ValueError(
            f"the {type(module).__name__} has no blocks, so there is nothing to cut"
        )
    return named


def _chosen(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if not name or name not in known:
            children = [child for child, _ in module.named_children()]
            raise ValueError(unknown_name("block", name, children))
    if len({*names}) < len(names):
        raise ValueError(f"names {tuple(names)} have one block twice; name each once")
    chosen = {name: known[name] for name in names}
    within = {id(each) for block in chosen.values() for each in _tensors(block).values()}
    left_out = [name for name, each in _tensors(module).items() if id(each) not in within]
    if left_out:
        raise ValueError(
            f"the named blocks leave out {left_out}; name the blocks that have them"
        )
    return chosen


def _children(
    module: nn.Module, is_flat: bool, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # `named_children` leaves out repetitions
        assert child is not None
        if is_flat and _runs_in_order(child) and len(child._modules) and not hooks(child):
            yield from _children(child, is_flat, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _runs_in_order(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _sequence(named: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Make a module that runs blocks in sequence; blocks keep their paths in the model."""
    stage = nn.Sequential()
    for path, block in named:
        *parents, name = path.split(".")
        place = stage
        for parent in parents:
            if parent not in place._modules:
                place.add_module(parent, nn.Sequential())
            place = place.get_submodule(parent)  # type: ignore[assignment]
        place.add_module(name, block)
    return stage


def _leave_input_alone(stage: nn.Module) -> None:
    for layer in stage.modules():
        if any(True for _ in layer.parameters(recurse=False)):
            return  # later layers work on the output of this layer
        if getattr(layer, "inplace", False):
            layer.inplace = False  # type: ignore[assignment]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _require_no_hooks(module: nn.Module) -> None:
    if len(hooks(module)) > is_channels_last(module):
        raise ValueError(
            f"the {type(module).__name__} has hooks, which would belong to no stage; register "
            "them on one of its blocks"
        )


def _require_cut_points(at: Sequence[int], num_blocks: int) -> None:
    are_indices = all(isinstance(each, int) and 0 < each < num_blocks for each in at)
    if not are_indices or any(first >= second for first, second in pairwise(at)):
        raise ValueError(
            f"cannot cut at {[*at]}: a model of {num_blocks} blocks is cut at rising indices "
            f"from 1 to {num_blocks - 1}, each the first block of the next stage"
        )


def _require_apart(stages: Sequence[nn.Module]) -> None:
    owner: dict[int, int] = {}
    for stage, module in enumerate(stages):
        for name, tensor in _tensors(module).items():
            if (first := owner.setdefault(id(tensor), stage)) != stage:
                raise ValueError(
                    f"stages {first} and {stage} share the tensor {name!r}, but run on "
                    "different machines; cut elsewhere, or give each a tensor of its own"
                )


def _require_same(
    module: nn.Module, stages: Sequence[nn.Module], sample: Tensor | None
) -> None:
    if sample is None:
        raise ValueError(
            "names need a sample, a batch of inputs on which the blocks are compared with the "
            "model's own forward; give one"
        )
    # A single sample has no variance within its batch, which batch normalisation needs.
    batch = torch.cat([sample, sample])
    copied, copies = copy.deepcopy((module, nn.Sequential(*stages)))
    for is_training in (False, True):
        one, other = (_run(each.train(is_training), batch) for each in (copied, copies))
        if not (
            isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
        ):
            mode = "training" if is_training else "evaluation"
            raise ValueError(
                f"in {mode} mode, the named blocks in sequence do not give the outputs of the "
                f"{type(module).__name__}: its forward does something else, or runs them in "
                "another order; move that into a block"
            )


@torch.no_grad()
def _run(module: nn.Module, batch: Tensor) -> object:
    replace_dropout(module, torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):  # so that both draw the same in their own dropout
        return module(batch.clone())


@contextmanager
def _evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    modes = {layer: layer.training for module in modules for layer in module.modules()}
    for layer in modes:
        layer.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode
