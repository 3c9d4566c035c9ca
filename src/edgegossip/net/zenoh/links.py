"""Links of a zenoh session: which leave the machine, are dead or expired, or of strangers."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import zenoh

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import is_loopback
from edgegossip.net.identity.certificates import Holder
from edgegossip.net.transport import Incarnation

_LOG = logging.getLogger("edgegossip.net")
_FIRST = 0x10000
_NUM_DIGITS = len(f"{_FIRST:x}")
_MAX_DOUBLINGS = 10
_MAX_REASONS = 1000
ALIVE = "edgegossip/*/alive/*/*"
"""Keys of all signs of life."""
_TOKEN = re.compile(r"edgegossip/([^/]+)/alive/(\d{1,9})/[^/]+")
Ends: TypeAlias = tuple[str, str, str]
"""The session at the other end of a link, and the addresses of both ends."""
Report: TypeAlias = Callable[[Rank | None, str], None]
"""Called from any thread for a stranger, with its claimed rank (if any) and a reason."""


class Links:
    """The open links of a session; links within this machine use no network card.

    Attributes:
        leaving: Whether a link leaves this machine, by its ends. The dict is replaced, never
            changed, because zenoh's threads write while other threads read.
    """

    def __init__(self) -> None:
        self.leaving: dict[Ends, bool] = {}
        self._ended: Callable[[Incarnation], object] = lambda _: None

    def follow(
        self, session: zenoh.Session, ended: Callable[[Incarnation], object] = lambda _: None
    ) -> None:
        """Follow `session` until it is closed or another one is followed.

        Workers that call each other have two links. zenoh uses one at a time, counts only the
        incoming ones (`max_links`), and does not tell of what was lost with one of two.

        Args:
            session: The session.
            ended: Called with the process at the other end of a link that has ended, if there
                is another link to it.
        """
        self.leaving, self._ended = {}, ended
        _follow(session, self._linked)

    def leave_machine(self, session_id: str | None) -> bool:
        """Whether traffic with a session leaves this machine.

        Without a link to that session, any external link counts, because the path leads over a
        router or is not known yet.
        """
        links = self.leaving
        direct = [leaves for (other, *_), leaves in links.items() if other == session_id]
        return any(direct or links.values())

    def host(self, incarnation: Incarnation) -> str | None:
        """Host at which a process is reached without a relay; None if there is no such link."""
        for other, _, destination in self.leaving:
            if process_of(other) == incarnation:
                return destination.split("/", 1)[1].rpartition(":")[0].strip("[]")
        return None

    @property
    def ranks(self) -> set[Rank]:
        """Workers at the other ends, as their session ids say."""
        length = len(new_session_id(0))
        sessions = [zid for zid, *_ in self.leaving if len(zid) == length]
        return {int(zid[:_NUM_DIGITS], 16) - _FIRST for zid in sessions}

    def _linked(self, link: zenoh.Link, *, is_open: bool) -> None:
        # A copy, as other threads read it while this one writes.
        leaving, ends = dict(self.leaving), _ends(link)
        leaving.pop(ends, None)
        if is_open:
            leaving[ends] = not _is_within(*ends[1:])
        self.leaving = leaving
        process, is_left = process_of(ends[0]), any(other == ends[0] for other, *_ in leaving)
        if not is_open and is_left and process is not None:
            self._ended(process)


class _Linked(Protocol):
    def __call__(self, link: zenoh.Link, *, is_open: bool) -> None: ...


def _follow(session: zenoh.Session, linked: _Linked, *, history: bool = True) -> None:
    """Call `linked` for each link that is opened or closed."""

    def report(event: zenoh.LinkEvent) -> None:
        linked(event.link, is_open=event.kind == zenoh.SampleKind.PUT)

    # At once, without a thread of its own: a link must be known before its messages arrive.
    handler = zenoh.handlers.Callback(report, indirect=False)
    session.info.declare_link_events_listener(handler, history=history)


def _ends(link: zenoh.Link) -> Ends:
    return str(link.zid), str(link.src), str(link.dst)


def _is_within(source: str, destination: str) -> bool:
    """Whether both ends of a link are on this machine, so that its traffic stays internal."""
    return is_loopback(source) or source.rpartition(":")[0] == destination.rpartition(":")[0]


def new_session_id(rank: Rank, incarnation: Incarnation = 0) -> str:
    """Draw the id of a session of `rank`; the id contains the rank and the incarnation.

    >>> len(new_session_id(3)), new_session_id(3, 0xBEEF)[:21]
    (27, '10003000000000000beef')
    """
    return f"{_FIRST + rank:x}{incarnation:016x}{secrets.token_hex(3)}"


def process_of(session_id: str | None) -> Incarnation | None:
    """The incarnation in a session's id; None if it is not the session of a worker.

    >>> process_of(new_session_id(3, 17)), process_of("c0ffee"), process_of(None)
    (17, None, None)
    """
    if session_id is None or len(session_id) != _NUM_DIGITS + 22:
        return None
    return int(session_id[_NUM_DIGITS : _NUM_DIGITS + 16], 16)


class DeadLinks:
    """Detects links to workers that show no sign of life.

    A zenoh session that closes during an incoming connection may admit the new link after it
    has closed all other links. The new link then lives as long as the process. The caller
    believes that it has reached the worker, and never connects to the worker's next session.
    Only the caller can end this, by opening a new session.

    A malicious worker could cause such renewals by linking without a sign of life, so the wait
    doubles each time.

    Args:
        links: Links of the session.
        patience: Seconds for which a link may lack a sign of life. A leaving worker withdraws
            its token and then stays for at most a lease.
    """

    def __init__(self, links: Links, patience: Seconds) -> None:
        self._links = links
        self._patience = patience
        self._num_found = 0
        self._silent_since: dict[Rank, Seconds] = {}

    def start_over(self) -> None:
        """Forget the links of the session before."""
        self._silent_since = {}

    def find(self, absent: Collection[Rank]) -> Rank | None:
        """Look for a worker whose link has lacked a sign of life for too long."""
        silent, now = self._links.ranks.intersection(absent), time.monotonic()
        # A worker that was seen meanwhile is not in it, so its time begins anew.
        self._silent_since = {rank: self._silent_since.get(rank, now) for rank in silent}
        patience = self._patience * 2 ** min(self._num_found, _MAX_DOUBLINGS)
        found = [rank for rank, since in self._silent_since.items() if now - since > patience]
        if not found:
            return None
        self._num_found += 1
        return min(found)


class ExpiredLinks:
    """Detects links whose other end may have reopened them with an expiring certificate.

    zenoh closes all links of a certificate at the beginning of the second in which it expires.
    TLS accepts the certificate until the end of that second. A link that is opened in between
    may stay for good (zenoh 1.10), and only a new session, with new handshakes, ends it. zenoh
    tells no end of a certificate, so every session is suspect whose link was closed and
    reopened within one second of this machine's clock. A worker closes its own links before
    its certificate expires, so honest workers cause this only if their clock is late.

    A malicious worker could cause renewals by reopening its links often, so the wait doubles
    each time. It can hide its expiry by opening another session in that second.

    Args:
        clock: Returns the time of day in seconds since 1970, as certificates have it.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.time) -> None:
        self._clock = clock
        self._num_found = 0
        self._lock = threading.Lock()
        self._closed_in: dict[str, int] = {}
        self._suspects: dict[Ends, tuple[int, str]] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Follow `session` until it is closed or another one is followed."""
        with self._lock:
            self._closed_in, self._suspects = {}, {}
        # Without history: links that are open already were not reopened.
        _follow(session, self._linked, history=False)

    def find(self) -> bool:
        """Whether a link may have outlived its certificate; logs whose link it is."""
        wait = 2 ** min(self._num_found, _MAX_DOUBLINGS)
        now = int(self._clock())
        with self._lock:
            self._closed_in = {zid: at for zid, at in self._closed_in.items() if at == now}
            names = {name for at, name in self._suspects.values() if now >= at + wait}
        if not names:
            return False
        self._num_found += 1
        _LOG.warning(
            "the certificate of %s may have expired: its link was closed and reopened within a "
            "second; all links are reopened, which only valid certificates permit",
            ", ".join(sorted(names)),
        )
        return True

    def _linked(self, link: zenoh.Link, *, is_open: bool) -> None:
        self.take(_ends(link), link.auth_identifier, is_open=is_open)

    def take(self, ends: Ends, name: str | None, *, is_open: bool) -> None:
        """Note that a link of a certificate's holder was opened or closed just now."""
        now = int(self._clock())
        with self._lock:
            # Only the second counts, because certificates know no fractions.
            if not is_open:
                self._closed_in[ends[0]] = now
                self._suspects.pop(ends, None)
            elif name is not None and self._closed_in.get(ends[0]) == now:
                self._suspects[ends] = (now, name)


def warn_without_relay(session: zenoh.Session, holders: Mapping[str, Holder]) -> None:
    """Warn if a worker that does not listen is linked to another worker, and not to a router.

    Nobody calls such a worker, and the other worker cannot relay: each end of a link drops
    messages that name another sender than the certificate.

    Args:
        session: Session of a worker that does not listen and has certificates.
        holders: Holders of the permitted certificates, by common name.
    """
    warned: set[Rank] = set()

    def linked(link: zenoh.Link, *, is_open: bool) -> None:
        rank = holders.get(link.auth_identifier or "")
        if not is_open or not isinstance(rank, int) or rank in warned:
            return
        warned.add(rank)
        _LOG.warning(
            "this worker reaches only worker %d, because it does not listen, and workers with "
            "certificates do not relay; to reach the others too, give --listen tls/0.0.0.0:0 "
            "(any free port), or --connect with the endpoint of a router",
            rank,
        )

    _follow(session, linked)


def log_refused_connections() -> None:
    """Let zenoh print a line for every connection that TLS rejects.

    Connections with a wrong authority, with an expired or missing certificate, or without TLS
    fail before there is a session. Zenoh reports these only in its log on standard output. The
    environment variable RUST_LOG has priority.
    """
    with _plain_unless_on_a_terminal():
        zenoh.init_log_from_env_or(
            # Access control drops declarations of others, but not their later withdrawal, which
            # zenoh then calls unknown. Such lines name no peer, and nothing is to be done.
            "error,zenoh::net::routing::hat=off,zenoh::api::session=off,"
            "zenoh_link_tls::unicast=warn,zenoh_link_commons::tls=warn"
        )


def log_as_environment_says() -> None:
    """Let zenoh log what the environment variable RUST_LOG asks for, if it is set."""
    if os.environ.get("RUST_LOG"):
        with _plain_unless_on_a_terminal():
            zenoh.try_init_log_from_env()  # type: ignore[no-untyped-call]


@contextmanager
def _plain_unless_on_a_terminal() -> Iterator[None]:
    """Keep codes for colors out of files: zenoh looks at NO_COLOR when its log begins."""
    is_set = "NO_COLOR" in os.environ
    if not is_set and not sys.stdout.isatty():
        os.environ["NO_COLOR"] = "1"
    yield
    if not is_set:
        os.environ.pop("NO_COLOR", None)


def report_strangers(
    session: zenoh.Session,
    run: str,
    num_workers: int,
    holders: Mapping[str, Holder],
    refused: Report,
) -> None:
    """Call `refused` for links of peers outside the run and for workers of other runs.

    Their messages are dropped. Reports end when the session is closed.

    Args:
        session: Session of a worker.
        run: Name of the run in the keys.
        num_workers: Number of workers in the run.
        holders: Holders of the permitted certificates, by common name.
        refused: Called once for each stranger.
    """
    # A link names a certificate, a sign of life names a rank: either may be the first to show.
    report_links(session, holders, lambda reason: refused(None, reason))
    report = _once(refused)

    def appeared(sample: zenoh.Sample) -> None:
        match = _TOKEN.fullmatch(str(sample.key_expr))
        # The rank is only a claim: a stranger may be anybody.
        if match and match[1] != run:
            rank = int(match[2])
            reason = (
                f"a sign of life in run {match[1][:80]!r}, whose recipe or --name differs from "
                f"this run, {run!r}"
            )
            report(rank if rank < num_workers else None, reason)

    session.liveliness().declare_subscriber(ALIVE, appeared, history=True)


def token_of(key: str) -> tuple[str, Rank | None]:
    """The run and the rank that a sign of life names; both are claims.

    >>> token_of("edgegossip/night:quickstart/alive/3/17"), token_of("else")
    (('night:quickstart', 3), ('', None))
    """
    match = _TOKEN.fullmatch(key)
    return ("", None) if match is None else (match[1], int(match[2]))


def report_links(
    session: zenoh.Session, holders: Mapping[str, Holder], refused: Callable[[str], None]
) -> None:
    """Call `refused` once for each link of a peer that is no worker, router or observer.

    This includes links that join another peer's session. Zenoh verifies with only a short key
    that both links belong to one session.

    Args:
        session: Session of a worker or a router.
        holders: Holders of the permitted certificates, by common name.
        refused: Called with the reason.
    """
    num_workers = len({each for each in holders.values() if isinstance(each, int)})
    names: dict[str, str] = {}
    report = _once(lambda _, reason: refused(reason))

    def linked(link: zenoh.Link, *, is_open: bool) -> None:
        name, session_id = link.auth_identifier, str(link.zid)
        if not is_open:
            names.pop(session_id, None)
        elif name is None:
            return  # without certificates there are no names
        elif name not in holders and "@" in name:
            report(None, f"a link from {name[:80]!r}, which is valid only in other runs")
        elif name not in holders:
            report(
                None,
                f"a link from {name[:80]!r}, which is not one of the {num_workers} workers",
            )
        # One session with links of two certificates: the second link uses the rights of the
        # first.
        elif names.setdefault(session_id, name) != name:
            report(None, f"a link from {name!r} in a session of {names[session_id]!r}")

    _follow(session, linked)


def _once(refused: Report) -> Report:
    """Wrap `refused` so that it gets each reason once, and at most a thousand reasons."""
    reported: set[tuple[Rank | None, str]] = set()

    def report(rank: Rank | None, reason: str) -> None:
        if (rank, reason) not in reported and len(reported) < _MAX_REASONS:
            reported.add((rank, reason))
            refused(rank, reason)

    return report
