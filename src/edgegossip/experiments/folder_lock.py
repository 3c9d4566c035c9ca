"""Folder locks: one writing process at a time; the kernel releases a dead process's lock."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgegossip.core.errors import RunFolderError
from edgegossip.experiments.files import make_folder

LOCK = ".lock"
"""Name of the lock file, which contains the writing process's id."""
_LOG = logging.getLogger("edgegossip.experiments")
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# No symbolic link: its target would be overwritten.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_held: set[int] = set()  # descriptors


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
    descriptor = _take(folder)
    _held.add(descriptor)
    try:
        yield
    finally:
        # Removed while locked: a process that has opened it meanwhile notices; see `_take`.
        with suppress(OSError):
            (folder / LOCK).unlink()
        _held.discard(descriptor)
        os.close(descriptor)


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


def _take(folder: Path) -> int:
    """Open and lock the lock file; return its descriptor."""
    path = folder / LOCK
    while True:
        try:
            descriptor = os.open(path, _OPEN, 0o666)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {path}: {error.strerror}; choose another --out"
            ) from error
        try:
            _lock(descriptor, folder)
            if _is_there(descriptor, path):
                _write_holder(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed it since it was opened


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        which = f"process {holder}" if holder.isdecimal() else "another process"
        raise RunFolderError(
            f"{folder} is in use by {which}; wait until it has ended, or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise RunFolderError(f"cannot lock {folder}: {error.strerror}") from error
        _LOG.warning(
            "%s cannot be locked (%s): make sure that nothing else writes to it",
            folder,
            error.strerror,
        )


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the opened file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    with suppress(OSError):  # on a full disk, the lock still holds
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)


def _forget_in_child() -> None:
    """Close the descriptor in a forked child, which would otherwise hold the lock."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
