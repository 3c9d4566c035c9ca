"""The compute pool runs every task once, wherever it runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.trainer import Outcome, Trainer, TrainingResult
from edgegossip.sim.pool import ComputePool


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_every_task_gives_its_own_result(num_threads: int) -> None:
    with ComputePool(num_threads) as pool:
        pending = [pool.submit(lambda k=k: k * k) for k in range(20)]
        assert [one.result() for one in reversed(pending)] == [k * k for k in range(20)][::-1]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_task_runs_once_however_often_it_is_asked(num_threads: int) -> None:
    calls = count()
    with ComputePool(num_threads) as pool:
        pending = pool.submit(lambda: next(calls))
        assert [pending.result() for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_task_that_fails_fails_again_the_same_way(num_threads: int) -> None:
    calls = count()

    def fail() -> None:
        raise RuntimeError(f"call {next(calls)}")

    with ComputePool(num_threads) as pool:
        pending = pool.submit(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="call 0"):
                pending.result()


class RestingTrainer(Trainer):
    """Notes when it trains and rests; fails if told to."""

    num_samples = 1

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def cost(self, request: Train) -> float:
        return 1.0

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self.calls.append(f"train at {progress}")
        if self.fails:
            raise TrainingError(f"after {len(self.calls)} trainings")
        return TrainingResult(request.params, 1, 1, 0.0)

    def rest(self) -> None:
        self.calls.append("rest")

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_trainer_trains_once_and_then_rests(num_threads: int) -> None:
    trainer = RestingTrainer(fails=False)
    with ComputePool(num_threads) as pool:
        pending = pool.train(trainer, Train(torch.zeros(1), Steps(1)), 0.5)
        assert pending.result() is pending.result()
    assert trainer.calls == ["train at 0.5", "rest"]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_training_that_fails_fails_again_the_same_way(num_threads: int) -> None:
    trainer = RestingTrainer(fails=True)
    with ComputePool(num_threads) as pool:
        pending = pool.train(trainer, Train(torch.zeros(1), Steps(1)), 0.0)
        for _ in range(2):
            with pytest.raises(TrainingError, match="after 1 trainings"):
                pending.result()
    assert trainer.calls == ["train at 0.0"]


def test_without_threads_a_trainer_waits_until_it_is_asked() -> None:
    trainer = RestingTrainer(fails=False)
    pending = ComputePool(0).train(trainer, Train(torch.zeros(1), Steps(1)), 0.0)
    assert trainer.calls == []
    pending.result()
    assert trainer.calls == ["train at 0.0", "rest"]


def test_without_threads_a_task_waits_until_it_is_asked_for() -> None:
    started: list[str] = []
    pool = ComputePool(0)
    pending = pool.submit(lambda: started.append(threading.current_thread().name))
    assert started == []
    pending.result()
    assert started == [threading.current_thread().name]


class JoiningTrainer(RestingTrainer):
    """Prepares work that others can join, and records how many trained together."""

    key = "of all"

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(fails=False)
        self.sizes = sizes

    def prepare(self, request: Train, progress: float) -> JoiningTrainer:
        return self

    def size_of_groups(self, number: int) -> int:
        return -(-number // 2)

    def train_with(self, others: Sequence[JoiningTrainer]) -> list[Outcome]:
        together = [self, *others]
        self.sizes.append(len(together))
        return [TrainingResult(torch.zeros(1), 1, 1, 0.0) for _ in together]


@pytest.mark.parametrize("num_threads", [0, 3])
def test_trainers_that_can_run_together_do_so_in_groups_of_their_choice(
    num_threads: int,
) -> None:
    found: list[int] = []
    with ComputePool(num_threads) as pool:
        request = Train(torch.zeros(1), Steps(1))
        trainers = [JoiningTrainer(found) for _ in range(7)]
        for pending in [pool.train(each, request, 0.0) for each in trainers]:
            pending.result()
    assert sorted(found) == [3, 4]


def test_tasks_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)
    with ComputePool(2) as pool:
        for one in [pool.submit(both.wait), pool.submit(both.wait)]:
            one.result()


def test_threads_compute_on_one_core_each() -> None:
    with ComputePool(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_a_closed_pool_forgets_what_has_not_begun() -> None:
    has_begun = threading.Event()
    ran: list[int] = []

    def first() -> None:
        has_begun.set()
        time.sleep(0.02)

    with ComputePool(1) as pool:
        pool.submit(first)
        for k in range(5):
            pool.submit(lambda k=k: ran.append(k))
        has_begun.wait()
    assert ran == []


def test_by_default_there_is_a_thread_a_core() -> None:
    with ComputePool() as pool:
        assert pool.num_threads >= 1


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 0, got -1"):
        ComputePool(-1)
