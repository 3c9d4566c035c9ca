"""Garbage collection whose cost does not depend on the number of workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make Python search for reference cycles a hundred times less often.

    The event loop makes and drops thousands of objects without cycles, while the states and
    events of all workers stay alive; the collector traverses these living objects again and
    again. With 10,000 workers, that took 40 % of the time (benchmarks/results/simulator.md).
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
