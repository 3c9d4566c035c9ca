"""Load generators: processes that count the words of files, or sort the lines.

The paper runs the same two programs, WordCount and Sort, during training. The jobs are outside
our process tree, so monitors count them as use by other processes. They end with the process
that requested them, even if it is killed, because the pipe between them closes. This file is
also the program that they run.
"""

from __future__ import annotations

import heapq
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import psutil

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_choices, check_ranges
from edgegossip.machine.counters import is_running
from edgegossip.machine.system import own_group

if TYPE_CHECKING:  # it imports torch, which would take as long as many a load
    from edgegossip.contract.protocol import Seconds

MB = 1_000_000
SIZES = tuple(MB * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 1000, 1500, 2000))
"""File sizes in bytes; the paper's Fig. 9 has the same number of sizes, up to 10 GB."""
KINDS = ("wordcount", "sort")

_BLOCK = MB
"""Bytes of distinct text, which a file repeats."""
_RUN = 8 * MB
"""Memory that a sort uses, in bytes."""
_WORDS = 10
"""Words in a line."""
_LINES = 10_000
"""Lines between two readings of the clock."""
_START: Seconds = 120.0
"""Timeout for a start, long enough to write 2 GB to a slow disk."""
_END: Seconds = 5.0
_GRACE: Seconds = 1.0
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Load:
    """A job that is repeated on the same file.

    Args:
        kind: "wordcount" or "sort".
        num_bytes: Size of the file, at least 1.
        num_processes: Number of parallel processes, at least 1; each takes one core.
        share: Share of the available processor time, in (0, 1]; the job pauses for the rest.

    Raises:
        ValueError: If an argument is out of range.
    """

    kind: str
    num_bytes: int
    num_processes: int = 1
    share: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self, kind=KINDS)
        check_ranges(
            self, num_bytes="at least 1", num_processes="at least 1", share="in (0, 1]"
        )

    @property
    def disk_bytes(self) -> int:
        """Disk space for the files: the text and, for each sort, the text in sorted runs."""
        return self.num_bytes * (1 + (self.kind == "sort") * self.num_processes)

    @contextmanager
    def running(self, parent: Path | None = None) -> Iterator[None]:
        """Keep the machine busy during the context, and leave no files behind.

        Args:
            parent: Parent of a temporary folder; by default, the system's temporary folder.

        Raises:
            DataError: If there is not enough space, or a process ends early.
        """
        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="edgegossip-load-", dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            free = shutil.disk_usage(folder).free
            if free < 1.1 * self.disk_bytes + 100 * MB:
                raise DataError(
                    f"a {self.kind} of {self.num_bytes / MB:g} MB needs "
                    f"{self.disk_bytes / MB:g} MB in {folder.parent}, where {free / MB:.0f} MB "
                    "are free; choose a smaller file, or another folder by TMPDIR"
                )
            stack.enter_context(_processes(self, folder))
            yield


@contextmanager
def _processes(load: Load, folder: Path) -> Iterator[None]:
    settings = [load.kind, str(load.num_bytes), str(load.share), str(folder)]
    # The process started here starts the jobs and ends, so they are nobody's children.
    starter = subprocess.Popen(
        [sys.executable, "-m", __name__, "start", str(load.num_processes), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert starter.stdin
    assert starter.stdout
    assert starter.stderr
    pids: list[int] = []
    try:
        starter.wait()
        with _deadline(_START, starter.stdin.close):
            for line in starter.stdout:
                pids.append(int(line))
                if len(pids) == load.num_processes:
                    break
        if len(pids) == load.num_processes:
            yield
    finally:
        num_alive = sum(map(is_running, pids))
        starter.stdin.close()
        with _deadline(_END, lambda: _kill(pids)):
            starter.stdout.read()  # its end comes when all of them are gone
        complaints = starter.stderr.read().decode(errors="replace").splitlines()
        starter.stdout.close()
        starter.stderr.close()
    if num_alive < load.num_processes:
        reason = complaints[-1] if complaints else "killed, or slow to start"
        raise DataError(f"a {load.kind} of {load.num_bytes / MB:g} MB ended early: {reason}")


@contextmanager
def _deadline(seconds: Seconds, action: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


# The program.


def _start(num_processes: int, arguments: list[str]) -> None:
    for number in range(num_processes):
        command = [sys.executable, "-m", "edgegossip.machine.loads", str(number), *arguments]
        # Ctrl+C is for the process that wanted the load, which then ends it.
        subprocess.Popen(command, **own_group())


def _work(number: int, kind: str, num_bytes: int, share: float, folder: Path) -> None:
    """Run the job until the pipe closes or the work fails."""

    def job() -> None:
        text = folder / "text"
        if number == 0:
            write_text(folder / "part", num_bytes)
            (folder / "part").rename(text)
        while not text.exists():
            time.sleep(0.01)
        # In one write, as the others write into the same pipe.
        os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())
        pause = Pauses(share)
        while True:
            if kind == "wordcount":
                count_words(text, pause)
            else:
                sort_lines(text, folder / str(number), pause)

    def attempt() -> None:
        try:
            job()
        except OSError as error:
            # Most likely the folder is being removed, and this process about to end.
            time.sleep(_GRACE)
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=attempt, daemon=True).start()
    sys.stdin.buffer.read()
    for _ in range(_ATTEMPTS):  # while the job goes on making files
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
    os._exit(0)


class Pauses:
    """Limits its caller to a share of processor time."""

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._last = time.thread_time()

    def __call__(self) -> None:
        if self._rest:
            time.sleep(self._rest * (time.thread_time() - self._last))
            self._last = time.thread_time()


def write_text(path: Path, num_bytes: int) -> None:
    """Write lines of random words; a few words are frequent, and most are rare."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 10))) for _ in range(5000)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(words))))
    block = bytearray()
    while len(block) < min(num_bytes, _BLOCK):
        line = draw.choices(words, cum_weights=weights, k=_WORDS)
        block += " ".join(line).encode() + b"\n"
    with path.open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        file.seek(num_bytes - 1)
        file.write(b"\n")


def count_words(text: Path, pause: Callable[[], object]) -> Counter[bytes]:
    """Count the occurrences of each word in the file `text`."""
    words: Counter[bytes] = Counter()
    with text.open("rb") as file:
        for number, line in enumerate(file, start=1):
            words.update(line.split())
            if number % _LINES == 0:
                pause()
    return words


def sort_lines(text: Path, runs: Path, pause: Callable[[], object]) -> None:
    """Sort the lines of the file `text`, with sorted `runs` on disk for data beyond memory."""
    runs.mkdir(exist_ok=True)
    paths = []
    with text.open("rb") as file:
        for number in count():
            lines = file.readlines(_RUN)
            if not lines:
                break
            paths.append(runs / str(number))
            paths[-1].write_bytes(b"".join(sorted(lines)))
            pause()
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in paths]
        for number, _ in enumerate(heapq.merge(*files), start=1):
            if number % _LINES == 0:
                pause()


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    if first == "start":
        _start(int(others[0]), others[1:])
    else:
        kind, num_bytes, share, folder = others
        _work(int(first), kind, int(num_bytes), float(share), Path(folder))
