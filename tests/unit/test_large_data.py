"""Data sets that stay in their files: mapped arrays, and samples that are read ahead."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset, Split, from_numpy, from_torch
from edgegossip.data.hold_out import hold_out
from edgegossip.data.local import Local
from edgegossip.data.read_ahead import Reader, ReadingPool
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.platform import uneven
from edgegossip.training.task import Task, Workload

NUM_SAMPLES = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((NUM_SAMPLES, 4), np.float32)
Y = np.arange(NUM_SAMPLES) % 3


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A map-style data set, with some Python for each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 59 and os.environ.get("EDGEGOSSIP_TEST_KILL") == str(os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.from_numpy(X[index]), int(Y[index])


def mapped(folder: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    np.save(folder / name, array)
    loaded: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return loaded


def trained(dataset: Dataset, out: Path, num_rounds: int = 3) -> tuple[float, ...]:
    """The final parameters of EdgeGossip on three uneven machines."""
    task = Task(dataset=dataset, model=partial(nn.Linear, 4, 3), batch_size=4)
    inner = EpochGossip(topology=complete(3), num_rounds=num_rounds)
    experiment = Experiment(task=task, algorithm=EdgeGossip(inner=inner), platforms=uneven(3))
    params = run(experiment, out=out).params
    return tuple(torch.cat([each.flatten() for each in params.values()]).tolist())


def rows(num_workers: int) -> Dataset:
    return from_torch("rows", Rows(), Rows(), num_classes=3, num_workers=num_workers)


@thorough
def test_where_samples_lie_and_who_reads_them_changes_no_bit(tmp_path: Path) -> None:
    pairs = (mapped(tmp_path, "x", X), mapped(tmp_path, "y", Y))
    sets = {
        "memory": from_numpy("rows", (X, Y), (X, Y), num_classes=3),
        "files": from_numpy("rows", pairs, pairs, num_classes=3),
        "threads": from_numpy("rows", pairs, pairs, num_classes=3, num_workers=2),
        "python": rows(0),
        "processes": rows(2),
    }
    found = {name: trained(each, tmp_path / name) for name, each in sets.items()}
    assert len(set(found.values())) == 1


class Counting:
    """Counts how often each sample was read."""

    def __init__(self) -> None:
        self.num_reads = torch.zeros(NUM_SAMPLES, dtype=torch.int64)

    def __call__(self, indices: Tensor) -> Tensor:
        self.num_reads[indices] += 1
        return indices.clone()

    def reader(self, shard: Tensor) -> Reader:
        return Reader(self, shard, ReadingPool(self, num_workers=1))


def batches(*positions: list[int]) -> list[Tensor]:
    return [torch.tensor(each) for each in positions]


def following(cut: list[Tensor]) -> Callable[[int], list[Tensor]]:
    """The batches of a pass that are still to come."""
    return lambda num_batches: cut[:num_batches]


def test_each_batch_is_read_once_and_in_order() -> None:
    counting = Counting()
    reader = counting.reader(torch.arange(10, 20))
    cut = batches([0, 1], [2, 3], [4], [5], [6])
    found = [
        reader.read(batch, following(cut[i + 1 :])).tolist() for i, batch in enumerate(cut)
    ]
    assert found == [[10, 11], [12, 13], [14], [15], [16]]
    assert counting.num_reads.tolist() == [0] * 10 + [1] * 7 + [0] * 43


def test_only_so_many_batches_are_read_ahead() -> None:
    counting = Counting()
    pool = ReadingPool(counting, num_workers=1)
    cut = batches(*[[i] for i in range(8)])
    Reader(counting, torch.arange(NUM_SAMPLES), pool).read(cut[0], following(cut[1:]))
    pool.start(torch.tensor([59])).result()  # what was begun before has been read
    assert counting.num_reads.nonzero()[:, 0].tolist() == [0, 1, 2, 59]


def test_batches_of_another_pass_take_the_place_of_those_read_ahead() -> None:
    reader = Counting().reader(torch.arange(NUM_SAMPLES))
    old, new = batches([0], [1], [2]), batches([1], [3])
    reader.read(old[0], following(old[1:]))
    assert reader.read(new[0], following(new[1:])).tolist() == [1]
    assert reader.read(new[1], following([])).tolist() == [3]


@pytest.mark.parametrize(
    ("part", "is_copied"), [(slice(10, 50), False), (slice(0, 60, 2), True)]
)
def test_parts_of_mapped_arrays_are_sent_as_their_place_in_the_file(
    tmp_path: Path, part: slice, is_copied: bool
) -> None:
    wide = RANDOM.standard_normal((NUM_SAMPLES, 500), np.float32)
    split = ArraySplit({"x": mapped(tmp_path, "x", wide)[part]})
    sent = pickle.dumps(split)
    assert (len(sent) > 2000) is is_copied
    there: Split = pickle.loads(sent)
    assert len(there) == len(split)
    chosen = torch.tensor([3])
    assert torch.equal(there.batch(chosen)["x"], torch.from_numpy(wide[part][3:4]))


def test_what_a_mapped_split_reads_is_equal_after_it_was_sent(tmp_path: Path) -> None:
    split = ArraySplit(mapped(tmp_path, "x", X), mapped(tmp_path, "y", Y), num_workers=1)
    sent = pickle.dumps(split)
    assert len(sent) < 1000
    there: Split = pickle.loads(sent)
    chosen = torch.tensor([7, 3])
    for ours, theirs in zip(split.batch(chosen), there.batch(chosen), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(split.labels, there.labels)


def test_held_out_samples_are_read_ahead_too() -> None:
    data = hold_out(rows(2), share=0.5)
    assert len(data.train) == NUM_SAMPLES // 2
    cut, following = batches([0], [1, 2]), []

    def upcoming(num_batches: int) -> list[Tensor]:
        following.append(num_batches)
        return cut[1:]

    reader = data.training.reader(torch.arange(len(data.train)))
    reader.read(cut[0], upcoming)
    x, y = reader.read(cut[1], upcoming)
    assert following == [4, 4]  # as many as two processes read ahead
    expected = data.train.batch(cut[1])
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


def test_data_that_stays_with_a_worker_is_read_ahead_too() -> None:
    own = from_numpy("rows", (X, Y), (X, Y), num_classes=3, num_workers=1)
    local = Local("rows", load=lambda rank: own, num_classes=3, input_shape=(4,))
    task = Task(dataset=local, model=partial(nn.Linear, 4, 3), batch_size=4)
    workload = Workload(task, [0], seed=0)
    before = set(threading.enumerate())
    workload.make_trainer(0).train(Train(workload.initial_params(), Steps(2)))
    begun = set(threading.enumerate()) - before
    assert [each.name.startswith("read-ahead") for each in begun] == [True]


def test_learners_that_begin_at_once_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ReadingPool] = []
    make = ReadingPool._make_executor

    def slowly(pool: ReadingPool) -> Executor:
        made.append(pool)
        time.sleep(0.1)
        return make(pool)

    monkeypatch.setattr(ReadingPool, "_make_executor", slowly)
    pool = ArraySplit(X, Y, num_workers=2).pool
    assert pool is not None
    with ThreadPoolExecutor(4) as learners:
        started = list(learners.map(pool.start, [torch.tensor([1])] * 4))
    for each in started:
        x, _ = each.result()
        assert torch.equal(x, torch.from_numpy(X[1:2]))
    assert made == [pool]


def test_a_killed_process_that_reads_ends_in_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEGOSSIP_TEST_KILL", str(os.getpid()))
    with pytest.raises(DataError, match="process that reads samples ahead has ended"):
        trained(rows(1), tmp_path)


def test_samples_are_fetched_together_where_the_data_set_can() -> None:
    class Table(Rows):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
            asked.append(indices)
            return [self[index] for index in indices]

    asked: list[list[int]] = []
    data = from_torch("rows", Table(), Table(), num_classes=3)
    asked.clear()
    x, _ = data.train.batch(torch.tensor([4, 2]))
    assert asked == [[4, 2]]
    assert torch.equal(x, torch.from_numpy(X[[4, 2]]))


@pytest.mark.parametrize(
    ("train", "num_classes", "message"),
    [
        ((X, Y[:-1]), 0, r"rows: a batch has tensors of unequal length, 60 at \[0\] and 59"),
        ((X, Y.astype(str)), 3, r"rows: an array of <U21 holds no samples"),
        ((X, Y + 0.5), 3, r"rows, train split: labels .* expected one torch.int64"),
        ((X, Y + 1), 3, r"label 3 of sample 2 is out of range; expected 0 \.\. 2"),
        (X, 3, r"rows: samples with classes are a pair \(x, y\) of arrays"),
        (
            {"x": X.tolist()},
            0,
            r"rows: a batch holds float .* expected tensors or NumPy arrays",
        ),
        ({"x": X.astype(np.float64)}, 0, r"numbers at \['x'\] are torch.float64"),
    ],
)
def test_bad_arrays_are_refused(train: Any, num_classes: int, message: str) -> None:  # noqa: ANN401
    with pytest.raises(DataError, match=message):
        from_numpy("rows", train, train, num_classes)


@pytest.mark.parametrize("make", [rows, partial(from_numpy, "rows", (X, Y), (X, Y), 3)])
def test_a_negative_number_of_readers_is_refused(make: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match="num_workers must be at least 0, got -1"):
        make(num_workers=-1)
