"""Folder locks: one writing process at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edgegossip.core.errors import RunFolderError
from edgegossip.core.file_lock import locked_file
from edgegossip.experiments.files import make_folder

LOCK = ".lock"
"""Name of the lock file, which contains the writing process's id."""
_LOG = logging.getLogger("edgegossip.experiments")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of `folder` during the block; make a missing folder.

    A lock file of a killed process is harmless. Child processes never inherit the
    lock; a worker's process locks its own folder.

    Raises:
        RunFolderError: If another process, or this one, holds the lock, or the folder cannot be
            written.
    """
    make_folder(folder)
    path = folder / LOCK
    with ExitStack() as stack:
        try:
            problem = stack.enter_context(locked_file(path, wait=False))
        except BlockingIOError as error:
            raise RunFolderError(
                f"{folder} is in use by {error.strerror}; wait until it has ended, or choose "
                "another --out"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"cannot write {path}: {error.strerror}; choose another --out"
            ) from error
        if problem is not None:
            _LOG.warning("%s", problem)
        yield


def require_unlocked(*folders: Path) -> None:
    """Reject folders that a process is writing to, before any work.

    Raises:
        RunFolderError: If a folder is locked.
    """
    for folder in folders:
        if (folder / LOCK).exists():
            with locked(folder):
                pass


def lock_holder(folder: Path) -> int | None:
    """Number of the process that has last locked a folder and not unlocked it, if any.

    The process may have been killed since.
    """
    try:
        text = (folder / LOCK).read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
