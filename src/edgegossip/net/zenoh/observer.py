"""An observer of runs: it asks workers for their logs, over one worker or router."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import zenoh

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.identity.access import STATUS, zenoh_security
from edgegossip.net.identity.certificates import OBSERVER
from edgegossip.net.identity.tls import TLS, CertificateWatch, Credentials, require_tls
from edgegossip.net.zenoh.links import log_refused_connections
from edgegossip.net.zenoh.session import (
    LEASE,
    KeepTrying,
    RenewedSession,
    open_session,
    session_settings,
)

INTERVAL: Seconds = 0.5
"""Seconds between two questions."""
_PATIENCE: Seconds = 5.0
"""Seconds for which an answer may be under way before the question is asked again."""
_MAX_LOGS = 4096
_KEY = re.compile(r"edgegossip/([A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]+)?)/status/(\d{1,6})")
_LOG = logging.getLogger("edgegossip.net")


class Reader(Protocol):
    """Gets the lines of workers' logs, from one thread."""

    def read(self, run: str, rank: Rank, lines: bytes, *, is_first: bool) -> None:
        """Take complete lines of worker `rank`; if `is_first`, earlier ones no longer count."""


class _Log:
    """How far the log of a worker has been read."""

    def __init__(self) -> None:
        self.file = self.position = 0
        self.asked_at: Seconds | None = None  # while an answer is under way


class Observer:
    """Reads the logs of workers, without sending anything but questions for them.

    Workers answer with the last 4 MiB of their logs and then with what is new, so an observer
    that is started again loses nothing recent. Nothing is asked while `is_wanted` says no.

    Args:
        address: Endpoints of workers or routers; the first that answers is used, and it relays
            questions to the others.
        reader: Gets the lines.
        security: The observer's files; without them, links are plain.
        run_names: Names of runs to which workers' certificates may be bound; unbound
            certificates are always accepted.
        num_workers: Number of workers in the largest run; with `security`, no link with a
            worker of a higher rank is used.
        insecure: Allow plain links beyond this machine.
        lease: As in `ZenohTransport`.
        is_wanted: Returns whether somebody wants to know.

    Raises:
        NetworkError: If `security` is invalid, or is missing beyond this machine.
        ValueError: If `lease` is out of range.
    """

    def __init__(
        self,
        address: Address,
        reader: Reader,
        *,
        security: TLS | None = None,
        run_names: Sequence[str] = (),
        num_workers: int = 64,
        insecure: bool = False,
        lease: Seconds = LEASE,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        require_tls(address, security, insecure=insecure)
        self._address = address
        self._reader = reader
        self._run_names = run_names
        self._num_workers = num_workers
        self._is_wanted = is_wanted
        self._settings = session_settings(address, lease, is_secure=security is not None)
        watch = None
        if security is not None:
            log_refused_connections()
            watch = CertificateWatch(security, OBSERVER, run_names)
        self._logs: dict[str, _Log] = {}
        self._lock = threading.Lock()  # held while answers are used
        self._zenoh: zenoh.Session | None = None
        self._is_over = threading.Event()
        self._session = RenewedSession(
            self._open_session, enter=self._enter, leave=self._leave, watch=watch
        )
        self._thread = threading.Thread(target=self._ask, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._is_over.set()
        self._thread.join()
        self._session.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_session(
        self, credentials: Credentials | None, keep_trying: KeepTrying
    ) -> zenoh.Session:
        settings = self._settings
        if credentials is not None:
            names = self._run_names
            settings = settings | zenoh_security(
                credentials, "*", self._num_workers, names, is_observer=True
            )
        return open_session(settings, self._address, 1, keep_trying)

    def _enter(self, session: zenoh.Session) -> None:
        self._zenoh = session

    def _leave(self) -> None:
        self._zenoh = None

    def _ask(self) -> None:
        try:
            self._session.open(lambda: not self._is_over.is_set())
        except NetworkError as error:
            if not self._is_over.is_set():
                _LOG.error("%s", error)
            return
        while not self._is_over.wait(INTERVAL):
            session = self._zenoh
            if session is not None and self._is_wanted():
                self._get(session, STATUS, b"", self._heard)

    def _get(
        self,
        session: zenoh.Session,
        key: str,
        question: bytes,
        use: Callable[[str, bytes], None],
    ) -> None:
        with suppress(zenoh.ZError):
            session.get(
                key,
                lambda reply: self._answered(reply, use),
                payload=question,
                # Also of answers: never at the cost of the workers' own messages.
                congestion_control=zenoh.CongestionControl.DROP,
                consolidation=zenoh.ConsolidationMode.NONE,
                timeout=_PATIENCE,
            )

    # Answers, from threads of zenoh.

    def _answered(self, reply: zenoh.Reply, use: Callable[[str, bytes], None]) -> None:
        sample = reply.ok
        if sample is not None and not self._is_over.is_set():
            # A damaged answer counts as none.
            with self._lock, suppress(ValueError, LookupError, TypeError):
                use(str(sample.key_expr), sample.payload.to_bytes())

    def _heard(self, key: str, answer: bytes) -> None:
        """Ask a worker whose log has grown for its lines."""
        about = json.loads(answer)
        if not _KEY.fullmatch(key) or (key not in self._logs and len(self._logs) >= _MAX_LOGS):
            return
        log = self._logs.setdefault(key, _Log())
        if int(about["file"]) != log.file or int(about["size"]) != log.position:
            self._ask_for_lines(key, log)

    def _ask_for_lines(self, key: str, log: _Log) -> None:
        now = time.monotonic()
        if log.asked_at is not None and now - log.asked_at < _PATIENCE:
            return
        session, log.asked_at = self._zenoh, now
        if session is not None:
            question = f"{log.file} {log.position}".encode()
            self._get(session, key, question, self._read)

    def _read(self, key: str, answer: bytes) -> None:
        head, _, lines = answer.partition(b"\n")
        about, log, match = json.loads(head), self._logs[key], _KEY.fullmatch(key)
        file, begin, end = (int(about[name]) for name in ("file", "from", "to"))
        is_first = file != log.file or begin == 0
        if match is None or not (is_first or begin == log.position) or end < begin:
            return  # twice, as after a question that was asked again
        log.file, log.position, log.asked_at = file, end, None
        if lines or is_first:
            self._reader.read(match[1], int(match[2]), lines, is_first=is_first)
        # Until all is read; then the next question shows what is new.
        if lines and end < int(about["size"]):
            self._ask_for_lines(key, log)
