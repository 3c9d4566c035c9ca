"""Where training is done, and what is lost there, changes no bit of a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.every_word import EveryWord
from tests.fake_cluster import FakeSession
from tests.small_runs import (
    FAULTS,
    NUM_WORKERS,
    ctrl_c_at,
    dataset,
    parameters,
    quick,
    repeatable_events,
    small_run,
    small_task,
)
from tests.stage_runs import STAGE_SETTINGS, staged_run, staged_task
from tests.tiers import first, thorough

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.cli.main import main
from edgegossip.contract.errors import Interrupted, NetworkError, TrainingError
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.data.hold_out import hold_out
from edgegossip.integrations.ray.tensors_in_store import put_together, take_apart
from edgegossip.recipes.rehearsal import Rehearsal
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Focused
from edgegossip.training.stages.pipelined import PipelinedStage

STAGES: dict[str, Any] = {"inner": Alone(num_rounds=5, local_steps=4), **STAGE_SETTINGS}


def experiment(name: str) -> Experiment:
    """A run with faults and data that is assigned and aggregated, or one in stages."""
    if name == "pipelined":
        task = staged_task(PipelinedStage, options={"max_passed": 9})
        return staged_run(Pipelined(**STAGES), task)
    if name == "decoupled":
        return staged_run(Decoupled(**STAGES))
    if name != "every-word":
        return small_run(name, faults=FAULTS)
    aggregating = AccuracyAware(selection=Focused())
    task = small_task(dataset=hold_out(dataset(), 0.2), accuracy_aware=aggregating)
    return replace(small_run(task=task, faults=FAULTS), algorithm=EveryWord(NUM_WORKERS))


def left(folder: Path) -> tuple[bytes, bytes]:
    return repeatable_events(folder), parameters(folder)


@cache
def local(name: str) -> tuple[bytes, bytes]:
    with TemporaryDirectory() as folder:
        run(experiment(name), out=folder, num_threads=0)
        return left(Path(folder))


class Warner(Rehearsal):
    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        warnings.warn("a warning", UserWarning, stacklevel=2)
        return super().train(request, progress)


class Unknown(Rehearsal):
    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        raise KeyError("of a user's own")


def trained(pool: Any, make: Callable[..., Trainer]) -> TrainingResult:  # noqa: ANN401
    """Result of a single piece of work."""
    trainer = pool.trainers(make)(0, 0)
    request = Train(torch.ones(3), Steps(1))
    trainer.cost(request)
    result: TrainingResult = pool.train(trainer, request, 0.0).result()
    return result


# The same bits.


@thorough
@pytest.mark.parametrize("name", first(1, ["gosgd", "every-word", "pipelined", "decoupled"]))
def test_results_are_those_of_the_local_pool(tmp_path: Path, name: str) -> None:
    session = FakeSession()
    run(experiment(name), out=tmp_path, open_pool=session.pool)
    assert left(tmp_path) == local(name)
    assert session.num_orders > 20
    assert not session.is_open


LOSSES = [("gosgd", 0), ("gosgd", 1), ("every-word", 2)]
MORE_LOSSES = [(name, seed) for name in ("gosgd", "every-word") for seed in range(3, 13)]


@pytest.mark.parametrize(
    ("name", "seed"),
    [*first(1, LOSSES), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LOSSES)],
)
def test_lost_actors_change_nothing(tmp_path: Path, name: str, seed: int) -> None:
    session = FakeSession(3, loss_probability=0.05, seed=seed)
    run(experiment(name), out=tmp_path, open_pool=session.pool)
    assert session.num_losses > 0
    assert left(tmp_path) == local(name)


@pytest.mark.parametrize("begins", ["here", "there"])
@pytest.mark.parametrize("name", first(1, ["gosgd", "every-word"]))
def test_a_checkpoint_of_one_pool_goes_on_in_another(
    tmp_path: Path, name: str, begins: str
) -> None:
    pools: list[dict[str, Any]] = [{"num_threads": 1}, {"open_pool": FakeSession().pool}]
    first, second = pools if begins == "here" else reversed(pools)
    begun = experiment(name)
    with ctrl_c_at(20, begun.algorithm), pytest.raises(Interrupted):
        run(begun, out=tmp_path, **first)
    run(begun, out=tmp_path, resume=True, **second)
    assert left(tmp_path) == local(name)


def test_work_too_small_to_send_is_done_here(tmp_path: Path) -> None:
    session = FakeSession()
    open_pool = partial(session.pool, min_seconds=100.0)
    run(experiment("gosgd"), out=tmp_path, open_pool=open_pool)
    assert session.num_orders <= NUM_WORKERS + 1  # until it is known how small
    assert left(tmp_path) == local("gosgd")


def test_trainers_that_the_pool_did_not_make_train_here() -> None:
    session = FakeSession()
    with session.pool() as pool:
        request = Train(torch.ones(3), Steps(1))
        assert pool.train(Rehearsal(1), request, 0.0).result().params is request.params
    assert session.num_orders == 0


# The cluster changes.


def test_a_lost_node_is_done_without(tmp_path: Path) -> None:
    session = FakeSession(2)
    run(experiment("gosgd"), out=tmp_path, open_pool=Leaving(session).pool)
    assert session.num_losses > 0
    assert left(tmp_path) == local("gosgd")


def test_where_only_some_cores_shall_be_used_another_takes_the_place_of_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgegossip.integrations.ray.ray_pool._NODES_SECONDS", 0.01)
    session = FakeSession(2)
    run(experiment("gosgd"), out=tmp_path, open_pool=Leaving(session, num_actors=1).pool)
    assert session.num_losses > 0
    assert left(tmp_path) == local("gosgd")


class Leaving:
    """Loses a node when the first work has been done there."""

    def __init__(self, session: FakeSession, num_actors: int | None = None) -> None:
        self.session = session
        self.num_actors = num_actors

    def pool(self) -> Any:  # noqa: ANN401
        pool: Any = self.session.pool(num_actors=self.num_actors)
        session = self.session
        train = pool.train

        def leaving(*arguments: Any) -> Any:  # noqa: ANN401
            if len(session.there) == 2 and session.num_orders > 6:
                session.there.remove(session.desks[0].node)
            return train(*arguments)

        pool.train = leaving
        return pool


def test_without_any_node_the_run_fails_and_says_how_to_go_on() -> None:
    session = FakeSession(1)
    session.refuses = True
    with session.pool() as pool, pytest.raises(TrainingError, match="start machines, and --re"):
        trained(pool, partial(make, Rehearsal))


def test_work_that_ends_every_actor_ends_the_run() -> None:
    session = FakeSession(1, loss_probability=1.0)
    with session.pool() as pool, pytest.raises(TrainingError, match="worker 0 ended 5 actors"):
        trained(pool, partial(make, Rehearsal))


def test_a_node_with_other_versions_is_refused() -> None:
    session = FakeSession(1)
    session.versions = session.versions | {"torch": "1.0"}
    with session.pool() as pool, pytest.raises(NetworkError, match=r"host-0 has torch 1.0"):
        trained(pool, partial(make, Rehearsal))


def make(kind: type[Rehearsal], rank: int, incarnation: int) -> Trainer:
    return kind(1)


def test_learners_of_crashed_workers_are_forgotten(tmp_path: Path) -> None:
    session = FakeSession(1)
    run(experiment("gosgd"), out=tmp_path, open_pool=session.pool)
    assert session.desks[0].num_learners == NUM_WORKERS


def test_data_of_a_run_that_is_over_makes_room_for_the_next_one() -> None:
    session = FakeSession(1)
    with session.pool() as pool:
        for _ in range(3):
            trained(pool, partial(make, Rehearsal))
    assert len(session.desks[0].desk._makers) == 1


# What goes wrong in training.


def test_a_loss_that_is_not_finite_is_told_as_by_the_local_pool(tmp_path: Path) -> None:
    task = small_task(optimizer=partial(torch.optim.SGD, lr=1e30))
    messages: list[str] = []
    pools: list[dict[str, Any]] = [{"num_threads": 0}, {"open_pool": FakeSession().pool}]
    for pool in pools:
        with pytest.raises(TrainingError) as failed:
            run(quick(task=task), out=tmp_path / str(len(messages)), **pool)
        messages.append(str(failed.value))
    assert messages[0] == messages[1]


def test_any_error_is_told_with_where_it_was_raised() -> None:
    with FakeSession(1).pool() as pool, pytest.raises(TrainingError, match="of a user's own"):
        trained(pool, partial(make, Unknown))


def test_warnings_of_trainers_arrive() -> None:
    with FakeSession(1).pool() as pool, pytest.warns(UserWarning, match="a warning"):
        trained(pool, partial(make, Warner))


# On the way.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(12)[::2],
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.rand(10)[4:7],
    ],
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    found = put_together(take_apart(tensor))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        assert found.stride() == tensor.stride()
    assert found.numel() == 0 or found.data_ptr() != tensor.data_ptr()


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = str(tmp_path / "run")
    assert main(["run", "quickstart", "--pool", "ray", "--out", out]) == 2
    assert "pip install 'edgegossip[ray]'" in capsys.readouterr().err


def test_an_address_is_for_ray_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", "--ray-address", "auto"]) == 2
    assert "--ray-address is for --pool ray" in capsys.readouterr().err
