"""A link is measured as it is: latency and both rates, with a clock and over a real network."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from tests.zenoh_workers import RUN

from edgegossip.contract.codec import Buffer
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.link_meter import MAX_TRANSFER_BYTES, LinkMeter
from edgegossip.net.memory import MemoryNetwork, MemoryTransport
from edgegossip.net.transport import MAX_FRAME_BYTES, Listener, Transport
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

MODEL = 100_000
LATENCY = 0.01


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> Seconds:
        return self.now


class ClockedTransport:
    """A transport whose frames take time on a clock: their bytes, and the small ones a latency.

    Large frames follow each other on the link, so that only the message behind them waits for
    the latency.
    """

    def __init__(self, inner: MemoryTransport, clock: Clock, bandwidth: float) -> None:
        self._inner = inner
        self._clock = clock
        self._bandwidth = bandwidth
        self.num_bytes = 0
        self.is_slow_at_first = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        self._inner.open(listener, max_bytes)

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        size = sum(len(memoryview(part).cast("B")) for part in frame)
        self.num_bytes += size
        if size > 1000:
            slowness = {1: 100, 2: 10} if self.is_slow_at_first else {}
            slow = slowness.get(self.num_bytes // MODEL, 1)
            self._clock.now += size / self._bandwidth * slow
        else:
            self._clock.now += LATENCY
        self._inner.send(receiver, frame)


@contextmanager
def two_meters(
    *bandwidths: float,
) -> Iterator[tuple[LinkMeter, LinkMeter, list[ClockedTransport]]]:
    network, clock = MemoryNetwork(), Clock()
    ends = [
        ClockedTransport(network.transport(rank), clock, bandwidth)
        for rank, bandwidth in enumerate(bandwidths)
    ]
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(LinkMeter(end, MODEL, clock))  # type: ignore[arg-type]
            for end in ends
        )
        yield one, other, ends


def test_latency_and_the_rates_of_both_directions_are_those_of_the_link() -> None:
    with two_meters(1e6, 4e6) as (meter, _, _):
        found = meter.measure(1)
    assert found.round_trips == pytest.approx([2 * LATENCY] * 20)
    assert found.latency == pytest.approx(LATENCY)
    assert found.sent == pytest.approx([1e6, 1e6], rel=1e-3)
    assert found.received == pytest.approx([4e6, 4e6], rel=1e-3)


def test_a_slow_link_carries_one_model_and_a_fast_one_not_more_than_the_limit() -> None:
    with two_meters(2e4, 2e4) as (meter, _, _):
        found = meter.measure(1, patience=60.0)
    assert found.sent == pytest.approx([2e4], rel=1e-3)
    assert found.received == pytest.approx([2e4], rel=1e-3)
    with two_meters(1e15, 1e15) as (meter, _, ends):
        meter.measure(1)
    assert all(end.num_bytes < 2.1 * MAX_TRANSFER_BYTES for end in ends)


def test_a_path_that_begins_slowly_is_measured_when_it_has_its_speed() -> None:
    with two_meters(6e6, 6e6) as (meter, _, ends):
        for end in ends:
            end.is_slow_at_first = True
        found = meter.measure(1)
    assert found.sent == pytest.approx([6e6, 6e6], rel=1e-2)
    assert found.received == pytest.approx([6e6, 6e6], rel=1e-2)


def test_a_worker_that_is_not_there_is_told() -> None:
    with (
        LinkMeter(MemoryNetwork().transport(0), MODEL) as meter,
        pytest.raises(NetworkError, match=r"worker 1 cannot be reached within 0\.1 s"),
    ):
        meter.measure(1, patience=0.1)


def test_a_worker_that_does_not_answer_is_told() -> None:
    class Silent(Listener):
        def received(self, sender: Rank, frame: memoryview) -> None: ...
        def appeared(self, rank: Rank, incarnation: int) -> None: ...
        def disappeared(self, rank: Rank, incarnation: int) -> None: ...
        def interrupted(self, rank: Rank, incarnation: int) -> None: ...
        def refused(self, rank: Rank | None, reason: str) -> None: ...

    network = MemoryNetwork()
    silent = network.transport(1)
    silent.open(Silent())
    with (
        LinkMeter(network.transport(0), MODEL) as meter,
        pytest.raises(NetworkError, match=r"worker 1 did not answer within 0\.1 s"),
    ):
        meter.measure(1, patience=0.1)
    silent.close()


@pytest.mark.parametrize(
    "frame", [b"", b"x", struct.pack("<BQQ", 3, 0, 2**40), struct.pack("<BQQ", 9, 0, 0)]
)
def test_a_damaged_or_excessive_request_is_not_served(frame: bytes) -> None:
    with two_meters(1e6, 1e6) as (meter, other, ends):
        other.received(0, memoryview(bytearray(frame)))
        meter.measure(1)  # it still serves others
        assert ends[1].num_bytes < 10 * MODEL


def test_a_real_link_is_measured() -> None:
    ports = free_ports(2)
    endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]

    def transport(rank: Rank) -> Transport:
        address = Address(listen=(endpoints[rank],), connect=(endpoints[1 - rank],))
        return ZenohTransport(run=f"{RUN}:plan", rank=rank, num_workers=2, address=address)

    with LinkMeter(transport(0), MODEL) as meter, LinkMeter(transport(1), MODEL):
        found = meter.measure(1)
    assert 0 < found.latency < 0.1
    assert len(found.sent) == len(found.received) == 2
    assert min(*found.sent, *found.received) > 1e6
