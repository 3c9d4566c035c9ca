"""The end times of EpochGossip's epochs, simulated without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.protocol import Payload, Rank, Seconds, Train
from edgegossip.contract.rounds import RoundState
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.sampling.batches import Probe
from edgegossip.training.sampling.sampler import Batch
from edgegossip.training.task import Workload

MANY = 200
"""Maximum number of simulated epochs."""
MANY_MESSAGES = 1_000_000
"""Messages, beyond which fewer epochs are simulated, but at least two."""


def epoch_gossip_seconds(
    workload: Workload, platforms: Sequence[Platform], link: Link, num_epochs: int
) -> Seconds:
    """Virtual seconds until EpochGossip on the complete graph has done `num_epochs`.

    Epochs beyond `MANY`, or fewer with hundreds of workers, are assumed to take the mean
    duration of the later half of those before.

    Args:
        workload: Workload with the sizes of shards and messages.
        platforms: Platform of each worker.
        link: Link between any two workers.
        num_epochs: Number of epochs, at least 1.
    """
    per_epoch = max(1, len(platforms) * (len(platforms) - 1))
    most = min(MANY, max(2, MANY_MESSAGES // per_epoch))
    if num_epochs > most:
        half, whole = (
            epoch_gossip_seconds(workload, platforms, link, number)
            for number in (most // 2, most)
        )
        return whole + (num_epochs - most) * (whole - half) / (most - most // 2)
    simulator = Simulator(
        _OnlySends(topology=complete(len(platforms)), num_rounds=num_epochs),
        platforms,
        workload.initial_params(),
        lambda rank, incarnation: NoTraining(len(workload.shards[rank])),
        links=Links(default=link),
    )
    simulator.run()
    return simulator.now


class _OnlySends(EpochGossip):
    """EpochGossip without mixing, which would be slow for large models."""

    def mix(self, state: RoundState, inbox: Mapping[Rank, Payload]) -> None:
        pass


@dataclass(frozen=True)
class NoTraining(Trainer):
    """A trainer that only reports the cost of an epoch over a shard."""

    shard_size: int

    @property
    def num_samples(self) -> int:
        return self.shard_size

    def cost(self, request: Train) -> float:
        return self.num_samples

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        return TrainingResult(request.params, self.num_samples, 1, 0.0)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def only_taken(taken: Iterable[Batch | Probe], request: Train) -> TrainingResult:
    """Take the requested batches as a learner would, without training on them."""
    sizes = [len(part) for part in taken if isinstance(part, Batch)]
    return TrainingResult(request.params, sum(sizes), len(sizes), 0.0)
