"""Figures as they are kept in `benchmarks/results`."""

from __future__ import annotations

from typing import Any


def rounded(value: Any) -> Any:  # noqa: ANN401
    """Floats with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
