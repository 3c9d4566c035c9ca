"""Those who reach this worker and have no part in its run: zenoh keeps them out, we say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import zenoh

from edgegossip.core.protocol import Rank
from edgegossip.net.certificates import holder_name

Refused: TypeAlias = Callable[[Rank | None, str], None]
"""Told of a stranger, by the rank it claims, if any; may be called from any thread."""

_TOKEN = re.compile(r"edgegossip/([^/]+)/alive/(\d{1,9})/[^/]+")


def log_refused_connections() -> None:
    """Let zenoh print a line for every connection that TLS refuses.

    A wrong authority, an expired certificate or none, a client that speaks plainly: these fail
    before there is a session, and zenoh tells of them in its log only, on standard output.
    What the environment variable RUST_LOG says goes first.
    """
    zenoh.init_log_from_env_or("error,zenoh_link_tls::unicast=warn")


def report_strangers(
    session: zenoh.Session, run: str, num_workers: int, refused: Refused
) -> None:
    """Call `refused` for links of those who are no workers of the run, and for other runs.

    Nothing comes of what they send. This lasts until the session is closed.

    Args:
        session: That of a worker.
        run: Its run's name in the keys.
        num_workers: Of the run.
        refused: Called once for each stranger.
    """
    known = {holder_name(rank) for rank in (*range(num_workers), None)}
    strangers: set[str] = set()

    def report(stranger: str, rank: Rank | None, reason: str) -> None:
        if stranger not in strangers and len(strangers) < 1000:
            strangers.add(stranger)
            refused(rank, reason)

    def linked(event: zenoh.LinkEvent) -> None:
        name = event.link.auth_identifier
        if event.kind == zenoh.SampleKind.PUT and name is not None and name not in known:
            report(name, None, f"a link from {name[:80]!r}, which is no worker of this run")

    def appeared(sample: zenoh.Sample) -> None:
        match = _TOKEN.fullmatch(str(sample.key_expr))
        if match and match[1] != run:
            rank = int(match[2])
            reason = (
                f"a sign of life in run {match[1][:80]}, whose settings or --name are not "
                f"those of this run, {run}"
            )
            report(f"{rank}: {reason}", rank if rank < num_workers else None, reason)

    session.info.declare_link_events_listener(linked, history=True)
    session.liveliness().declare_subscriber("edgegossip/*/alive/*/*", appeared, history=True)
