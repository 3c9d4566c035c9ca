"""An HTTP server with metrics for Prometheus, health and readiness.

It serves /metrics, /healthz and /readyz from daemon threads, so that it ends with the process.
Whatever is shown is read when somebody asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import psutil

from edgegossip.contract.errors import NetworkError, require_extra
from edgegossip.machine.http_server import ThreadedServer
from edgegossip.net.zenoh.router import Router

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LOG = logging.getLogger("edgegossip.real")
_MAX_PORT = 65535


@dataclass(frozen=True)
class MetricsAddress:
    """Where metrics are served.

    Attributes:
        host: Name or address of the interface.
        port: Port; 0 chooses a free one.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def plus(self, number: int) -> MetricsAddress:
        """The address with a port higher by `number`; a free port stays one.

        Raises:
            ValueError: If there is no such port.
        """
        if not self.port:
            return self
        if self.port + number > _MAX_PORT:
            raise ValueError(f"port {self.port + number} is above {_MAX_PORT}")
        return replace(self, port=self.port + number)


def metrics_address(given: str, what: str = "metrics") -> MetricsAddress:
    """Read PORT or HOST:PORT; a port alone is on 127.0.0.1.

    Raises:
        ValueError: If `given` is neither; the message begins with `what`.

    >>> print(*map(metrics_address, ("9464", "0.0.0.0:9464", "[::]:0")))
    127.0.0.1:9464 0.0.0.0:9464 [::]:0
    """
    host, colon, port = given.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_number = port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT
    if not is_number or bool(colon) != bool(host) or (":" in host and not is_bracketed):
        raise ValueError(
            f"{what} must be PORT or HOST:PORT with a port in 0..{_MAX_PORT}, such as 9464 "
            f"(this machine only) or 0.0.0.0:9464 (everybody), got {given!r}"
        )
    return MetricsAddress(host.strip("[]") or "127.0.0.1", int(port))


class Shown(Protocol):
    """The metrics, health and readiness of this process."""

    @property
    def is_healthy(self) -> bool:
        """Whether the process still handles events."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes part."""

    def collect(self) -> Iterable[Metric]:
        """Its metrics, read now."""


class RouterMetrics:
    """Metrics of a router, which is healthy and ready from when it listens.

    Args:
        router: The router.
    """

    is_healthy = is_ready = True

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        """See `Shown`."""
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily(
            "edgegossip_router_workers",
            "Workers of all runs that show signs of life at this router.",
            value=self._router.num_present,
        )


class MetricsServer:
    """Serves the metrics of this process until it is closed.

    Before anything is shown, and after its end, the process is healthy and not ready.

    Args:
        address: Where to listen.

    Attributes:
        port: Port at which it listens.

    Raises:
        NetworkError: If it cannot listen there.
        UsageError: If the package prometheus_client is missing.
    """

    def __init__(self, address: MetricsAddress) -> None:
        require_extra("--metrics", "prometheus_client", "metrics")
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._shown: Shown | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = _Server((address.host, address.port), _Handler)
        except OSError as error:
            raise NetworkError(
                f"cannot serve metrics at {address}: {error.strerror or error}; choose another "
                "--metrics PORT or HOST:PORT"
            ) from error
        self._server.set_app(self._answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        _LOG.info("metrics are at http://%s/metrics", replace(address, port=self.port))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def showing(self, shown: Shown) -> Iterator[None]:
        """Show `shown` within the block."""
        self._shown = shown
        try:
            yield
        finally:
            self._shown = None

    def collect(self) -> Iterable[Metric]:
        """Metrics of the process, and of what is shown; called at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        shown = self._shown
        # The client's own collector of a process is for Linux only; these are its names.
        process = psutil.Process()
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info().rss
            began = process.create_time()
        yield CounterMetricFamily(
            "process_cpu_seconds", "Processor time used.", value=times.user + times.system
        )
        yield GaugeMetricFamily("process_resident_memory_bytes", "Memory in use.", value=memory)
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start, in seconds since 1970.", value=began
        )
        is_ready = shown is not None and shown.is_ready
        yield GaugeMetricFamily("edgegossip_ready", "1 if /readyz says yes.", value=is_ready)
        if shown is not None:
            yield from shown.collect()

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        shown = self._shown
        match environ["PATH_INFO"]:
            case "/metrics":
                pages: Iterable[bytes] = self._metrics(environ, start_response)
                return pages
            case "/healthz":
                is_well, words = shown is None or shown.is_healthy, ("healthy", "not healthy")
            case "/readyz":
                is_well, words = shown is not None and shown.is_ready, ("ready", "not ready")
            case _:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"there are /metrics, /healthz and /readyz\n"]
        status = "200 OK" if is_well else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain")])
        return [f"{words[not is_well]}\n".encode()]


@contextmanager
def serving_metrics(where: str | None) -> Iterator[MetricsServer | None]:
    """Serve metrics within the block, at PORT or HOST:PORT; nothing without an address.

    Raises:
        NetworkError: If this machine cannot listen there.
        UsageError: If the package prometheus_client is missing.
        ValueError: If `where` is no address.
    """
    if where is None:
        yield None
        return
    server = MetricsServer(metrics_address(where))
    try:
        yield server
    finally:
        server.close()


class _Server(ThreadedServer, WSGIServer):
    def server_bind(self) -> None:
        super().server_bind()
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds; a silent client must not hold a thread for ever

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no news."""
