"""Differences between Linux, macOS and Windows, in one place.

No other module uses a name that one of them lacks. A function decides when it is called, by the
presence of a name, so that a test can take the name away.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def stop_signals() -> tuple[int, ...]:
    """Signals that ask a program to stop: Ctrl+C, SIGTERM, a closed terminal, Ctrl+Break."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def is_hangup(number: int) -> bool:
    """Whether this signal is SIGHUP, which a closed terminal sends and Windows lacks."""
    return number == getattr(signal, "SIGHUP", None)


def own_group() -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a process that Ctrl+C does not reach by itself."""
    if hasattr(os, "setsid"):
        return {"start_new_session": True}
    return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


def send_stop(process: subprocess.Popen[bytes], number: int) -> None:
    """Ask a process that was started with `own_group` to stop.

    Windows has no signals between processes. Its Ctrl+Break is the only event that reaches
    another group, and the only one that leaves the process time to write a checkpoint.
    """
    process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", number))


def leave_terminal() -> None:
    """Keep Ctrl+C from this process, and end it with its parent, where the system can.

    Only Linux ends it with a parent that was killed.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None and hasattr(signal, "SIGKILL"):
            prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def usable_cores() -> int | None:
    """Number of cores that this process may use; None where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return None


def user_number() -> int:
    """Number of the user, for names in a folder that all users share; 0 on Windows.

    A temporary folder of Windows belongs to one user.
    """
    return os.getuid() if hasattr(os, "getuid") else 0


def others_may_read(path: Path) -> bool:
    """Whether the permissions let other users read a file; False on Windows.

    Windows keeps permissions elsewhere, and reports all files as readable by everybody.
    """
    if not hasattr(os, "getuid"):
        return False
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def open_flags() -> int:
    """Flags for `os.open`: follow no link where that can be told, and change no line ends."""
    return getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
