"""A list of three machines, as a plan is given one."""

from __future__ import annotations

from pathlib import Path

THREE = """
[[machine]]
name = "desk"
samples_per_second = 1000
mbits = 100
latency_ms = 5

[[machine]]
name = "phone"
count = 2
samples_per_second = 250.5
latency_ms = 20
"""


def three_machines(folder: Path) -> Path:
    """Write it to a file in `folder`."""
    path = folder / "machines.toml"
    path.write_text(THREE)
    return path
