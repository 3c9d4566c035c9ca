"""Any tree of dataclasses, containers, numbers and tensors as JSON plus tensors, and back.

Checkpoints are made of this instead of pickles: reading one can build dataclasses of modules
that are already imported, and nothing else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

Json: TypeAlias = Any
"""What `json.dumps` takes."""


def dismantle(tree: object) -> tuple[Json, dict[str, Tensor]]:
    """Split `tree` into plain JSON and the tensors in it.

    A tensor or dataclass that is in it at several places is kept once, and is one again after
    `assemble`.

    Raises:
        TypeError: If something in it is neither a dataclass, list, tuple, dict, str, number,
            bool, None nor a tensor.

    >>> import torch
    >>> plain, tensors = dismantle({"x": (torch.ones(2), 3)})
    >>> assemble(plain, tensors)
    {'x': (tensor([1., 1.]), 3)}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    instances: dict[int, int] = {}

    def take(item: object) -> Json:
        match item:
            case None | bool() | int() | float() | str():
                return item
            case Tensor():
                if id(item) not in names:
                    names[id(item)] = f"t{len(names)}"
                    # A view of a larger tensor is cut out; files hold no shared memory.
                    tensors[names[id(item)]] = item.detach().clone().contiguous()
                return {"tensor": names[id(item)]}
            case list():
                return [take(element) for element in item]
            case tuple():
                return {"tuple": [take(element) for element in item]}
            case dict():
                return {"dict": [[take(key), take(value)] for key, value in item.items()]}
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            if id(item) in instances:
                return {"same": instances[id(item)]}
            kind, number = type(item), len(instances)
            instances[id(item)] = number
            values = {f.name: take(getattr(item, f.name)) for f in dataclasses.fields(item)}
            name = f"{kind.__module__}:{kind.__qualname__}"
            return {"dataclass": name, "number": number, "fields": values}
        raise TypeError(f"cannot keep a {type(item).__name__} in a checkpoint: {item!r}")

    return take(tree), tensors


def assemble(plain: Json, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Undo `dismantle`.

    Raises:
        ValueError: If `plain` names a dataclass that is not there, not one, or has other
            fields by now.
    """
    instances: dict[int, Any] = {}

    def give(plain: Json) -> Any:  # noqa: ANN401
        match plain:
            case list():
                return [give(element) for element in plain]
            case {"tensor": name}:
                return tensors[name]
            case {"tuple": elements}:
                return tuple(give(element) for element in elements)
            case {"dict": pairs}:
                return {give(key): give(value) for key, value in pairs}
            case {"same": number}:
                return instances[number]
            case {"dataclass": name, "number": number, "fields": fields}:
                kind = _find_dataclass(name)
                if fields.keys() != {field.name for field in dataclasses.fields(kind)}:
                    raise ValueError(f"{name!r} had other fields when the checkpoint was made")
                instance: Any = object.__new__(kind)
                instances[number] = instance
                for field, value in fields.items():
                    # Frozen dataclasses refuse plain assignment.
                    object.__setattr__(instance, field, give(value))
                return instance
        return plain

    return give(plain)


def _find_dataclass(name: str) -> type:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{name!r} in the checkpoint is not a dataclass of this program")
    return found
