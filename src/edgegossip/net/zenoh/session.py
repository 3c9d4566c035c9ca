"""Opening zenoh sessions, at once or as soon as a peer answers."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import zenoh

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Seconds
from edgegossip.net.address import Address
from edgegossip.net.transport import CHUNK_BYTES

LEASE: Seconds = 5.0
"""Half of the worst-case time until a silent machine counts as lost. It must exceed a worker's
pauses on a busy machine; 1.5 s did not.
"""
_LEASES = (0.1, 3600.0)
KeepTrying: TypeAlias = Callable[[], bool]
"""Polled several times per second while no peer answers; if it returns false, the attempt
ends."""
_LOG = logging.getLogger("edgegossip.net")
_LOOK: Seconds = 0.1
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
        "transport/link/tx/keep_alive": 4,
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
        if (session := answer.wait(_LOOK)) is not None:
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
