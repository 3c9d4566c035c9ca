"""Starting the same script several times on this machine, each time as a different worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from edgegossip.core.errors import Interrupted, RunFolderError
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.deploy.join import Connection
from edgegossip.deploy.launch import free_ports
from edgegossip.deploy.script_worker import ScriptWorker
from edgegossip.experiments.signals import on_stop_signal
from edgegossip.net.address import Address
from edgegossip.net.session import LEASE

# Workers run side by side; several intra-op threads each would get in their way.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def local_workers(num_workers: int, name: str, lease: Seconds = LEASE) -> list[ScriptWorker]:
    """Workers that reach each other over free ports of this machine."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(num_workers)]
    addresses = (
        Address(listen=(own,), connect=tuple(each for each in endpoints if each != own))
        for own in endpoints
    )
    return [
        ScriptWorker(
            rank=rank,
            num_workers=num_workers,
            connection=Connection(address=address, lease=lease),
            name=name,
        )
        for rank, address in enumerate(addresses)
    ]


def run_script(script: Sequence[str], workers: Sequence[ScriptWorker], out: Path) -> list[Rank]:
    """Run a script once for each of `workers`, and wait for all processes.

    The first worker writes to this terminal, the others to `out`/worker-R.txt.

    Args:
        script: File and arguments of the script.
        workers: The workers of this machine.
        out: Folder for the other workers' output, made if there are other workers.

    Returns:
        The ranks whose process failed.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; each signal reaches the processes as
            Ctrl+C.
        RunFolderError: If `out` cannot be written.
    """
    processes: dict[Rank, subprocess.Popen[bytes]] = {}
    asked: list[int] = []

    def send(number: int) -> None:
        for process in [*processes.values()]:
            if process.poll() is None:
                process.send_signal(number)

    def stop() -> None:
        asked.append(signal.SIGINT)
        send(signal.SIGINT)

    with contextlib.ExitStack() as stack:
        stack.callback(send, signal.SIGKILL)  # however this ends, no worker outlives it
        stack.enter_context(on_stop_signal(stop, insist=lambda: send(signal.SIGKILL)))
        for worker in workers:
            output = None if worker is workers[0] else stack.enter_context(_log(out, worker))
            processes[worker.rank] = _start(script, worker, output)
        if asked:
            stop()  # again, for those that were started since
        failed = [rank for rank, process in processes.items() if process.wait()]
    if asked:
        raise Interrupted("interrupted; the workers have left the run")
    return failed


def _log(out: Path, worker: ScriptWorker) -> IO[bytes]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return log_path(out, worker.rank).open("wb")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {out}: {error.strerror}; choose another --out"
        ) from error


def log_path(out: Path, rank: Rank) -> Path:
    """Path of the output of a worker that does not write to the terminal."""
    return out / f"worker-{rank}.txt"


def _start(
    script: Sequence[str], worker: ScriptWorker, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *script],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**_ENVIRONMENT, **os.environ, **worker.environment()},
        # Ctrl+C reaches them only through this process.
        start_new_session=True,
    )
