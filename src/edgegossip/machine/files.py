"""Atomic writing of files, also on a disk that has become full."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a full quota."""
_AT_ONCE = 2**20


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
    return os.open(reserve_of(path), os.O_RDWR | os.O_NOFOLLOW | more, 0o666)


def _allocate(file: BinaryIO, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except (AttributeError, OSError) as error:  # the former: on macOS
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        for start in range(0, num_bytes, _AT_ONCE):
            file.write(bytes(min(_AT_ONCE, num_bytes - start)))


# File locks between processes; the kernel releases a dead process's lock.


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
