"""One model in parts: workers of each role start from, train and report their own."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.small_runs import (
    ctrl_c_at,
    dataset,
    parameters,
    repeatable_events,
    small_run,
    tensors,
)
from tests.split_learning import (
    BATCH_SIZE,
    LEARNING_RATE,
    NUM_DEVICES,
    SplitLearning,
    SplitState,
    cloud_part,
    device_part,
    split_run,
    split_task,
)
from tests.tiers import thorough
from tests.worker_threads import Crew
from torch import Tensor, nn

from edgegossip.contract import Effect, Evaluate, Event, Seconds, Started
from edgegossip.contract.errors import Interrupted, LocalProtocolError, RunFolderError
from edgegossip.contract.metrics import consensus_distance
from edgegossip.data.dataset import Split
from edgegossip.data.hold_out import hold_out
from edgegossip.real.gathering import Gathering
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.training.loss import prepare_batch
from edgegossip.training.task import Workload

NAMES = ["device.0.weight", "device.0.bias", "device.3.weight", "device.3.bias"]
NAMES += ["cloud.1.weight", "cloud.1.bias"]
CLOUD = NUM_DEVICES


def workload() -> Workload:
    return split_run().workload()


def batch_of(split: Split, indices: Tensor) -> tuple[Tensor, Tensor]:
    x, y = prepare_batch(dataset().training, split.batch(indices), torch.device("cpu"))
    return x, y


# Vectors of parts and of the whole.


def test_workers_of_one_role_start_equal_and_those_of_another_from_another_model() -> None:
    ready = workload()
    assert torch.equal(ready.initial_params(0), ready.initial_params(1))
    for rank, part in ((0, device_part), (CLOUD, cloud_part)):
        num_params = sum(each.numel() for each in part().parameters())
        assert ready.initial_params(rank).numel() == num_params


def test_a_joined_vector_is_what_the_parts_compute_one_behind_the_other() -> None:
    ready = workload()
    whole, distance = ready.average({rank: ready.initial_params(rank) for rank in range(3)})
    assert distance == 0
    named = ready.named_parameters(whole)
    assert [*named] == NAMES
    model = nn.Sequential(OrderedDict(device=device_part(), cloud=cloud_part()))
    model.load_state_dict(named)
    x, y = batch_of(dataset().test, torch.arange(24))
    outputs = model(x).detach()
    loss, metrics = ready.evaluate(whole)
    assert loss == pytest.approx(float(F.cross_entropy(outputs, y)))
    assert metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))


def test_each_part_is_averaged_over_its_workers_alone() -> None:
    ready = workload()
    start = {rank: ready.initial_params(rank) for rank in range(3)}
    moved = {0: start[0] + 1, 1: start[1] + 3, CLOUD: start[CLOUD] + 10}
    expected, _ = ready.average({0: start[0] + 2, CLOUD: start[CLOUD] + 10})
    mean, distance = ready.average(moved)
    torch.testing.assert_close(mean, expected)
    assert distance == pytest.approx(math.sqrt(len(start[0])))  # both are 1 from the mean
    with_first = ready.with_own(mean, 0, moved[0])
    torch.testing.assert_close(with_first, ready.average({0: moved[0], CLOUD: moved[CLOUD]})[0])


def test_whole_models_are_averaged_as_ever() -> None:
    ready = small_run("gossip").workload()
    params = ready.initial_params()
    stacked = torch.stack([params, params + 1, params + 5])
    mean, distance = ready.average(dict(enumerate(stacked)))
    assert torch.equal(mean, stacked.mean(0))
    assert distance == consensus_distance(stacked)
    assert torch.equal(ready.with_own(mean, 1, stacked[1]), stacked[1])


def test_who_holds_all_parts_holds_a_whole_model() -> None:
    ready = workload()
    assert [ready.is_whole(each) for each in ([0, CLOUD], [0, 1], [CLOUD], [])] == [
        True,
        False,
        False,
        False,
    ]


def test_a_join_of_ones_own_may_run_the_parts_in_any_way() -> None:
    class Sum(nn.Module):
        def __init__(self, parts: Mapping[str, nn.Module]) -> None:
            super().__init__()
            self.one, self.other = parts["device"], parts["cloud"]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(x) + self.other(x)
            return y

    def linear() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    task = split_task(model={"device": linear, "cloud": linear}, join=Sum)
    ready = replace(split_run(), task=task).workload()
    parts = {rank: torch.zeros(111) for rank in (0, CLOUD)}
    assert ready.evaluate(ready.average(parts)[0])[0] == pytest.approx(math.log(3))


# Whole runs.


def of_one_model(num_steps: int) -> dict[str, Tensor]:
    """The joined model, trained in one place on the batches of the only device."""
    ready = split_run(num_devices=1).workload()
    whole, _ = ready.average({rank: ready.initial_params(rank) for rank in range(2)})
    model = nn.Sequential(OrderedDict(device=device_part(), cloud=cloud_part()))
    model.load_state_dict(ready.named_parameters(whole))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for indices in ready.shards[0][: num_steps * BATCH_SIZE].view(-1, BATCH_SIZE):
        x, y = batch_of(dataset().train, indices)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def test_a_model_split_between_two_learns_what_it_learns_in_one_place(tmp_path: Path) -> None:
    run(split_run(num_devices=1), out=tmp_path)
    expected = of_one_model(num_steps=6)
    found = tensors(tmp_path)
    assert {*found} == {*NAMES}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def run_long(out: Path) -> Results:
    return run(split_run(algorithm=SplitLearning(num_rounds=40)), out=out)


def test_a_run_in_parts_learns_and_says_how_good_each_worker_is(tmp_path: Path) -> None:
    results = run_long(tmp_path)
    assert results.history[-1].accuracy > 0.9 > results.history[0].accuracy
    first, second, cloud = results.worker_accuracies
    assert cloud == results.history[-1].accuracy  # there is no other cloud in the mean
    assert min(first, second) > 0.5
    assert results.history[-1].consensus_distance > 0


def test_a_run_in_parts_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    experiment = split_run()
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(experiment, out=whole)
    with ctrl_c_at(20, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=halves)
    run(experiment, out=halves, resume=True)
    assert parameters(halves) == parameters(whole)
    assert repeatable_events(halves) == repeatable_events(whole)


def test_a_part_whose_workers_are_all_lost_counts_as_they_left_it(tmp_path: Path) -> None:
    experiment = split_run(faults=Faults(script=(Crash(at=0.3, rank=CLOUD),)), max_seconds=2.0)
    results = run(experiment, out=tmp_path)
    assert len(results.worker_accuracies) == 3
    assert {*results.params} == {*NAMES}


@thorough
def test_hosts_hold_parts_too_and_what_they_leave_is_joined(tmp_path: Path) -> None:
    experiment = split_run(algorithm=SplitLearning(num_rounds=12))
    crew = Crew(tmp_path)
    assert crew.all(experiment) == ["finished"] * 3
    results = Gathering(experiment, tmp_path).finish()
    assert {*tensors(tmp_path)} == {*NAMES}
    assert len(results.worker_accuracies) == 3
    assert results.history[-1].accuracy > results.history[0].accuracy


@thorough
def test_what_lacks_a_part_is_no_model(tmp_path: Path) -> None:
    experiment = split_run()
    crew = Crew(tmp_path)
    assert crew.all(experiment) == ["finished"] * 3
    for path in (crew.folder(CLOUD) / "snapshots").iterdir():
        path.unlink()
    results = Gathering(experiment, tmp_path).finish()
    assert [each.time for each in results.history] == [results.virtual_seconds]
    (crew.folder(CLOUD) / "summary.json").unlink()
    message = r"no worker except \[0, 1\] .* has finished"
    with pytest.raises(RunFolderError, match=message):
        Gathering(experiment, tmp_path).finish()


# What cannot be.


def test_an_algorithm_with_other_roles_than_the_models_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown role 'worker'; choose one of 'cloud', 'device'"
    ):
        small_run("gossip", task=split_task())


def test_a_part_that_nobody_holds_is_refused() -> None:
    task = split_task(model={"device": device_part, "cloud": cloud_part, "edge": cloud_part})
    with pytest.raises(
        ValueError, match="a part 'edge', but no worker that is evaluated holds it"
    ):
        split_run(task=task)
    with pytest.raises(ValueError, match="no parts"):
        split_task(model={})


def with_a_layer_more(parts: Mapping[str, nn.Module]) -> nn.Module:
    return nn.Sequential(*parts.values(), nn.Linear(3, 3))


def of_copies(parts: Mapping[str, nn.Module]) -> nn.Module:
    return nn.Sequential(*copy.deepcopy([*parts.values()]))


def of_one(parts: Mapping[str, nn.Module]) -> nn.Module:
    return parts["device"]


@pytest.mark.parametrize("join", [with_a_layer_more, of_copies, of_one])
def test_a_join_takes_all_parts_as_they_are_and_nothing_else(join: object) -> None:
    with pytest.raises(ValueError, match=r"join made a model of .* parameters out of parts"):
        replace(split_run(), task=split_task(join=join)).workload()


@dataclass(frozen=True, kw_only=True)
class Asks(SplitLearning):
    """Its cloud wants to know how good its part is."""

    def handle(self, state: SplitState, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Started) and state.rank == CLOUD:
            return [Evaluate(state.params)]
        return super().handle(state, event, now)


def test_a_part_alone_cannot_be_evaluated(tmp_path: Path) -> None:
    task = split_task(dataset=hold_out(dataset(), 0.2, seed=0))
    with pytest.raises(LocalProtocolError, match=r"evaluate \[33\] .* whole model has 723"):
        run(split_run(task=task, algorithm=Asks()), out=tmp_path)
