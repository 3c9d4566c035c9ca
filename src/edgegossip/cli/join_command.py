"""The commands of a machine that joins a run by an invitation.

torch is imported only after the process has begun anew, because that takes seconds.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

from edgegossip.cli.printing import TIMED, LogOptions, log_to_console
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.machine.files import write_whole
from edgegossip.net.address import Address
from edgegossip.net.identity.invitation import Invitation
from edgegossip.net.identity.joined import JoinedRun, RevocationNews, certificates, join_run

VARIABLE = "EDGEGOSSIP_INVITATION"
"""Environment variable that may have the invitation."""
_WORKERS = "workers"
_STOP = 60.0


@dataclass(frozen=True, kw_only=True)
class JoinOptions(LogOptions):
    """Join a run by an invitation, and train as one of its workers.

    Without an invitation, a machine that has joined goes on in the folder `out`. Options after
    `--` are for `edgegossip worker`, e.g. -- --threads 2.

    Args:
        invitation: The line from `edgegossip invite`; - reads it from standard input. It may
            also be in EDGEGOSSIP_INVITATION.
        name: Name of this machine in the run; by default its host name.
        out: Folder of the run on this machine; by default runs/joined/RUN.
        trust_code: Fetch the recipe's file and run it, if the recipe is not of the package.
        relay: Use routers only, even if the others could call this machine.
        port: Port for direct links, if a firewall lets only some through; 0 chooses a free one,
            so that several workers of one machine do not collide.
        start: Begin to train; otherwise only join.
    """

    invitation: tyro.conf.Positional[str | None] = None
    name: str | None = None
    out: Path | None = None
    trust_code: bool = False
    relay: bool = False
    port: int = 0
    start: bool = True


def join_command(arguments: list[str]) -> int:
    """`edgegossip join`."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, further = arguments[:split], arguments[split + 1 :]
    options = tyro.cli(JoinOptions, prog="edgegossip join", args=arguments)
    text = _invitation(options.invitation)
    if text is None:
        if options.out is None:
            raise UsageError("join needs an invitation, or the --out of a run joined earlier")
        return _take_part(options.out, options, further)
    log_to_console(logging.INFO, TIMED, options)
    invitation = Invitation.parse(text)
    folder = options.out or Path("runs", "joined", invitation.run)
    _join(invitation, folder, options)
    if options.start:
        # This process begins anew, without the invitation in its arguments and its environment,
        # which other programs of this machine could read for as long as it trains.
        os.environ.pop(VARIABLE, None)
        sys.stdout.flush()
        again = ["-m", "edgegossip", "join", "--out", str(folder)]
        logged = ["--log-format", options.log_format]
        os.execv(sys.executable, [sys.executable, *again, *logged, "--", *further])
    return 0


def _invitation(given: str | None) -> str | None:
    if given != "-":
        return given or os.environ.get(VARIABLE)
    return getpass.getpass("invitation: ") if sys.stdin.isatty() else sys.stdin.readline()


def _join(invitation: Invitation, folder: Path, options: JoinOptions) -> None:
    run, code = join_run(
        invitation,
        folder,
        options.name,
        wants_code=options.trust_code,
        port=None if options.relay else options.port,
    )
    print(
        f"joined run {run.run} as {run.name}, worker {run.rank}; links are "
        f"{'direct where both ends can be called' if run.listen else 'relayed by a router'}"
    )
    own = importlib.metadata.version("edgegossip")
    if run.version != own:
        print(f"warning: the run has edgegossip {run.version}, and this machine {own}")
    if run.digest is not None and code is not None:
        if hashlib.sha256(code.encode()).hexdigest() != run.digest:
            raise NetworkError("the recipe's file is damaged; join with a new invitation")
        path = _recipe_file(folder, run)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, code.encode())


def _recipe_file(folder: Path, run: JoinedRun) -> Path:
    # The name alone, so that no invitation chooses where a file is written or read.
    return folder / "recipe" / Path(run.words[0].rpartition(":")[0]).name


def _recipe(folder: Path, run: JoinedRun) -> str:
    """The recipe as this machine names it.

    Raises:
        UsageError: If its file is not here, or is another one.
    """
    from edgegossip.recipes.registry import RECIPES

    if run.digest is None:
        if run.words[0] not in RECIPES:
            raise UsageError(
                f"this package has no recipe {run.words[0]!r:.60}; install version "
                f"{run.version}"
            )
        return run.words[0]
    function = run.words[0].rpartition(":")[2]
    fetched = _recipe_file(folder, run)
    for path in (fetched, Path(fetched.name)):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == run.digest:
            return f"{path}:{function}"
    raise UsageError(
        f"the run needs the recipe file {fetched.name} with SHA-256 {run.digest}, which is not "
        f"here; copy it to {fetched} and repeat `edgegossip join --out {folder}`, or, if you "
        "trust who has invited you to run any code here, join with a new invitation and "
        "--trust-code"
    )


def _take_part(folder: Path, options: JoinOptions, further: list[str]) -> int:
    from edgegossip.cli.command import parse_recipe
    from edgegossip.cli.invite_command import SharedOptions
    from edgegossip.cli.live.member import await_plan
    from edgegossip.cli.worker_command import worker_command

    run = JoinedRun.read(folder)
    log_to_console(logging.INFO, TIMED, options, run=run.run, rank=run.rank)
    words = [_recipe(folder, run), *run.words[1:]]
    # Only what the recipe itself can be told: an invitation sets no option of this machine,
    # such as where it writes.
    parse_recipe("join", SharedOptions, words)
    if run.kind == "undecided":
        with RevocationNews(run, folder, _stop):
            planned = await_plan(run, folder, words[0], _address(run), further)
        return 0 if planned is None else _take_part(folder, options, further)
    address = _address(run)
    listen = ["--listen", *address.listen] if address.listen else []
    # A planned run has all its workers from the start.
    opened = ["--open"] if run.kind == "open" else []
    logged = ["--log-format", options.log_format]
    own = [*opened, *logged, "--rank", str(run.rank), "--name", run.run]
    out, certs = folder / _WORKERS / str(run.rank), certificates(folder)
    paths = ["--out", str(out), "--tls", str(certs), "--connect", *address.connect]
    with RevocationNews(run, folder, _stop):
        return worker_command([*words, *own, *paths, *listen, *further])


def _stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def _address(run: JoinedRun) -> Address:
    """Where this machine listens, and the routers to which it connects."""
    if run.listen is None:
        return Address(connect=run.routers)
    # One router at a time: messages with two paths are duplicated or lost. A worker that does
    # not listen has the others in reserve.
    return Address(listen=(_free_endpoint(run.listen),), connect=run.routers[:1])


def _free_endpoint(endpoint: str) -> str:
    """`endpoint`, or any port if another program has taken that one since the trial."""
    host, _, port = endpoint.removeprefix("tls/").rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return f"tls/{host}:0"
    return endpoint


@dataclass(frozen=True, kw_only=True)
class LeaveOptions:
    """Leave a run for good: stop this machine's worker, and give its rank back.

    Args:
        out: Folder of the run on this machine.
    """

    out: Path


def leave_command(arguments: list[str]) -> int:
    """`edgegossip leave`."""
    options = tyro.cli(LeaveOptions, prog="edgegossip leave", args=arguments)
    run = JoinedRun.read(options.out)
    _stop_worker(options.out / _WORKERS / str(run.rank))
    run.ask(options.out, "leave")
    run.forget(options.out)
    print(f"{run.name} has left run {run.run}; its model and log stay in {options.out}")
    return 0


def _stop_worker(folder: Path) -> None:
    from edgegossip.machine.counters import is_running
    from edgegossip.runs.files import lock_holder

    pid, end = lock_holder(folder), time.monotonic() + _STOP
    if pid is None or not is_running(pid):
        return
    with suppress(ProcessLookupError):
        # The others go on at once, instead of waiting for its return.
        os.kill(pid, getattr(signal, "SIGUSR1", signal.SIGTERM))
    while is_running(pid) and lock_holder(folder) == pid:
        if time.monotonic() > end:
            raise NetworkError(f"process {pid} does not end; stop it, and leave again")
        time.sleep(0.1)
