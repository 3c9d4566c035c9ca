"""The command for a router between workers that cannot connect to each other."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import tyro

from edgegossip.cli.printing import TIMED, LogOptions, log_to_console
from edgegossip.contract.protocol import Seconds
from edgegossip.net.address import Address
from edgegossip.net.identity.tls import load_tls, require_tls
from edgegossip.net.zenoh.router import Router
from edgegossip.net.zenoh.session import LEASE
from edgegossip.real.metrics_server import RouterMetrics, metrics_address, serving_metrics
from edgegossip.runs.process import on_stop_signal


@dataclass(frozen=True, kw_only=True)
class RouterOptions(LogOptions):
    """Relay messages between workers that cannot connect to each other, until Ctrl+C.

    Args:
        listen: Endpoint for workers, e.g. tls/0.0.0.0:7447.
        connect: Other routers, e.g. tls/server:7447.
        tls: Folder with ca.pem and the routers' certificate; see `edgegossip certs`. Changes to
            these files and to revoked.pem take effect at once.
        ban: Serial number of a further certificate to reject; repeatable.
        run: Name of a run with its own certificates (certs issue --run); repeatable.
        insecure: Allow plain links beyond this machine; anybody can then read messages and
            join.
        num_workers: Number of workers in the largest run; with TLS, messages of higher ranks
            are not relayed.
        lease: Lease of links in seconds; use the workers' value.
        metrics: PORT or HOST:PORT of /metrics for Prometheus, /healthz and /readyz; a port
            alone is for this machine only. By default none.
    """

    listen: tuple[str, ...]
    connect: tuple[str, ...] = ()
    tls: Path | None = None
    ban: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    run: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    insecure: bool = False
    num_workers: int = 64
    lease: Seconds = LEASE
    metrics: str | None = None

    def __post_init__(self) -> None:
        if self.metrics is not None:
            metrics_address(self.metrics)


def router_command(arguments: list[str]) -> int:
    """`edgegossip router`."""
    options = tyro.cli(RouterOptions, prog="edgegossip router", args=arguments)
    log_to_console(logging.INFO, TIMED, options)
    address = Address(listen=options.listen, connect=options.connect)
    tls = load_tls(options.tls, None, options.run, options.ban)
    require_tls(address, tls, insecure=options.insecure)
    stop = threading.Event()
    with (
        on_stop_signal(stop.set),
        serving_metrics(options.metrics) as metrics,
        Router(
            address,
            num_workers=options.num_workers,
            security=tls,
            run_names=options.run,
            lease=options.lease,
        ) as router,
        nullcontext() if metrics is None else metrics.showing(RouterMetrics(router)),
    ):
        print(f"router: listening at {', '.join(options.listen)}; Ctrl+C ends it", flush=True)
        stop.wait()
    return 0
