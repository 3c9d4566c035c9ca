"""The command that checks this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgegossip.contract.errors import NetworkError, UsageError, without_password
from edgegossip.machine.system import usable_cores

_STYLES = {"ok": "green", "none": "dim", "missing": "yellow", "failed": "red"}
_LOCAL_REDIS = "redis://localhost:6379"


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine and suggest remedies.

    Args:
        connect: Endpoints of other workers to try, such as tls/host:7447.
        tls: Folder of this worker's certificate, from edgegossip certs.
        rank: Rank of this worker, required with --tls.
        router: Check a router's machine instead of a worker's.
        redis: Server to try for telemetry, such as redis://host:6379.
        joined: Folder of a run that this machine has joined: tries its signing service and
            routers, and says whether links are direct or relayed.
    """

    connect: tuple[str, ...] = ()
    tls: Path | None = None
    rank: int | None = None
    router: bool = False
    redis: str | None = None
    joined: Path | None = None

    def __post_init__(self) -> None:
        if self.router and self.rank is not None:
            raise UsageError("choose one of --rank R and --router")
        if (self.tls is None) != (self.rank is None and not self.router):
            raise UsageError(
                "--tls FOLDER and --rank R (or --router) go together: which certificate?"
            )


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Args:
        what: Checked item.
        state: "ok", "none" (optional and absent), "missing" or "failed".
        detail: Result of the check, or the remedy.
        was_asked_for: Whether a failed check makes the command fail.
    """

    what: str
    state: str
    detail: str
    was_asked_for: bool = False


def doctor_command(arguments: list[str]) -> int:
    """Run `edgegossip doctor`; return 1 if a requested check fails."""
    options = tyro.cli(Doctor, prog="edgegossip doctor", args=arguments)
    findings = [*_software(), *_hardware(), _redis(options.redis)]
    if options.tls is not None or options.connect:
        findings += _network(options)
    if options.joined is not None:
        findings += _joined(options.joined)
    table = Table(box=None, padding=(0, 1), show_header=False)
    for finding in findings:
        style = _STYLES[finding.state]
        table.add_row(finding.what, f"[{style}]{finding.state}[/]", escape(finding.detail))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(any(each.was_asked_for and each.state != "ok" for each in findings))


def _software() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield _package("torch", "train")
    yield _package("eclipse-zenoh", "talk to other machines", module="zenoh")
    yield _package("cryptography", "make and check certificates")
    yield _package("psutil", "measure what other programs use")


def _package(name: str, purpose: str, module: str = "") -> Finding:
    try:
        importlib.import_module(module or name)
        return Finding(name, "ok", importlib.metadata.version(name))
    except (ImportError, OSError) as error:  # OSError: a library that it needs is not there
        advice = f"{error}; to {purpose}: pip install {name}"
        return Finding(name, "missing", advice)


def _hardware() -> Iterator[Finding]:
    usable = usable_cores()
    yield Finding("cores", "ok", f"{usable or os.cpu_count()} of {os.cpu_count()}")
    yield _memory()
    if torch := _optional("torch"):
        yield Finding("torch threads", "ok", str(torch.get_num_threads()))
        yield _gpu(torch)


def _memory() -> Finding:
    if not (psutil := _optional("psutil")):
        return Finding("memory", "none", "to know: pip install psutil")
    memory = psutil.virtual_memory()
    gib = 2**30
    return Finding(
        "memory", "ok", f"{memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free"
    )


def _gpu(torch: Any) -> Finding:  # noqa: ANN401
    if not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            return Finding("GPU", "ok", "Apple's (mps); use it with --torch-device auto")
        return Finding("GPU", "none", "that torch can use; trains on the cores")
    names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return Finding("GPU", "ok", f"{', '.join(names)}; use it with --torch-device auto")


def _redis(url: str | None) -> Finding:
    asked = url is not None
    if not (redis := _optional("redis")):
        advice = "only for telemetry in Redis: pip install 'edgegossip[redis]'"
        return Finding("Redis", "missing" if asked else "none", advice, asked)
    url = url or _LOCAL_REDIS
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3) as server:
            version = server.info("server")["redis_version"]
        return Finding("Redis", "ok", f"{version} at {without_password(url)}", asked)
    except (redis.RedisError, ValueError) as error:
        advice = f"{without_password(url)}: {error}; start one, or give --redis URL"
        return Finding("Redis", "failed" if asked else "none", advice, asked)


def _network(options: Doctor) -> Iterator[Finding]:
    try:
        from edgegossip.net.identity.certificates import common_name
        from edgegossip.net.identity.tls import TLS
        from edgegossip.net.zenoh.probe import probe
    except ImportError as error:
        yield Finding("network", "failed", f"{error}; see above", was_asked_for=True)
        return
    tls = None
    if options.tls is not None:
        tls = TLS.from_folder(options.tls, options.rank)
        try:
            credentials = tls.check(options.rank)
            identity, revocations = credentials.identity, credentials.revocations.values()
            name = common_name(identity.holder.subject)
            revoked = sum(len(each.serials) for each in revocations)
            detail = f"{tls.certificate} is {name}'s until {identity.end:%Y-%m-%d}"
            detail += f"; {revoked} others are revoked"
            yield Finding("TLS", "ok", detail, was_asked_for=True)
        except NetworkError as error:
            yield Finding("TLS", "failed", str(error), was_asked_for=True)
            tls = None
    for endpoint in options.connect:
        try:
            reached = probe(endpoint, tls)
            how = f"TLS with {reached.name}" if reached.name else "reachable"
            if endpoint.startswith("tls/") and options.tls is None:
                how += "; to try TLS too: --tls FOLDER and --rank R or --router"
            detail = f"{how}, {1e3 * reached.seconds:.0f} ms"
            yield Finding(endpoint, "ok", detail, was_asked_for=True)
        except (NetworkError, ValueError) as error:
            yield Finding(endpoint, "failed", str(error), was_asked_for=True)


def _joined(folder: Path) -> Iterator[Finding]:
    from edgegossip.net.identity.joined import JoinedRun
    from edgegossip.net.zenoh.probe import probe

    run = JoinedRun.read(folder)
    host, port = run.service
    try:
        rows = run.ask(folder, "members")["members"]
        others = [each["name"] for each in rows if each["state"] == "member"]
        detail = f"{host}:{port}; members: {', '.join(sorted(others))}"
        yield Finding("signing service", "ok", detail, was_asked_for=True)
    except NetworkError as error:
        yield Finding("signing service", "failed", str(error), was_asked_for=True)
    for endpoint in run.routers:
        try:
            reached = probe(endpoint, run.tls(folder))
            detail = f"{endpoint}, {1e3 * reached.seconds:.0f} ms"
            yield Finding("router", "ok", detail, was_asked_for=True)
        except (NetworkError, ValueError) as error:
            yield Finding("router", "failed", f"{endpoint}: {error}", was_asked_for=True)
    detail = "relayed by a router: the signing service could not call this machine"
    if run.listen is not None:
        detail = f"direct, at {run.listen}, with members that can be called, too; else relayed"
    yield Finding("links", "ok", detail)


def _optional(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
