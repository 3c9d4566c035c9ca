"""The command that runs a script once for each worker. Importing this module imports torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from edgegossip.cli.commands import default_folder
from edgegossip.core.errors import UsageError
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.core.ranges import check_ranges
from edgegossip.deploy.join import Connection
from edgegossip.deploy.script_launch import local_workers, log_path, run_script
from edgegossip.deploy.script_worker import ScriptWorker
from edgegossip.net.address import Address
from edgegossip.net.session import LEASE

_USAGE = "edgegossip script -n 4 [OPTIONS] FILE.py [ITS OWN ARGUMENTS]"


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """Run a training script that uses edgegossip, once for each worker.

    Args:
        n: Number of workers, on all machines.
        rank: Rank of the only worker to run on this machine; by default, all workers run here.
        listen: Endpoint at which other workers reach this one, e.g. tls/0.0.0.0:7447.
        connect: Endpoint of another worker or a router, e.g. tls/server:7447.
        multicast: Also look for workers on the local network.
        tls: Folder with ca.pem and this rank's certificate; see `edgegossip certs`.
        ban: Serial number of a further certificate to reject; repeatable.
        insecure: Allow plain links beyond this machine; anybody can then read messages and
            join.
        lease: Seconds after which a link is closed if it is silent or cannot send a piece of
            256 kB; slow links need more.
        name: Name of the run, equal for all its workers.
        out: Folder for the output of all workers but the first; by default runs/NAME/STAMP.
    """

    n: Annotated[int, tyro.conf.arg(name="n", aliases=("-n",))]
    rank: Rank | None = None
    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    multicast: bool = False
    tls: Path | None = None
    ban: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    insecure: bool = False
    lease: Seconds = LEASE
    name: str = "script"
    out: Path | None = None

    def __post_init__(self) -> None:
        check_ranges(self, n="at least 1")
        if self.rank is None and self._connects():
            raise ValueError(
                "options of the connection, such as --listen, --connect or --tls, are those of "
                "one worker; add its --rank"
            )

    def _connects(self) -> bool:
        """Whether any option of the connection is given."""
        ways = (self.listen, self.connect, self.multicast)
        return any((*ways, self.tls, self.ban, self.insecure, self.lease != LEASE))

    def workers(self) -> list[ScriptWorker]:
        """The workers of this machine."""
        if self.rank is None:
            return local_workers(self.n, self.name)
        connection = Connection(
            address=Address(listen=self.listen, connect=self.connect, multicast=self.multicast),
            tls=self.tls,
            ban=self.ban,
            insecure=self.insecure,
            lease=self.lease,
        )
        return [
            ScriptWorker(
                rank=self.rank, num_workers=self.n, connection=connection, name=self.name
            )
        ]


def script_command(arguments: list[str]) -> int:
    """`edgegossip script`."""
    ours, script = _split(arguments)
    options = tyro.cli(ScriptOptions, prog="edgegossip script", args=ours)
    if not script:
        raise UsageError(f"no script; usage: {_USAGE}")
    if not Path(script[0]).is_file():
        raise UsageError(f"there is no file {script[0]}; usage: {_USAGE}")
    try:
        workers = options.workers()
    except ValueError as error:
        raise UsageError(str(error)) from error
    out = options.out or default_folder(Path(script[0]).stem)
    failed = run_script(script, workers, out)
    for rank in failed:
        where = "" if rank == workers[0].rank else f": {_last_line(log_path(out, rank))}"
        print(f"edgegossip: worker {rank} failed{where}", file=sys.stderr)
    return 1 if failed else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split our options from the script and its own arguments.

    >>> _split(["-n", "4", "train.py", "--lr", "0.1"])
    (['-n', '4'], ['train.py', '--lr', '0.1'])
    """
    found = [index for index, each in enumerate(arguments) if each.endswith(".py")]
    start = found[0] if found else len(arguments)
    return arguments[:start], arguments[start:]


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no output'} (see {path})"
