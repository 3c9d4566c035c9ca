"""Frames bring a message and who it is between, or are refused."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from benchmarks.corpus import frames
from hypothesis import given, settings, strategies as st
from tests.bad_frames import forge, mutate

from edgegossip.contract.codec import num_bytes
from edgegossip.contract.protocol import Message
from edgegossip.net.guard.envelope import NUM_BYTES, Envelope, pack, unpack

ENVELOPE = Envelope(b"run 0001", sender=3, sender_life=2**62, receiver_life=0, number=2**63 - 1)
MESSAGE = Message("push", 7, {"x": torch.arange(5.0), "w": torch.tensor(0.5).double()})
FRAME = b"".join(pack(ENVELOPE, MESSAGE))
SENT = frames()


def test_a_frame_brings_message_and_envelope() -> None:
    envelope, message = unpack(bytearray(FRAME))
    assert envelope == ENVELOPE
    assert (message.kind, message.round) == ("push", 7)
    assert torch.equal(message.payload["x"], torch.arange(5.0))
    assert len(FRAME) == NUM_BYTES + num_bytes(MESSAGE)


def test_tensors_are_neither_copied_when_packed_nor_when_unpacked_and_stay_aligned() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    small, part = pack(ENVELOPE, Message("push", 0, {"x": x}))
    x[0] = 1
    assert torch.frombuffer(part, dtype=torch.float64)[0] == 1
    assert len(small) % 8 == 0
    frame = bytearray(FRAME)
    _, message = unpack(frame)
    frame[-4:] = struct.pack("<f", 9.0)
    assert message.payload["x"][-1] == 9
    assert all(x.data_ptr() % x.itemsize == 0 for x in message.payload.values())


@pytest.mark.parametrize(
    "fields", [{"run": b"short"}, {"sender": -1}, {"number": 2**63}, {"sender_life": -1}]
)
def test_an_envelope_has_limits(fields: dict[str, int]) -> None:
    given = {"run": b"run 0001", "sender": 3, "sender_life": 1, "receiver_life": 1, "number": 1}
    with pytest.raises(ValueError, match=next(iter(fields))):
        Envelope(**{**given, **fields})  # type: ignore[arg-type]


def test_no_number_is_read_that_does_not_fit_into_a_tensor() -> None:
    frame = bytearray(FRAME)
    struct.pack_into("<Q", frame, NUM_BYTES - 16, 2**63)
    forge(frame)
    with pytest.raises(ValueError, match=r"number must be in 0..2\*\*63 - 1"):
        unpack(frame)


def test_every_flipped_bit_is_noticed() -> None:
    for at in range(len(FRAME)):
        for bit in range(8):
            frame = bytearray(FRAME)
            frame[at] ^= 1 << bit
            with pytest.raises(ValueError, match="frame"):
                unpack(frame)


@pytest.mark.parametrize("length", [0, 1, 8, NUM_BYTES - 1, NUM_BYTES, len(FRAME) - 1])
def test_a_torn_frame_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="frame"):
        unpack(bytearray(FRAME[:length]))


def test_exchanged_parts_of_a_tensor_are_noticed() -> None:
    frame = b"".join(pack(ENVELOPE, Message("push", 0, {"x": torch.arange(100_000.0)})))
    middle, size = len(frame) // 2, 4096
    parts = frame[: middle - size], frame[middle - size : middle], frame[middle : middle + size]
    head, one, other = parts
    with pytest.raises(ValueError, match="damaged"):
        unpack(bytearray(head + other + one + frame[middle + size :]))


@pytest.mark.parametrize(("at", "byte"), [(0, b"x"), (7, b"\x02")], ids=["magic", "version"])
def test_another_program_or_version_is_told_what_to_do(at: int, byte: bytes) -> None:
    with pytest.raises(ValueError, match="install the same edgegossip on all machines"):
        unpack(bytearray(FRAME[:at] + byte + FRAME[at + 1 :]))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_damaged_frame_is_refused_or_what_was_sent(draw: random.Random) -> None:
    frame = mutate(SENT, draw)
    copy = bytes(frame)
    try:
        unpack(frame)
    except ValueError:
        assert copy not in SENT
    else:
        assert copy in SENT


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_forged_frame_is_refused_or_read_but_never_a_crash(draw: random.Random) -> None:
    frame = mutate(SENT, draw)
    forge(frame)
    try:
        envelope, message = unpack(frame)
    except ValueError:
        return
    assert b"".join(pack(envelope, message))[:NUM_BYTES]


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_bytes_by_chance_are_no_frame(data: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        unpack(bytearray(data))
