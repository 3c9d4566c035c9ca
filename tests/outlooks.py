"""Outlooks of a plan's candidates, for tests of what is said of them."""

from __future__ import annotations

from typing import Any

from edgegossip.plan.ranking import Outlook


def outlook(
    run: str, seconds: float = 2.0, times: tuple[float, ...] = (2.0,), **others: float
) -> Outlook:
    values: dict[str, Any] = {
        "value": 0.9,
        "num_bytes": 1e6,
        "joules": 900.0,
        "samples": 2e4,
        "idle": 0.0,
        "uplink": 0.1,
    }
    return Outlook(run=run, seconds=seconds, times=times, **{**values, **others})
