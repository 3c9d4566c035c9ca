"""Messages as bytes: a small header and raw tensors, in the safetensors format. Never pickle.

What arrives is only ever parsed into tensors; nothing in it can name code to run.
"""

from __future__ import annotations

import json
from typing import TypeAlias

import safetensors
import safetensors.torch
import torch

from edgegossip.core.metrics import payload_num_bytes
from edgegossip.core.protocol import Message

_Signature: TypeAlias = tuple[object, ...]
_overheads: dict[_Signature, int] = {}


def encode(message: Message) -> bytes:
    """Write `message` as bytes.

    >>> import torch
    >>> len(encode(Message("params", 3, {"params": torch.zeros(10)})))
    160
    """
    # Copies, because the format refuses tensors that share their memory.
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in message.payload.items()
    }
    header = {"kind": message.kind, "round": str(message.round)}
    return safetensors.torch.save(tensors, metadata=header)


def decode(data: bytes) -> Message:
    """Read what `encode` wrote.

    Raises:
        ValueError: If `data` is no such message.

    >>> import torch
    >>> decode(encode(Message("params", 3, {"params": torch.ones(2)}))).payload["params"]
    tensor([1., 1.])
    """
    try:
        payload = safetensors.torch.load(data)
        header = _metadata(data)
        return Message(header["kind"], int(header["round"]), payload)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{len(data)} bytes are not a message: {error}; expected the safetensors format "
            "with 'kind' and 'round' in its metadata"
        ) from None


def num_bytes(message: Message) -> int:
    """Size of ``encode(message)``, without encoding it once a message of its form was seen.

    >>> import torch
    >>> message = Message("params", 3, {"params": torch.zeros(10)})
    >>> num_bytes(message) == len(encode(message))
    True
    """
    payload = message.payload
    signature: _Signature = (
        message.kind,
        len(str(message.round)),
        *[(name, tensor.shape, tensor.dtype) for name, tensor in payload.items()],
    )
    content = payload_num_bytes(payload)
    overhead = _overheads.get(signature)
    if overhead is None:
        overhead = _overheads[signature] = len(encode(message)) - content
    return content + overhead


def _metadata(data: bytes) -> dict[str, str]:
    # The safetensors format: 8 bytes of length, a JSON header, the tensors.
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    if not isinstance(metadata, dict):
        raise TypeError("metadata is not an object")
    return metadata
