"""Atomic writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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
