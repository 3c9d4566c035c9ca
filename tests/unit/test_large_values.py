"""Honest values that are far larger than initial parameters: workers exchange them anyway."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.liars import teach
from tests.small_learners import seeded
from tests.tiers import thorough
from tests.virtual_network import VirtualNetwork, Wire
from tests.virtual_process import Process
from tests.virtual_time import VirtualTime
from torch import Tensor, nn

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.server.methods import ASP
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Message, Rank, Seconds, Train
from edgegossip.contract.topology import complete, from_edges
from edgegossip.contract.trainer import TrainingResult
from edgegossip.data.dataset import WorkerData, from_tensors
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostSettings
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD

NUM_SAMPLES = 48
_HORIZON: Seconds = 600.0


def pixels() -> tuple[Tensor, Tensor]:
    """Black or white pixels, so that their variance is 16,256."""
    random = torch.Generator().manual_seed(0)
    x = 255.0 * torch.randint(2, (NUM_SAMPLES, 8), generator=random).float()
    return x, (x[:, 0] > 0).long()


def pixel_model() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))


def prices() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(NUM_SAMPLES, 2, generator=random)
    return x, 1e5 + 1e4 * x.sum(1, keepdim=True)


@dataclass(frozen=True)
class Problem:
    """Something to learn whose honest values are large."""

    data: Callable[[], tuple[Tensor, Tensor]]
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]


PIXELS = Problem(pixels, pixel_model, F.cross_entropy)
PRICES = Problem(prices, lambda: nn.Linear(2, 1), F.mse_loss)


class TimedLearner(Learner):
    """Training of a real model that takes virtual time."""

    def __init__(
        self,
        problem: Problem,
        rank: Rank,
        num_workers: int,
        time: VirtualTime,
        seconds: Seconds,
    ) -> None:
        data = problem.data()
        super().__init__(
            LearnerSettings(
                model=seeded(problem.model),
                loss=problem.loss,
                optimizer=SGD(lr=0.1),
                batch_size=4,
            ),
            WorkerData(
                dataset=from_tensors("large", train=data, test=data).training,
                shard=torch.arange(rank % num_workers, NUM_SAMPLES, num_workers),
            ),
            rank=rank,
        )
        self._virtual_time, self._seconds = time, seconds

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._virtual_time.sleep(self.cost(request) * self._seconds)
        return super().train(request, progress)


@dataclass
class VirtualRun:
    """Workers that train real models in virtual time.

    Args:
        sample_seconds: Seconds that each worker takes for a sample.
    """

    algorithm: Algorithm[Any]
    problem: Problem
    sample_seconds: tuple[Seconds, ...]
    hosts: dict[Rank, Host[Any]] = field(default_factory=dict)
    processes: dict[Rank, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.time = VirtualTime()
        self.network = VirtualNetwork(self.time, random.Random(0), Wire())
        for rank in range(len(self.sample_seconds)):
            self.start(rank)

    def start(self, rank: Rank) -> None:
        num_workers = len(self.sample_seconds)
        process = self.processes[rank] = Process(self.network, rank, skew=0.0)
        learner = TimedLearner(
            self.problem, rank, num_workers, self.time, self.sample_seconds[rank]
        )
        self.hosts[rank] = Host(
            self.algorithm,
            rank,
            num_workers,
            learner.model.params.clone(),
            learner,
            self.network.transport(process),
            settings=HostSettings(
                run=b"virtual!", max_seconds=_HORIZON, quiet_seconds=0.25, runtime=process
            ),
        )
        process.run(self.hosts[rank])

    def restart(self, rank: Rank, at: Seconds, after: Seconds) -> None:
        """Kill a process, and start another one without its files."""
        self.time.at(at, lambda: self.network.kill(rank))
        self.time.at(at + after, lambda: self.start(rank))

    def to_the_end(self) -> None:
        assert self.time.run(2 * _HORIZON, lambda: not self.network.num_running)

    def require_together(self) -> None:
        """All have finished, and have rejected and muted nobody."""
        reasons = {rank: process.reason for rank, process in self.processes.items()}
        assert reasons == dict.fromkeys(self.processes, "finished")
        for host in self.hosts.values():
            assert host.receiving._strikes.muted == set()
            assert not [reason for reason in host.refusals if "values" in reason]

    def require_all_arrived(self) -> None:
        for rank, host in self.hosts.items():
            for other, peer in host.peers:
                assert peer.received == self.hosts[other].peers[rank].sent > 0

    def require_equal(self) -> None:
        models = torch.stack([host.state.estimate for host in self.hosts.values()])
        torch.testing.assert_close(models, models.mean(0).expand_as(models))


def gosgd(num_workers: int) -> GoSGD:
    return GoSGD(
        topology=complete(num_workers), num_rounds=40, exchange_probability=1.0, local_steps=1
    )


@pytest.mark.parametrize("problem", [PIXELS, PRICES], ids=["pixels", "prices"])
def test_two_workers_of_uneven_speed_push_their_models(problem: Problem) -> None:
    run = VirtualRun(gosgd(2), problem, (0.01, 0.1))
    run.to_the_end()
    run.require_together()
    run.require_all_arrived()


def test_three_workers_of_uneven_speed_push_their_models() -> None:
    run = VirtualRun(gosgd(3), PIXELS, (0.01, 0.1, 0.2))
    run.to_the_end()
    run.require_together()
    run.require_all_arrived()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_worker_that_was_started_again_takes_its_neighbors_model(num_workers: int) -> None:
    algorithm = EpochGossip(topology=complete(num_workers), num_rounds=12)
    run = VirtualRun(algorithm, PIXELS, (0.05,) * num_workers)
    run.restart(1, at=6.0, after=3.0)
    run.to_the_end()
    run.require_together()
    run.require_equal()
    assert run.hosts[1].state.round == 12


def test_a_worker_with_one_neighbor_does_not_wait_for_others_to_confirm_its_model() -> None:
    path = from_edges(3, [(0, 1), (1, 2)])
    run = VirtualRun(EpochGossip(topology=path, num_rounds=12), PIXELS, (0.05,) * 3)
    run.restart(0, at=6.0, after=3.0)
    run.to_the_end()
    run.require_together()
    # If it waited until nobody has patience left, they would end five seconds later.
    assert max(process.ended_at for process in run.processes.values()) < 12.0


@pytest.mark.parametrize("num_workers", [2, 3])
def test_diloco_loses_no_update(num_workers: int) -> None:
    algorithm = DiLoCo(topology=complete(num_workers), num_rounds=8, local_steps=4)
    run = VirtualRun(algorithm, PIXELS, (0.01, 0.1, 0.05)[:num_workers])
    run.to_the_end()
    run.require_together()
    run.require_all_arrived()
    run.require_equal()


@thorough
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_was_started_again_takes_the_servers_model(num_workers: int) -> None:
    algorithm = ASP(num_workers=num_workers, num_rounds=60)
    run = VirtualRun(algorithm, PIXELS, (0.05,) * (1 + num_workers))
    run.restart(1, at=6.0, after=1.0)
    run.to_the_end()
    run.require_together()
    assert run.hosts[1].state.round > 30


@pytest.mark.parametrize("size", [3e38, 1e29])
def test_the_only_other_worker_cannot_end_an_honest_one(size: float) -> None:
    """Values that are believed break training, which then goes back and mutes their sender."""

    def lie(receiver: Rank, message: Message) -> Message:
        if message.kind != "push" or message.round < 10:
            return message
        lies = {name: torch.full_like(x, size) for name, x in message.payload.items()}
        return replace(message, payload=lies)

    run = VirtualRun(gosgd(2), PIXELS, (0.05, 0.05))
    teach(run.hosts[1], lie)
    run.to_the_end()
    honest = run.hosts[0]
    assert run.processes[0].reason == "finished"
    assert honest.receiving._strikes.muted == {1}
    assert honest.state.estimate.abs().max() < 1e5
