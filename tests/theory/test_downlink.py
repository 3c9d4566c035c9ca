"""Many senders, one receiver: its downlink sets the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tests.scripted import SIZE, message, on_start, world

from edgegossip.contract.codec import num_bytes
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Rank,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

LATENCY = 0.03
DOWNLINK = 1000.0


@pytest.mark.parametrize("num_senders", [1, 2, 7, 32])
@pytest.mark.parametrize("num_messages", [1, 3])
@pytest.mark.parametrize("uplink", [300.0, 1e4, float("inf")])
@pytest.mark.parametrize("downlink", [1e3, 1.7e4])
def test_equal_senders_at_once_take_the_time_of_the_narrower_end(
    num_senders: int, num_messages: int, uplink: float, downlink: float
) -> None:
    send: list[Effect] = [Send(0, message())] * num_messages
    sends: dict[Rank, list[Effect]] = dict.fromkeys(range(1, num_senders + 1), send)
    platform = Platform(throughput=1.0, uplink=uplink, downlink=downlink)
    result = world(
        on_start(sends),
        platforms=(platform,) * (num_senders + 1),
        links=Links(default=Link(latency=LATENCY)),
    ).run()
    own = num_messages * SIZE
    expected = LATENCY + max(num_senders * own / downlink, own / uplink)
    times = [now for now, *_ in result.watcher.arrivals]
    assert len(times) == num_senders * num_messages
    assert times == sorted(times)
    assert times[-1] == pytest.approx(expected)


@dataclass(frozen=True)
class Sender:
    """Begins at a time, and sends a message of so many floats."""

    start: Seconds
    uplink: float
    num_floats: int

    @property
    def num_bytes(self) -> int:
        return num_bytes(message(num_floats=self.num_floats))

    def bytes_after(self, now: Seconds) -> float:
        """How many bytes leave its uplink after `now`."""
        return min(self.num_bytes, max(0.0, self.uplink * (self.end - now)))

    @property
    def end(self) -> Seconds:
        return self.start + self.num_bytes / self.uplink


def draw_senders(seed: int, slowest: float, latest: Seconds) -> list[Sender]:
    draw = random.Random(seed)
    return [
        Sender(
            start=draw.uniform(0, latest),
            uplink=slowest * 10 ** draw.uniform(0, 1.5),
            num_floats=draw.randint(1, 100),
        )
        for _ in range(draw.randint(2, 8))
    ]


def simulated(senders: Sequence[Sender]) -> list[tuple[Seconds, Sender]]:
    """When the message of each sender comes."""

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started() if rank:
                return [SetTimer("go", senders[rank - 1].start)]
            case TimerFired():
                num_floats = senders[rank - 1].num_floats
                return [Send(0, message(num_floats=num_floats)), Finish()]
        return [Finish()]

    platforms = [Platform(throughput=1.0, uplink=sender.uplink) for sender in senders]
    receiver = Platform(throughput=1.0, downlink=DOWNLINK)
    result = world(answer, platforms=(receiver, *platforms)).run()
    return [(now, senders[rank - 1]) for now, _, rank, _ in result.watcher.arrivals]


def exact_end(senders: Sequence[Sender]) -> Seconds:
    """When a downlink that never rests while there are bytes has taken them all.

    What comes after any moment takes that long from then on, and one moment is the last at
    which nothing waits.
    """
    moments = [sender.start for sender in senders] + [sender.end for sender in senders]
    return max(
        moment + sum(sender.bytes_after(moment) for sender in senders) / DOWNLINK
        for moment in moments
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("latest", [0.0, 2.0])
@pytest.mark.parametrize("slowest", [DOWNLINK / 10, DOWNLINK])
def test_the_last_message_comes_when_a_downlink_that_never_rests_is_done(
    seed: int, slowest: float, latest: Seconds
) -> None:
    senders = draw_senders(seed, slowest, latest)
    assert max(now for now, _ in simulated(senders)) == pytest.approx(exact_end(senders))


@pytest.mark.parametrize("seed", range(20))
def test_a_message_waits_only_for_those_that_began_before_it(seed: int) -> None:
    senders = draw_senders(seed, DOWNLINK / 10, 2.0)
    earlier = sorted(senders, key=lambda sender: sender.start)
    times = {id(sender): now for now, sender in simulated(senders)}
    for num in range(1, len(senders) + 1):
        some = simulated(earlier[:num])
        assert {id(sender): now for now, sender in some}.items() <= times.items()


@pytest.mark.parametrize("seed", range(20))
def test_no_more_bytes_have_come_than_the_downlink_takes(seed: int) -> None:
    senders = draw_senders(seed, DOWNLINK / 10, 2.0)
    first, total = min(sender.start for sender in senders), 0
    for now, sender in simulated(senders):
        total += sender.num_bytes
        assert total <= (now - first) * DOWNLINK + 1e-6
        assert now >= sender.end - 1e-9
