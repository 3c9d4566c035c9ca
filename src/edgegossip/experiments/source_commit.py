"""The commit of the source code that computes results."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def source_commit(file: Path = Path(__file__)) -> str | None:
    """Commit of the Git repository that tracks `file`, by default of this package.

    `-dirty` follows the commit's twelve digits if any Python file of the repository differs
    from it or is new.

    Returns:
        None if no repository tracks the file, as in an installed package, or if Git is missing
        or refuses to read the repository.
    """
    try:
        # A package may be installed below a repository that does not track it.
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "--short=12", "HEAD")
        changes = _git(file.parent, "status", "--porcelain", "--", ":(top)*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str:
    # A Git hook names its own repository in the environment.
    inherited = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env={**inherited, "GIT_OPTIONAL_LOCKS": "0"},  # somebody may be committing
    )
    return done.stdout.strip()
