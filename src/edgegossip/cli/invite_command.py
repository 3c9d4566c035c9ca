"""The commands of the machine that invites others to a run. Importing this imports torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

import tyro

from edgegossip.cli.command import Command, parse_recipe
from edgegossip.cli.options import KeepOptions
from edgegossip.cli.printing import TIMED, LogOptions, log_to_console
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.machine.files import locked_file
from edgegossip.net.address import Address, parse
from edgegossip.net.identity.certificates import (
    RUN_NAME,
    authority_folder,
    authority_paths,
    holder_paths,
    issue,
    load_authority,
    make_authority,
    write_file,
)
from edgegossip.net.identity.enrollment import Json, Offer, fingerprint_of
from edgegossip.net.identity.invitation import Invitation
from edgegossip.net.identity.joined import JoinedRun
from edgegossip.net.identity.members import NAME, Member, Members
from edgegossip.net.identity.signing import SigningService
from edgegossip.net.identity.tls import load_tls
from edgegossip.net.zenoh.router import Router
from edgegossip.net.zenoh.session import LEASE
from edgegossip.recipes.call import RecipeCall, option_words
from edgegossip.runs.process import on_stop_signal

PORT = 7446
"""Usual port of the signing service, below that of routers and workers."""
_ABSENT: Seconds = 15.0
_MOST_CODE_BYTES = 2**19


@dataclass(frozen=True, kw_only=True)
class SharedOptions(KeepOptions):
    """Options that all workers of a run share.

    Args:
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        max_seconds: Time limit, counted from the beginning; by default the recipe's.
    """

    only: str | None = None
    max_seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the machine that invites others.

    Args:
        host: Name or address under which the others reach this machine, e.g. 203.0.113.7; by
            default its address in the local network.
        name: Name of the run; by default the recipe's.
        certs: Folder of all certificates, as of certs init.
        port: Port at which new machines ask for a certificate.
        router_port: Port of the router.
        router: Endpoint of a further router, which runs elsewhere, e.g. tls/other:7447;
            repeatable. Workers use it if this one is lost.
        minutes: Time for which an invitation is valid.
        days: Validity of the machines' certificates.
        lease: Lease of links in seconds; see `edgegossip router`.

    Raises:
        ValueError: If an option is malformed or out of range.
    """

    host: str | None = None
    name: str | None = None
    certs: Path = Path("certs")
    port: int = PORT
    router_port: int = 7447
    router: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    minutes: float = 60.0
    days: int = 365
    lease: Seconds = LEASE

    def __post_init__(self) -> None:
        if self.name is not None and not RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name must have 1 to 40 letters, digits and '_.-', got {self.name!r}"
            )
        if not 0 < self.minutes <= 7 * 24 * 60:
            raise ValueError(f"minutes must be above 0, and at most a week, got {self.minutes}")
        for endpoint in self.router:
            if parse("router", endpoint)[0] != "tls":
                raise ValueError(f"router must be tls/HOST:PORT, got {endpoint!r}")


@dataclass(frozen=True, kw_only=True)
class InviteOptions(ServiceOptions, SharedOptions, LogOptions):
    """Invite machines to a run, and connect them, until Ctrl+C.

    The first call makes an authority and a router's certificate. A second call beside a running
    one prints another invitation. The recipe's --num-workers is the limit of the run.
    """


def invite_command(arguments: list[str]) -> int:
    """`edgegossip invite`."""
    command = parse_recipe("invite", InviteOptions, arguments)
    options = command.options
    log_to_console(logging.INFO, TIMED, options)
    members = members_of(options, command.call)
    with ExitStack() as stack:
        if has_service_lock(members, stack):
            _serve(command, members, stack)
        else:
            _invite_once_more(members, options)
    return 0


def members_of(options: ServiceOptions, call: RecipeCall) -> Members:
    """The members of the run with the given name, or the recipe's, with an authority."""
    name = call.name.rpartition(":")[2]
    run = options.name or re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:40]
    authority = authority_folder(options.certs)
    if not authority_paths(authority)[0].exists():
        make_authority(authority)
    return Members(authority, run)


def has_service_lock(members: Members, stack: ExitStack) -> bool:
    """Take the lock of the run's signing service; false if another process has it."""
    lock = locked_file(members.folder / f".{members.run}.service.lock", wait=False)
    try:
        stack.enter_context(lock)
    except BlockingIOError:
        return False
    return True


def _invite_once_more(members: Members, options: ServiceOptions) -> None:
    path = _service_path(members)
    try:
        host, port = json.loads(path.read_text())
    except (OSError, ValueError):
        raise NetworkError(
            f"{path} is missing; the other `edgegossip invite` begins or ends: try again"
        ) from None
    authority = load_authority(members.folder)[0]
    token = members.invite(60 * options.minutes)
    invitation = Invitation(host, port, members.run, fingerprint_of(authority), token)
    _show(invitation, options.minutes)


def _service_path(members: Members) -> Path:
    return members.folder / f"{members.run}.service.json"


def _serve(
    command: Command[InviteOptions, RecipeCall], members: Members, stack: ExitStack
) -> None:
    options = command.options
    experiment = options.applied_to(command.call.experiment(options.only))
    shared = {each.name: getattr(options, each.name) for each in fields(SharedOptions)}
    given = [w for name, x in shared.items() if x is not None for w in option_words(name, x)]
    words = [*command.call.words(), *given]
    service = serve(options, members, words, experiment.num_workers, stack)
    stop = threading.Event()

    def invite() -> None:
        _show(service.invite(), options.minutes)

    with on_stop_signal(stop.set):
        print(f"{service.announcement}; Ctrl+C ends them")
        invite()
        if sys.stdin.isatty():
            print("press Enter for another invitation", flush=True)
            threading.Thread(target=_at_each_line, args=(invite,), daemon=True).start()
        stop.wait()


@dataclass(frozen=True)
class Service:
    """A run's signing service and router while they run.

    Args:
        signing: The signing service.
        host: Name or address under which others reach this machine.
        members: The run's members.
        options: The options.
    """

    signing: SigningService
    host: str
    members: Members
    options: ServiceOptions

    def invite(self) -> Invitation:
        """Make an invitation."""
        token = self.members.invite(60 * self.options.minutes)
        return self.signing.invitation(self.host, token=token)

    @property
    def announcement(self) -> str:
        """The run, and where the two listen."""
        offer = self.signing.offer
        return (
            f"run {offer.run}: {' '.join(offer.words)}, at most {offer.num_workers} workers\n"
            f"router at port {self.options.router_port}, signing service at port "
            f"{self.signing.port}, both at {self.host}"
        )


def serve(
    options: ServiceOptions,
    members: Members,
    words: Sequence[str],
    num_workers: int,
    stack: ExitStack,
    plans: Callable[[Member, Json], Json] | None = None,
) -> Service:
    """Start a router and a signing service, which end with `stack`.

    Args:
        options: Where and how they listen.
        members: The run's members.
        words: The recipe, its arguments, and options that all workers share.
        num_workers: Limit of the run.
        stack: Ends the two.
        plans: As in `SigningService`; new machines wait for the plan.
    """
    run, host = members.run, options.host or _local_address()
    router = stack.enter_context(_router(options, members, host, num_workers))
    endpoint = _endpoint(host, options.router_port)
    offer = _offer(words, run, num_workers, (endpoint, *options.router))
    signing = SigningService(
        members,
        offer if plans is None else replace(offer, kind="undecided"),
        host="::" if ":" in host else "",
        port=options.port,
        days=options.days,
        present=lambda: router.present(run),
        plans=plans,
    )
    stack.enter_context(signing)
    record = json.dumps([host, signing.port]).encode()
    write_file(_service_path(members), record, mode=0o600)
    stack.callback(_service_path(members).unlink, missing_ok=True)
    return Service(signing, host, members, options)


def _router(options: ServiceOptions, members: Members, host: str, num_workers: int) -> Router:
    if not holder_paths(options.certs / "router", None)[0].exists():
        issue(members.folder, [None], out=options.certs)
    everywhere = "::" if ":" in host else "0.0.0.0"
    listen = _endpoint(everywhere, options.router_port)
    return Router(
        Address(listen=(listen,), connect=options.router),
        num_workers=num_workers,
        security=load_tls(options.certs, None, [members.run]),
        run_names=[members.run],
        lease=options.lease,
    )


def _endpoint(host: str, port: int) -> str:
    return f"tls/[{host}]:{port}" if ":" in host else f"tls/{host}:{port}"


def _at_each_line(invite: Callable[[], None]) -> None:
    for _ in sys.stdin:
        invite()


def _offer(words: Sequence[str], run: str, num_workers: int, routers: tuple[str, ...]) -> Offer:
    code, digest = None, None
    file, colon, function = words[0].rpartition(":")
    if colon:
        content = Path(file).read_bytes()
        if len(content) > _MOST_CODE_BYTES:
            raise UsageError(f"{file} has more than {_MOST_CODE_BYTES} bytes; make it smaller")
        code, digest = content.decode(), hashlib.sha256(content).hexdigest()
        words = [f"{Path(file).name}:{function}", *words[1:]]
    return Offer(
        run=run,
        words=tuple(words),
        num_workers=num_workers,
        routers=routers,
        version=importlib.metadata.version("edgegossip"),
        digest=digest,
        code=code,
    )


def _local_address() -> str:
    """The address of this machine in the network with its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the address is for examples
            address: str = probe.getsockname()[0]
        except OSError:
            raise UsageError(
                "this machine has no network; give the --host under which others reach it"
            ) from None
    return address


def _show(invitation: Invitation, minutes: float) -> None:
    print(f"\nfor one machine, within {minutes:g} minutes:\n\n  edgegossip join {invitation}\n")
    if sys.stdout.isatty():
        try:
            import segno
        except ImportError:
            print("(to see it as a QR code, too: pip install 'edgegossip[qr]')")
        else:
            segno.make(str(invitation), error="l").terminal(compact=True)
    sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class MembersOptions:
    """List the members of a run, on the machine that invites, or on a member's.

    Args:
        out: Folder of a run that this machine has joined; by default, list the runs of `certs`.
        certs: Folder of all certificates.
    """

    out: Path | None = None
    certs: Path = Path("certs")


def members_command(arguments: list[str]) -> int:
    """`edgegossip members`."""
    options = tyro.cli(MembersOptions, prog="edgegossip members", args=arguments)
    if options.out is not None:
        run = JoinedRun.read(options.out)
        answer = run.ask(options.out, "members")
        _print_members(run.run, [Member(**each) for each in answer["members"]], answer["now"])
        return 0
    known = Members.all_in(authority_folder(options.certs))
    if not known:
        raise NetworkError(
            f"nobody was invited with {options.certs}; give --certs, or the --out of a run "
            "that this machine has joined"
        )
    for each in known:
        _print_members(each.run, each.rows(), each.clock())
    return 0


def _print_members(run: str, rows: list[Member], now: Seconds) -> None:
    print(f"run {run}:" if rows else f"run {run}: no members")
    for each in rows:
        rank = "-" if each.rank < 0 else str(each.rank)
        joined = datetime.fromtimestamp(each.joined)
        print(
            f"  {rank:>3}  {each.name:32} {_state(each, now):24} since {joined:%Y-%m-%d %H:%M}"
        )


def _state(member: Member, now: Seconds) -> str:
    if member.state != "member":
        return member.state
    if member.seen is None:
        return "not seen yet"
    ago = max(0.0, now - member.seen)
    return "present" if ago < _ABSENT else f"absent for {ago / 60:.0f} min"


@dataclass(frozen=True, kw_only=True)
class BanOptions:
    """Expel a machine from a run for good; its certificate is revoked.

    Args:
        name: Name of the machine, from `edgegossip members`.
        run: Name of the run, if `certs` has several.
        certs: Folder of all certificates.
    """

    name: tyro.conf.Positional[str]
    run: str | None = None
    certs: Path = Path("certs")


def ban_command(arguments: list[str]) -> int:
    """`edgegossip ban`."""
    options = tyro.cli(BanOptions, prog="edgegossip ban", args=arguments)
    if not NAME.fullmatch(options.name):
        raise UsageError(
            f"{options.name!r} is not the name of a machine; see edgegossip members"
        )
    runs = [
        each
        for each in Members.all_in(authority_folder(options.certs))
        if options.run in (None, each.run)
    ]
    if len(runs) != 1:
        names = ", ".join(each.run for each in runs) or "none"
        raise UsageError(f"say from which run (--run); {options.certs} has {names}")
    member = runs[0].remove(options.name, "banned")
    if member is None:
        print(f"{options.name} is no member of {runs[0].run}, and cannot become one")
    else:
        print(
            f"{options.name} is banned, and rank {member.rank} is free; members refuse it "
            "within seconds"
        )
    return 0
