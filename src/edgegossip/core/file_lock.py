"""File locks between processes; the kernel releases a dead process's lock."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# No symbolic link: its target would be overwritten.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_held: set[int] = set()  # descriptors


@contextmanager
def locked_file(path: Path, *, wait: bool) -> Iterator[str | None]:
    """Lock `path` during the block; the file is made before it and removed after it.

    A lock file of a killed process is harmless. Child processes never inherit the lock.

    Args:
        path: Lock file, which contains the id of the process that holds it.
        wait: Wait until the lock is free.

    Yields:
        None, or a warning if this file system has no locks.

    Raises:
        BlockingIOError: If the lock is held, by another process or this one, and `wait` is
            false; its `strerror` names the process.
        OSError: If `path` cannot be written or locked.
    """
    descriptor, problem = _take(path, wait=wait)
    _held.add(descriptor)
    try:
        where = f"{path.parent} cannot be locked ({problem})"
        yield problem and f"{where}: make sure that nothing else writes to it"
    finally:
        # Removed while locked: a process that has opened it meanwhile notices; see `_take`.
        with suppress(OSError):
            path.unlink()
        _held.discard(descriptor)
        os.close(descriptor)


def _take(path: Path, *, wait: bool) -> tuple[int, str | None]:
    """Open and lock the file; return its descriptor."""
    while True:
        descriptor = os.open(path, _OPEN, 0o666)
        try:
            problem = _lock(descriptor, wait=wait)
            if _is_there(descriptor, path):
                _write_holder(descriptor)
                return descriptor, problem
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed it since it was opened


def _lock(descriptor: int, *, wait: bool) -> str | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        which = f"process {holder}" if holder.isdecimal() else "another process"
        raise BlockingIOError(errno.EWOULDBLOCK, which) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return error.strerror
    return None


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
