"""Real training against the plain loop that it must equal: digits, a small MLP, SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.algorithms import ALGORITHMS, AnyAlgorithm, with_settings
from tests.small_learners import taken
from tests.tiers import by_name
from torch import Tensor, nn

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.divshare import DivShare
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.swift import SWIFT
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.protocol import Epochs, Steps, Work
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import Dataset
from edgegossip.data.readers import digits
from edgegossip.models.small import mlp
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Random
from edgegossip.training.task import Task, Workload

SEED = 3
BATCH_SIZE = 16
OPTIMIZERS = {
    "plain": SGD(lr=0.1, momentum=0.0),
    "momentum-and-decay": SGD(lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": SGD(lr=0.05, momentum=0.9, nesterov=True),
}
FAMILIES = ["bsp", "asp", "epoch-gossip", "gosgd", "choco-gossip", "diloco"]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return digits()


def make_workload(dataset: Dataset, num_workers: int, optimizer: SGD) -> Workload:
    model = partial(mlp, dataset.input_shape, dataset.num_classes, hidden=(8,))
    task = Task(dataset=dataset, model=model, optimizer=optimizer, batch_size=BATCH_SIZE)
    return Workload(task, range(num_workers), SEED)


def simulate(
    algorithm: AnyAlgorithm,
    workload: Workload,
    platforms: Sequence[Platform] | None = None,
    pool: ComputePool | None = None,
) -> Tensor:
    """Final parameters, [num_workers, num_params]."""
    topology = algorithm.traits.topology
    assert topology is not None
    num_workers = topology.num_workers
    simulator = Simulator(
        algorithm,
        platforms or [Platform(throughput=1000.0)] * num_workers,
        workload.initial_params(),
        workload.make_trainer,
        pool=pool,
        wire=True,
        evaluate=workload.evaluate,
    )
    assert simulator.run()
    rows = [*simulator.estimates().values()]
    return torch.stack(rows) if len({*map(len, rows)}) == 1 else torch.cat(rows)


class PlainLoop:
    """The loop that anybody would write: an nn.Module, torch.optim.SGD, no flat vectors."""

    def __init__(self, workload: Workload, dataset: Dataset, optimizer: SGD) -> None:
        self.dataset = dataset
        self.model = mlp(dataset.input_shape, dataset.num_classes, hidden=(8,))
        self.model.load_state_dict(workload.named_parameters(workload.initial_params()))
        self.optimizer = optimizer(self.model.parameters())

    def step(self, batch: Tensor) -> None:
        x, y = self.dataset.train.batch(batch)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.dataset.prepare(x)), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @property
    def params(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def batches(workload: Workload, rank: int, works: Sequence[Work]) -> list[Tensor]:
    """The batches that worker `rank` draws for `works`, one after the other."""
    shard = workload.shards[rank]
    sampler = AccuracyAwareSampler(
        num_samples=len(shard),
        batch_size=BATCH_SIZE,
        selection=Random(),
        key=(SEED, rank, 0),
    )
    stream = BatchStream(sampler)
    return [shard[batch.positions] for work in works for batch in taken(stream, work)]


@each_optimizer
@pytest.mark.parametrize(
    ("make", "works"),
    [
        (lambda graph: Gossip(topology=graph, num_rounds=4, local_steps=3), [Steps(12)]),
        (lambda graph: AllReduce(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: GoSGD(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: EpochGossip(topology=graph, num_rounds=2), [Epochs(), Epochs()]),
        (lambda graph: ADPSGD(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: DivShare(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: SWIFT(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: ChocoGossip(topology=graph, num_rounds=12), [Steps(12)]),
        (lambda graph: StochasticGradientPush(topology=graph, num_rounds=12), [Steps(12)]),
    ],
    ids=[
        *("gossip", "all-reduce", "gosgd", "epoch-gossip", "adpsgd", "div-share", "swift"),
        *("choco-gossip", "sgp"),
    ],
)
def test_one_worker_is_plain_sgd_to_the_last_bit(
    make: Callable[..., AnyAlgorithm], works: list[Work], optimizer: SGD, dataset: Dataset
) -> None:
    workload = make_workload(dataset, 1, optimizer)
    loop = PlainLoop(workload, dataset, optimizer)
    for batch in batches(workload, 0, works):
        loop.step(batch)
    assert torch.equal(simulate(make(complete(1)), workload)[0], loop.params)


@each_optimizer
def test_all_reduce_is_single_machine_sgd_with_the_union_of_the_batches(
    optimizer: SGD, dataset: Dataset
) -> None:
    num_workers, num_rounds = 4, 20
    workload = make_workload(dataset, num_workers, optimizer)
    streams = [batches(workload, rank, [Steps(num_rounds)]) for rank in range(num_workers)]
    loop = PlainLoop(workload, dataset, optimizer)
    for of_all in zip(*streams, strict=True):
        loop.step(torch.cat(of_all))
    after = simulate(AllReduce(topology=complete(4), num_rounds=num_rounds), workload)
    torch.testing.assert_close(after, loop.params.expand_as(after), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("local_steps", [1, 3])
def test_gossip_on_the_complete_graph_is_all_reduce(local_steps: int, dataset: Dataset) -> None:
    workload = make_workload(dataset, 4, OPTIMIZERS["momentum-and-decay"])
    graph = complete(4)
    gossip = Gossip(topology=graph, num_rounds=5, local_steps=local_steps)
    all_reduce = AllReduce(topology=graph, num_rounds=5, local_steps=local_steps)
    one, other = simulate(gossip, workload), simulate(all_reduce, workload)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", by_name(ALGORITHMS, FAMILIES))
def test_equal_seeds_and_any_number_of_threads_give_equal_bits(
    algorithm: AnyAlgorithm, dataset: Dataset
) -> None:
    num_rounds = algorithm.traits.num_rounds or 0
    algorithm = with_settings(algorithm, num_rounds=max(2, num_rounds // 6))
    workload = make_workload(dataset, 5, OPTIMIZERS["momentum-and-decay"])
    platforms = uneven(5)
    expected = simulate(algorithm, workload, platforms)
    again = make_workload(dataset, 5, OPTIMIZERS["momentum-and-decay"])
    with ComputePool(num_threads=2) as pool:
        assert torch.equal(simulate(algorithm, again, platforms, pool), expected)


def test_other_seeds_give_other_bits(dataset: Dataset) -> None:
    algorithm = ALGORITHMS["gossip"]
    one = make_workload(dataset, 5, OPTIMIZERS["plain"])
    other = Workload(one.task, range(5), SEED + 1)
    assert not torch.equal(simulate(algorithm, one), simulate(algorithm, other))
