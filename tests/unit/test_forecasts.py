"""Push-min: in a few rounds everybody knows the fastest, and forgets it once it is gone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from edgegossip.algorithms.wrappers.edge_gossip.forecasts import (
    Fastest,
    PlatformForecast,
    detach,
    known_of,
)
from edgegossip.contract.codec import num_bytes
from edgegossip.contract.protocol import Message, Received, Send


def said(fastest: Fastest, own_seconds: float) -> Message:
    """A message of a worker that needs `own_seconds`."""
    send = Send(1, Message("params", 0, {"params": torch.zeros(3)}, {"weight": 0.5}))
    return fastest.piggyback(send, own_seconds).message


def news(seconds: float, age: int) -> Message:
    return Message("params", 0, {}, {"fastest_seconds": seconds, "fastest_age": age})


class Crowd:
    """Workers that push to a random other one each epoch."""

    def __init__(self, seconds: list[float], max_age: int, seed: int = 0) -> None:
        self.seconds = seconds
        self.known = [Fastest() for _ in seconds]
        self.max_age = max_age
        self.draw = random.Random(seed)
        self.online = list(range(len(seconds)))

    def epoch(self) -> None:
        for rank in self.online:
            self.known[rank].grow_older(self.max_age)
        messages = {j: said(self.known[j], self.seconds[j]) for j in self.online}
        for rank in self.online:
            receiver = self.draw.choice([j for j in self.online if j != rank])
            self.known[receiver].hear(messages[rank], self.max_age)

    def minima(self) -> set[float]:
        return {min(self.known[j].seconds, self.seconds[j]) for j in self.online}


@pytest.mark.parametrize("num_workers", [4, 16, 64, 256])
def test_the_minimum_spreads_in_logarithmic_time(num_workers: int) -> None:
    for seed in range(3):
        crowd = Crowd([2.0] * (num_workers - 1) + [1.0], max_age=100, seed=seed)
        num_epochs = 0
        while crowd.minima() != {1.0}:
            crowd.epoch()
            num_epochs += 1
        # Theory: log2 E + ln E + O(1) epochs (Pittel, 1987).
        assert num_epochs <= math.log2(num_workers) + math.log(num_workers) + 6


def test_a_fastest_that_is_gone_is_forgotten_within_its_age() -> None:
    crowd = Crowd([1.0, *[2.0] * 15], max_age=8)
    for _ in range(12):
        crowd.epoch()
    crowd.online.remove(0)
    assert 1.0 in crowd.minima()
    for _ in range(9):
        crowd.epoch()
    assert crowd.minima() == {2.0}


def test_a_fastest_that_slows_down_is_forgotten_within_its_age() -> None:
    crowd = Crowd([1.0, *[2.0] * 15], max_age=8)
    for _ in range(12):
        crowd.epoch()
    crowd.seconds[0] = 3.0
    for _ in range(9):
        crowd.epoch()
    assert crowd.minima() == {2.0}


def test_as_long_as_the_fastest_speaks_it_is_remembered() -> None:
    crowd = Crowd([1.0, *[2.0] * 15], max_age=10)
    for _ in range(12):
        crowd.epoch()
    for _ in range(50):
        crowd.epoch()
        assert crowd.minima() == {1.0}


def test_it_takes_some_40_bytes() -> None:
    plain, told = said(Fastest(), math.inf), said(Fastest(), 3.125)
    assert num_bytes(told) - num_bytes(plain) == 40


def test_a_message_is_not_written_to_and_comes_back_as_it_was() -> None:
    plain, told = said(Fastest(), math.inf), said(Fastest(2.0, 1), 3.0)
    assert plain.numbers == {"weight": 0.5}
    assert told.numbers == {"weight": 0.5, "fastest_seconds": 2.0, "fastest_age": 1}
    assert detach(Received(1, told)).message.numbers == plain.numbers


def test_a_worker_that_is_itself_the_fastest_says_so_at_age_0() -> None:
    told = said(Fastest(3.0, 5), 2.0)
    assert (told.numbers["fastest_seconds"], told.numbers["fastest_age"]) == (2.0, 0)


def test_of_equally_fast_news_the_fresher_counts() -> None:
    known = Fastest(2.0, 3)
    known.hear(news(2.0, 5), max_age=8)
    assert known.age == 3
    known.hear(news(2.0, 1), max_age=8)
    assert known == Fastest(2.0, 1)


def test_slower_older_or_no_news_change_nothing() -> None:
    known = Fastest(2.0, 3)
    known.hear(news(3.0, 0), max_age=8)
    known.hear(news(1.0, 9), max_age=8)
    known.hear(Message("params", 0), max_age=8)
    assert known == Fastest(2.0, 3)


def test_a_forecast_survives_its_journey() -> None:
    forecast = PlatformForecast(7, 123.456, 1e6 / 3)
    message = forecast.message()
    assert (message.kind, message.round) == ("forecast", 7)
    assert PlatformForecast.from_message(message) == forecast
    assert num_bytes(message) - num_bytes(Message("forecast", 7)) < 100


def test_what_is_known_counts_the_lost_as_failed_and_the_unheard_as_neither() -> None:
    forecasts = {0: PlatformForecast(0, 5.0, 10.0), 1: PlatformForecast(0, 7.0, 20.0)}
    throughputs, costs = known_of(forecasts, {1: None}, 3, min_throughput=0.5)
    assert throughputs == [5.0, 0.0, 0.5]
    assert costs == [10.0, 20.0, 0.0]
