"""Random damage to bytes, whatever they mean."""

from __future__ import annotations

import random

EXTREMES = [0, 1, 2**31, 2**63 - 1, 2**64 - 1, 0x7FF8 << 48, 0x7FF0 << 48, 0x7F800000]


def flip_bits(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    for _ in range(draw.choice((1, 1, 2, 9))):
        frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)


def make_extreme(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = draw.randrange(0, len(frame) - 7, draw.choice((1, 8)))
    frame[at : at + 8] = draw.choice(EXTREMES).to_bytes(8, "little")


def cut_out(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    begin, end = _range(frame, draw)
    del frame[begin:end]


def put_in(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = draw.randrange(len(frame) + 1)
    frame[at:at] = draw.randbytes(draw.choice((1, 8, 100)))


def repeat(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    begin, end = _range(frame, draw)
    frame[end:end] = frame[begin:end]


def swap(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    length = draw.choice((1, 4, 8, 64))
    if len(frame) > 2 * length:
        a, b = (draw.randrange(0, len(frame) - length + 1) for _ in range(2))
        frame[a : a + length], frame[b : b + length] = (
            frame[b : b + length],
            frame[a : a + length],
        )


def join(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    other = draw.choice(others)
    frame[draw.randrange(len(frame) + 1) :] = other[draw.randrange(len(other) + 1) :]


def _range(frame: bytearray, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(frame))
    return begin, min(len(frame), begin + draw.choice((1, 4, 8, 50, len(frame))))
