"""Sessions of zenoh: opened as soon as a peer answers, and renewed when certificates change."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

import zenoh

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Seconds
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import common_name
from edgegossip.net.identity.tls import CertificateWatch, Credentials

LEASE: Seconds = 15.0
"""Half of the worst-case time until a silent machine counts as lost. It must exceed a worker's
pauses on a busy machine; 1.5 s did not. On a link of 64 kbit/s that is used up, TCP may need
more than 5 s to repeat what was lost (`benchmarks/thin_links.py`).
"""
CHUNK_BYTES = 256 * 1024
"""Largest piece of a frame. Smaller pieces cost more calls; larger ones exceed the caches
(`benchmarks/exchange.py`).
"""
_LEASES = (0.1, 3600.0)
KeepTrying: TypeAlias = Callable[[], bool]
"""Polled several times per second while no peer answers; if it returns false, the attempt
ends."""
_LOG = logging.getLogger("edgegossip.net")
_POLL: Seconds = 0.1
_WATCH: Seconds = 1.0
"""Seconds between two looks at certificates and at the state of the links."""
_RETRY: Seconds = 0.5
_SOON: Seconds = 3.0
_LATER: Seconds = 30.0


def _give_each_link_a_thread(num_workers: int) -> None:
    """Keep a cut link from blocking other links; an existing `ZENOH_RUNTIME` has priority.

    A cut link's socket lingers for ten seconds with undelivered data, and blocks a thread of
    zenoh. With zenoh's default of one or two threads, a worker would notice losses too late and
    lose connected peers.
    """
    threads = f"(worker_threads: {num_workers + 1})"
    runtimes = ", ".join(f"{name}: {threads}" for name in ("rx", "tx", "net"))
    os.environ.setdefault("ZENOH_RUNTIME", f"({runtimes})")


def require_lease(lease: Seconds) -> None:
    """Validate `lease`.

    Raises:
        ValueError: If `lease` is out of range.
    """
    shortest, longest = _LEASES
    if not shortest <= lease <= longest:
        raise ValueError(f"lease must be from {shortest} to {longest:g} seconds, got {lease}")


def session_settings(address: Address, lease: Seconds, *, is_secure: bool) -> dict[str, object]:
    """Settings that differ from zenoh's defaults, by key in its configuration.

    Raises:
        ValueError: If `lease` is out of range.
    """
    require_lease(lease)
    listen, is_local = address.listen, address.is_loopback and not address.multicast
    if address.multicast and not listen:
        listen = ("tls/0.0.0.0:0" if is_secure else "tcp/0.0.0.0:0",)
    return {
        # A worker that does not listen is never called. The peer that it calls relays all
        # messages; with certificates, only a router may (see `relaying`).
        "mode": "peer" if listen else "client",
        "listen/endpoints": list(listen),
        "connect/endpoints": list(address.connect),
        # Absent peers are called until they answer. A client has no session before the first
        # answer, so `_open_client` makes its first call.
        "connect/timeout_ms": -1 if listen else 0,
        "connect/exit_on_failure": False,
        "connect/retry": {
            "period_init_ms": 100,
            "period_max_ms": 1000,
            "period_increase_factor": 1.5,
        },
        # Nothing is sent to a worker before it has appeared.
        "open/return_conditions": {"connect_scouted": False, "declares": False},
        # Shared memory bypasses the link, and a killed process leaves 16 MB behind until the
        # next one begins. However, it halves the time on one machine.
        "transport/shared_memory/enabled": is_local,
        # The shared memory of departed neighbors, 16 MB each, stays mapped for good. That is
        # too high a price for small messages, which are copied quickly.
        "transport/shared_memory/transport_optimization/message_size_threshold": (
            CHUNK_BYTES // 2
        ),
        # Priorities would let the end of a token overtake the last messages.
        "transport/unicast/qos/enabled": False,
        "scouting/multicast/enabled": address.multicast,
        "transport/link/tx/lease": round(lease * 1e3),
        # Signs of life per lease. On a link that loses frames, TCP notices a lost one by the
        # next ones; with too few, it waits twice as long for each repetition.
        "transport/link/tx/keep_alive": 8,
        # During this time, a link that a peer waits for cannot be cut.
        "transport/link/tx/queue/congestion_control/block/wait_before_close": round(
            lease * 1e6
        ),
        # Batches of 64 kB. With zenoh's default of two, the ends wait a third of the time.
        "transport/link/tx/queue/size/data": 16,
        # Strangers cannot make this machine buffer more for a message.
        "transport/link/rx/max_message_size": 4 * CHUNK_BYTES,
    }


def open_session(
    settings: Mapping[str, object],
    address: Address,
    num_workers: int,
    keep_trying: KeepTrying = lambda: True,
) -> zenoh.Session:
    """Open a session at `address`, for links with `num_workers` workers.

    A listening session opens at once. A session that does not listen opens when the first peer
    answers; until then it logs its attempts at intervals.

    Args:
        settings: Result of `session_settings`.
        address: Endpoints to listen at and to connect to.
        num_workers: Number of workers in the run.
        keep_trying: See `KeepTrying`.

    Raises:
        NetworkError: If listening fails, or `keep_trying` returns false.
    """
    # Before the first session of the process, which reads this once.
    _give_each_link_a_thread(num_workers)
    config = zenoh.Config()
    for key, value in settings.items():
        config.insert_json5(key, json.dumps(value))
    if settings["mode"] == "client":
        return _open_client(config, ", ".join(address.connect), keep_trying)
    try:
        return zenoh.open(config)
    except zenoh.ZError as error:
        raise NetworkError(
            f"cannot listen at {', '.join(address.listen) or 'any port'}: {error}; "
            "does this machine have that address, and is the port free?"
        ) from None


def _open_client(
    config: zenoh.Config, endpoints: str, keep_trying: KeepTrying
) -> zenoh.Session:
    """Try the endpoints until one answers."""
    began, say_after, answer = time.monotonic(), _SOON, _Attempt(config)
    problem = "no answer yet"
    while keep_trying():
        if (session := answer.wait(_POLL)) is not None:
            return session
        waited = time.monotonic() - began
        if waited >= say_after:
            say_after = waited + _LATER
            _LOG.warning("still trying to reach %s: %s", endpoints, problem)
        if answer.has_failed:
            problem = "no program listens there, or it rejects this worker"
            time.sleep(_RETRY)
            answer = _Attempt(config)
    answer.give_up()
    raise NetworkError(
        f"cannot reach {endpoints}: {problem}. Is the worker or router there running, and "
        "the path to it open? `edgegossip doctor --connect` tests it"
    )


class _Attempt:
    """One attempt to open a session, in a thread because zenoh's wait blocks signals."""

    def __init__(self, config: zenoh.Config) -> None:
        self.has_failed = False
        self._config = config
        self._lock = threading.Lock()
        self._has_given_up = False
        self._found: queue.SimpleQueue[zenoh.Session | zenoh.ZError] = queue.SimpleQueue()
        threading.Thread(target=self._open, name="open a session", daemon=True).start()

    def wait(self, seconds: Seconds) -> zenoh.Session | None:
        """Wait up to `seconds` for the session; None if it has not opened."""
        try:
            found = self._found.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, zenoh.Session):
            return found
        self.has_failed = True
        return None

    def give_up(self) -> None:
        """Stop waiting; if the session opens later, close it."""
        with self._lock:
            self._has_given_up = True
        if (session := self.wait(0)) is not None:
            session.close()  # type: ignore[no-untyped-call]

    def _open(self) -> None:
        found: zenoh.Session | zenoh.ZError
        try:
            found = zenoh.open(self._config)
        except zenoh.ZError as error:
            found = error
        with self._lock:
            if not self._has_given_up:
                self._found.put(found)
                return
        if isinstance(found, zenoh.Session):
            found.close()  # type: ignore[no-untyped-call]


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
        # First the end of all renewals, so that none opens another session behind this one.
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
            # Changed files come first: a new certificate may be the remedy for an expired one.
            credentials = None if self._watch is None else self._watch.poll()
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
            return _WATCH
        return min(_WATCH, max(0.0, self._watch.seconds_left))

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
        # Without the lock, because this may take long and `close` must not wait for it.
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
                self._is_over.wait(_WATCH)
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
