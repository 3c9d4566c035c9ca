"""Expired links: opened with a certificate in its last second, and never closed by zenoh."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zenoh

from edgegossip.core.protocol import Seconds
from edgegossip.net.known_links import Ends

_LOG = logging.getLogger("edgegossip.net")
_MAX_DOUBLINGS = 10


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
        linked = zenoh.handlers.Callback(self._linked, indirect=False)
        session.info.declare_link_events_listener(linked, history=False)

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

    def _linked(self, event: zenoh.LinkEvent) -> None:
        link = event.link
        ends = (str(link.zid), str(link.src), str(link.dst))
        self.take(ends, link.auth_identifier, is_open=event.kind == zenoh.SampleKind.PUT)

    def take(self, ends: Ends, name: str | None, *, is_open: bool) -> None:
        """Note that a link of a certificate's holder was opened or closed just now."""
        now = int(self._clock())
        with self._lock:
            if not is_open:
                self._closed_in[ends[0]] = now
                self._suspects.pop(ends, None)
            elif name is not None and self._closed_in.get(ends[0]) == now:
                self._suspects[ends] = (now, name)
