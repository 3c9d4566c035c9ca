"""Figures as they are kept in `benchmarks/results`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

from edgegossip.runs.describe import source_commit, versions
from edgegossip.runs.study import machine


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Origin of figures: command, options, commit, versions and machine.

    Call it before the work, because the code may change meanwhile.
    """
    spec = sys.modules["__main__"].__spec__
    command = ["python"] if spec is None else ["python", "-m", spec.name]
    return {
        "command": shlex.join([*command, *sys.argv[1:]]),
        "options": json.loads(json.dumps(vars(options), default=str)),
        "commit": source_commit(),
        "versions": versions(),
        "machine": machine(),
    }


def rounded(value: Any) -> Any:  # noqa: ANN401
    """Floats with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
