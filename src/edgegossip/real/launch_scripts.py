"""Starting the same script several times on this machine, each time as a different worker."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from edgegossip.contract.errors import Interrupted, RunFolderError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.zenoh.session import LEASE
from edgegossip.real.join import Connection
from edgegossip.real.launch import free_ports
from edgegossip.real.script_worker import ScriptWorker
from edgegossip.real.supervision import killed_by, supervised


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


def run_script(
    script: Sequence[str], workers: Sequence[ScriptWorker], out: Path
) -> dict[Rank, str | None]:
    """Run a script once for each of `workers`, and wait for all processes.

    The first worker writes to this terminal, the others to `out`/worker-R.txt.

    Args:
        script: File and arguments of the script.
        workers: The workers of this machine.
        out: Folder for the other workers' output, made if there are other workers.

    Returns:
        The ranks whose process failed, with the signal that killed it, in words; None if it
        ended by itself.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; each signal reaches the processes as
            Ctrl+C.
        RunFolderError: If `out` cannot be written.
    """
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(supervised(signal.SIGINT))
        for worker in workers:
            output = None if worker is workers[0] else stack.enter_context(_log(out, worker))
            started.start(worker.rank, script, output, worker.environment())
        processes = started.processes
        failed = {rank: killed_by(each) for rank, each in processes.items() if each.wait()}
    if started.is_stopping:
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
