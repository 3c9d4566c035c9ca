"""WordCount and Sort like those of a cluster: their input comes over a link, in splits.

    python -m benchmarks.mapreduce serve ADDRESS         on the host that has the text
    python -m benchmarks.mapreduce run ADDRESS SOCKET    beside training, on another host

A job of `num_bytes` first waits `SET_UP` seconds for its tasks, as on a cluster. Up to `slots`
map tasks at once then read one split each: WordCount counts its words, Sort writes it sorted to
disk. One reduce task combines what they left, writes the result to disk, and sends it to the
other host, where a cluster keeps its second copy. So small jobs use one core, the link and the
disk for moments, and large ones use all of them, in phases. An equal job follows at once.

Sizes are nominal: all bytes are divided by `SCALE`, the size of a split too, so that a link of
400 Mbit/s stands for one of 10 Gbit/s, and a job of 10 GB takes seconds.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import os
import shutil
import signal
import socket
import socketserver
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRWPair
from pathlib import Path
from typing import BinaryIO

from edgegossip.machine.loads import MB, Load, write_text

SCALE = 25
SPLIT = 128 * MB // SCALE
"""Bytes of a map task's input; Hadoop's default block of 128 MB."""
SET_UP = 0.5
"""Seconds before the tasks of a job begin; several on a cluster."""
PORT = 7450
_CHUNK = MB

Server = tuple[str, int]


# The other host.


class Keeper(socketserver.StreamRequestHandler):
    """Answers "read N" with N bytes of text, and throws away the bytes after "write N"."""

    def handle(self) -> None:
        wish, number = self.rfile.readline().split()
        left = int(number)
        with suppress(ConnectionError):  # the task was killed
            while left > 0:
                if wish == b"read":
                    left -= self.connection.send(TEXT[: min(left, len(TEXT))])
                elif received := len(self.rfile.read(min(left, _CHUNK))):
                    left -= received
                else:
                    return
            self.wfile.write(b".")


class Keepers(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


TEXT = b""


def serve(server: Server) -> None:
    """Hand out text, until killed."""
    global TEXT
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text"), _CHUNK)
        TEXT = Path(folder, "text").read_bytes()
    with Keepers(server, Keeper) as keepers:
        keepers.serve_forever()


# Tasks.


@contextmanager
def _asked(server: Server, wish: str) -> Iterator[BufferedRWPair]:
    with socket.create_connection(server) as link, link.makefile("rwb") as stream:
        stream.write(f"{wish}\n".encode())
        stream.flush()
        yield stream


def _durable(path: Path, lines: Iterator[bytes]) -> None:
    """Write `lines`; disks would otherwise see them during some later job."""
    with path.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def map_task(kind: str, server: Server, num_bytes: int, part: Path) -> None:
    """Read a split of `num_bytes` from `server`; leaves the file `part`."""
    with _asked(server, f"read {num_bytes}") as stream:
        left, counts, lines = num_bytes, Counter[bytes](), list[bytes]()
        while left > 0:
            line = stream.readline(left)
            left -= len(line)
            if kind == "wordcount":
                counts.update(line.split())
            else:
                lines.append(line.rstrip(b"\n") + b"\n")
    if kind == "wordcount":
        lines = [b"%s %d\n" % pair for pair in counts.items()]
    _durable(part, iter(sorted(lines)))


def reduce_task(kind: str, server: Server, parts: list[Path], out: Path) -> None:
    """Combine what map tasks left, and keep a copy at `server`."""
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(part.open("rb")) for part in parts]
        if kind == "sort":
            _durable(out, iter(heapq.merge(*files)))
        else:
            counts = Counter[bytes]()
            for file in files:
                for line in file:
                    word, number = line.split()
                    counts[word] += int(number)
            _durable(out, iter([b"%s %d\n" % pair for pair in sorted(counts.items())]))
    with _asked(server, f"write {out.stat().st_size}") as stream, out.open("rb") as file:
        shutil.copyfileobj(file, stream, _CHUNK)
        stream.flush()
        stream.read(1)


def run_job(load: Load, server: Server, folder: Path) -> None:
    """Run one job; each task is a process, of which `load.num_processes` run at once."""
    time.sleep(SET_UP)
    starts = range(0, load.num_bytes, SPLIT)
    parts = [folder / str(number) for number in range(len(starts))]
    tasks = [
        (load.kind, server, min(SPLIT, load.num_bytes - start), part)
        for start, part in zip(starts, parts, strict=True)
    ]
    fork = multiprocessing.get_context("fork")
    with fork.Pool(min(len(tasks), load.num_processes)) as pool:
        pool.starmap(map_task, tasks, chunksize=1)
        pool.apply(reduce_task, (load.kind, server, parts, folder / "out"))


# The host on which training runs.


def _scratch() -> tempfile.TemporaryDirectory[str]:
    # Killed tasks may still be ending when their folder goes.
    return tempfile.TemporaryDirectory(prefix="edgegossip-jobs-", ignore_cleanup_errors=True)


def run(server: Server, path: str) -> None:
    """Repeat the job that a client of the Unix socket `path` names, while it stays there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client, _scratch() as folder:
                load = Load(**json.loads(client.recv(1000)))
                child = os.fork()
                if not child:
                    os.setpgid(0, 0)
                    try:
                        while True:
                            run_job(load, server, Path(folder))
                    except BaseException as error:
                        print(f"{load} failed: {error!r}", file=sys.stderr, flush=True)
                        os._exit(1)
                with suppress(PermissionError):  # the child was first
                    os.setpgid(child, child)
                client.sendall(b".")
                client.recv(1)
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    client.sendall(b"!")
                    continue
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                client.sendall(b".")


@contextmanager
def running(load: Load, path: str) -> Iterator[None]:
    """Have the jobs of `load` repeated by the runner at the Unix socket `path`.

    Raises:
        RuntimeError: If a job has failed.
    """
    wish = {"kind": load.kind, "num_bytes": load.num_bytes, "num_processes": load.num_processes}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(json.dumps(wish).encode())
        client.recv(1)
        yield
        client.sendall(b".")
        if client.recv(1) != b".":
            raise RuntimeError(f"{load} failed; see the messages above")


if __name__ == "__main__":
    wish, address, *others = sys.argv[1:]
    if wish == "serve":
        serve((address, PORT))
    else:
        run((address, PORT), *others)
