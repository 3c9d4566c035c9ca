"""A model that several processes of `torch.distributed` train together, as one vector.

The process of rank 0 in their group, the *lead*, has the vector; the others follow.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgegossip.contract.errors import UsageError
from edgegossip.models.flat import (
    FlatModel,
    common_type,
    described,
    description,
    frozen_sample,
    is_mask,
    sample,
)


def group_of(model: nn.Module, given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of the processes that train `model` together; None for this process alone.

    Args:
        model: A model, perhaps in `DistributedDataParallel` or sharded with `fully_shard`,
            which know their group.
        given: The group, if the caller names it.

    Raises:
        ValueError: If this process is not in the group, or the model is sharded among a part
            of the processes.
        UsageError: If another kind of distributed training has changed the model.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    _require_known_kind(model)
    group, inner = given, getattr(model, "_orig_mod", model)
    if group is None and isinstance(inner, DistributedDataParallel):
        group = inner.process_group
    if shards := num_shards(model):
        num_processes = dist.get_world_size()
        if shards != num_processes or group not in (None, dist.group.WORLD):
            raise ValueError(
                f"the parameters are sharded among {shards} of {num_processes} processes; "
                "shard the model among all, or use DistributedDataParallel within a group"
            )
        group = dist.group.WORLD
    if group is None:
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in process_group; give it a group of its own")
    return group if dist.get_world_size(group) > 1 else None


def num_shards(model: nn.Module) -> int:
    """Number of processes among which `fully_shard` has divided parameters; 0 without it."""
    meshes = (getattr(each, "device_mesh", None) for each in model.parameters())
    return max((mesh.size() for mesh in meshes if mesh is not None), default=0)


def _require_known_kind(model: nn.Module) -> None:
    # By name: importing these classes takes most of a second.
    found = {type(each).__name__ for each in model.modules()}
    kind = None
    if "FullyShardedDataParallel" in found:
        # Its parameters are pieces of vectors that exist during a forward pass only, and
        # PyTorch 2.13 ends with a segmentation fault where it gathers them on a CPU.
        kind = "FullyShardedDataParallel (FSDP1)"
    elif "DeepSpeedEngine" in found:
        # The optimizer's own copy would overwrite exchanged parameters at its next step.
        kind = "DeepSpeed"
    if kind is not None:
        raise UsageError(
            f"{kind} keeps the parameters where no exchange reaches them; use "
            "DistributedDataParallel or torch.distributed.fsdp.fully_shard (FSDP2): in "
            "Lightning strategy='ddp' or ModelParallelStrategy, in Transformers "
            "fsdp_config={'version': 2}"
        )


def without_ddp(model: nn.Module) -> nn.Module:
    """The module in `DistributedDataParallel`, whose names have no prefix, or `model`."""
    inner = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


class ReplicatedModel(FlatModel):
    """A `FlatModel` of which each process has a copy, as in `DistributedDataParallel`.

    The module may be put into `DistributedDataParallel` before or afterwards.

    Args:
        module: Module to change in place.
        group: The processes; None for this one alone.
        options: Other arguments of `FlatModel`.
    """

    is_sharded = False

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(module, **options)
        self._group = group
        has_buffers = options.get("has_buffers", True)
        self.described = described(self.module, has_buffers)
        self.frozen_sample = frozen_sample(self.module)

    def gather(self) -> Tensor:
        """[num_params] a copy of all values, on the CPU."""
        return self.params.to("cpu", copy=True)

    def share(self, params: Tensor | None) -> None:
        """Replace all values in all processes by the lead's `params`, [num_params].

        All processes call this together; followers give None.
        """
        if params is not None:
            self.load(params)
        if self._group is not None:
            dist.broadcast(self.values, dist.get_global_rank(self._group, 0), self._group)


class ShardedModel:
    """A module whose parameters `fully_shard` has divided among all processes, as one vector.

    The vector is that of a `FlatModel` of the undivided module, and only the lead has it, on
    the CPU. All processes make this object together, and call each method together, because
    shards move.

    Args:
        module: Module that is sharded already.
        has_buffers: Include floating-point buffers, of which the lead's count; see `FlatModel`.

    Attributes:
        num_trained: Number of entries of the vector that are parameters; they come first.
        described: Descriptions of the tensors (see `flat.described`); on the lead only.
        frozen_sample: Some frozen values (see `flat.frozen_sample`); on the lead only.

    Raises:
        ValueError: If `module` has no trainable parameter, or its tensors have several types.
    """

    is_sharded = True

    def __init__(self, module: nn.Module, *, has_buffers: bool) -> None:
        self._module = module
        parameters = {_clean(name): each for name, each in module.named_parameters()}
        names = [name for name, each in parameters.items() if each.requires_grad]
        if not names:
            raise ValueError(
                f"{type(module).__name__} has nothing to train: no parameter with "
                "requires_grad=True"
            )
        self.num_trained = sum(parameters[name].numel() for name in names)
        buffers = {_clean(name): each for name, each in module.named_buffers()}
        if has_buffers:
            names += [
                name
                for name, each in buffers.items()
                if each.is_floating_point() and not is_mask(each)
            ]
        full = self._full_state(ignore_frozen_params=False)
        # Buffers that the module's own state leaves out are not sent either.
        self._shapes = {name: full[name].shape for name in names if name in full}
        self.described = [description(name, full[name]) for name in self._shapes]
        if full:
            common_type(full[name] for name in self._shapes)
        frozen = [full[name] for name in parameters if name in full and name not in names]
        self.frozen_sample = sample(frozen)

    def gather(self) -> Tensor:
        """[num_params] all values on the lead, on the CPU; empty on followers."""
        full = self._full_state(ignore_frozen_params=True)
        values = [full[name].flatten() for name in self._shapes]
        return torch.cat(values) if values else torch.empty(0)

    def share(self, params: Tensor | None) -> None:
        """Replace all values in all processes by the lead's `params`, [num_params].

        Followers give None.
        """
        full: dict[str, Any] = {}
        if params is not None:
            shapes = self._shapes
            pieces = torch.split(params, [shape.numel() for shape in shapes.values()])
            pairs = zip(shapes.items(), pieces, strict=True)
            full = {name: piece.view(shape) for (name, shape), piece in pairs}
        # Imported here, as only sharded models need what takes most of a second.
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
        )

        # Not strict: counters and frozen parameters stay as they are.
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=False
        )
        set_model_state_dict(self._module, full, options=options)

    def _full_state(self, *, ignore_frozen_params: bool) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
        )

        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=ignore_frozen_params
        )
        return dict(get_model_state_dict(self._module, options=options))


def _clean(name: str) -> str:
    """The name of a parameter as a model's state has it, without that of a wrapper."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


SharedModel: TypeAlias = ReplicatedModel | ShardedModel
