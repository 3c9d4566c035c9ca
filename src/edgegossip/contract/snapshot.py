"""Snapshots: trees of dataclasses, containers, numbers and tensors as JSON plus tensors.

Checkpoints use this format instead of pickle: reading a checkpoint can only build dataclasses
from modules that are already imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from torch import Tensor

Json: TypeAlias = Any
"""A value that `json.dumps` accepts."""
_PLAIN = frozenset({type(None), bool, int, float, str})


def dismantle(tree: object) -> tuple[Json, dict[str, Tensor]]:
    """Split `tree` into plain JSON and the tensors in it.

    Tensors are copied, to the CPU; whoever restores a tree moves them to their device. A
    tensor or dataclass that occurs in several places is stored once, and is shared again
    after `assemble`. Keys of dicts must be numbers, strings, or tuples of numbers and strings.

    Raises:
        TypeError: If an item is not a dataclass, list, tuple, dict, str, number, bool, None or
            tensor.

    >>> import torch
    >>> plain, tensors = dismantle({"x": (torch.ones(2), 3)})
    >>> assemble(plain, tensors)
    {'x': (tensor([1., 1.]), 3)}
    """
    dismantling = _Dismantling()
    return dismantling.take(tree), dismantling.tensors


def assemble(plain: Json, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Undo `dismantle`.

    Raises:
        ValueError: If `plain` names a missing dataclass, a dataclass with other fields, or
            anything but a dataclass, or if a dict has keys other than numbers, strings and
            tuples of them.
        Exception: `LookupError`, `TypeError` or `RecursionError`, if `plain` is not from
            `dismantle`.
    """
    return _Assembling(tensors).give(plain)


# These are objects and not nested recursive functions. Such a function is part of a reference
# cycle with all tensors that it has seen, and a long run's garbage collector rarely frees it.


class _Dismantling:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._instances: dict[int, int] = {}

    def take(self, item: object) -> Json:
        if type(item) in _PLAIN:  # the most frequent case
            return item
        match item:
            case None | bool() | int() | float() | str():
                return item
            case Tensor():
                return {"tensor": self._name(item)}
            case list():
                return [self.take(element) for element in item]
            case tuple():
                return {"tuple": [self.take(element) for element in item]}
            case dict():
                pairs = [[self.take(key), self.take(value)] for key, value in item.items()]
                return {"dict": pairs}
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return self._take_dataclass(item)
        raise TypeError(f"cannot keep a {type(item).__name__} in a checkpoint: {item!r}")

    def _name(self, item: Tensor) -> str:
        if id(item) not in self._names:
            self._names[id(item)] = f"t{len(self._names)}"
            # A view of a larger tensor is copied, because files hold no shared memory.
            copied = item.detach().to("cpu", copy=True)
            self.tensors[self._names[id(item)]] = copied.contiguous()
        return self._names[id(item)]

    def _take_dataclass(self, item: Any) -> Json:  # noqa: ANN401
        if id(item) in self._instances:
            return {"same": self._instances[id(item)]}
        kind: Any = type(item)
        number = len(self._instances)
        self._instances[id(item)] = number
        values = {name: self.take(getattr(item, name)) for name in _field_names(kind)}
        name = f"{kind.__module__}:{kind.__qualname__}"
        return {"dataclass": name, "number": number, "fields": values}


class _Assembling:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._instances: dict[int, Any] = {}

    def give(self, plain: Json) -> Any:  # noqa: ANN401
        match plain:
            case list():
                return [self.give(element) for element in plain]
            case {"tensor": name}:
                return self._tensors[name]
            case {"tuple": elements}:
                return tuple(self.give(element) for element in elements)
            case {"dict": pairs}:
                return {self._give_key(key): self.give(value) for key, value in pairs}
            case {"same": number}:
                return self._instances[number]
            case {"dataclass": str(name), "number": number, "fields": dict(fields)}:
                return self._give_dataclass(name, number, fields)
            case dict():
                raise ValueError(f"{plain!r:.60} cannot be part of a checkpoint")
        return plain

    def _give_key(self, plain: Json) -> Any:  # noqa: ANN401
        """A key: a number, a string, or a tuple of them.

        Dataclasses that contain each other would take forever to hash.
        """
        match plain:
            case None | bool() | int() | float() | str():
                return plain
            case {"tuple": elements}:
                return tuple(self._give_key(element) for element in elements)
        raise ValueError(f"{plain!r:.60} is not a key of a dict")

    def _give_dataclass(self, name: str, number: int, fields: Mapping[str, Json]) -> Any:  # noqa: ANN401
        kind = _find_dataclass(name)
        if fields.keys() != {*_field_names(kind)}:
            raise ValueError(f"{name!r} had other fields when the checkpoint was made")
        instance: Any = object.__new__(kind)
        self._instances[number] = instance
        for field, value in fields.items():
            # Frozen dataclasses refuse plain assignment.
            object.__setattr__(instance, field, self.give(value))
        return instance


@cache
def _field_names(kind: Any) -> tuple[str, ...]:  # noqa: ANN401
    return tuple(field.name for field in dataclasses.fields(kind))


def _find_dataclass(name: str) -> type:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{name!r} in the checkpoint is not a dataclass of this program")
    return found
