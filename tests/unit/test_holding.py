"""An arrived message counts for as long as it takes memory."""

from __future__ import annotations

import psutil
import pytest
import torch

from edgegossip.net.host.receiving import ReceiveBudget

KB = 1000


def frame(size: int) -> memoryview:
    return memoryview(bytearray(size))


def test_a_frame_counts_until_the_last_tensor_made_of_it_is_gone() -> None:
    holding = ReceiveBudget(1000 * KB, largest=10 * KB)
    held = holding.take(1, frame(100 * KB))
    assert held is not None
    assert len(held) == 100 * KB
    tensor = torch.frombuffer(held[8:], dtype=torch.float32)[:2]
    del held
    assert holding.num_bytes >= 100 * KB
    del tensor
    assert holding.num_bytes == 0


def test_what_would_be_too_much_is_refused_until_there_is_room() -> None:
    holding = ReceiveBudget(1000 * KB, largest=10 * KB)
    held = [holding.take(1, frame(100 * KB)) for _ in range(12)]
    assert [each is not None for each in held] == [True] * 9 + [False] * 3
    held.clear()
    assert holding.take(1, frame(100 * KB)) is not None


def test_each_sender_has_a_share_that_the_others_cannot_take() -> None:
    holding = ReceiveBudget(1000 * KB, largest=100 * KB)
    held = [holding.take(1, frame(100 * KB)) for _ in range(9)]
    others = [holding.take(2, frame(100 * KB)) for _ in range(4)]
    assert None not in held
    assert [each is not None for each in others] == [True] * 3 + [False]


def test_a_message_larger_than_the_limit_gets_through() -> None:
    assert ReceiveBudget(1 * KB, largest=100 * KB).take(1, frame(100 * KB)) is not None


def test_memory_may_be_freed_by_a_thread_that_is_just_counting() -> None:
    holding = ReceiveBudget(1000 * KB, largest=10 * KB)
    held = holding.take(1, frame(KB))
    with holding._lock:  # as when the garbage collector begins there
        del held
    assert holding.num_bytes == 0


@pytest.mark.parametrize(
    ("memory", "largest", "limit"),
    [(2**30, 2**20, 2**27), (2**40, 2**20, 2**30), (2**40, 2**30, 2**33)],
)
def test_the_limit_follows_the_machine_and_the_model(
    memory: int, largest: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        total = memory

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert ReceiveBudget(None, largest).max_bytes == limit
