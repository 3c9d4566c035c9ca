"""Hosts in one process, each in a thread, to be disturbed while they run."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from tests.algorithms import NUM_WORKERS
from tests.parity import SETTINGS, SIZE
from tests.worlds import NUM_PARAMS, ManySamples

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Train
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices
from edgegossip.net.memory import MemoryNetwork

EPOCHS = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=6)
LONG = replace(EPOCHS, num_rounds=10_000)


class Slow(ManySamples):
    """Takes its time, and calls `before` each piece of work."""

    def __init__(
        self, rank: Rank, seconds: float = 0.005, before: Callable[[], None] | None = None
    ) -> None:
        super().__init__(rank, 0.1, SIZE)
        self._seconds = seconds
        self._before = before or (lambda: None)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._before()
        time.sleep(self._seconds)
        return super().train(request, progress)


def make_host(
    algorithm: Algorithm[Any],
    rank: Rank,
    network: MemoryNetwork,
    trainer: ManySamples | None = None,
    **options: Any,  # noqa: ANN401
) -> Host[Any]:
    options = {"settings": SETTINGS} | options
    names = [each.name for each in fields(HostServices) if each.name in options]
    services = HostServices(**{name: options.pop(name) for name in names})
    return Host(
        algorithm,
        rank,
        NUM_WORKERS,
        torch.zeros(NUM_PARAMS),
        trainer or Slow(rank),
        network.transport(rank),
        services=services,
        **options,
    )


class Running:
    """Hosts that run in threads, to be disturbed meanwhile."""

    def __init__(self, algorithm: Algorithm[Any], **options: Any) -> None:  # noqa: ANN401
        self.network = MemoryNetwork()
        self.options = options
        self.algorithm = algorithm
        self.reasons: dict[Rank, str] = {}
        self.hosts: dict[Rank, Host[Any]] = {}
        self.threads: dict[Rank, threading.Thread] = {}
        for rank in range(NUM_WORKERS):
            self.start(rank)

    def start(self, rank: Rank) -> None:
        host = make_host(self.algorithm, rank, self.network, **self.options)

        def run() -> None:
            self.reasons[rank] = host.run()

        self.hosts[rank] = host
        self.threads[rank] = threading.Thread(target=run, daemon=True)
        self.threads[rank].start()

    def kill(self, rank: Rank) -> None:
        self.network.kill(rank)
        self.hosts[rank].stop()

    def wait_for_round(self, number: int, *ranks: Rank) -> None:
        deadline = time.monotonic() + 20
        while any(self.hosts[rank].state.round < number for rank in ranks):
            assert time.monotonic() < deadline, [h.state.round for h in self.hosts.values()]
            time.sleep(0.002)

    def wait_until_in_step(self) -> None:
        """Wait until no worker is more than a round ahead of another."""
        deadline = time.monotonic() + 20
        while True:
            rounds = [host.state.round for host in self.hosts.values()]
            if max(rounds) - min(rounds) <= 1:
                return
            assert time.monotonic() < deadline, rounds
            time.sleep(0.002)

    def stop(self) -> None:
        for host in self.hosts.values():
            host.stop()
        for thread in self.threads.values():
            thread.join(20)
            assert not thread.is_alive()


class Checkpoints(dict[Rank, dict[str, Any]]):
    """The last that each host has kept."""

    def save(self, content: dict[str, Any]) -> bool:
        self[content["state"].rank] = copy.deepcopy(content)
        return True
