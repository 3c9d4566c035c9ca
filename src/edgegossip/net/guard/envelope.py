"""The envelope of a message on a network: run, sender, lives, number and checksum."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

import xxhash

from edgegossip.contract import codec
from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Message, Rank

MAGIC = b"edgegos"
VERSION = 1
# The size is a multiple of 8, so the message behind it is aligned.
_FIELDS = struct.Struct("<7sB8sQQQQ")
_CHECKSUM = struct.Struct("<Q")
_LARGEST = 2**63 - 1
NUM_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Envelope:
    """Run, sender, lives and number of a message.

    Attributes:
        run: 8 bytes that identify this run.
        sender: Author of the message.
        sender_life: The sender's life in which it wrote the message.
        receiver_life: The receiver's life for which the message is meant; 0 for any.
        number: Number of the message.

    Raises:
        ValueError: If `run` is not 8 bytes, or a number is not in 0 .. 2**63 - 1.
    """

    run: bytes
    sender: Rank
    sender_life: int
    receiver_life: int
    number: int

    def __post_init__(self) -> None:
        if len(self.run) != 8:
            raise ValueError(f"run must be 8 bytes, got {len(self.run)}")
        numbers = (self.sender, self.sender_life, self.receiver_life, self.number)
        if min(numbers) < 0 or max(numbers) > _LARGEST:
            raise ValueError(
                "sender, sender_life, receiver_life and number must be in 0..2**63 - 1, got "
                f"{numbers}"
            )


_values = attrgetter(*(each.name for each in fields(Envelope)))


def pack(envelope: Envelope, message: Message) -> list[Buffer]:
    """Write a frame, in parts: the headers, and the memory of each tensor.

    Raises:
        ValueError: If `message` cannot be encoded.

    >>> import torch
    >>> envelope = Envelope(b"run 0001", sender=3, sender_life=1, receiver_life=2, number=5)
    >>> frame = bytearray().join(pack(envelope, Message("age", 7, {"x": torch.ones(2)})))
    >>> same, message = unpack(frame)
    >>> same == envelope, message.round, message.payload["x"]
    (True, 7, tensor([1., 1.]))
    """
    header, *tensors = codec.encode(message)
    start = _FIELDS.pack(MAGIC, VERSION, *_values(envelope))
    # The tensors are not copied; the transport sends the parts one after the other.
    checksum = _CHECKSUM.pack(_hash([start, header, *tensors]))
    return [b"".join([start, checksum, header]), *tensors]


def unpack(frame: Buffer) -> tuple[Envelope, Message]:
    """Read a joined frame from `pack`; the tensors are views of `frame`, as in `codec.decode`.

    Raises:
        ValueError: If `frame` is anything else. Damage goes unnoticed with probability 2**-64.
            The checksum is not a signature and does not authenticate the sender.
    """
    view = memoryview(frame)
    if len(view) < NUM_BYTES:
        raise ValueError(f"{len(view)} bytes are too few for a frame")
    magic, version, *values = _FIELDS.unpack_from(view)
    # Before the checksum, because another version may compute another one.
    if magic != MAGIC or version != VERSION:
        raise ValueError(
            f"a frame that begins with {magic!r}, version {version}, instead of {MAGIC!r}, "
            f"version {VERSION}; install the same edgegossip on all machines"
        )
    # Before the codec, which then reads only what a worker has written.
    (checksum,) = _CHECKSUM.unpack_from(view, _FIELDS.size)
    if _hash([view[: _FIELDS.size], view[NUM_BYTES:]]) != checksum:
        raise ValueError("a frame that was damaged: its checksum is wrong")
    return Envelope(*values), codec.decode(view[NUM_BYTES:])


def _hash(parts: Iterable[Buffer]) -> int:
    # xxh3 runs at the speed of memory; CRC-32 would take up to ten times as long as sending.
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
