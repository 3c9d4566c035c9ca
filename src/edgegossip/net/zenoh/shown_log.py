"""A worker's log for observers, which ask for what they have not read yet."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import zenoh

from edgegossip.net.runtime import TokenBucket

HISTORY = 4 * 2**20
"""Bytes of the log, counted from its end, that an observer gets at first."""
_AT_ONCE = 2**17
_LONGEST = 3 * 2**18
"""Maximum bytes of a line; the transport takes no message of more than 1 MiB."""
_ANSWERS = (8.0, 64)
"""Sustained rate, per second, and burst of answers with lines, for all observers together."""


class ShownLog:
    r"""Answers questions about a log of lines that grows; nothing is done between questions.

    An empty question is answered with the file and its size, in bytes. The question
    `FILE POSITION` is answered with the complete lines from there on, after a line of JSON that
    tells the `file`, its `size`, and from where `to` where the lines reach. An answer may have
    fewer lines than there are. In another file, and from 0 in a long one, the answer is the
    first line, which describes the run, and the next position is `HISTORY` before the end.

    Args:
        path: The log; it may come later.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> _ = path.write_text("first\nsecond\nthi")
    >>> head, lines = ShownLog(path).answer(b"0 6").split(b"\n", 1)
    >>> lines
    b'first\nsecond\n'
    >>> json.loads(head)["to"]
    13
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bucket = TokenBucket(*_ANSWERS)

    def answer(self, question: bytes) -> bytes | None:
        """The answer to a question; None without a log, or beyond the limit of answers.

        Raises:
            OSError: If the log cannot be read.
            ValueError: If the question is malformed.
        """
        if not self._path.exists():
            return None
        status = self._path.stat()
        about = {"file": status.st_ino, "size": status.st_size}
        if not question:
            return json.dumps(about).encode()
        file, position = map(int, question[:64].split())
        if position < 0:
            raise ValueError(f"the position must be at least 0, got {position}")
        if not self._bucket.take(time.monotonic()):
            return None
        if file != status.st_ino or position > status.st_size:
            position = 0
        lines, end = self._lines(position, status.st_size)
        return json.dumps({**about, "from": position, "to": end}).encode() + b"\n" + lines

    def _lines(self, position: int, size: int) -> tuple[bytes, int]:
        """Complete lines from `position` on, and the position of the next ones."""
        with self._path.open("rb") as file:
            file.seek(position)
            if position == 0 and size > HISTORY:
                first = file.readline(_LONGEST)
                file.seek(size - HISTORY)
                file.readline()  # the rest of a line
                return (first if first.endswith(b"\n") else b""), file.tell()
            found = file.read(_AT_ONCE)
            if b"\n" not in found:
                found += file.readline()
                if len(found) > _LONGEST:
                    return b"", position + len(found)
        lines = found[: found.rfind(b"\n") + 1]
        return lines, position + len(lines)

    def take(self, query: zenoh.Query, key: str) -> None:
        """Answer a question from the network as `key`."""
        asked = query.payload
        # A malformed question has no answer, and an observer asks again for a lost one.
        with suppress(OSError, ValueError, zenoh.ZError):
            answer = self.answer(b"" if asked is None else asked.to_bytes())
            if answer is not None:
                query.reply(key, answer)
        query.drop()  # type: ignore[no-untyped-call]
