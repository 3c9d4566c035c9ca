"""Writing whole files, also on a disk that has become full, and locks between processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from edgegossip.machine.system import open_flags

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a full quota."""
_AT_ONCE = 2**20
_PATIENCE = 0.1
"""Seconds until a lock counts as held."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_whole(path: Path, content: bytes | Iterable[bytes], *, mode: int = 0o666) -> None:
    """Replace a file atomically: even after a power cut, it is complete, either old or new.

    Args:
        path: File to write.
        content: Whole content, or its parts in sequence.
        mode: Permissions of the new file, restricted by the umask.

    Raises:
        OSError: If the file cannot be written; the old one is then unchanged.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed
        # Opened with its final mode, so that no other user can read a key in between.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def reserve(path: Path, num_bytes: int) -> None:
    """Keep room for `write_reserved`, in a file beside `path`.

    Args:
        path: File to write later.
        num_bytes: Largest size of its content. Some file systems keep no room (btrfs and ZFS,
            which write all changes elsewhere).

    Raises:
        OSError: If the disk has no room; nothing is left.
    """
    try:
        with open(_open_reserve(path, os.O_CREAT), "r+b") as file:
            file.truncate(num_bytes)  # left by a process that was killed
            _allocate(file, num_bytes)
    except OSError:
        with suppress(OSError):
            reserve_of(path).unlink()
        raise


def reserve_of(path: Path) -> Path:
    """The file that keeps room for `path`."""
    return path.with_name(path.name + ".reserved")


def write_reserved(path: Path, content: bytes) -> None:
    """Replace a file atomically, in the room kept by `reserve`, if any.

    Args:
        path: File to write.
        content: Whole content.

    Raises:
        OSError: If the file cannot be written; the old one is then unchanged, and the room is
            kept.
    """
    try:
        descriptor = _open_reserve(path)
    except FileNotFoundError:
        return write_whole(path, content)
    with open(descriptor, "r+b") as file:
        file.write(content)
        file.truncate()
        os.fsync(file.fileno())
    reserve_of(path).replace(path)
    return None


def _open_reserve(path: Path, more: int = 0) -> int:
    # A link there would be from someone else.
    return os.open(reserve_of(path), os.O_RDWR | open_flags() | more, 0o666)


def _allocate(file: BinaryIO, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except (AttributeError, OSError) as error:  # the former: on macOS
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        for start in range(0, num_bytes, _AT_ONCE):
            file.write(bytes(min(_AT_ONCE, num_bytes - start)))


@contextmanager
def locked_file(path: Path, *, wait: bool) -> Iterator[str | None]:
    """Lock `path` during the block; the file is made before it and removed after it.

    The kernel frees the lock of a killed process, whose file is harmless. Child processes never
    inherit the lock.

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
    # A soft lock, which filelock could fall back to, would outlive a killed process.
    lock = FileLock(path, fallback_to_soft=False, thread_local=False)
    problem = None
    try:
        # One attempt would also fail if the last holder has just removed the file.
        lock.acquire(timeout=-1 if wait else _PATIENCE)
    except Timeout:
        raise BlockingIOError(errno.EWOULDBLOCK, _holder(path)) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        problem = (
            f"{path.parent} cannot be locked ({error.strerror}): make sure that nothing else "
            "writes to it"
        )
    try:
        with suppress(OSError):  # on a full disk, the lock still holds
            path.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield problem
    finally:
        # Removed while it is locked: a process that has opened it meanwhile opens it again.
        with suppress(OSError):
            path.unlink()
        lock.release()


def _holder(path: Path) -> str:
    """Name the process that holds a lock."""
    with suppress(OSError):
        if (holder := path.read_text(encoding="utf-8", errors="replace").strip()).isdecimal():
            return f"process {holder}"
    return "another process"
