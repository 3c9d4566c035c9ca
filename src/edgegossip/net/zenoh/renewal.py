"""Renewal of sessions at run time when certificates change."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

import zenoh
from cryptography.exceptions import UnsupportedAlgorithm

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.certificates import common_name
from edgegossip.net.identity.tls import TLS, Credentials
from edgegossip.net.zenoh.session import KeepTrying

_LOG = logging.getLogger("edgegossip.net")
_LOOK: Seconds = 1.0
_COMPLAIN = 3
_EARLY: Seconds = 1.0
"""Seconds before the end of the own certificate at which links are closed. Sent frames still
arrive, and no link is reopened in the last second; see `ExpiredLinks`.
"""
_T = TypeVar("_T")


class CertificateWatch:
    """Watches the files of a worker or router for valid changes.

    Damaged or untrusted files change nothing: the last valid certificates and revocation lists
    stay in use, and a line is logged.

    Args:
        tls: The files.
        rank: Worker that owns the files; None for routers.
        run_names: Names of runs that the certificate may be bound to.

    Raises:
        NetworkError: If the files are invalid now; see `TLS.check`.
    """

    def __init__(self, tls: TLS, rank: Rank | None, run_names: Collection[str]) -> None:
        self.tls = tls
        self._rank = rank
        self._run_names = run_names
        self._contents = tls.contents()
        self.current = tls.check(rank, run_names)
        # Number of failures in a row of the same contents, by outcome.
        self._failures: Counter[str] = Counter()

    @property
    def seconds_left(self) -> Seconds:
        """Seconds until links must be closed, because the current certificate expires."""
        return (self.current.identity.end - datetime.now(UTC)).total_seconds() - _EARLY

    def complain_of_expiry(self) -> None:
        """Log that the current certificate expires now, and what to do."""
        which = "--router" if self._rank is None else f"--rank {self._rank}"
        _LOG.error(
            "%s expires at %s, so all links are closed and nothing can be exchanged; make a "
            "new one where the authority is (edgegossip certs issue %s --replace) and copy it "
            "and its key to this machine, where they take effect within seconds",
            self.tls.certificate,
            f"{self.current.identity.end:%Y-%m-%d %H:%M:%S} UTC",
            which,
        )

    def look(self) -> Credentials | None:
        """Read the files if they have changed; return new credentials, if any."""
        contents = self.tls.contents()
        if contents != self._contents:
            self._failures.clear()
        elif not self._failures:
            return None
        self._contents = contents
        before = self.current
        identity = self._try(
            "the current certificates stay in use",
            lambda: self.tls.identity(self._rank, self._run_names),
            before.identity,
        )
        after = self._try(
            "the earlier revocations stay in force, without new ones",
            lambda: self._with_revocations(replace(before, identity=identity)),
            replace(before, identity=identity),
        )
        if after == before:
            return None
        self.current = after
        if after.identity != before.identity:
            self.tls.warn(after.identity)
        if after.is_revoked:
            _LOG.error("%s is revoked; other workers close their links", self.tls.certificate)
        return after

    def _with_revocations(self, credentials: Credentials) -> Credentials:
        revocations = self.tls.revocations(credentials.identity, credentials.revocations)
        credentials = replace(credentials, revocations=revocations)
        credentials.anchors()  # raises if there are too many
        return credentials

    def _try(self, consequence: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            result = read()
        except (NetworkError, OSError, ValueError, UnsupportedAlgorithm) as error:
            self._failures[consequence] += 1
            # Wait: the administrator may be replacing one file after the other.
            if self._failures[consequence] == _COMPLAIN:
                _LOG.error("%s: %s", consequence, error)
            return otherwise
        del self._failures[consequence]
        return result


class RenewedSession:
    """A zenoh session that closes and reopens with new rules when certificates change.

    There is no other way, because a zenoh session keeps its initial rules. A stuck session is
    also reopened, with the same rules. When the own certificate expires, the session closes,
    and reopens as soon as there is a new certificate.

    Args:
        open_session: Opens a session with given credentials; for later sessions, it is retried
            until it succeeds.
        enter: Called with each opened session.
        leave: Called before each session is closed.
        lost: Called after a session is closed to be replaced, now or later.
        is_stuck: Returns whether the open session is stuck; called once a second.
        watch: Watches for changed files; None without certificates.
    """

    def __init__(
        self,
        open_session: Callable[[Credentials | None, KeepTrying], zenoh.Session],
        *,
        enter: Callable[[zenoh.Session], None],
        leave: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
        is_stuck: Callable[[], bool] = lambda: False,
        watch: CertificateWatch | None,
    ) -> None:
        self._open = open_session
        self._enter = enter
        self._leave = leave
        self._lost = lost
        self._is_stuck = is_stuck
        self._watch = watch
        self._session: zenoh.Session | None = None
        self._is_over = threading.Event()
        # Held while a session begins or ends.
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="renewal", daemon=True)

    def open(self, keep_trying: KeepTrying = lambda: True) -> None:
        """Open the first session.

        Raises:
            NetworkError: If the session cannot be opened, or `keep_trying` returns false.
        """
        credentials = None if self._watch is None else self._watch.current
        self._session = self._open(credentials, keep_trying)
        self._enter(self._session)
        self._thread.start()

    def close(self) -> None:
        """Close the session for good; has no effect if it is closed already."""
        self._is_over.set()
        with self._changing:
            self._end()

    def _end(self) -> bool:
        """Close the session; return False if it was closed already."""
        session, self._session = self._session, None
        if session is None:
            return False
        with suppress(zenoh.ZError):
            self._leave()
        with suppress(zenoh.ZError):  # a stuck link ends with the process
            session.close()  # type: ignore[no-untyped-call]
        return True

    def _follow(self) -> None:
        while not self._is_over.wait(self._pause):
            credentials = None if self._watch is None else self._watch.look()
            if credentials is not None:
                begin = time.monotonic()
                if self._renew(credentials):
                    _say_what_changed(credentials, time.monotonic() - begin)
            elif self._session is None:
                continue  # until there is a new certificate
            elif self._watch is not None and self._watch.seconds_left <= 0:
                self._watch.complain_of_expiry()
                self._close_for_now()
            elif self._is_stuck():
                self._renew(None if self._watch is None else self._watch.current)

    @property
    def _pause(self) -> Seconds:
        """Seconds until the next look."""
        if self._watch is None or self._session is None:
            return _LOOK
        return min(_LOOK, max(0.0, self._watch.seconds_left))

    def _close_for_now(self) -> bool:
        """Close this session; return False if `close` has been called."""
        with self._changing:
            if self._is_over.is_set():
                return False
            if self._end():
                self._lost()
        return True

    def _renew(self, credentials: Credentials | None) -> bool:
        """Replace this session with a new one; return False if `close` was called meanwhile."""
        if not self._close_for_now():
            return False
        session = self._open_at_last(credentials)
        with self._changing:
            if session is None or self._is_over.is_set():
                if session is not None:
                    session.close()  # type: ignore[no-untyped-call]
                return False
            self._session = session
            self._enter(session)
        return True

    def _open_at_last(self, credentials: Credentials | None) -> zenoh.Session | None:
        complained = False
        while not self._is_over.is_set():
            try:
                return self._open(credentials, lambda: not self._is_over.is_set())
            except NetworkError as error:
                if not complained:
                    _LOG.error("no new links: %s", error)
                complained = True
                self._is_over.wait(_LOOK)
        return None


def _say_what_changed(credentials: Credentials, seconds: Seconds) -> None:
    _LOG.warning(
        "certificates have changed: this one is %s until %s, %d are revoked; "
        "all links were closed, and can be reopened after %.1f s",
        common_name(credentials.identity.holder.subject),
        f"{credentials.identity.end:%Y-%m-%d %H:%M} UTC",
        sum(len(each.serials) for each in credentials.revocations.values()),
        seconds,
    )
