"""Processes of workers on this machine: started, stopped and ended together."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from edgegossip.contract.protocol import Rank
from edgegossip.runs.process import on_stop_signal

# Workers run side by side; several intra-op threads each would get in their way.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Supervised:
    """The processes of a run's workers.

    Args:
        stop_signal: Signal that asks a worker to stop.

    Attributes:
        processes: The processes, by rank.
        is_stopping: Whether the workers were asked to stop.
    """

    def __init__(self, stop_signal: int = signal.SIGTERM) -> None:
        self.processes: dict[Rank, subprocess.Popen[bytes]] = {}
        self.is_stopping = False
        self._stop_signal = stop_signal

    def start(
        self,
        rank: Rank,
        arguments: Sequence[str],
        output: IO[bytes] | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a worker: Python with `arguments`."""
        process = self.processes[rank] = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**_ENVIRONMENT, **os.environ, **(environment or {})},
            # Ctrl+C reaches it only through this process.
            start_new_session=True,
        )
        if self.is_stopping:  # the signal came while it was being started
            process.send_signal(self._stop_signal)

    def stop(self) -> None:
        """Ask all workers to stop."""
        self.is_stopping = True
        self._send(self._stop_signal)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in [*self.processes.values()]:  # a signal may come during `start`
            if process.poll() is None:
                process.send_signal(number)


@contextmanager
def supervised(stop_signal: int = signal.SIGTERM) -> Iterator[Supervised]:
    """Pass signals on to the workers; however the block ends, no worker outlives it."""
    workers = Supervised(stop_signal)
    try:
        with on_stop_signal(workers.stop, insist=workers.kill):
            yield workers
    finally:
        workers.kill()
        for process in workers.processes.values():
            process.wait()


def killed_by(process: subprocess.Popen[bytes]) -> str | None:
    """Say by which signal a process was killed; None if it ended by itself or still runs.

    A killed process could not say anything itself, so the end of its output is no reason.
    """
    code = process.poll()
    return None if code is None or code >= 0 else f"was killed (signal {-code})"


def command_line(process: subprocess.Popen[bytes]) -> str:
    """The `edgegossip` command of a process, for a terminal."""
    assert isinstance(process.args, list)
    return shlex.join(["edgegossip", *process.args[3:]])
