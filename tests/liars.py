"""Runs in which one of four workers lies, in the form of an honest one.

A liar is a host like the others, so that it is met, begins and trains; but what it sends passes
through a `Lie`, which is told the receiver and the message before it gets its number, seal and
checksum. A lie may change any message, those of the network (`net/status`) too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.parity import Steady
from tests.worlds import NUM_PARAMS, TARGETS, ManySamples
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Message, Rank, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices, HostSettings
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.tls import TLS
from edgegossip.net.memory import MemoryNetwork

NUM_WORKERS = 4
LIAR = 0  # what is first said counts most, where rank decides
HONEST = range(1, NUM_WORKERS)
SETTINGS = HostSettings(
    run=b"lie test", meet_seconds=20.0, quiet_seconds=0.01, settle_seconds=0.2
)
Lie = Callable[[Rank, Message], Message]
"""What the liar sends to a receiver in place of a message."""


def honestly(receiver: Rank, message: Message) -> Message:
    """No lie."""
    return message


class Careful(ManySamples):
    """Pulled towards a target; its loss becomes infinite beyond `limit`, as real ones do."""

    def __init__(self, rank: Rank, seconds: float = 0.0, limit: float = 1e15) -> None:
        super().__init__(rank, 0.1, 4)
        self._seconds = seconds
        self._limit = limit
        self.num_starts_over = 0

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        time.sleep(self._seconds)
        if not request.params.abs().max() <= self._limit:
            raise TrainingError("the loss became nan; try a smaller learning rate")
        loss = 0.5 * (request.params - TARGETS[self.ranks[0]]).square().sum().item()
        return replace(super().train(request, progress), loss=loss)

    def start_over(self) -> None:
        self.num_starts_over += 1


def certificates(folder: Path) -> list[TLS]:
    """One for each worker, of one authority."""
    make_authority(folder)
    issue(folder, [*range(NUM_WORKERS)])
    return [TLS.from_folder(folder, rank) for rank in range(NUM_WORKERS)]


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        hosts: All, by rank.
        reasons: How the honest have ended, or what they have raised.
    """

    hosts: list[Host[Any]]
    reasons: dict[Rank, str | BaseException]
    liar: Rank = LIAR

    @property
    def honest(self) -> list[Rank]:
        """All but the liar."""
        return [host.rank for host in self.hosts if host.rank != self.liar]

    @property
    def estimates(self) -> Tensor:
        """Parameters of the honest workers, [num_workers - 1, num_params]."""
        return torch.stack([self.hosts[rank].state.estimate for rank in self.honest])

    @property
    def muted(self) -> set[Rank]:
        """Whom an honest one hears no longer."""
        return set().union(*(self.hosts[rank].receiving._strikes.muted for rank in self.honest))

    def refusals(self) -> set[str]:
        """Why the honest have refused what the liar sent."""
        told = [reason for rank in self.honest for reason in self.hosts[rank].refusals]
        begin = f"worker {self.liar}: "
        return {each.removeprefix(begin) for each in told if each.startswith(begin)}


def run(
    algorithm: Algorithm[Any],
    lie: Lie = honestly,
    *,
    security: list[TLS] | None = None,
    make_trainer: Callable[[Rank], ManySamples] = Careful,
    seconds: float = 20.0,
    liar: Rank = LIAR,
) -> Outcome:
    """Run all, until the honest have come to their ends.

    Raises:
        AssertionError: If one has not in time.
    """
    network = MemoryNetwork()
    hosts: list[Host[Any]] = [
        Host(
            algorithm,
            rank,
            NUM_WORKERS,
            torch.zeros(NUM_PARAMS),
            make_trainer(rank),
            network.transport(rank, security=None if security is None else security[rank]),
            settings=SETTINGS,
            services=HostServices(forecaster=Steady(100.0)),
        )
        for rank in range(NUM_WORKERS)
    ]
    teach(hosts[liar], lie)
    outcome = Outcome(hosts, {}, liar)

    def work(rank: Rank) -> None:
        try:
            outcome.reasons[rank] = hosts[rank].run()
        except BaseException as error:
            outcome.reasons[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(NUM_WORKERS)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for rank in outcome.honest:
        threads[rank].join(max(0.0, deadline - time.monotonic()))
    hosts[liar].stop()
    threads[liar].join(5.0)
    outcome.reasons.pop(liar, None)
    assert len(outcome.reasons) == len(HONEST), f"an honest worker did not end: {outcome}"
    return outcome


def teach(host: Host[Any], lie: Lie) -> None:
    """Let all that `host` sends pass through `lie`."""
    pack = host.sending._frame

    def lying(receiver: Rank, message: Message, number: int) -> list[Buffer]:
        return pack(receiver, lie(receiver, message), number)

    host.sending._frame = lying  # type: ignore[method-assign]
