"""The command that shows at once what the package does."""

from __future__ import annotations

import os
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from edgegossip.cli.command import default_folder
from edgegossip.cli.commands import compare_command

EPOCHS = 8
"""Epochs of the comparison: enough for all curves to rise, and seconds on two cores."""
_REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Simulate four uneven machines that learn to read digits, and open the report.

    The pictures are part of scikit-learn, so nothing is downloaded.

    Args:
        out: Folder of the results; by default runs/demo/STAMP.
        open: Whether to open the report in a browser; auto does so if a person sits here.
    """

    out: Path | None = None
    open: Literal["auto", "yes", "no"] = "auto"


def demo_command(arguments: list[str]) -> int:
    """`edgegossip demo`."""
    options = tyro.cli(Demo, prog="edgegossip demo", args=arguments)
    out = options.out or default_folder("demo")
    print("Four machines at 100, 80, 33 and 25 % speed learn to read digits.", flush=True)
    code = compare_command(["quickstart", "--num-epochs", str(EPOCHS), "--out", str(out)])
    print(
        "The report compares how the algorithms keep these machines busy. Next:\n"
        "  edgegossip new my-project --task vision    a project of your own\n"
        "  edgegossip launch quickstart -n 4          the same on a real network of processes"
    )
    if options.open == "yes" or (options.open == "auto" and _is_seen()):
        webbrowser.open((out / _REPORT).resolve().as_uri())
    return code


def _is_seen() -> bool:
    """Whether a browser would open where the person is who typed the command."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    has_window = "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return has_window or sys.platform in ("darwin", "win32")
