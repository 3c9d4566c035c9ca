"""The command that makes certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from edgegossip.core.errors import UsageError, unknown_name
from edgegossip.net.certificates import authority_paths, holder_paths, issue, make_authority


@dataclass(frozen=True, kw_only=True)
class Init:
    """Make the authority that signs the certificates of all workers.

    Args:
        out: Folder for its certificate, ca.pem, and its key, ca-key.pem.
        days: How long it is valid.
    """

    out: Path = Path("certs")
    days: int = 3650

    def run(self) -> None:
        path = make_authority(self.out, days=self.days)
        print(f"{path}: for every machine")
        print(f"{authority_paths(self.out)[1]}: stays here; whoever has it can be any worker")


@dataclass(frozen=True, kw_only=True)
class Issue:
    """Make keys and certificates for workers and routers.

    Args:
        rank: Of a worker; say it again for more of them.
        router: Make one for routers. Whoever has it can be any worker.
        host: Name or IP address of the worker's machine, for other programs that compare it;
            say it again for more of them.
        out: Folder of the authority, and for the new files.
        days: How long they are valid; at most as long as the authority.
    """

    rank: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    router: bool = False
    host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    out: Path = Path("certs")
    days: int = 365

    def run(self) -> None:
        if not (self.rank or self.router):
            raise UsageError(
                "certs issue needs a worker: --rank R, once or more often; or --router"
            )
        holders = (*self.rank, None) if self.router else self.rank
        issue(self.out, holders, self.host, days=self.days)
        for rank in holders:
            certificate, key = holder_paths(self.out, rank)
            whose = "routers" if rank is None else f"worker {rank}"
            print(f"{certificate}, {key}: for the machine of {whose}, with ca.pem")


USAGE = """\
usage: edgegossip certs init [OPTIONS]            an authority, once for all workers
       edgegossip certs issue --rank R [OPTIONS]  a worker's key and certificate
       edgegossip certs issue --router [OPTIONS]  the routers'
       edgegossip certs init --help               every option; the same for issue
"""
_COMMANDS: dict[str, type[Init | Issue]] = {"init": Init, "issue": Issue}


def certs_command(arguments: list[str]) -> int:
    """`edgegossip certs`."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("certs needs one of: init, issue; for example: edgegossip certs init")
    name, *rest = arguments
    if name not in _COMMANDS:
        raise UsageError(unknown_name("command of certs", name, _COMMANDS))
    command = tyro.cli(_COMMANDS[name], prog=f"edgegossip certs {name}", args=rest)
    try:
        command.run()
    except ValueError as error:  # out of range
        raise UsageError(str(error)) from error
    return 0
