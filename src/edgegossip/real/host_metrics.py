"""Metrics of a worker, read from its host when somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.host import Host

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PATIENCE: Seconds = 60.0
"""Seconds within which the host's thread must handle an event to be healthy. Training runs in
another thread, but a checkpoint on a slow disk does not."""


class HostMetrics:
    """Metrics, health and readiness of one worker.

    Nothing is measured between two scrapes. Counters begin at 0 with the process, as Prometheus
    expects. All methods are thread-safe.

    Args:
        host: The worker's host.
    """

    def __init__(self, host: Host[Any]) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._asked_at: Seconds | None = None  # of the ping without an answer
        self._largest: dict[str, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the worker has met its peers."""
        return self._host.peers.has_begun

    @property
    def is_healthy(self) -> bool:
        """Whether the host's thread has answered the last ping, or still may; sends the next.

        Until the run has begun, that thread may wait for a connection.
        """
        now = time.monotonic()
        with self._lock:
            if self._asked_at is not None:
                return now - self._asked_at < PATIENCE
            if self.is_ready:
                self._asked_at = now
                self._host.ping(self._answered)
            return True

    def _answered(self) -> None:
        self._asked_at = None

    def collect(self) -> Iterable[Metric]:
        """The worker's metrics, as families of prometheus_client."""
        yield from self._progress()
        yield from self._speed()
        yield from self._messages()
        yield from self._peers()

    def _progress(self) -> Iterable[Metric]:
        host = self._host
        yield _counter(
            "samples", "Samples of all trainings that have ended.", host.trainings.num_samples
        )
        yield _gauge("round", "Round of the algorithm.", host.state.round)
        yield _counter(
            "training_seconds",
            "Seconds of training, with the preparation of data.",
            self._growing("training", host.training_seconds),
        )
        yield _counter(
            "waiting_seconds",
            "Seconds in which the worker could only wait for a message.",
            self._growing("waiting", host.waiting_seconds),
        )

    def _growing(self, name: str, value: float) -> float:
        """The largest value so far: the work in progress may turn out a bit shorter.

        Prometheus takes a counter that falls for one that has begun at 0 again.
        """
        with self._lock:
            self._largest[name] = max(value, self._largest.get(name, 0.0))
            return self._largest[name]

    def _speed(self) -> Iterable[Metric]:
        measured, forecast = self._host.trainings.speed, self._host.forecast
        if measured is not None:
            yield _gauge("measured_samples_per_second", "Speed of the last training.", measured)
        if forecast is not None:
            yield _gauge(
                "forecast_samples_per_second",
                "Speed that the last forecast promised.",
                forecast.throughput,
            )
            yield _gauge(
                "forecast_relative_error",
                "Relative error that the last forecast expected of itself.",
                forecast.relative_error,
            )

    def _messages(self) -> Iterable[Metric]:
        host, budget = self._host, self._host.receiving.budget
        outbox = host.sending.outbox
        yield _per_peer("sent_bytes", "Bytes handed to the transport.", outbox.sent)
        yield _per_peer("received_bytes", "Bytes accepted from the network.", budget.accepted)
        yield _per_peer(
            "send_queue_bytes", "Bytes that wait to be sent.", outbox.waiting, is_counter=False
        )
        yield _gauge("received_held_bytes", "Received bytes in memory.", budget.num_bytes)
        yield _gauge("queue_length", "Events that wait for the worker.", host.num_queued)
        yield _refusals(host.receiving.refusals_by_author)

    def _peers(self) -> Iterable[Metric]:
        peers = dict(self._host.peers)
        reached = {rank: int(peer.is_reachable) for rank, peer in peers.items()}
        yield _gauge("peers", "All other workers of the run.", len(peers))
        yield _gauge(
            "peers_in_reach", "Workers with a link to this one.", sum(reached.values())
        )
        yield _gauge(
            "peers_lost",
            "Workers that the algorithm counts as lost.",
            sum(peer.is_lost for peer in peers.values()),
        )
        yield _per_peer("peer_in_reach", "1 if there is a link.", reached, is_counter=False)


def _counter(name: str, what: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"edgegossip_{name}", what, value=value)


def _gauge(name: str, what: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"edgegossip_{name}", what, value=value)


def _per_peer(
    name: str, what: str, values: Mapping[Rank, float], *, is_counter: bool = True
) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
    family = kind(f"edgegossip_{name}", what, labels=["peer"])
    for rank, value in sorted(values.items()):
        family.add_metric([str(rank)], value)
    return family


def _refusals(counts: Mapping[tuple[Rank | None, str], int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "edgegossip_refusals",
        "Messages that were refused or never arrived.",
        labels=["peer", "reason"],
    )
    for (sender, reason), number in counts.items():
        family.add_metric(["outside" if sender is None else str(sender), reason], number)
    return family
