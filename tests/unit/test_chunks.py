"""Frames in pieces: what is put together is what was cut, or nothing."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from edgegossip.net.zenoh.pieces import Assembler, split
from edgegossip.net.zenoh.session import CHUNK_BYTES

HEADER_BYTES = 32


class Collector:
    """An assembler, what it made and why it refused."""

    def __init__(self, max_bytes: int = 10_000_000) -> None:
        self.frames: list[bytes] = []
        self.reasons: list[str] = []
        self._assembler = Assembler(max_bytes, self.reasons.append)

    def add(self, *pieces: bytes) -> None:
        for piece in pieces:
            frame = self._assembler.add(piece)
            if frame is not None:
                self.frames.append(bytes(frame))

    def reset(self) -> None:
        self._assembler.reset()


def pieces(serial: int, size: int) -> list[bytes]:
    return list(split(serial, [random.Random(size).randbytes(size)]))


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=5))
def test_parts_of_any_size_come_out_joined(sizes: list[int]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    collector = Collector()
    cut = list(split(3, parts))
    collector.add(*cut)
    assert collector.frames == [b"".join(parts)]
    assert collector.reasons == []
    assert max(map(len, cut)) <= HEADER_BYTES + CHUNK_BYTES
    assert len(cut) == max(1, -(-sum(sizes) // CHUNK_BYTES))


def test_a_lost_piece_costs_its_frame_and_is_reported_once() -> None:
    collector = Collector()
    first, _, *rest = pieces(0, 5 * CHUNK_BYTES)
    collector.add(first, *rest, *pieces(1, 600_000))
    assert collector.frames == [content(600_000)]
    assert collector.reasons == ["a piece without those before it"]


def test_the_end_of_another_frame_of_the_same_size_does_not_fit() -> None:
    collector = Collector()
    begin, _ = pieces(0, 2 * CHUNK_BYTES)
    _, end = pieces(1, 2 * CHUNK_BYTES)
    collector.add(begin, end)
    assert collector.frames == []
    assert collector.reasons == ["a piece without those before it"]


def test_a_frame_that_begins_before_the_last_has_ended_replaces_it() -> None:
    collector = Collector()
    begin, _ = pieces(0, 2 * CHUNK_BYTES)
    collector.add(begin, *pieces(1, CHUNK_BYTES + 1000))
    assert collector.frames == [content(CHUNK_BYTES + 1000)]
    assert collector.reasons == ["a frame that ends too early"]


def test_a_short_frame_comes_between_the_pieces_of_a_long_one() -> None:
    collector = Collector()
    begin, end = pieces(0, 2 * CHUNK_BYTES)
    collector.add(begin, *pieces(1, 1000), end)
    assert collector.frames == [content(1000), content(2 * CHUNK_BYTES)]
    assert collector.reasons == []


def test_pieces_have_the_sizes_and_the_marks_that_are_asked_for() -> None:
    sizes, asked = [40, 10, 100], list[int]()
    cut = list(split(7, [b"a" * 60, b"b" * 20], lambda: sizes[len(asked)], leave(asked)))
    assert asked == [40, 10, 30]
    assert [struct.unpack_from("<QQQQ", piece) for piece in cut] == [
        (7, 80, 0, 1),
        (7, 80, 40, 2),
        (7, 80, 50, 3),
    ]
    collector = Collector()
    collector.add(*cut)
    assert collector.frames == [b"a" * 60 + b"b" * 20]


def leave(asked: list[int]) -> Callable[[int], int]:
    def mark(num_bytes: int) -> int:
        asked.append(num_bytes)
        return len(asked)

    return mark


def test_a_frame_that_is_too_large_is_refused_before_memory_is_spent() -> None:
    collector = Collector(max_bytes=1000)
    collector.add(struct.pack("<QQQQ", 0, 2**63, 0, 0) + b"x", *pieces(1, 1000))
    assert collector.frames == [content(1000)]
    assert collector.reasons == ["a frame that is too large"]


def test_after_a_reset_the_rest_of_a_frame_is_not_taken() -> None:
    collector = Collector()
    begin, end = pieces(0, 2 * CHUNK_BYTES)
    collector.add(begin)
    collector.reset()
    assert collector.reasons == []
    collector.add(end)
    assert collector.frames == []


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"", "no piece of a frame"),
        (b"x" * 31, "no piece of a frame"),
        (struct.pack("<QQQQ", 0, 3, 0, 0) + b"four", "a piece that does not fit its frame"),
        (struct.pack("<QQQQ", 0, 3, 0, 0), "a piece that does not fit its frame"),
        (struct.pack("<QQQQ", 0, 3, 1, 0) + b"on", "a piece without those before it"),
        (struct.pack("<QQQQ", 0, 3, 2**64 - 1, 0) + b"on", "a piece without those before it"),
    ],
)
def test_garbage_is_refused(piece: bytes, reason: str) -> None:
    collector = Collector()
    collector.add(piece)
    assert collector.reasons == [reason]
    collector.add(*pieces(5, 10))
    assert collector.frames == [content(10)]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=9))
def test_pieces_in_any_order_make_only_frames_that_were_sent(
    order: list[tuple[int, int, int]],
) -> None:
    sent = [bytes([serial]) * (3 * CHUNK_BYTES + serial) for serial in range(3)]
    cut = [list(split(serial, [frame])) for serial, frame in enumerate(sent)]
    collector = Collector()
    for serial, begin, end in order:
        collector.add(*cut[serial][begin : end + 1])
    assert set(collector.frames) <= set(sent)
