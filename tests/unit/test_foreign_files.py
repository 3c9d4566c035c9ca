"""Damaged and forged files of all kinds are read or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.foreign_files import TARGETS
from tests.fuzz_files import Fuzzer
from tests.tiers import by_name

DRAWN = ("report", "study")
"""Drawing takes long."""
NUM_FILES = 22
"""Of each of the others, but for those that train: two hundred in all."""
FEW = ("har", "profile", "pictures", "finished run")
"""A format each, and a folder."""
FEWER = {"resumed run": 16, "workers": 8, "resumed worker": 3}


@pytest.mark.parametrize("name", by_name([name for name in TARGETS if name not in DRAWN], FEW))
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    fuzzer = Fuzzer(tmp_path, seed=3, names=[name])
    fuzzer.run(FEWER.get(name, NUM_FILES))
    assert not fuzzer.examples
    assert not fuzzer.silent
    # It damages neither too lightly nor too much to try what is behind the first check.
    assert fuzzer.read.total() > 0
    assert fuzzer.refused.total() > 0 or name in FEWER


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_damaged_is_drawn_or_refused(tmp_path: Path, name: str) -> None:
    fuzzer = Fuzzer(tmp_path, seed=3, names=[name])
    fuzzer.run(NUM_FILES)
    assert not fuzzer.examples
