"""Messages as bytes: a small header and raw tensors, in the safetensors format, never pickle.

Received bytes are only parsed into tensors; they cannot name code to run. Writing copies no
contiguous tensor in main memory, and reading from a writable buffer copies no tensor.

The layout is the length of the header (8 bytes, little-endian), the header (JSON, padded with
spaces to a multiple of 8), and the tensors without gaps, in decreasing order of entry size.
Every tensor is therefore aligned. Kind, round and numbers are in the header's metadata; numbers
are written in Python's notation (``weight=0.125 session=3``), which is lossless.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from edgegossip.contract.protocol import Message

Buffer: TypeAlias = bytes | bytearray | memoryview
_Form: TypeAlias = tuple[str, torch.dtype, torch.Size]
"""A tensor without its entries: name, dtype and shape."""
_Place: TypeAlias = tuple[int, int, torch.dtype, tuple[int, ...], str]
"""Beginning and end of a tensor, its dtype, shape and name."""

MAX_HEADER_BYTES = 2**20
MAX_TENSORS = 4096
MAX_NUMBERS = 4096
MAX_DIMS = 16

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_METADATA = "__metadata__"
_ROUND = '"round":"'
_NUMBERS = '","numbers":"'
_VARIABLE = re.compile(
    _ROUND.encode() + rb"(-?[0-9]{1,19})(?:" + _NUMBERS.encode() + rb'([^"\\]*))?"'
)
_KINDS = {int, float}
_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
_MAX_KEPT_HEADER = 4096
"""Maximum bytes of a cached header, so that strangers cannot fill memory."""


def encode(message: Message) -> list[Buffer]:
    """Write `message` as bytes, in parts: the header, and the memory of each tensor.

    Only tensors that are not contiguous, or not in main memory, are copied.

    Raises:
        ValueError: If a dtype, a name or a number is not allowed, there are too many tensors or
            dimensions, or the header is too long.

    >>> import torch
    >>> [len(part) for part in encode(Message("params", 3, {"params": torch.zeros(10)}))]
    [120, 40]
    """
    header = _header(message.kind, _variable(message), _forms(message))
    tensors = [*message.payload.values()]
    if len(tensors) > 1:
        tensors.sort(key=lambda tensor: -tensor.itemsize)
    return [header, *map(_memory, tensors)]


def decode(data: Buffer) -> Message:
    """Read the joined bytes from `encode`.

    The tensors are views of `data` if it is writable, and otherwise of one copy.

    Raises:
        ValueError: If `data` is not an encoded message.

    >>> import torch
    >>> parts = encode(Message("push", 3, {"params": torch.ones(2)}, {"weight": 0.5}))
    >>> message = decode(bytearray().join(parts))
    >>> message.payload["params"], message.numbers
    (tensor([1., 1.]), {'weight': 0.5})
    """
    view = memoryview(data)
    if view.readonly:
        view = memoryview(bytearray(view))
    try:
        return _parse(view)
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{len(view)} bytes are not a message: {error}; expected the safetensors format "
            "with 'kind' and 'round' in its metadata"
        ) from None


def num_bytes(message: Message) -> int:
    """Number of bytes from ``encode(message)``, computed without reading the tensors' entries.

    >>> import torch
    >>> message = Message("params", 3, {"params": torch.zeros(10)})
    >>> num_bytes(message) == sum(len(part) for part in encode(message))
    True
    """
    return _num_bytes(*form(message))


def form(message: Message) -> tuple[str, int, tuple[_Form, ...]]:
    """All on which `num_bytes` depends; hashable."""
    # The simulator calls this for every message, most of which have no numbers.
    variable = _variable(message) if message.numbers else str(message.round)
    return message.kind, len(variable), _forms(message)


# Writing.


def _forms(message: Message) -> tuple[_Form, ...]:
    return tuple([(name, x.dtype, x.shape) for name, x in message.payload.items()])


def _memory(tensor: Tensor) -> memoryview:
    # NumPy lacks some dtypes, so this uses bytes. A single number has no dimension to slice.
    tensor = tensor if tensor.is_cpu else tensor.cpu()
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.numel() == 1:  # contiguous with any stride, but bytes need a stride of 1
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _variable(message: Message) -> str:
    """Part of a header that differs between messages of one form: the round and the numbers."""
    if not message.numbers:
        return str(message.round)
    numbers = " ".join([f"{name}={value!r}" for name, value in message.numbers.items()])
    kinds = {*map(type, message.numbers.values())}
    if not (kinds <= _KINDS and _are_names(tuple(message.numbers))):
        raise ValueError(
            f"cannot send the numbers {numbers}; Python's int and float can be, under names of "
            "letters, digits, _ and ."
        )
    return f"{message.round}{_NUMBERS}{numbers}"


def _header(kind: str, variable: str, forms: tuple[_Form, ...]) -> bytes:
    before, after = _around_variable(kind, forms)
    text = f"{before}{variable}{after}".encode()
    length = len(text) + -len(text) % 8
    if length > MAX_HEADER_BYTES or len(forms) > MAX_TENSORS:
        raise ValueError(
            f"cannot send {len(forms)} tensors with a header of {length} bytes; at most "
            f"{MAX_TENSORS} and {MAX_HEADER_BYTES} can be; join tensors"
        )
    return length.to_bytes(8, "little") + text.ljust(length)


@lru_cache(maxsize=4096)
def _around_variable(kind: str, forms: tuple[_Form, ...]) -> tuple[str, str]:
    """The JSON of a header before and after its round and numbers."""
    offsets, end = {}, 0
    for name, dtype, shape in sorted(forms, key=lambda form: -form[1].itemsize):
        begin, end = end, end + shape.numel() * dtype.itemsize
        offsets[name] = [begin, end]
    fields: dict[str, Any] = {_METADATA: {"kind": kind, "round": ""}}
    for name, dtype, shape in forms:
        if dtype not in _CODES or name == _METADATA or len(shape) > MAX_DIMS:
            raise ValueError(
                f"cannot send tensor {name!r} of {dtype} {list(shape)}; a name other than "
                f"{_METADATA!r}, at most {MAX_DIMS} dimensions and one of {[*_CODES]} can be"
            )
        place = {"shape": shape, "data_offsets": offsets[name]}
        fields[name] = {"dtype": _CODES[dtype], **place}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    # No name can contain this, because quotes in names are escaped.
    before, mark, after = text.partition(_ROUND)
    return before + mark, after


@lru_cache(maxsize=4096)
def _num_bytes(kind: str, length: int, forms: tuple[_Form, ...]) -> int:
    tensors = sum(shape.numel() * dtype.itemsize for _, dtype, shape in forms)
    return len(_header(kind, "0" * length, forms)) + tensors


# Reading.


def _parse(view: memoryview) -> Message:
    length = int.from_bytes(view[:8], "little")
    start = 8 + length
    if length % 8 or length > MAX_HEADER_BYTES or start > len(view):
        raise ValueError(f"a header of {length} bytes")
    kind, round, numbers, num_bytes, places = _read_header(bytes(view[8:start]))
    if num_bytes != len(view) - start:
        raise ValueError(f"{len(view) - start} bytes for tensors that take {num_bytes}")
    payload = {
        name: _tensor(view, start + begin, dtype, shape)
        for begin, _, dtype, shape, name in places
    }
    return Message(kind, round, payload, numbers)


_Header: TypeAlias = tuple[str, int, dict[str, float], int, tuple[_Place, ...]]
"""Kind, round, numbers, bytes of all tensors, and the place of each."""


def _read_header(header: bytes) -> _Header:
    """Read a header; the part that headers of one form share is read once and cached."""
    found = _VARIABLE.search(header) if len(header) <= _MAX_KEPT_HEADER else None
    if found is None:
        return _read_json(header)
    begin, end = found.start(1), found.end() - 1
    # Only the metadata has a "round" with a string as its value.
    rest = header[:begin] + b"0" + header[end:].rstrip(b" ")
    kind, _, others, num_bytes, places = _read_kept(rest)
    numbers = {} if found[2] is None else _read_numbers(found[2].decode(), _are_names)
    if others:
        raise ValueError("numbers that do not follow the round")
    return kind, _whole(found[1].decode()), numbers, num_bytes, places


def _read_json(header: bytes) -> _Header:
    fields = json.loads(header.decode(), object_pairs_hook=_unique)
    if not isinstance(fields, dict) or len(fields) > 1 + MAX_TENSORS:
        raise ValueError("the header is not an object, or is too large")
    kind, round, numbers = _metadata(fields.pop(_METADATA, None))
    places = tuple([(*_place(entry), name) for name, entry in fields.items()])
    num_bytes = _end_without_gaps(place[:2] for place in places)
    return kind, round, numbers, num_bytes, places


_read_kept = lru_cache(maxsize=256)(_read_json)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name twice")
    return fields


def _metadata(metadata: Any) -> tuple[str, int, dict[str, float]]:  # noqa: ANN401
    match metadata:
        case {"kind": str(kind), "round": str(digits)} if len(metadata) == 2:
            return kind, _whole(digits), {}
        case {"kind": str(kind), "round": str(digits), "numbers": str(text)} if (
            len(metadata) == 3
        ):
            return kind, _whole(digits), _read_numbers(text, _check_names)
    raise ValueError("the metadata must hold 'kind' and 'round' and nothing else")


def _read_numbers(text: str, are_names: Callable[[tuple[str, ...]], bool]) -> dict[str, float]:
    pairs = [part.partition("=") for part in text.split(" ")]
    if len(pairs) > MAX_NUMBERS:
        raise ValueError("too many numbers")
    if not are_names(tuple([name for name, _, _ in pairs])):
        raise ValueError("numbers with a duplicate or missing name")
    return {name: _number(digits) for name, _, digits in pairs}


def _check_names(names: tuple[str, ...]) -> bool:
    """Whether these names of numbers are valid and unique."""
    return len({*names}) == len(names) and all(map(_NAME.fullmatch, names))


_are_names = lru_cache(maxsize=256)(_check_names)
"""`_check_names` with a cache."""


def _number(text: str) -> float:
    # `float` accepts more than `repr` writes: underscores, digits of other scripts.
    value = int(text[:20]) if text.lstrip("-").isdecimal() else float(text[:32])
    if repr(value) != text:
        raise ValueError("a number that is not in Python's notation")
    return value


def _whole(digits: str) -> int:
    # `int`, too, accepts more than `str` writes: spaces, leading zeros.
    if len(digits) <= 20 and str(int(digits)) == digits:
        return int(digits)
    raise ValueError("a whole number that is malformed")


def _place(entry: Any) -> tuple[int, int, torch.dtype, tuple[int, ...]]:  # noqa: ANN401
    """Beginning, end, dtype and shape of a tensor."""
    match entry:
        case {
            "dtype": str(code),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if len(entry) == 3 and code in _DTYPES and len(shape) <= MAX_DIMS:
            dtype = _DTYPES[code]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError("a length or place is not a number")
            # PyTorch multiplies lengths even if one of them is 0.
            if math.prod(max(1, length) for length in shape) >= 2**48:
                raise ValueError("a tensor too large")
            if math.prod(shape) * dtype.itemsize != end - begin or begin % dtype.itemsize:
                raise ValueError("a tensor whose place does not fit its shape")
            return begin, end, dtype, tuple(shape)
    raise ValueError("a tensor without known dtype, shape and place")


def _end_without_gaps(places: Iterable[tuple[int, int]]) -> int:
    covered = 0
    for begin, end in sorted(places):
        if begin != covered:
            raise ValueError("tensors that overlap or leave gaps")
        covered = end
    return covered


def _tensor(view: memoryview, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(view, dtype=dtype, count=numel, offset=at)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    if dtype == torch.bool and tensor.view(torch.uint8).max() > 1:
        raise ValueError("a truth value that is neither 0 nor 1")
    return tensor
