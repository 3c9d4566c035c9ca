"""Tensors in Ray's object store: raw bytes outside the pickle, which are not copied twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Taken: TypeAlias = tuple[Any, torch.dtype, tuple[int, ...], tuple[int, ...], bool]


class _Way(threading.local):
    """The way in which this thread currently sends tensors."""

    is_sharing = False


_way = _Way()


@contextmanager
def tensors_as_bytes() -> Iterator[None]:
    """Let tensors pass through Ray as NumPy arrays; by default they would be pickled.

    A receiver gets a writable copy, unless the tensor was put while `sharing`.
    """
    from ray.util import deregister_serializer, register_serializer

    register_serializer(Tensor, serializer=take_apart, deserializer=put_together)
    try:
        yield
    finally:
        deregister_serializer(Tensor)


@contextmanager
def sharing() -> Iterator[None]:
    """Let all readers on a machine share the tensors that this thread puts in the context."""
    _way.is_sharing = True
    try:
        yield
    finally:
        _way.is_sharing = False


def take_apart(tensor: Tensor) -> _Taken:
    """Return the bytes of a tensor and its layout in them.

    >>> rows = torch.arange(6).view(2, 3)
    >>> put_together(take_apart(rows.T)).stride()
    (1, 3)
    """
    tensor = tensor.detach().cpu()
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()  # gaps of a larger one stay behind
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    array = flat.view(torch.uint8).numpy()
    return array, tensor.dtype, tuple(tensor.shape), tensor.stride(), _way.is_sharing


def put_together(taken: _Taken) -> Tensor:
    """Rebuild the tensor that was taken apart, equal bit for bit, strides included."""
    array, dtype, shape, stride, is_shared = taken
    if is_shared:
        flat = torch.from_numpy(array)  # cannot be written to
    else:
        # Memory of PyTorch's own, as kernels may round by how their input is aligned.
        flat = torch.empty(len(array), dtype=torch.uint8)
        flat.numpy()[:] = array
    return flat.view(dtype).as_strided(shape, stride)
