"""The command that makes and revokes certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.net.identity.certificates import (
    OBSERVER,
    Holder,
    authority_folder,
    authority_paths,
    common_name,
    holder_paths,
    issue,
    issued,
    make_authority,
    parse_serial,
    serial_name,
)
from edgegossip.net.identity.revocation import list_path, revoke, revoked_serials


@dataclass(frozen=True, kw_only=True)
class Init:
    """Make the authority that signs all workers' certificates.

    Args:
        out: Folder of all certificates; the authority's files go into its folder authority.
        days: Validity in days.
    """

    out: Path = Path("certs")
    days: int = 3650

    def run(self) -> None:
        path = make_authority(authority_folder(self.out), days=self.days)
        key = authority_paths(path.parent)[1]
        print(f"{key}: stays here; anyone who has it can impersonate any worker")


@dataclass(frozen=True, kw_only=True)
class Issue:
    """Make keys and certificates for workers, routers and observers.

    Args:
        rank: Rank of a worker; repeatable.
        router: Make a certificate for routers. The holder of its key can impersonate any
            worker.
        observer: Make a certificate for observers (`edgegossip watch --connect`). The holder of
            its key can read what workers log, and send nothing.
        run_name: Name of the runs (worker --name) in which the certificates are valid; by
            default all runs.
        replace: Replace earlier certificates, which stay valid until they expire or are
            revoked. A running worker switches to the new certificates.
        host: Name or IP address of the worker's machine, for programs that verify it;
            repeatable.
        out: Folder of all certificates, as of certs init; each worker's files go into a folder
            of its own there.
        days: Validity in days; limited by the authority's validity.
    """

    rank: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    router: bool = False
    observer: bool = False
    run_name: Annotated[str | None, tyro.conf.arg(name="run")] = None
    replace: bool = False
    host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    out: Path = Path("certs")
    days: int = 365

    def run(self) -> None:
        if not (holders := _holders(self)):
            raise UsageError(
                "certs issue needs a worker: --rank R, one or more times, or --router, or "
                "--observer"
            )
        authority = authority_folder(self.out)
        is_flat = authority == self.out
        paths = issue(
            authority,
            holders,
            self.host,
            run_name=self.run_name,
            replace=self.replace,
            days=self.days,
            out=None if is_flat else self.out,
        )
        for rank, path in zip(holders, paths, strict=True):
            others = "observers" if rank == OBSERVER else "routers"
            whose = f"worker {rank}" if isinstance(rank, int) else others
            if is_flat:
                key = holder_paths(self.out, rank)[1]
                print(f"{path}, {key}: for the machine of {whose}, with ca.pem")
            else:
                print(f"{path.parent}: copy this folder to the machine of {whose}, for --tls")


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """Add certificates to the authority's revocation list.

    Args:
        rank: Rank of a worker whose existing certificates are all revoked; repeatable.
        router: Revoke all certificates of routers.
        observer: Revoke all certificates of observers.
        serial: Serial number of a single certificate, from edgegossip certs list; repeatable.
        out: Folder of all certificates, as of certs init.
    """

    rank: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    router: bool = False
    observer: bool = False
    serial: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    out: Path = Path("certs")

    def run(self) -> None:
        holders = _holders(self)
        if not (holders or self.serial):
            raise UsageError(
                "certs revoke needs --rank R, --router, --observer or --serial NUMBER"
            )
        authority = authority_folder(self.out)
        known = {each.serial_number for each in issued(authority)}
        serials = [parse_serial(each) for each in self.serial]
        # Workers on this machine may use these folders.
        copies = {path.parent for path in self.out.glob("*/ca.pem")} - {authority}
        for serial in revoke(authority, holders, serials, copies):
            print(f"{serial:x}: revoked")
            if serial not in known:
                print(
                    "  not issued here, so rejected only if it has the name "
                    f"{serial_name(serial)}"
                )
        print(
            f"{list_path(authority)}: for every machine, beside ca.pem; running workers see it"
        )


def _holders(options: Issue | Revoke) -> tuple[Holder, ...]:
    router: tuple[Holder, ...] = (None,) if options.router else ()
    observer: tuple[Holder, ...] = (OBSERVER,) if options.observer else ()
    return (*options.rank, *router, *observer)


@dataclass(frozen=True, kw_only=True)
class List:
    """Show the certificates that the authority has issued.

    Args:
        out: Folder of all certificates, as of certs init.
    """

    out: Path = Path("certs")

    def run(self) -> None:
        authority = authority_folder(self.out)
        revoked = revoked_serials(authority)
        for each in issued(authority):
            name, serial = common_name(each.subject), each.serial_number
            state = (
                "revoked" if serial in revoked else f"until {each.not_valid_after_utc:%Y-%m-%d}"
            )
            print(f"{name:24} {serial:40x} {state}")


USAGE = """\
usage: edgegossip certs init [OPTIONS]            an authority, once for all workers
       edgegossip certs issue --rank R [OPTIONS]  a worker's key and certificate
       edgegossip certs issue --router [OPTIONS]  the routers'
       edgegossip certs issue --observer          that of observers, which only read
       edgegossip certs revoke --rank R           withdraw the certificates of rank R
       edgegossip certs list                      what there is
       edgegossip certs init --help               every option; the same for issue
"""
CERTS_COMMANDS: dict[str, type[Init | Issue | Revoke | List]] = {
    "init": Init,
    "issue": Issue,
    "revoke": Revoke,
    "list": List,
}


def certs_command(arguments: list[str]) -> int:
    """`edgegossip certs`."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            f"certs needs one of: {', '.join(CERTS_COMMANDS)}; "
            "for example: edgegossip certs init"
        )
    name, *rest = arguments
    if name not in CERTS_COMMANDS:
        raise UsageError(unknown_name("command of certs", name, CERTS_COMMANDS))
    command = tyro.cli(CERTS_COMMANDS[name], prog=f"edgegossip certs {name}", args=rest)
    try:
        command.run()
    except ValueError as error:  # out of range
        raise UsageError(str(error)) from error
    return 0
