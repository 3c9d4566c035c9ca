"""No path leads from the test split to an algorithm: only reports measure on it.

An algorithm that uses every word of the contract runs in both drivers. Its test split refuses
to be read meanwhile, and nothing that the algorithm, its trainer or its predictor holds leads
to it, however many references away.
"""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.every_word import EveryWord, Keeper
from tests.parity import Steady
from tests.small_runs import NUM_WORKERS, dataset, events, small_run, small_task
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Assigned, Evaluated, Predicted
from edgegossip.data.dataset import ArraySplit
from edgegossip.data.hold_out import hold_out
from edgegossip.data.nested import Nested
from edgegossip.net.host.host import Host
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real import worker as worker_module
from edgegossip.real.gathering import Gathering
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.simulator import Simulator
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.task import Workload


class Guarded:
    """A test split that refuses to be read while it is locked, and counts how often it was."""

    def __init__(self, split: ArraySplit) -> None:
        self.split = split
        self.is_locked = False
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: Tensor) -> Nested:
        self._read()
        return self.split.batch(indices)

    @property
    def labels(self) -> Tensor:
        self._read()
        return self.split.labels

    def _read(self) -> None:
        assert not self.is_locked, "the test split was read while an algorithm ran"
        self.num_reads += 1


@dataclass
class Guard:
    """An experiment whose test split is guarded."""

    test: Guarded
    experiment: Experiment

    @property
    def forbidden(self) -> set[int]:
        """The forbidden data: the split, and the memory of its tensors."""
        split = self.test.split
        where = {each.untyped_storage().data_ptr() for each in (split.x, split.y)}
        return where | {id(self.test), id(split)}


@pytest.fixture(params=[True, False], ids=["buffers sent", "buffers measured"])
def guard(request: pytest.FixtureRequest) -> Guard:
    data = hold_out(dataset(), 0.2)
    assert isinstance(data.test, ArraySplit)
    test = Guarded(data.test)
    task = small_task(
        dataset=replace(data, test=test),
        has_buffers=request.param,
        accuracy_aware=AccuracyAware(),
    )
    return Guard(test, small_run(task=task, algorithm="gossip", evaluation_interval=None))


def every_word(guard: Guard) -> Experiment:
    return replace(guard.experiment, algorithm=EveryWord(NUM_WORKERS))


def leads_to(roots: Iterable[object], forbidden: set[int]) -> bool:
    """Whether anything in `forbidden` can be reached, by references or by shared memory.

    Classes, modules and the global names of functions are everybody's, and lead everywhere.
    """
    seen: set[int] = set()
    kept: list[object] = []  # alive, so that no id is used twice
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType)):
            continue
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, Tensor):
            seen.add(item.untyped_storage().data_ptr())
        referents = gc.get_referents(item)
        if isinstance(item, types.FunctionType):
            referents = [each for each in referents if each is not item.__globals__]
        waiting += referents
    return not seen.isdisjoint(forbidden)


def require_every_answer(state: Keeper) -> None:
    told = {type(each) for each in state.kept}
    assert told >= {Assigned, Evaluated, Predicted}
    assert state.round == 6


@thorough
def test_in_the_simulator_only_reports_read_the_test_split(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulators = set()
    simulate = Simulator.run

    def locked(self: Simulator[Any], until: float) -> bool:
        simulators.add(self)
        guard.test.is_locked = True
        try:
            return simulate(self, until)
        finally:
            guard.test.is_locked = False

    monkeypatch.setattr(Simulator, "run", locked)
    run(every_word(guard), out=tmp_path, num_threads=0)
    assert events(tmp_path, "evaluated")
    assert guard.test.num_reads > 0  # by the reports
    [simulator] = simulators
    for state in simulator.states:
        require_every_answer(state)
    machines = simulator._machines
    roots = [simulator.states, simulator._algorithm, list(simulator._agenda)]
    roots += [(machines.trainer(r), machines.monitor(r)) for r in range(NUM_WORKERS)]
    assert not leads_to(roots, guard.forbidden)


@thorough
def test_on_a_network_nobody_reads_the_test_split_before_the_report(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, network = every_word(guard), MemoryNetwork()
    hosts: list[Host[Any]] = []

    def make_host(*arguments: Any, **options: Any) -> Host[Any]:  # noqa: ANN401
        hosts.append(Host(*arguments, **options))
        return hosts[-1]

    monkeypatch.setattr(worker_module, "Host", make_host)
    ends: list[str] = []

    def work(rank: int) -> None:
        out = tmp_path / "workers" / str(rank)
        end = take_part(
            experiment,
            rank,
            network.transport(rank),
            out=out,
            settings=WorkerSettings(meet_seconds=20.0),
            forecaster=Steady(8.0),
        )
        ends.append(end)

    guard.test.is_locked = True
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ends == ["finished"] * NUM_WORKERS
    for host in hosts:
        require_every_answer(host.state.inner)
    roots = [
        (host.state, host._algorithm, host._work._trainer, host._work._forecaster)
        for host in hosts
    ]
    assert not leads_to(roots, guard.forbidden)
    guard.test.is_locked = False
    num_reads = guard.test.num_reads
    Gathering(experiment, tmp_path).finish()
    assert guard.test.num_reads > num_reads


def test_a_trainer_of_ones_own_is_given_no_way_to_the_test_split(guard: Guard) -> None:
    given: dict[str, object] = {}

    def make(**arguments: Any) -> Learner:  # noqa: ANN401
        given.update(arguments)
        return Learner(**arguments)

    task = replace(guard.experiment.task, trainer=make)
    Workload(task, range(NUM_WORKERS), seed=0).make_trainer(0)
    data: Any = given["data"]
    assert data.dataset is task.dataset.training
    assert not leads_to([given], guard.forbidden)


def test_what_answers_evaluate_does_not_hold_the_test_split(guard: Guard) -> None:
    workload = Workload(guard.experiment.task, range(NUM_WORKERS), seed=0)
    validator = workload.validator(0)
    assert validator is not None
    validator.evaluate(workload.initial_params())
    assert not leads_to([validator], guard.forbidden)


def test_the_search_for_a_path_finds_one_where_there_is_one(guard: Guard) -> None:
    data, forbidden = guard.experiment.task.dataset, guard.forbidden
    split = guard.test.split

    def closure() -> object:
        return data

    for path in ({"deep": [(data,)]}, closure, data.prepare, split.x[3:5], Held(split.y)):
        assert leads_to([path], forbidden)
    assert not leads_to([data.training, data.validation, Held(split.y.clone())], forbidden)


@dataclass(slots=True)
class Held:
    """Holds a tensor."""

    tensor: Tensor


def without_validation(guard: Guard) -> Experiment:
    experiment = every_word(guard)
    data = replace(experiment.task.dataset, validation=None)
    return replace(experiment, task=replace(experiment.task, dataset=data))


def test_evaluating_without_validation_data_is_an_error(guard: Guard, tmp_path: Path) -> None:
    what_to_do = r"no validation data; take some out .* with edgegossip\.hold_out"
    with pytest.raises(LocalProtocolError, match=what_to_do):
        run(without_validation(guard), out=tmp_path, num_threads=0)
