"""Aggregating is left off when nobody waits for it any more."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS, SYNCHRONOUS
from tests.hosts import Checkpoints, Slow, make_host
from tests.parity import run_all, simulate
from tests.small_learners import learner
from tests.tiers import thorough

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Rank
from edgegossip.net.host.host import Host
from edgegossip.net.memory import MemoryNetwork
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.aggregation import COMBINATIONS, aggregator
from edgegossip.training.sampling.cancellation import cancellable

WITHIN = 10.0


class ToldError(Exception):
    """The event that ends a computation."""


def samples(num_samples: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(num_samples, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.zeros(num_samples, dtype=torch.int64)


def asks_of(name: str) -> int:
    asked = []
    with cancellable(lambda: asked.append(1)):
        aggregator(name).fit(*samples())
    return len(asked)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_class_is_left_off_in_its_midst_wherever_it_asks(name: str) -> None:
    num_asks = asks_of(name)
    # Once before the class and once for the means; what is between is within.
    assert num_asks > 2 + 5
    for left_off_at in {1, 2, num_asks // 2, num_asks}:
        left = iter(range(left_off_at - 1))

        def ask() -> None:
            if next(left, None) is None:  # noqa: B023
                raise ToldError

        with pytest.raises(ToldError), cancellable(ask):
            aggregator(name).fit(*samples())
    # Nothing is left behind: outside, nobody is asked.
    aggregator(name).fit(*samples())


@pytest.mark.parametrize("call", ["set_up", "train"])
def test_a_learner_that_is_cancelled_while_it_aggregates_leaves_off(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = learner(accuracy_aware=AccuracyAware(aggregator=aggregator("svd-kmeans", ratio=2)))
    asked = cancel_at(some, 5, monkeypatch)
    with pytest.raises(TrainingError, match="worker 0 was told to stop"):
        some.set_up() if call == "set_up" else some.batches
    assert len(asked) == 5


def cancel_at(some: Learner, number: int, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Cancel `some` when it asks for the `number`-th time; returns the times it has asked."""
    asked: list[None] = []
    ask = Learner._check_cancelled

    def watched(self: Learner) -> None:
        asked.append(None)
        if len(asked) == number:
            self.cancel()
        ask(self)

    monkeypatch.setattr(Learner, "_check_cancelled", watched)
    return asked


class SlowToSetUp(Slow):
    """Sets up until it is cancelled, or told that it is ready."""

    def __init__(self, rank: Rank, *, is_ready: bool) -> None:
        super().__init__(rank)
        self.has_begun, self._may_end = threading.Event(), threading.Event()
        self._is_ready = is_ready

    def set_up(self) -> None:
        self.has_begun.set()
        if not self._is_ready:
            assert self._may_end.wait(WITHIN)
            raise TrainingError("told to stop")

    def cancel(self) -> None:
        self._may_end.set()


@thorough
def test_a_host_stopped_while_it_sets_up_leaves_at_once_and_goes_on_to_the_last_bit() -> None:
    algorithm = SYNCHRONOUS["gossip"]
    _, states = simulate(algorithm)
    checkpoints = Checkpoints()

    def hosts(network: MemoryNetwork, *, is_resumed: bool) -> list[Host[Any]]:
        made = []
        for rank in range(NUM_WORKERS):
            trainers.append(SlowToSetUp(rank, is_ready=is_resumed or rank != 2))
            options: dict[str, Any] = {"save": checkpoints.save}
            if is_resumed:
                options["checkpoint"] = checkpoints.get(rank)
            made.append(make_host(algorithm, rank, network, trainers[-1], **options))
        return made

    trainers: list[SlowToSetUp] = []
    network = MemoryNetwork()
    first = hosts(network, is_resumed=False)
    threads = [threading.Thread(target=host.run, daemon=True) for host in first]
    for thread in threads:
        thread.start()
    assert trainers[2].has_begun.wait(WITHIN)
    # One that has not begun keeps no checkpoint, and would rejoin the others.
    while not (first[2]._work.is_busy and all(host.peers.has_begun for host in first)):
        time.sleep(0.001)
    started = time.monotonic()
    for host in first:
        host.stop()
    for thread in threads:
        thread.join(WITHIN)
    assert time.monotonic() - started < 1.0
    assert checkpoints[2]["work"]["train"] is not None
    resumed = hosts(MemoryNetwork(), is_resumed=True)
    assert run_all(resumed) == ["finished"] * NUM_WORKERS
    for host, state in zip(resumed, states, strict=True):
        assert torch.equal(host.state.params, state.params)
