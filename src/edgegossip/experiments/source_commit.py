"""The commit of the source code that computes results."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def source_commit(file: Path = Path(__file__)) -> str | None:
    """Commit of the Git repository that tracks `file`, by default of this package.

    `-dirty` follows the commit's twelve digits if a tracked file differs from it.

    Returns:
        None if no repository tracks the file, as in an installed package, or Git is missing.
    """
    try:
        # A package may be installed below a repository that does not track it.
        _git(file.parent, "ls-files", "--error-unmatch", str(file))
        return _git(
            file.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()
