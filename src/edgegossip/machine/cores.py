"""Number of usable processor cores."""

from __future__ import annotations

import os
import sys


def num_cores() -> int:
    """The cores that this process may use; only Linux tells them from those that exist."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
