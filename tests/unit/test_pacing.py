"""Pacing over a path with a rate and a round trip, in virtual time."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from edgegossip.net.pacing import LEAST, Pace, UploadLimit

LARGEST = 262_144


class Path:
    """A path that carries `rate` bytes per second, and acknowledges them after a round trip."""

    def __init__(self, rate: float, round_trip: float) -> None:
        self.rate, self.round_trip = rate, round_trip
        self.now = self.free_at = 0.0
        self.pace = Pace(lambda: self.now, LARGEST)
        self.under_way: deque[tuple[float, int, int]] = deque()
        self.most = self.num_sent = self.waiting = 0

    def send(self, seconds: float) -> None:
        """Send as much as may leave."""
        until = self.now + seconds
        while self.now < until:
            size = self.pace.piece_bytes
            if not self.waiting or self.waiting + size <= self.pace.window:
                self.free_at = max(self.now, self.free_at) + size / self.rate
                mark = self.pace.sent(size)
                self.under_way.append((self.free_at + self.round_trip, size, mark))
                self.num_sent += size
                self.waiting += size
                self.most = max(self.most, self.waiting)
            else:
                self.now, size, mark = self.under_way.popleft()
                self.waiting -= size
                if mark:
                    self.pace.acknowledged(mark)


@pytest.mark.parametrize("rate", [8e3, 125e3, 12.5e6])
@pytest.mark.parametrize("round_trip", [0.0005, 0.05, 0.6])
def test_a_path_is_used_up_and_holds_about_a_second(rate: float, round_trip: float) -> None:
    path = Path(rate, round_trip)
    path.send(20.0)  # begins small
    before = path.num_sent
    path.send(10.0)
    assert path.num_sent - before > 0.9 * 10 * rate
    # A first window waits on a path of 64 kbit/s, whatever its round trip.
    assert path.most < 1.2 * rate * (2.0 + round_trip) + 2 * LEAST


def test_a_path_that_others_fill_is_not_left_to_them() -> None:
    path = Path(1e5, 0.1)
    path.send(5.0)
    path.round_trip = 1.2
    path.send(20.0)
    before = path.num_sent
    path.send(10.0)
    assert path.num_sent - before > 0.85 * 10 * 1e5


def test_a_rate_that_falls_is_followed() -> None:
    path = Path(1e6, 0.05)
    path.send(10.0)
    assert path.pace.window > 5e5
    path.rate = 1e5
    path.send(200.0)
    assert path.pace.window < 4e5
    path.rate = 1e6
    path.send(60.0)
    assert path.pace.window > 4e5


def test_short_messages_ask_for_few_acknowledgements() -> None:
    path = Path(1e8, 0.001)
    path.send(2.0)
    assert sum(path.pace.sent(400) > 0 for _ in range(1000)) <= 2


def test_a_piece_leaves_without_an_acknowledgement_in_the_end() -> None:
    now = [0.0]

    def clock() -> float:  # each look takes a tenth of a second
        now[0] += 0.1
        return now[0]

    pace = Pace(clock, LARGEST)
    pace.sent(20_000)
    pace.wait(LEAST, 0.0, lambda: True)  # would wait for ever
    assert 1.0 < now[0] < 3.0


def test_the_end_of_a_link_ends_a_wait() -> None:
    pace = Pace(lambda: 0.0, LARGEST)
    pace.sent(20_000)
    is_up = [True]
    thread = threading.Thread(target=pace.wait, args=(LEAST, 0.0, lambda: is_up[0]))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    is_up[0] = False
    pace.reset()
    thread.join(10.0)
    assert not thread.is_alive()
    assert pace.rate is None


def test_acknowledgements_of_an_earlier_link_or_of_nothing_count_for_nothing() -> None:
    pace = Pace(lambda: 0.0, LARGEST)
    mark = pace.sent(20_000)
    pace.acknowledged(mark - 1)
    pace.acknowledged(mark + 1)
    pace.reset()
    pace.acknowledged(mark)
    assert pace.rate is None


def test_all_receivers_share_the_upload_limit() -> None:
    now = [10.0]
    limit = UploadLimit(1e6, lambda: now[0])
    assert [limit.delay(250_000) for _ in range(4)] == [0.0, 0.25, 0.5, 0.75]
    now[0] = 12.0  # what was not used is not made up for
    assert [limit.delay(250_000) for _ in range(2)] == [0.0, 0.25]
