"""The way of a worker's batches to the device of its model, without waiting for the device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.data.dataset import ArraySplit, Split, TrainingData
from edgegossip.data.nested import Nested, leaves, map_leaves
from edgegossip.training.loss import prepare_batch

Augment: TypeAlias = Callable[[Nested], Nested]
Upcoming: TypeAlias = Callable[[int], Sequence[Tensor]]

RESIDENT_SHARE = 0.25
"""Largest share of a GPU's free memory that a training split may take there."""
_MOST_INDICES_AHEAD = 1024
"""Maximum number of batches whose indices are copied to the device at once."""
_MOST_UNDERWAY = 8
"""Maximum number of copied batches that wait for the device. Without a limit, a fast host would
fill the memories of both."""


class Feed:
    """Brings the batches of a worker's shard to the device of its model.

    On a CPU, a batch is read, augmented and prepared just before its step. A GPU must not wait
    for the host in a step, nor the host for it:

    - A split in memory is copied to the GPU once if it takes at most `RESIDENT_SHARE` of the
      free memory and is not augmented. A batch is then an index into it. All learners of a
      process share the copy.
    - Other batches are copied from pinned memory, on a stream of their own. As the host runs
      ahead of the GPU, this happens while the GPU computes earlier steps.

    Args:
        dataset: Training samples and their preparation.
        shard: [n] indices of the worker's samples.
        torch_device: Device of the model.
        augment: Changes a batch that was read; None for no change.

    Attributes:
        indices: [n] indices of the worker's samples in the split from which they are read.
    """

    def __init__(
        self,
        dataset: TrainingData,
        shard: Tensor,
        torch_device: torch.device,
        augment: Augment | None = None,
    ) -> None:
        self._dataset = dataset
        self._torch_device = torch_device
        self._augment = augment
        self._reader = dataset.reader(shard)
        self._split, self.indices = dataset.resolved(shard)
        self._ahead: deque[tuple[Tensor, Tensor]] = deque()  # positions, and indices on device
        self._uploads = _Uploads(torch_device) if torch_device.type == "cuda" else None

    @cached_property
    def _resident(self) -> ArraySplit | None:
        # On first use, because a learner may be made for other things than training.
        return None if self._augment else resident(self._split, self._torch_device)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for feeds with the same `prepare`."""
        return self._dataset, self._resident

    def inputs(self, positions: Tensor, upcoming: Upcoming) -> Nested:
        """Bring a batch, or its indices in a resident split, to the device.

        Args:
            positions: As in `Reader.read`.
            upcoming: As in `Reader.read`.
        """
        if self._resident is not None:
            return self._next_indices(positions, upcoming)
        return self.uploaded(self.read(positions, upcoming))

    def read(self, positions: Tensor, upcoming: Upcoming) -> Nested:
        """Read and augment a batch, in main memory; see `inputs`."""
        samples = self._reader.read(positions, upcoming)
        return samples if self._augment is None else self._augment(samples)

    def uploaded(self, samples: Nested) -> Nested:
        """Bring samples in main memory to the device."""
        return samples if self._uploads is None else self._uploads.begin(samples)

    def inputs_at(self, indices: Tensor) -> Nested:
        """As `inputs`, for samples of any shard, given by entries of `indices`; without
        augmentation.
        """
        return self.uploaded(self._split.batch(indices) if self._resident is None else indices)

    def prepare(self, inputs: Nested) -> Nested:
        """Turn `inputs` into samples for the model; computes on the device only."""
        samples = inputs if self._resident is None else self._resident.batch(inputs)
        return prepare_batch(self._dataset, samples, self._torch_device)

    def _next_indices(self, positions: Tensor, upcoming: Upcoming) -> Tensor:
        if not self._ahead or self._ahead[0][0] is not positions:
            # One copy for the rest of the pass instead of one for each step.
            following = [positions, *upcoming(_MOST_INDICES_AHEAD)]
            indices = self.indices[torch.cat(following)]
            moved = indices if self._uploads is None else self._uploads.begin(indices)
            pieces = torch.split(moved.to(self._torch_device), [*map(len, following)])
            self._ahead = deque(zip(following, pieces, strict=True))
        return self._ahead.popleft()[1]


class _Uploads:
    """Copies to a GPU, beside its computation."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._before: deque[torch.cuda.Event] = deque()

    def begin(self, samples: Nested) -> Nested:
        """Begin to copy; what the current stream computes from now on waits for the copy."""
        current = torch.cuda.current_stream(self._torch_device)
        # Recorded before the steps that use this batch, so complete after all earlier ones.
        self._before.append(current.record_event())
        if len(self._before) > _MOST_UNDERWAY:
            self._before.popleft().synchronize()
        with torch.cuda.stream(self._stream):
            moved = map_leaves(self._upload, samples)
        current.wait_stream(self._stream)
        for _, leaf in leaves(moved):
            leaf.record_stream(current)  # or the other stream would reuse its memory too early
        return moved

    def _upload(self, leaf: Tensor) -> Tensor:
        # The allocator keeps the pinned copy until the stream has read it.
        return leaf.pin_memory().to(self._torch_device, non_blocking=True)


# Splits on a GPU.

_RESIDENT: weakref.WeakKeyDictionary[Split, dict[torch.device, ArraySplit | None]]
_RESIDENT = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def resident(split: Split, torch_device: torch.device) -> ArraySplit | None:
    """The copy of a split on a GPU; None if the split stays in main memory.

    This is decided once for each split and GPU.
    """
    if not isinstance(split, ArraySplit) or split.is_mapped:
        return None
    with _LOCK:
        known = _RESIDENT.setdefault(split, {})
        if torch_device not in known:
            held = split.x if split.y is None else (split.x, split.y)
            num_bytes = sum(leaf.nbytes for _, leaf in leaves(held))
            fits = num_bytes <= RESIDENT_SHARE * free_bytes(torch_device)
            known[torch_device] = _moved(split, torch_device) if fits else None
        return known[torch_device]


def _moved(split: ArraySplit, torch_device: torch.device) -> ArraySplit:
    x = map_leaves(lambda leaf: leaf.to(torch_device), split.x)
    return ArraySplit(x, None if split.y is None else split.y.to(torch_device))


def free_bytes(torch_device: torch.device) -> int:
    """Free memory of a GPU; 0 for a CPU, whose splits are where they should be."""
    return torch.cuda.mem_get_info(torch_device)[0] if torch_device.type == "cuda" else 0
