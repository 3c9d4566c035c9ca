"""What an algorithm's messages look like, so that a network can refuse all others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.core.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a message may be.

    Attributes:
        dtype: Of floats, only finite ones are let in.
        shape: None stands for any length.
        max_numel: Entries at most; needed if, and only if, a length is None.
        minimum: Of all entries.
        maximum: Of all entries.

    Raises:
        ValueError: If `max_numel` is missing, or given beside a fixed shape.

    >>> spec = TensorSpec(torch.float32, (None, 2), max_numel=10)
    >>> spec.fits(torch.zeros(5, 2)), spec.fits(torch.zeros(6, 2)), spec.fits(torch.zeros(2))
    (True, False, False)
    >>> spec.allows(torch.tensor([[math.nan, 0.0]]))
    False
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    max_numel: int | None = None
    minimum: float = -math.inf
    maximum: float = math.inf

    def __post_init__(self) -> None:
        if (None in self.shape) != (self.max_numel is not None):
            raise ValueError(
                f"shape {self.shape} with max_numel={self.max_numel}; give max_numel where a "
                "length is None, and nowhere else"
            )

    @classmethod
    def like(cls, tensor: Tensor) -> TensorSpec:
        """Just as `tensor` is, whatever its values.

        >>> TensorSpec.like(torch.zeros(3)).shape
        (3,)
        """
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def max_num_bytes(self) -> int:
        """What the largest such tensor takes."""
        fixed = math.prod(length for length in self.shape if length is not None)
        numel = fixed if self.max_numel is None else self.max_numel
        return numel * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Whether dtype, shape and size are right."""
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.shape)
            and all(a in (None, b) for a, b in zip(self.shape, tensor.shape, strict=True))
            and (self.max_numel is None or tensor.numel() <= self.max_numel)
        )

    def allows(self, tensor: Tensor) -> bool:
        """Whether all entries of a `tensor` that fits are finite and within the limits."""
        is_limited = self.minimum > -math.inf or self.maximum < math.inf
        if tensor.numel() == 0 or not (is_limited or self.dtype.is_floating_point):
            return True
        # A sum is finite only if all its terms are, and takes least time (`isfinite().all()`
        # takes fifty times as long); but finite terms may overflow.
        if not is_limited and math.isfinite(tensor.sum().item()):
            return True
        low, high = (extreme.item() for extreme in tensor.aminmax())
        is_finite = math.isfinite(low) and math.isfinite(high)
        return is_finite and self.minimum <= low and high <= self.maximum

    def __str__(self) -> str:
        lengths = ", ".join("any" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} [{lengths}]"


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What messages of one kind may be.

    Attributes:
        tensors: What the payload has, by name.
        optional: What it may have besides.
        max_ahead: By how many rounds the message may be ahead of its receiver; None for any
            number. Rounds are never negative.

    >>> spec = MessageSpec({"x": TensorSpec(torch.float32, (2,))})
    >>> spec.mismatch({"x": torch.zeros(3)})
    "tensor 'x' is torch.float32 [3] instead of torch.float32 [2]"
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    optional: Mapping[str, TensorSpec] = field(default_factory=dict)
    max_ahead: int | None = None

    @property
    def max_num_bytes(self) -> int:
        """What the tensors of the largest such message take."""
        specs = [*self.tensors.values(), *self.optional.values()]
        return sum(spec.max_num_bytes for spec in specs)

    def mismatch(self, payload: Mapping[str, Tensor]) -> str | None:
        """What is wrong with the names, dtypes or shapes of `payload`; None if nothing is."""
        if missing := self.tensors.keys() - payload.keys():
            return f"tensor {min(missing)!r} is missing"
        for name, tensor in payload.items():
            spec = self._spec(name)
            if spec is None:
                return f"nothing is known of a tensor {name[:40]!r}"
            if not spec.fits(tensor):
                return f"tensor {name!r} is {TensorSpec.like(tensor)} instead of {spec}"
        return None

    def bad_values(self, payload: Mapping[str, Tensor]) -> str | None:
        """Which tensor of a `payload` without mismatch has values that it must not; or None."""
        for name, tensor in payload.items():
            spec = self._spec(name)
            if spec is not None and not spec.allows(tensor):
                limits = f"[{spec.minimum:g}, {spec.maximum:g}]"
                return f"tensor {name!r} has values that are not finite or not in {limits}"
        return None

    def _spec(self, name: str) -> TensorSpec | None:
        return self.tensors.get(name) or self.optional.get(name)


def lacks(algorithm: object, method: str) -> LocalProtocolError:
    """The error of an algorithm that runs in the simulator only."""
    return LocalProtocolError(
        f"{type(algorithm).__name__} does not say what its messages look like; give it a "
        f"`{method}` method (docs/contract.md) to run it on a network"
    )
