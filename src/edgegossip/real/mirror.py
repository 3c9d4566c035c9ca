"""Copies of workers' logs that an observer reads, laid out as the folder of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edgegossip.contract.protocol import Rank

_LOG = logging.getLogger("edgegossip.real")
_MAX_BYTES = 2**28
"""Maximum size of one worker's copy; the lines after it are left out."""


class Mirror:
    """Writes the lines that an `Observer` reads to `FOLDER/RUN/workers/RANK/events.jsonl`.

    Lines that name another worker as their own are left out: nobody speaks for another.

    Args:
        folder: Folder of the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full: set[Path] = set()

    def read(self, run: str, rank: Rank, lines: bytes, *, is_first: bool) -> None:
        """See `Reader`."""
        # Not every system allows a colon in a name.
        path = self._folder / run.replace(":", "-") / "workers" / str(rank) / "events.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = b"".join(line for line in lines.splitlines(True) if _is_of(rank, line))
        if not is_first and path.exists() and path.stat().st_size + len(own) > _MAX_BYTES:
            if path not in self._full:
                _LOG.warning("%s is full; what follows of worker %d is left out", path, rank)
            self._full.add(path)
            return
        with path.open("wb" if is_first else "ab") as file:
            file.write(own)


def _is_of(rank: Rank, line: bytes) -> bool:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("rank", rank) == rank
