"""Downlinks and uplinks of platforms, by hand-computed times."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.scripted import SIZE, World, message, on_start, world

from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
)
from edgegossip.sim.fault import Crash, Drop, Fault, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

LATENCY = 0.25
LINKS = Links(default=Link(latency=LATENCY))
SEND: list[Effect] = [Send(0, message())]


def platform(uplink: float = math.inf, downlink: float = math.inf) -> Platform:
    """Bandwidths in messages a second."""
    return Platform(throughput=10.0, uplink=uplink * SIZE, downlink=downlink * SIZE)


def into_0(
    sends: dict[Rank, list[Effect]],
    *script: Fault,
    uplink: float = math.inf,
    downlink: float = 1.0,
    links: Links = LINKS,
    **settings: Any,  # noqa: ANN401
) -> World:
    """Workers that send to worker 0, whose downlink takes `downlink` messages a second."""
    others = (platform(uplink, downlink=math.inf),) * max(sends)
    platforms = (platform(downlink=downlink), *others)
    return world(
        on_start(sends), len(platforms), *script, platforms=platforms, links=links, **settings
    )


def arrivals(result: World) -> list[tuple[Seconds, Rank]]:
    """When a message came, and from whom."""
    return [(now, sender) for now, _, sender, _ in result.run().watcher.arrivals]


@pytest.mark.parametrize(
    ("uplink", "link", "downlink", "seconds"),
    [
        (1.0, math.inf, 1.0, 1.0),  # bytes flow on as they come: not 2
        (1.0, math.inf, 0.5, 2.0),
        (0.5, math.inf, 1.0, 2.0),
        (math.inf, 0.25, 1.0, 4.0),
        (0.5, 0.25, 1.0, 4.0),
        (0.25, 0.5, 1.0, 4.0),
        (math.inf, math.inf, 1.0, 1.0),
        (1.0, math.inf, math.inf, 1.0),
        (math.inf, math.inf, math.inf, 0.0),
    ],
)
def test_a_message_takes_the_time_of_the_slowest_part_of_its_way(
    uplink: float, link: float, downlink: float, seconds: Seconds
) -> None:
    links = Links(default=Link(latency=LATENCY, bandwidth=link * SIZE))
    result = into_0({1: SEND}, uplink=uplink, downlink=downlink, links=links)
    assert arrivals(result) == [(seconds + LATENCY, 1)]


def test_messages_to_anybody_share_the_senders_uplink() -> None:
    sends: list[Effect] = [Send(1, message()), Send(2, message())]
    platforms = (platform(uplink=0.5),) * 3
    result = world(on_start({0: sends}), platforms=platforms, links=LINKS).run()
    assert result.watcher.uplinks == [(0, 1, (0.0, 2.0)), (0, 2, (2.0, 4.0))]


def test_messages_queue_at_the_receivers_downlink_in_the_order_of_sending() -> None:
    result = into_0({3: SEND, 1: SEND, 2: SEND})
    assert arrivals(result) == [(1.25, 1), (2.25, 2), (3.25, 3)]
    # The uplinks were done at once: the network holds what waits.
    assert {span for *_, span in result.watcher.uplinks} == {(0.0, 0.0)}


def test_the_message_whose_first_byte_comes_first_goes_first() -> None:
    links = Links(overrides={(1, 0): Link(latency=0.5), (2, 0): Link(latency=0.25)})
    assert arrivals(into_0({1: SEND, 2: SEND}, links=links)) == [(1.25, 2), (2.25, 1)]


def test_slow_senders_at_once_do_not_wait_for_each_other() -> None:
    result = into_0(dict.fromkeys(range(1, 5), SEND), uplink=1.0, downlink=4.0)
    assert arrivals(result) == [(1.25, rank) for rank in range(1, 5)]


def test_what_a_slow_sender_leaves_of_the_downlink_goes_to_the_next() -> None:
    links = Links(
        default=LINKS.default, overrides={(1, 0): Link(latency=LATENCY, bandwidth=SIZE / 4)}
    )
    result = into_0({1: SEND, 2: SEND}, downlink=1.25, links=links)
    assert arrivals(result) == [(1.25, 2), (4.25, 1)]


def test_a_downlink_that_is_free_again_takes_a_message_at_once() -> None:
    result = into_0({1: [Send(0, message())] * 2}, uplink=0.25)
    assert arrivals(result) == [(4.25, 1), (8.25, 1)]


def test_receivers_do_not_share_a_downlink() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        is_start = isinstance(event, Started)
        return [Send((rank + 1) % 3, message()), Finish()] if is_start else []

    result = world(answer, platforms=(platform(downlink=1.0),) * 3).run()
    assert [now for now, *_ in result.watcher.arrivals] == [1.0] * 3


def test_a_wide_downlink_changes_nothing() -> None:
    sends = {rank: SEND * rank for rank in range(1, 5)}
    narrow, wide = (into_0(sends, uplink=1.0, downlink=at) for at in (1e9, math.inf))
    assert arrivals(narrow) == arrivals(wide)


# Faults.


def test_a_dropped_message_takes_no_downlink() -> None:
    assert arrivals(into_0({1: SEND, 2: SEND}, Drop(probability=1.0, sender=1))) == [(1.25, 2)]


def test_what_was_wholly_sent_before_a_crash_passes_the_downlink_all_the_same() -> None:
    result = into_0({1: SEND, 2: SEND}, Crash(at=0.5, rank=2))
    assert arrivals(result) == [(1.25, 1), (2.25, 2)]


def test_what_is_cut_off_before_its_first_byte_comes_takes_no_downlink() -> None:
    result = into_0({1: SEND, 2: SEND}, Crash(at=0.125, rank=1), uplink=1.0)
    assert arrivals(result) == [(1.25, 2)]
    assert result.watcher.losses == [(1.25, 0, 1, "crashed")]


def test_a_partition_that_begins_while_messages_wait_loses_them() -> None:
    partition = Partition(start=1.5, end=1.75, group=(0,))
    result = into_0({1: SEND, 2: SEND}, partition)
    assert arrivals(result) == [(1.25, 1)]
    assert result.watcher.losses == [(2.25, 0, 2, "partitioned")]


def test_a_message_that_a_partition_has_lost_takes_no_downlink() -> None:
    partition = Partition(start=0.0, end=0.125, group=(1,))
    result = into_0({1: SEND, 2: SEND}, partition)
    assert arrivals(result) == [(1.25, 2)]


def test_what_waits_for_a_crashed_worker_reaches_it_if_it_is_back_in_time() -> None:
    faults = Crash(at=1.5, rank=0), Recover(at=2.5, rank=0)
    result = into_0({1: SEND, 2: SEND, 3: SEND}, *faults)
    assert arrivals(result) == [(1.25, 1), (3.25, 3)]
    assert result.watcher.losses == [(2.25, 0, 2, "crashed")]


def test_a_message_on_its_way_to_a_crashed_worker_reaches_it_if_it_is_back_in_time() -> None:
    result = into_0({1: SEND}, Crash(at=0.125, rank=0), Recover(at=0.1875, rank=0))
    assert arrivals(result) == [(1.25, 1)]


def test_a_crash_empties_the_downlink_for_what_comes_after_it() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined=True):
                return [Send(1, message()), Finish()]
            case Started() if rank == 1:
                return [*SEND * 8, Finish()]
            case Started():
                return [Finish()]
            case Received() if rank == 1:
                return [Send(0, message())]
        return []

    faults = Crash(at=0.5, rank=0), Recover(at=0.75, rank=0)
    platforms = (platform(downlink=1.0), platform())
    result = world(answer, 2, *faults, platforms=platforms).run()
    times = [now for now, rank, *_ in result.watcher.arrivals if rank == 0]
    # Seven of its former life are still queued, up to 8 s; the new one does not wait for them.
    assert times == [1.0, 1.75, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("end", ["uplink", "downlink"])
@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan])
def test_a_bandwidth_out_of_range_is_refused(end: str, bandwidth: float) -> None:
    with pytest.raises(ValueError, match=f"{end} must be above 0 bytes/s"):
        Platform(throughput=1.0, **{end: bandwidth})  # type: ignore[arg-type]
