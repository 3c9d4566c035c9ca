"""Processes of this machine."""

from __future__ import annotations

import psutil


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie, regardless of its parent."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
