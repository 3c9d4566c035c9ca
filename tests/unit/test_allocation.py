"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.tiers import thorough

PROGRAM = """
import resource, numpy
from edgegossip.machine.allocation import keep_freed_memory
if {keeps}:
    keep_freed_memory()
def use():
    numpy.empty(40 << 20, numpy.uint8).fill(1)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, keeps: bool) -> int:
    program = PROGRAM.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return int(done.stdout)


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told")
def test_blocks_that_are_freed_and_taken_again_are_not_faulted_in_again() -> None:
    assert page_faults(keeps=True) < page_faults(keeps=False) / 4
