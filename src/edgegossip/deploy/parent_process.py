"""The process that started a worker."""

from __future__ import annotations

import psutil


def is_running(process: int) -> bool:
    """Whether a process exists; its parent does not matter, so a command may be repeated."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
