"""Data that lies with the workers: who reads it, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.local_data import SIZES, Files, local, local_run, own_data
from tests.small_runs import dataset, pictures, small_model, small_task

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import DataError, LocalProtocolError
from edgegossip.contract.protocol import Steps, Train
from edgegossip.data.dataset import Dataset, from_tensors
from edgegossip.data.nested import concatenated
from edgegossip.data.partition import Dirichlet
from edgegossip.runs.describe import describe, header
from edgegossip.runs.experiment import Experiment
from edgegossip.training.learner import Learner

RANKS = range(len(SIZES))


def reassigning(**data: Any) -> Experiment:  # noqa: ANN401
    experiment = local_run(data=data)
    balanced = EdgeGossip(inner=experiment.algorithm, on_failure="reassign")
    return replace(experiment, algorithm=balanced)


# Reading.


def test_every_worker_holds_out_its_own_validation_samples() -> None:
    data = local()
    for rank in RANKS:
        own = data.of(rank)
        assert own.validation is not None
        assert len(own.train) + len(own.validation) == SIZES[rank]
        assert len(own.validation) == round(0.2 * SIZES[rank])


def test_a_validation_split_of_its_own_stays() -> None:
    own = pictures(6, seed=9)
    data = local(lambda rank: own_data(rank, validation=own), held_out=None)
    assert data.of(0).validation is own
    assert len(data.of(0).train) == SIZES[0]


def test_data_is_read_once_and_only_when_it_is_needed() -> None:
    files = Files()
    data = local(files.load)
    assert files.reads == []
    assert data.of(2) is data.of(2)
    assert files.reads == [2]


def test_nothing_is_read_to_describe_an_experiment() -> None:
    files = Files()
    experiment = local_run(load=files.load)
    assert "num_train" not in header(experiment, None)
    described = describe(experiment.task.dataset)
    assert described["type"] == "Local"
    assert described["classes"] == ["dark", "gray", "bright"]
    assert "load" not in described
    assert files.reads == []


def test_a_process_reads_the_data_of_its_own_worker_alone() -> None:
    files = Files()
    workload = local_run(load=files.load).workload(reads=(1,))
    trainer = workload.make_trainer(1)
    assert trainer.num_samples == 8
    assert workload.validator(1) is not None
    assert files.reads == [1]
    with pytest.raises(DataError, match="data of worker 2 must not be read here"):
        workload.make_trainer(2)
    with pytest.raises(DataError, match="data of worker 0 must not be read here"):
        _ = workload.shards
    assert files.reads == [1]


def test_where_runs_are_gathered_no_data_is_read() -> None:
    files = Files()
    workload = local_run(load=files.load).workload(reads=())
    assert len(workload.named_parameters(workload.initial_params())) > 0
    with pytest.raises(DataError, match="must not be read here"):
        workload.evaluate(workload.initial_params())
    assert files.reads == []


def test_copies_in_other_processes_can_read() -> None:
    data = pickle.loads(pickle.dumps(local()))
    assert len(data.of(1).train) == 8


# Data that moves.


def test_no_trainer_is_assigned_the_data_of_others() -> None:
    files = Files()
    trainer = local_run(load=files.load).workload().make_trainer(0)
    with pytest.raises(
        LocalProtocolError, match=r"cannot reach the data of worker 2, only .*\[0"
    ):
        trainer.assign((0, 2))
    assert files.reads == [0]


def test_an_algorithm_that_moves_data_is_refused_unless_it_may_be_shared() -> None:
    with pytest.raises(ValueError, match=r"Local data is not shared.*--may-share-data"):
        reassigning()
    assert reassigning(may_share=True).algorithm.traits.moves_data
    dealt = replace(local_run(), task=small_task(dataset=dataset()))
    balanced = EdgeGossip(inner=dealt.algorithm, on_failure="reassign")
    replace(dealt, algorithm=balanced)  # dealt data is everywhere


def test_data_that_may_be_shared_is_read_when_it_is_assigned() -> None:
    files = Files()
    workload = local_run(load=files.load, data={"may_share": True}).workload(reads=(0,))
    trainer = workload.make_trainer(0)
    assert files.reads == [0]
    trainer.assign((0, 2))
    assert files.reads == [0, 2]
    own = [local().of(rank).train for rank in (0, 2)]
    assert trainer.num_samples == sum(map(len, own))
    assert isinstance(trainer, Learner)
    places = torch.tensor([33, 0, 31, 50])
    x, y = trainer._dataset.train.batch(trainer.shard[places])
    everything = concatenated([each.batch(torch.arange(len(each))) for each in own])
    assert torch.equal(x, everything[0][places])
    assert torch.equal(y, everything[1][places])
    request = Train(workload.initial_params(), Steps(3))
    assert trainer.train(request).num_steps == 3


# The wrong data.


def failing(rank: int) -> Dataset:
    raise FileNotFoundError(2, "No such file or directory", f"photos/{rank}")


@pytest.mark.parametrize(
    ("load", "settings", "message"),
    [
        (lambda r: own_data(r, train=pictures(0, seed=0)), {}, "train split: no samples"),
        (own_data, {"held_out": None}, "no validation split.*hold_out"),
        (lambda r: own_data(r, num_classes=4), {}, "num_classes is 4, but the task says 3"),
        (lambda r: own_data(r, input_shape=(1, 9, 6)), {}, "expected \\[1, 9, 6\\]"),
        (
            own_data,
            {"input_shape": (3, 6, 6)},
            r"input_shape is \(1, 6, 6\), but the task says",
        ),
        (lambda r: own_data(r, mean=torch.ones(1)), {}, r"mean of its own, \[1.0\]"),
        (failing, {}, "No such file or directory: 'photos/3'"),
        (lambda r: "photos", {}, "load gave 'photos'; it must return a Dataset"),
        (lambda r: own_data(r, train=pictures(1, seed=0)), {}, "both splits need at least 1"),
    ],
)
def test_the_data_of_a_worker_that_cannot_be_used_is_one_line(
    load: Any,  # noqa: ANN401
    settings: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(DataError, match=f"data of worker 3: .*{message}") as raised:
        local(load, **settings).of(3)
    assert "\n" not in str(raised.value)


def test_local_data_is_not_dealt() -> None:
    with pytest.raises(ValueError, match=r"partition is Dirichlet.* leave out partition"):
        small_task(dataset=local(), partition=Dirichlet(1.0))


def test_what_needs_all_data_in_one_place_is_refused() -> None:
    with pytest.raises(DataError, match="the data of this task stays with its workers"):
        len(local().train)


def test_dealt_data_needs_a_test_split() -> None:
    with pytest.raises(DataError, match="'file 0' has no test split"):
        small_task(dataset=own_data(0))


def test_classes_are_named_or_counted() -> None:
    with pytest.raises(ValueError, match="num_classes is 2, but 3 classes are named"):
        local(num_classes=2)
    assert local(classes=(), num_classes=3).num_classes == 3


@pytest.mark.filterwarnings("ignore:1 layers")
def test_normalization_without_exchange_needs_data_in_one_place() -> None:
    experiment = local_run()
    task = replace(experiment.task, has_buffers=False, model=small_model)
    with pytest.raises(ValueError, match="has_buffers is False"):
        replace(experiment, task=task).workload()


def test_samples_without_classes_may_be_local() -> None:
    data = local(
        lambda rank: from_tensors("numbers", {"x": torch.rand(20 + rank, 2)}),
        classes=(),
        input_shape=(),
    )
    assert len(data.of(1).train) == 17
