"""Nested batches: tensors in dicts, tuples and lists, with one entry for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError

Nested: TypeAlias = Any
"""A tensor, or a dict, tuple or list of nested tensors, at any depth."""


def map_leaves(
    change: Callable[[Any], Any], nested: Nested, kind: type | tuple[type, ...] = Tensor
) -> Nested:
    """Change every tensor of `nested`, keeping its structure; mappings become dicts.

    Args:
        change: Applied to each tensor.
        nested: The tensors.
        kind: Type of the leaves.

    >>> map_leaves(lambda leaf: leaf[:1], {"x": torch.tensor([1, 2]), "y": (torch.ones(2),)})
    {'x': tensor([1]), 'y': (tensor([1.]),)}

    Raises:
        DataError: If `nested` holds anything but leaves of this kind.
    """
    match nested:
        case _ if isinstance(nested, kind):
            return change(nested)
        case Mapping():
            return {key: map_leaves(change, item, kind) for key, item in nested.items()}
        case tuple() if hasattr(nested, "_fields"):
            return type(nested)(*(map_leaves(change, item, kind) for item in nested))
        case tuple() | list():
            return type(nested)(map_leaves(change, item, kind) for item in nested)
    raise _no_leaf("", nested, kind)


def leaves(
    nested: Nested, kind: type | tuple[type, ...] = Tensor, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path within `nested` and the value of every leaf, in order.

    >>> [path for path, _ in leaves({"x": torch.ones(2), "y": (torch.ones(2), torch.ones(2))})]
    ["['x']", "['y'][0]", "['y'][1]"]

    Args:
        nested: Tensors, in any structure.
        kind: As in `map_leaves`.
        path: Path of `nested` itself.

    Raises:
        DataError: If `nested` holds anything but leaves of this kind.
    """
    match nested:
        case _ if isinstance(nested, kind):
            yield path, nested
        case Mapping():
            for key, item in nested.items():
                yield from leaves(item, kind, f"{path}[{key!r}]")
        case tuple() | list():
            for index, item in enumerate(nested):
                yield from leaves(item, kind, f"{path}[{index}]")
        case _:
            raise _no_leaf(path, nested, kind)


def concatenated(batches: Sequence[Nested]) -> Nested:
    """Join batches of one structure.

    >>> concatenated([{"x": torch.tensor([1])}, {"x": torch.tensor([2, 3])}])
    {'x': tensor([1, 2, 3])}
    """
    columns = zip(*([leaf for _, leaf in leaves(batch)] for batch in batches), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_leaves(lambda leaf: next(joined), batches[0])


def num_samples(nested: Nested, kind: type | tuple[type, ...] = Tensor) -> int:
    """Number of samples in a batch: the common length of its tensors.

    Args:
        nested: The batch.
        kind: As in `map_leaves`.

    Raises:
        DataError: If the tensors have no common length, or there are no tensors.
    """
    lengths: dict[int, str] = {}
    for path, leaf in leaves(nested, kind):
        if leaf.ndim == 0:
            raise DataError(
                f"a batch has a single number{placed(path)}; every tensor of a batch needs an "
                "entry for each sample in its first dimension"
            )
        lengths.setdefault(len(leaf), path)
    if not lengths:
        raise DataError("a batch has no tensor; give it at least one, e.g. {'x': x}")
    if len(lengths) > 1:
        found = " and ".join(f"{length}{placed(path)}" for length, path in lengths.items())
        raise DataError(
            f"a batch has tensors of unequal length, {found}; every tensor of a batch needs "
            "an entry for each sample in its first dimension"
        )
    return next(iter(lengths))


def placed(path: str) -> str:
    """Place of a tensor, as text for a message; empty if the tensor is the whole batch."""
    return f" at {path}" if path else ""


def listed(batch: Nested) -> str:
    """The types and dimensions of a batch's tensors, as text for a message.

    >>> listed((torch.ones(2, 3), torch.arange(2)))
    'torch.float32 of 2 dimensions at [0] and torch.int64 of 1 dimensions at [1]'
    """
    each = (
        f"{leaf.dtype} of {leaf.ndim} dimensions{placed(path)}" for path, leaf in leaves(batch)
    )
    return " and ".join(each)


def _no_leaf(path: str, item: object, kind: type | tuple[type, ...]) -> DataError:
    wanted = "tensors" if kind is Tensor else "tensors or NumPy arrays"
    return DataError(
        f"a batch holds {type(item).__name__} {item!r:.40}{placed(path)}; expected {wanted}, "
        "nested in any dicts, tuples and lists"
    )
