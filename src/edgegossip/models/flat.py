"""A model whose parameters are views into one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

_GPU_ALIGNMENT = 256
"""Bytes at whose multiples tensors begin on a GPU, as they do in memory that CUDA allocates.
Without alignment, cuDNN's batch norm fails."""
_NUM_COMPARED = 1024
"""Approximate number of values of a frozen tensor that are compared."""


class FlatModel:
    """Puts a module's parameters, and optionally its buffers, into one vector.

    Afterwards the module computes on views of `values`, so loading new parameters is one copy.
    Weights of convolutions get the channels-last layout, because PyTorch's CPU kernels run up
    to twice as fast with it. The layout also determines the order of entries in the vector.
    Frozen parameters (``requires_grad = False``) stay with the module.

    On a GPU, there are gaps between the tensors, because kernels need aligned memory. Gaps hold
    no data, and are not part of `params`.

    Args:
        module: Module to change in place.
        has_buffers: Include floating-point buffers (running means and variances) after the
            parameters, so that they are exchanged and averaged too. Counters stay with the
            module, and so do buffers that its `state_dict` leaves out and masks: buffers of
            which some values, but not all, are infinite.
        channels_last: Use this layout for weights of convolutions; fast for inputs in the same
            layout.
        torch_device: Device of the module.
        alignment: Bytes at whose multiples the tensors begin; by default 256 on a GPU, and no
            alignment, so no gaps, on a CPU.

    Attributes:
        module: The module.
        values: All values and the gaps.
        sizes: Entries of each tensor in `params`, in order.
        num_params: Number of entries of `params`.
        num_trained: Number of entries of `params` that are parameters; they come first.
        trained: The parameters and their gaps only: a view of `values` whose ``grad`` the
            module's backward pass fills.
        moved_buffers: Buffers in the vector.
        has_gaps: Whether there are gaps.

    Raises:
        ValueError: If `module` has no trainable parameter, its tensors have several types, or
            they are float64 and the device is "mps".
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        has_buffers: bool = True,
        channels_last: bool = True,
        torch_device: torch.device | str = "cpu",
        alignment: int | None = None,
    ) -> None:
        _require_representable(module, torch.device(torch_device))
        self.module = module.to(torch_device)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(
                f"{type(module).__name__} has nothing to train: no parameter with "
                "requires_grad=True"
            )
        buffers = _floating_buffers(self.module) if has_buffers else []
        tensors = [*parameters, *(buffer for buffer, _ in buffers)]
        self.sizes = tuple(tensor.numel() for tensor in tensors)
        self.num_params = sum(self.sizes)
        self.num_trained = sum(parameter.numel() for parameter in parameters)
        dtype = common_type(tensors)
        if alignment is None:
            alignment = 1 if torch.device(torch_device).type == "cpu" else _GPU_ALIGNMENT
        *offsets, end = _offsets(self.sizes, max(1, alignment // dtype.itemsize))
        self.values = torch.zeros(end, dtype=dtype, device=torch_device)
        end_of_trained = [*offsets, end][len(parameters)]
        gradients = torch.zeros_like(self.values[:end_of_trained])
        self.trained = nn.Parameter(self.values[:end_of_trained])
        self.trained.grad = gradients
        for parameter, offset in zip(parameters, offsets, strict=False):
            parameter.data = _move(parameter.data, self.values, offset, channels_last)
            parameter.grad = _view(gradients, parameter, offset)
        self.moved_buffers = []
        for (buffer, owners), offset in zip(buffers, offsets[len(parameters) :], strict=True):
            moved = _move(buffer, self.values, offset, channels_last)
            for owner, name in owners:
                setattr(owner, name, moved)
            self.moved_buffers.append(moved)
        self.has_gaps = end > self.num_params
        self._places = [
            slice(offset, offset + size)
            for offset, size in zip(offsets, self.sizes, strict=True)
        ]
        self._num_tensors = len(parameters)
        self._pieces = [self.values[place] for place in self._places]

    @property
    def params(self) -> Tensor:
        """[num_params] all values, to read; a copy if there are gaps. `load` writes them."""
        return torch.cat(self._pieces) if self.has_gaps else self.values

    def load(self, params: Tensor) -> None:
        """Replace all values by `params`, [num_params], from any device."""
        if self.has_gaps:
            moved = params.to(self.values.device)
            torch._foreach_copy_(self._pieces, torch.split(moved, [*self.sizes]))
        else:
            self.values.copy_(params)

    def without_gaps(self, like_trained: Tensor) -> Tensor:
        """[num_trained] entries of a vector that is laid out as `trained`."""
        return torch.cat([like_trained[place] for place in self._places[: self._num_tensors]])

    def with_gaps(self, entries: Tensor) -> Tensor:
        """Lay out [num_trained] entries as `trained`, with zeros in the gaps."""
        spread = entries.new_zeros(self.trained.shape)
        pieces = torch.split(entries, [*self.sizes[: self._num_tensors]])
        for place, piece in zip(self._places, pieces, strict=False):
            spread[place] = piece
        return spread

    def zero_grad(self) -> None:
        """Zero all gradients, in one pass."""
        assert self.trained.grad is not None
        self.trained.grad.zero_()


def _require_representable(module: nn.Module, torch_device: torch.device) -> None:
    if torch_device.type != "mps":
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype == torch.float64:
            raise ValueError(
                f"{name!r} of the model is {tensor.dtype}, which 'mps' cannot hold; use "
                "float32 (model.float()), or train on 'cpu' or 'cuda'"
            )


def common_type(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type that all tensors have.

    Raises:
        ValueError: If they have several.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(
            f"the model's trainable parameters and buffers have types "
            f"{sorted(map(str, dtypes))}; one flat vector needs a single floating-point "
            "type: train in one, or leave the buffers out with has_buffers=False"
        )
    return dtypes.pop()


def _offsets(sizes: Iterable[int], step: int) -> Iterator[int]:
    """The beginning of each of several tensors, all multiples of `step`, and the end.

    >>> [*_offsets([3, 4, 5], step=4)]
    [0, 4, 8, 16]
    """
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // step) * step
    yield offset


def laid_out(module: nn.Module, has_buffers: bool) -> list[Tensor]:
    """The tensors of `module` in the vector of its `FlatModel`, in order."""
    buffers = _floating_buffers(module) if has_buffers else ()
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [*trained, *(buffer for buffer, _ in buffers)]


def described(module: nn.Module, has_buffers: bool) -> list[str]:
    """Describe the tensors in the vector of a `FlatModel`, in order.

    A description has name, type, shape, and memory layout if it is not the usual one. Models
    with equal descriptions exchange vectors whose entries mean the same.

    >>> described(nn.Linear(2, 3), has_buffers=True)
    ['weight float32 [3, 2]', 'bias float32 [3]']
    """
    prefixes = {id(each): f"{name}." if name else "" for name, each in module.named_modules()}
    named: list[tuple[str, Tensor]] = [
        (name, each) for name, each in module.named_parameters() if each.requires_grad
    ]
    for buffer, ((owner, name), *_) in _floating_buffers(module) if has_buffers else ():
        named.append((prefixes[id(owner)] + name, buffer))
    return [description(name, tensor) for name, tensor in named]


def description(name: str, tensor: Tensor) -> str:
    """Describe one tensor in the vector of a `FlatModel`; see `described`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    name = name.replace("_orig_mod.", "")  # a worker may compile its model, others not
    return f"{name} {dtype} {list(tensor.shape)}{layout}"


def frozen_sample(module: nn.Module) -> Tensor | None:
    """Some values of each frozen parameter, for comparing two models.

    None if nothing is frozen.
    """
    return sample([each.detach() for each in module.parameters() if not each.requires_grad])


def sample(tensors: Sequence[Tensor]) -> Tensor | None:
    """Some values of each of `tensors`, as float32 on the CPU; None without any."""
    spread = (each.flatten()[:: max(1, each.numel() // _NUM_COMPARED)] for each in tensors)
    return torch.cat([each.to("cpu", torch.float32) for each in spread]) if tensors else None


def _floating_buffers(module: nn.Module) -> list[tuple[Tensor, list[tuple[nn.Module, str]]]]:
    """The buffers for the vector, each once, with the modules and names that have it."""
    kept = {id(each) for each in module.state_dict(keep_vars=True).values()}
    found: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) in kept and buffer.is_floating_point() and not is_mask(buffer):
                found.setdefault(id(buffer), (buffer, []))[1].append((owner, name))
    return list(found.values())


def is_mask(buffer: Tensor) -> bool:
    """Whether some values of a buffer, but not all, are infinite."""
    # Statistics that training has yet to find may also begin as infinite, but as a whole.
    infinite = buffer.isinf()
    return bool(infinite.any() and not infinite.all())


def _view(flat: Tensor, like: Tensor, offset: int) -> Tensor:
    """The piece of `flat` at `offset` in the shape and memory layout of `like`."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + offset)


def _move(tensor: Tensor, flat: Tensor, offset: int, channels_last: bool) -> Tensor:
    if tensor.ndim == 4 and channels_last:
        # Not `contiguous`, which leaves a weight with one input channel as it is: its strides
        # fit both layouts, and the convolution would choose the other.
        tensor = torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()  # part of a larger tensor, with gaps
    view = _view(flat, tensor, offset)
    view.copy_(tensor)
    return view
