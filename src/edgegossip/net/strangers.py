"""Strangers: peers outside the run, which zenoh rejects and this module reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import zenoh

from edgegossip.core.protocol import Rank

Refused: TypeAlias = Callable[[Rank | None, str], None]
"""Called from any thread for a stranger, with its claimed rank (if any) and a reason."""

_TOKEN = re.compile(r"edgegossip/([^/]+)/alive/(\d{1,9})/[^/]+")


def log_refused_connections() -> None:
    """Let zenoh print a line for every connection that TLS rejects.

    Connections with a wrong authority, with an expired or missing certificate, or without TLS
    fail before there is a session. Zenoh reports these only in its log on standard output. The
    environment variable RUST_LOG has priority.
    """
    zenoh.init_log_from_env_or(
        # Access control drops declarations of others, but not their later withdrawal, which
        # zenoh then calls unknown. Such lines name no peer, and nothing is to be done.
        "error,zenoh::net::routing::hat=off,zenoh::api::session=off,"
        "zenoh_link_tls::unicast=warn,zenoh_link_commons::tls=warn"
    )


def report_strangers(
    session: zenoh.Session,
    run: str,
    num_workers: int,
    holders: Mapping[str, Rank | None],
    refused: Refused,
) -> None:
    """Call `refused` for links of peers outside the run and for workers of other runs.

    Their messages are dropped. Reports end when the session is closed.

    Args:
        session: Session of a worker.
        run: Name of the run in the keys.
        num_workers: Number of workers in the run.
        holders: Ranks of the permitted certificates, by common name.
        refused: Called once for each stranger.
    """
    report_links(session, holders, lambda reason: refused(None, reason))
    report = _once(refused)

    def appeared(sample: zenoh.Sample) -> None:
        match = _TOKEN.fullmatch(str(sample.key_expr))
        if match and match[1] != run:
            rank = int(match[2])
            reason = (
                f"a sign of life in run {match[1][:80]!r}, whose recipe or --name differs from "
                f"this run, {run!r}"
            )
            report(rank if rank < num_workers else None, reason)

    session.liveliness().declare_subscriber("edgegossip/*/alive/*/*", appeared, history=True)


def report_links(
    session: zenoh.Session, holders: Mapping[str, Rank | None], refused: Callable[[str], None]
) -> None:
    """Call `refused` once for each link of a peer that is neither a worker nor a router.

    This includes links that join another peer's session. Zenoh verifies with only a short key
    that both links belong to one session.

    Args:
        session: Session of a worker or a router.
        holders: Ranks of the permitted certificates, by common name.
        refused: Called with the reason.
    """
    num_workers = len({rank for rank in holders.values() if rank is not None})
    names: dict[str, str] = {}
    report = _once(lambda _, reason: refused(reason))

    def linked(event: zenoh.LinkEvent) -> None:
        name, session_id = event.link.auth_identifier, str(event.link.zid)
        if event.kind != zenoh.SampleKind.PUT:
            names.pop(session_id, None)
        elif name is None:
            return
        elif name not in holders and "@" in name:
            report(None, f"a link from {name[:80]!r}, which is valid only in other runs")
        elif name not in holders:
            report(
                None,
                f"a link from {name[:80]!r}, which is not one of the {num_workers} workers",
            )
        elif names.setdefault(session_id, name) != name:
            report(None, f"a link from {name!r} in a session of {names[session_id]!r}")

    session.info.declare_link_events_listener(linked, history=True)


def _once(refused: Refused) -> Refused:
    """Wrap `refused` so that it gets each reason once, and at most a thousand reasons."""
    told: set[tuple[Rank | None, str]] = set()

    def report(rank: Rank | None, reason: str) -> None:
        if (rank, reason) not in told and len(told) < 1000:
            told.add((rank, reason))
            refused(rank, reason)

    return report
