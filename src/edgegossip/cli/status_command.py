"""The command that tells the state of a run in a terminal."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from edgegossip.cli.printing import log_to_console, printable
from edgegossip.cli.watch_command import MeshOptions
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.real.mirror import Mirror
from edgegossip.report.status import RunState, as_table, run_state

_SETTLED: Seconds = 1.2
"""Seconds without an answer after which all that workers know has come."""


@dataclass(frozen=True, kw_only=True)
class StatusOptions(MeshOptions):
    """Print the state of each worker of a run, and end.

    Args:
        json: Print JSON.
        seconds: Seconds to wait for answers, with --connect.
    """

    json: bool = False
    seconds: Seconds = 10.0


def status_command(arguments: list[str]) -> int:
    """`edgegossip status`."""
    log_to_console()
    options = tyro.cli(StatusOptions, prog="edgegossip status", args=arguments)
    options.check("status")
    state = _of_mesh(options) if options.folder is None else run_state(options.folder)
    if state is None:
        raise UsageError(f"there is no run in {options.folder}; give the folder of a run")
    # Lines of logs come from other machines.
    print(json.dumps(asdict(state)) if options.json else printable(as_table(state)))
    return 0


class _Answers:
    """Passes answers on, and knows when the last one came."""

    def __init__(self, mirror: Mirror) -> None:
        self.last: Seconds | None = None
        self._mirror = mirror

    def read(self, run: str, rank: Rank, lines: bytes, *, is_first: bool) -> None:
        self._mirror.read(run, rank, lines, is_first=is_first)
        self.last = time.monotonic()


def _of_mesh(options: StatusOptions) -> RunState:
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="edgegossip-status-") as folder:
        answers = _Answers(Mirror(Path(folder)))
        with options.observer(answers):
            while (now := time.monotonic()) < deadline:
                if answers.last is not None and now - answers.last > _SETTLED:
                    break
                time.sleep(0.1)
        if (state := run_state(Path(folder))) is None:
            raise NetworkError(
                f"nothing was heard of a run at {', '.join(options.connect)} within "
                f"{options.seconds:g} s; is a worker or router there, and is the certificate "
                "for its run?"
            )
    return state
