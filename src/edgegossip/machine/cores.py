"""The number of usable processor cores."""

from __future__ import annotations

import os
import sys


def num_cores() -> int:
    """The number of cores that this process may use; outside Linux, the number of all cores."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
