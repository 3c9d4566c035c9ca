"""Guarantees for every test: one thread, no deadlines, fixed seeds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# As `use_deterministic_algorithms(True)`, which would import torch's compiler.
torch.set_deterministic_debug_mode("error")

# torch's first call takes hundreds of milliseconds, so a deadline only makes noise.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
# Where CI is set, hypothesis would derandomize this one too, and the night find nothing new.
settings.register_profile(
    "explore", deadline=None, derandomize=False, max_examples=2000, print_blob=True
)
settings.load_profile("repeatable")

# Thousands of collected tests would be walked over again and again: a twelfth of all the time.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """Nobody cuts the power between two tests; processes of their own do wait for disks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
