"""Training loops of one's own, in threads: what they exchange, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity import Steady
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import (
    LocalProtocolError,
    NetworkError,
    TrainingError,
    UsageError,
)
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.topology import complete
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.training_loop import TrainingLoop

NUM_SAMPLES, BATCH, DIM, LR = 12, 4, 3, 0.05
BIAS = -1  # where it stands in the values
EPOCHS = EpochGossip(topology=complete(2), num_rounds=4)
GOSGD = GoSGD(topology=complete(2), num_rounds=60, exchange_probability=1.0, local_steps=1)


class Learner:
    """A caller: a model that is drawn towards a target, with momentum, and batch norm."""

    def __init__(self, rank: Rank, lr: float = LR) -> None:
        torch.manual_seed(0)  # models start equal
        self.model = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        random = torch.Generator().manual_seed(1 + rank)
        x = torch.randn(NUM_SAMPLES // BATCH, BATCH, DIM, generator=random)
        self.batches = list(x)
        self.target = 1.0 - 2.0 * rank

    def steps(self) -> list[float]:
        """Train for an epoch; returns the losses."""
        return [self.step(x) for x in self.batches]

    def step(self, x: Tensor) -> float:
        loss = (self.model(x) - self.target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    @property
    def values(self) -> Tensor:
        """Parameters and running means, as one vector."""
        state = self.model.state_dict()
        return torch.cat([x.flatten() for x in state.values() if x.is_floating_point()])


def make_loop(
    learner: Learner, algorithm: Algorithm[Any], rank: Rank, network: MemoryNetwork
) -> TrainingLoop:
    transport = network.transport(rank)
    return TrainingLoop(
        learner.model, algorithm, rank, 2, transport, num_samples=NUM_SAMPLES, meet_seconds=60
    )


def train(learner: Learner, loop: TrainingLoop) -> None:
    with loop:
        while not loop.is_over:
            for x in learner.batches:
                loop.step(learner.step(x), len(x))


def side_by_side(*jobs: Callable[[], None]) -> list[BaseException | None]:
    """Run jobs in threads; say what each has raised."""
    raised: list[BaseException | None] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            jobs[index]()
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return raised


def both(
    algorithm: Algorithm[Any], lr_of_one: float = LR
) -> tuple[list[Learner], list[TrainingLoop]]:
    """Two learners that exchange from the beginning to the end."""
    network = MemoryNetwork()
    learners = [Learner(0), Learner(1, lr_of_one)]
    loops = [make_loop(learners[rank], algorithm, rank, network) for rank in (0, 1)]
    jobs = [lambda each=each: train(*each) for each in zip(learners, loops, strict=True)]
    assert side_by_side(*jobs) == [None, None]
    return learners, loops


def test_two_loops_do_what_averaging_by_hand_after_each_epoch_does() -> None:
    learners, loops = both(EPOCHS)
    by_hand = [Learner(rank) for rank in (0, 1)]
    for _ in range(EPOCHS.num_rounds):
        for learner in by_hand:
            learner.steps()
        average({0: by_hand[0].model, 1: by_hand[1].model})
    assert [loop.rounds for loop in loops] == [EPOCHS.num_rounds] * 2
    torch.testing.assert_close(learners[0].values, by_hand[0].values)
    assert torch.equal(learners[0].values, learners[1].values)


def average(models: dict[Rank, nn.Module]) -> None:
    with torch.no_grad():
        for own, other in zip(*(m.state_dict().values() for m in models.values()), strict=True):
            if own.is_floating_point():
                mean = (own + other) / 2
                own.copy_(mean)
                other.copy_(mean)


@thorough
def test_a_loop_notices_that_the_run_is_over_in_the_midst_of_an_epoch() -> None:
    learner, transport = Learner(0), MemoryNetwork().transport(0)
    algorithm = EpochGossip(topology=complete(1), num_rounds=5)
    loop = TrainingLoop(
        learner.model, algorithm, 0, 1, transport, num_samples=10**9, max_seconds=0.2
    )
    began = time.monotonic()
    with loop:
        while not loop.is_over and time.monotonic() < began + 5:
            loop.step(0.5, 1)
            time.sleep(0.01)
        assert loop.is_over
    assert loop.rounds == 0


class AsMeasured(Steady):
    """Forecasts what the last piece of work has taken."""

    def trained(self, start: Seconds, end: Seconds, cost: float) -> None:
        self.throughput = cost / (end - start)


@thorough
def test_blocks_of_an_epoch_are_counted_in_the_batches_that_were_done() -> None:
    """One of the caller's batches is more than a whole block was to be."""
    algorithm = EdgeGossip(inner=EpochGossip(topology=complete(1), num_rounds=5))
    transport = MemoryNetwork().transport(0)
    loop = TrainingLoop(
        nn.Linear(DIM, 1),
        algorithm,
        0,
        1,
        transport,
        num_samples=400,
        forecaster=AsMeasured(16_000.0),
    )
    num_samples = 0
    with loop:
        while not loop.is_over:
            time.sleep(0.004)
            num_samples += 64
            loop.step(1.0, 64)
    # By the clock, which is not exact.
    assert 5 * 100 <= num_samples <= 5 * 1200


@thorough
def test_one_that_learns_nothing_itself_learns_from_an_asynchronous_neighbor() -> None:
    learners, loops = both(GOSGD, lr_of_one=0.0)
    assert [loop.rounds for loop in loops] == [GOSGD.num_rounds] * 2
    end, start = (each.values[BIAS].item() for each in (learners[1], Learner(1)))
    assert end > start + 0.1, "its neighbor is drawn upwards"


def test_one_that_leaves_early_does_not_keep_the_other() -> None:
    network = MemoryNetwork()
    learners = [Learner(rank) for rank in (0, 1)]
    loops = [make_loop(learners[rank], EPOCHS, rank, network) for rank in (0, 1)]

    def leave() -> None:
        with loops[1] as loop:
            while loop.rounds < 2:
                for x in learners[1].batches:
                    loop.step(learners[1].step(x), len(x))
        assert not loop.is_over

    assert side_by_side(lambda: train(learners[0], loops[0]), leave) == [None, None]
    assert loops[0].is_over
    assert loops[0].rounds == EPOCHS.num_rounds


@thorough
def test_a_loop_goes_back_where_another_worker_is_to_blame() -> None:
    network = MemoryNetwork()
    learners = [Learner(rank) for rank in (0, 1)]
    loops = [make_loop(learners[rank], EPOCHS, rank, network) for rank in (0, 1)]
    loops[1]._host._sound._credit = 1  # another worker has been blamed before
    has_failed = False

    def diverge_once() -> None:
        nonlocal has_failed
        with loops[1] as loop:
            while not loop.is_over:
                for x in learners[1].batches:
                    loss = learners[1].step(x)
                    if loop.rounds == 2 and not has_failed:
                        has_failed, loss = True, float("nan")
                        learners[1].optimizer.state.clear()
                    loop.step(loss, len(x))

    raised = side_by_side(lambda: train(learners[0], loops[0]), diverge_once)
    assert raised == [None, None]
    assert has_failed
    assert loops[1].rounds == EPOCHS.num_rounds
    assert learners[1].values.isfinite().all()


def test_a_loss_that_is_not_finite_ends_a_loop_and_not_the_others() -> None:
    network = MemoryNetwork()
    learners = [Learner(rank) for rank in (0, 1)]
    loops = [make_loop(learners[rank], EPOCHS, rank, network) for rank in (0, 1)]

    def diverge() -> None:
        with loops[1] as loop:
            loop.step(float("nan"), BATCH)

    raised = side_by_side(lambda: train(learners[0], loops[0]), diverge)
    assert raised[0] is None
    assert isinstance(raised[1], TrainingError)
    assert "nan; try a smaller learning rate" in str(raised[1])
    assert loops[0].rounds == EPOCHS.num_rounds


def test_what_the_caller_raises_leaves_the_loop_and_is_passed_on() -> None:
    learner = Learner(0)
    alone = EpochGossip(topology=complete(1), num_rounds=2)
    transport = MemoryNetwork().transport(0)
    loop = TrainingLoop(learner.model, alone, 0, 1, transport, num_samples=NUM_SAMPLES)
    with pytest.raises(ZeroDivisionError), loop:
        raise ZeroDivisionError
    assert not [t for t in threading.enumerate() if t.name == "host 0"]


def test_steps_after_the_end_change_nothing() -> None:
    learner = Learner(0)
    alone = EpochGossip(topology=complete(1), num_rounds=1)
    transport = MemoryNetwork().transport(0)
    loop = TrainingLoop(learner.model, alone, 0, 1, transport, num_samples=NUM_SAMPLES)
    train(learner, loop)
    before = learner.values
    loop.step(1.0, BATCH)
    assert loop.rounds == 1
    assert torch.equal(learner.values, before)


def test_a_transport_that_cannot_be_opened_is_reported_where_the_loop_begins() -> None:
    network = MemoryNetwork()
    network.join(network.transport(0))
    loop = make_loop(Learner(0), EPOCHS, 0, network)
    with pytest.raises(NetworkError, match="rank 0 is taken"), loop:
        raise AssertionError("the block must not begin")


@pytest.mark.parametrize(
    ("rank", "num_workers", "message"),
    [
        (0, 3, "topology has 2 workers, but 3 take part; make the algorithm for 3"),
        (2, 2, r"rank must be in 0..1, got 2"),
        (-1, 2, r"rank must be in 0..1, got -1"),
    ],
)
def test_a_loop_of_other_workers_than_the_algorithms_is_refused(
    rank: int, num_workers: int, message: str
) -> None:
    algorithm = EpochGossip(topology=complete(2), num_rounds=2)
    transport = MemoryNetwork().transport(rank)
    with pytest.raises(ValueError, match=message):
        TrainingLoop(
            Learner(0).model, algorithm, rank, num_workers, transport, num_samples=NUM_SAMPLES
        )


def test_a_step_before_the_block_and_a_second_block_are_explained() -> None:
    learner = Learner(0)
    alone = EpochGossip(topology=complete(1), num_rounds=1)
    transport = MemoryNetwork().transport(0)
    loop = TrainingLoop(learner.model, alone, 0, 1, transport, num_samples=NUM_SAMPLES)
    with pytest.raises(UsageError, match=r"within the loop's block: with TrainingLoop"):
        loop.step(1.0, BATCH)
    train(learner, loop)
    with pytest.raises(UsageError, match="which has begun; make another loop"), loop:
        raise AssertionError("the block must not begin")
    assert loop.is_over


def test_a_balanced_loop_without_a_monitor_says_what_to_give() -> None:
    learner = Learner(0)
    algorithm = EdgeGossip(inner=EpochGossip(topology=complete(1), num_rounds=1))
    transport = MemoryNetwork().transport(0)
    loop = TrainingLoop(learner.model, algorithm, 0, 1, transport, num_samples=NUM_SAMPLES)
    with pytest.raises(LocalProtocolError, match=r"forecaster=edgegossip\.Monitor"):
        train(learner, loop)


def test_a_loop_without_samples_is_refused() -> None:
    transport = MemoryNetwork().transport(0)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        TrainingLoop(nn.Linear(1, 1), EPOCHS, 0, 2, transport, num_samples=0)
