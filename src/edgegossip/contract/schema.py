"""Descriptions of an algorithm's messages, so that a network can reject any other message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError, UndescribedError
from edgegossip.contract.protocol import Message, Payload, Rank

Limits: TypeAlias = range | tuple[float, float]
"""Allowed values of a number: a range of whole numbers, or a lower and an upper limit."""
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor in a message.

    Attributes:
        dtype: Data type; floats must be finite.
        shape: Lengths by dimension; None allows any length.
        max_numel: Maximum number of entries; required if, and only if, a length is None.
        minimum: Lower limit on all entries.
        maximum: Upper limit on all entries.
        measure: Computes the largest absolute value in a tensor that a compressor has packed;
            None uses the entries themselves.

    Raises:
        ValueError: If `max_numel` is missing, or is given for a fixed shape.

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
    measure: Callable[[Tensor], float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (None in self.shape) != (self.max_numel is not None):
            raise ValueError(
                f"shape {self.shape} with max_numel={self.max_numel}; give max_numel where a "
                "length is None, and nowhere else"
            )

    @classmethod
    def like(cls, tensor: Tensor) -> TensorSpec:
        """Describe tensors with the dtype and shape of `tensor`.

        >>> TensorSpec.like(torch.zeros(3)).shape
        (3,)
        """
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def max_num_bytes(self) -> int:
        """Maximum size of such a tensor in bytes."""
        fixed = math.prod(length for length in self.shape if length is not None)
        numel = fixed if self.max_numel is None else self.max_numel
        return numel * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Whether dtype, shape and size match."""
        if tensor.dtype != self.dtype:
            return False
        if self.max_numel is None:
            return tensor.shape == self.shape
        return (
            len(tensor.shape) == len(self.shape)
            and all(a in (None, b) for a, b in zip(self.shape, tensor.shape, strict=True))
            and tensor.numel() <= self.max_numel
        )

    def allows(self, tensor: Tensor) -> bool:
        """Whether all entries of a matching `tensor` are finite and within the limits."""
        return self.inspect(tensor)[0]

    def magnitude(self, tensor: Tensor) -> float | None:
        """The largest absolute value that an allowed `tensor` represents.

        None if there is nothing to compare, because the tensor has its own limits or no floats.

        >>> TensorSpec(torch.float32, (2,)).magnitude(torch.tensor([1.0, -3.0]))
        3.0
        """
        return self.inspect(tensor)[1]

    def inspect(self, tensor: Tensor) -> tuple[bool, float | None]:
        """Compute `allows` and `magnitude` in one pass.

        >>> TensorSpec(torch.float32, (2,)).inspect(torch.tensor([1.0, -3.0]))
        (True, 3.0)
        """
        is_limited, size = self.minimum > -math.inf or self.maximum < math.inf, None
        if (is_limited or self.dtype.is_floating_point) and tensor.numel():
            # A NaN makes both extremes NaN. (`isfinite().all()` takes fifteen times as long.)
            low, high = (extreme.item() for extreme in tensor.aminmax())
            is_finite = math.isfinite(low) and math.isfinite(high)
            if not (is_finite and self.minimum <= low and high <= self.maximum):
                return False, None
            size = None if is_limited else max(-low, high)
        return True, size if self.measure is None else self.measure(tensor)

    def __str__(self) -> str:
        lengths = ", ".join("any" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} [{lengths}]"


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """Description of all messages of a kind.

    The description must state everything that `handle` assumes: an index out of range would
    otherwise end the run of an honest worker. Whatever a worker derives from an allowed message
    must be allowed in its own messages, or the others would mute it for another worker's lie.
    A network also rejects floats that are far larger
    than usual among the workers. A tensor with its own limits is checked only against those
    limits, so give limits to tensors whose scale differs from the parameters'.

    Args:
        tensors: Required tensors of the payload, by name; an example tensor stands for its own
            dtype and shape.
        optional: Optional tensors of the payload, by name.
        numbers: Limits on the required numbers, by name: a `range` of whole numbers, or the
            smallest and the largest number. Numbers are always finite.
        optional_numbers: Limits on the optional numbers, by name.
        max_ahead: Maximum number of rounds that the message may be ahead of its receiver; None
            for any number. A worker that was cut off is behind by all the rounds it has missed.
            Rounds are never negative.
        is_passed_on: Whether workers relay the tensors, which are then named ``RANK.name``.
            Worker RANK wrote them in the message's round, and other workers relay them
            unchanged. A secured network adds a tensor ``RANK.seal``, which is relayed with the
            others.
        max_round: Maximum round of the message, usually the run's last; None for any round.
        may_be_empty: Whether a payload without any of the required tensors is allowed too.

    >>> relayed = {f"{rank}.x": TensorSpec(torch.float32, (2,)) for rank in range(3)}
    >>> len(MessageSpec(optional=relayed, is_passed_on=True).specs)
    3
    >>> spec = MessageSpec({"x": torch.zeros(2)}, numbers={"weight": (0, 1)})
    >>> spec.mismatch({"x": torch.zeros(3)}, {"weight": 0.5})
    "tensor 'x' is torch.float32 [3] instead of torch.float32 [2]"
    >>> spec.bad_values({"x": torch.zeros(2)}, {"weight": 1.5})
    "number 'weight' is 1.5, not within (0, 1)"
    """

    tensors: Mapping[str, TensorSpec | Tensor] = field(default_factory=dict)
    optional: Mapping[str, TensorSpec] = field(default_factory=dict)
    numbers: Mapping[str, Limits] = field(default_factory=dict)
    optional_numbers: Mapping[str, Limits] = field(default_factory=dict)
    max_ahead: int | None = None
    is_passed_on: bool = False
    max_round: int | None = None
    may_be_empty: bool = False
    specs: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    """All allowed tensors, by name."""
    _limits: Mapping[str, Limits] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        like = {
            name: TensorSpec.like(each) if isinstance(each, Tensor) else each
            for name, each in self.tensors.items()
        }
        object.__setattr__(self, "tensors", like)
        # Built once, because each message that arrives is checked against them.
        object.__setattr__(self, "specs", {**like, **self.optional})
        object.__setattr__(self, "_limits", {**self.numbers, **self.optional_numbers})

    @property
    def max_num_bytes(self) -> int:
        """Maximum size of all tensors in such a message, in bytes."""
        return sum(spec.max_num_bytes for spec in self.specs.values())

    @property
    def usual_num_bytes(self) -> int:
        """Maximum size of the required tensors in such a message, in bytes."""
        return sum(self.specs[name].max_num_bytes for name in self.tensors)

    def mismatch(
        self, payload: Mapping[str, Tensor], numbers: Mapping[str, float] = _NOTHING
    ) -> str | None:
        """Describe a mismatch of a message's names, dtypes or shapes; None if there is none."""
        for what, given, needed, known in (
            ("tensor", payload, self.tensors, self.specs),
            ("number", numbers, self.numbers, self._limits),
        ):
            if given.keys() == needed.keys():
                continue
            missing = needed.keys() - given.keys()
            is_empty = self.may_be_empty and needed is self.tensors and missing == needed.keys()
            if missing and not is_empty:
                return f"{what} {min(missing)!r} is missing"
            if unknown := given.keys() - known.keys():
                return f"unknown {what} {min(unknown)[:40]!r}"
        for name, tensor in payload.items():
            spec = self.specs[name]
            if not spec.fits(tensor):
                return f"tensor {name!r} is {TensorSpec.like(tensor)} instead of {spec}"
        return None

    def bad_values(
        self, payload: Mapping[str, Tensor], numbers: Mapping[str, float] = _NOTHING
    ) -> str | None:
        """Describe a forbidden value of a matching message; None if there is none."""
        return self.inspect(payload, numbers)[0]

    def inspect(
        self, payload: Mapping[str, Tensor], numbers: Mapping[str, float] = _NOTHING
    ) -> tuple[str | None, dict[str, float | None]]:
        """Return `bad_values`, and each tensor's `TensorSpec.magnitude` if there are none."""
        sizes: dict[str, float | None] = {}
        for name, tensor in payload.items():
            spec = self.specs[name]
            is_allowed, sizes[name] = spec.inspect(tensor)
            if not is_allowed:
                limits = f"[{spec.minimum:g}, {spec.maximum:g}]"
                wrong = f"tensor {name!r} has values that are not finite or not in {limits}"
                return wrong, {}
        for name, number in numbers.items():
            if not _is_within(number, self._limits[name]):
                return f"number {name!r} is {number!r}, not within {self._limits[name]}", {}
        return None, sizes


def require_described(
    schema: Mapping[str, MessageSpec], message: Message, sender: Rank
) -> None:
    """Check a message of this run's own algorithm, without reading the tensors' entries.

    Raises:
        UndescribedError: If the schema does not describe the message.
    """
    spec = schema.get(message.kind)
    if spec is None:
        mismatch: str | None = f"the schema has only the kinds {[*schema]}"
    else:
        mismatch = spec.mismatch(message.payload, message.numbers)
    if mismatch is not None:
        raise UndescribedError(
            f"worker {sender} sent a message {message.kind!r} that its algorithm's schema does "
            f"not describe: {mismatch}. On a network, other workers would reject it and ignore "
            "its sender; send what the schema describes, or describe all that is sent "
            "(`optional` tensors and numbers may be missing)"
        )


def _is_within(number: float, limits: Limits) -> bool:
    if isinstance(limits, range):
        return isinstance(number, int) and number in limits
    return math.isfinite(number) and limits[0] <= number <= limits[1]


def by_origin(payload: Payload) -> dict[Rank, Payload]:
    """Split the payload of a relayed message by author, in the order of ranks.

    >>> by_origin({"10.x": torch.zeros(1), "2.x": torch.ones(1)})
    {2: {'x': tensor([1.])}, 10: {'x': tensor([0.])}}
    """
    parts: dict[Rank, dict[str, Tensor]] = {}
    for key, tensor in payload.items():
        rank, _, name = key.partition(".")
        parts.setdefault(int(rank), {})[name] = tensor
    return dict(sorted(parts.items()))


def lacks(algorithm: object, method: str) -> LocalProtocolError:
    """The error for an algorithm without a schema."""
    return LocalProtocolError(
        f"{type(algorithm).__name__} does not describe its messages; give it a "
        f"`{method}` method (docs/contract.md) to run it on a network"
    )
