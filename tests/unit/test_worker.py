"""Workers in threads of one process: the folders they leave, and what they survive."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.small_runs import NUM_WORKERS, events, small_run, summary
from tests.tiers import thorough
from tests.worker_threads import WITHIN, Crew

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import NetworkError, RunFolderError, TrainingError
from edgegossip.contract.protocol import Effect, Event, Rank
from edgegossip.contract.topology import complete
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real import worker as worker_module
from edgegossip.real.gathering import Gathering
from edgegossip.real.introduction import run_id, run_key
from edgegossip.real.launch import launch
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.report.page import write_report
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run

EPOCHS = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=3)
EXPERIMENT = small_run(algorithm="epoch-gossip", evaluation_interval=None)
SHORT = replace(EXPERIMENT, algorithm=EPOCHS)
LONG = replace(EXPERIMENT, algorithm=replace(EPOCHS, num_rounds=40))
ENDLESS = replace(EXPERIMENT, algorithm=replace(EPOCHS, num_rounds=100_000))
Before = Callable[[Any, Event], None]


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(tmp_path / "run")


def before_each_event(monkeypatch: pytest.MonkeyPatch, call: Before) -> None:
    """Call `call` with the state and the event before a worker handles it."""
    handle = EpochGossip.handle

    def watched(self: Any, state: Any, event: Event, now: float) -> list[Effect]:  # noqa: ANN401
        call(state, event)
        return handle(self, state, event, now)

    monkeypatch.setattr(EpochGossip, "handle", watched)


def simulated(experiment: Experiment, crew: Crew) -> Results:
    return run(experiment, out=crew.out.with_name("simulated"))


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until the block ends, for workers to depend on."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as p:
        yield p
        p.kill()


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[k]) for k, x in one.items())


# A whole run.


@thorough
def test_workers_end_bit_for_bit_where_the_simulator_does(crew: Crew) -> None:
    assert crew.all(SHORT) == ["finished"] * NUM_WORKERS
    assert are_equal(Gathering(SHORT, crew.out).finish().params, simulated(SHORT, crew).params)


@thorough
def test_a_worker_leaves_its_model_its_log_and_a_summary(crew: Crew) -> None:
    crew.all(SHORT)
    folder = crew.folder(2)
    trained = events(folder, "trained")
    assert [each["num_steps"] for each in trained] == [2, 2, 2]
    found = summary(folder)
    assert (found["rank"], found["reason"], found["rounds"]) == (2, "finished", 3)
    assert found["samples_processed"] == sum(each["num_samples"] for each in trained)
    assert found["bytes_sent"] == sum(each["num_bytes"] for each in events(folder, "sent"))
    assert not (folder / "checkpoint.safetensors").exists()
    assert load_file(folder / "params.safetensors")["params"].isfinite().all()


@thorough
def test_the_time_of_day_makes_no_difference(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle([0.0, 4e9, 1e9, 2.0])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    assert crew.all(SHORT) == ["finished"] * NUM_WORKERS
    monkeypatch.undo()
    assert are_equal(Gathering(SHORT, crew.out).finish().params, simulated(SHORT, crew).params)
    assert summary(crew.folder(0))["seconds"] < 60


# Stopping and going on.


@pytest.mark.slow
def test_workers_whose_launcher_is_gone_stop_and_go_on_bit_for_bit(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_SHOW", 0.001)

    def end_parent(state: Any, event: Event) -> None:  # noqa: ANN401
        if state.round == 5:
            parent.kill()

    before_each_event(monkeypatch, end_parent)
    with sleeping() as parent:
        settings = replace(WITHIN, parent=parent.pid)
        assert crew.all(LONG, settings) == ["interrupted"] * NUM_WORKERS
    rounds = [summary(crew.folder(rank))["rounds"] for rank in range(NUM_WORKERS)]
    assert all(5 <= number < 40 for number in rounds)
    monkeypatch.undo()
    assert crew.all(LONG) == ["finished"] * NUM_WORKERS
    assert are_equal(Gathering(LONG, crew.out).finish().params, simulated(LONG, crew).params)
    assert not events(crew.out, "crashed")  # nobody was missed


@thorough
def test_a_damaged_checkpoint_is_reported_and_done_without(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    crew.folder(1).mkdir(parents=True)
    (crew.folder(1) / "checkpoint.safetensors").write_bytes(b"half of one")
    assert crew.all(SHORT) == ["finished"] * NUM_WORKERS
    assert "beginning without it" in caplog.text


@pytest.mark.slow
# The workers are threads here: one builds its model while others train.
@pytest.mark.filterwarnings("ignore:training draws from PyTorch's global generator")
def test_a_crash_and_a_restart_are_gathered_and_drawn(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, others_went_on, all_done = (threading.Event() for _ in range(3))
    rounds: dict[Rank, int] = {}

    def watch(state: Any, event: Event) -> None:  # noqa: ANN401
        rounds[state.rank] = state.round
        if state.rank == 1 and state.round == 3 and not has_failed.is_set():
            has_failed.set()
            raise TrainingError("the loss became nan")
        if state.rank == 0 and has_failed.is_set() and state.round >= 6:
            others_went_on.set()
        if others_went_on.is_set() and rounds[1] >= 9:
            all_done.set()

    before_each_event(monkeypatch, watch)
    monkeypatch.setattr(worker_module, "_SHOW", 0.01)
    with sleeping() as parent:
        settings = replace(WITHIN, parent=parent.pid)
        crew.start(ENDLESS, *range(NUM_WORKERS), settings=settings)
        [failure] = crew.join(1)
        assert isinstance(failure, TrainingError)
        assert others_went_on.wait(60)
        forget_the_end(crew.folder(1))
        crew.start(ENDLESS, 1, settings=settings)
        assert all_done.wait(60)
    assert crew.join(*range(NUM_WORKERS)) == ["interrupted"] * NUM_WORKERS
    results = Gathering(ENDLESS, crew.out).finish()
    assert results.reason == "interrupted"
    changes = [e["type"] for e in events(crew.out) if e["type"] in ("crashed", "recovered")]
    assert changes == ["crashed", "recovered"]
    times = [each["time"] for each in events(crew.out) if "time" in each]
    assert times == sorted(times)
    assert write_report(crew.out).exists()


def forget_the_end(folder: Path) -> None:
    """Make of the folder of a worker that has failed that of one that was killed."""
    for name in ("summary.json", "params.safetensors", "checkpoint.safetensors"):
        (folder / name).unlink(missing_ok=True)
    log = folder / "events.jsonl"
    *lines, ended = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines) + ended[: len(ended) // 2])
    (folder / "summary.json.part").write_bytes(b"{")


# Mistakes.


def test_a_rank_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3, got 4"):
        take_part(SHORT, 4, MemoryNetwork().transport(4), out=tmp_path)
    assert not list(tmp_path.iterdir())


@thorough
def test_a_worker_that_has_ended_does_not_begin_again(crew: Crew) -> None:
    crew.all(SHORT)
    before = (crew.folder(0) / "params.safetensors").read_bytes()
    with pytest.raises(RunFolderError, match="has ended; choose another --out"):
        take_part(SHORT, 0, MemoryNetwork().transport(0), out=crew.folder(0))
    assert (crew.folder(0) / "params.safetensors").read_bytes() == before


@thorough
def test_those_who_go_on_do_not_wait_for_one_that_has_ended(crew: Crew) -> None:
    settings = WorkerSettings(meet_seconds=1000.0, ended=(0,))
    crew.start(SHORT, 1, 2, 3, settings=settings)
    assert crew.join(1, 2, 3) == ["finished"] * 3


@thorough
def test_workers_that_have_ended_are_gathered_and_not_started_again(crew: Crew) -> None:
    def start(*arguments: Any) -> list[str]:  # noqa: ANN401
        raise AssertionError("a worker is started again")

    crew.all(SHORT)
    with pytest.raises(
        RunFolderError, match="another experiment: its seed is 3, now 4; choose"
    ):
        launch(replace(SHORT, seed=4), start, out=crew.out, resume=True)
    with pytest.raises(RunFolderError, match="already holds a run; choose another --out, or"):
        launch(SHORT, start, out=crew.out)
    assert launch(SHORT, start, out=crew.out, resume=True).reason == "finished"
    before = files(crew.out)
    # A finished run is only read.
    assert launch(SHORT, start, out=crew.out, resume=True).reason == "finished"
    assert files(crew.out) == before
    assert (crew.out / "params.safetensors") in before


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@thorough
def test_the_folder_of_another_experiment_is_left_alone(crew: Crew) -> None:
    crew.all(SHORT)
    other = replace(SHORT, seed=4)
    with pytest.raises(
        RunFolderError, match="another experiment: its seed is 3, now 4; choose"
    ):
        take_part(other, 0, MemoryNetwork().transport(0), out=crew.folder(0))


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot make .*; choose another --out"):
        take_part(SHORT, 0, MemoryNetwork().transport(0), out=tmp_path / "file" / "0")


@thorough
def test_a_worker_with_other_settings_ends_and_the_others_go_on_without_it(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(WITHIN, meet_seconds=0.5)
    crew.start(SHORT, 0, 1, 2, settings=settings)
    crew.start(replace(SHORT, seed=4), 3, settings=settings)
    *ends, error = crew.join(0, 1, 2, 3)
    assert ends == ["finished"] * 3
    assert isinstance(error, NetworkError)
    assert "has seed 3, this one 4; other initial parameters" in str(error)
    # The fourth ends once two have refused it, perhaps before the third has come.
    refused = [summary(crew.folder(rank))["refused"] for rank in range(3)]
    assert any("worker 3: of other settings" in each for each in refused)
    assert "dropped input from worker 3: of other settings (seed 4, this one 3" in caplog.text
    assert not (crew.folder(3) / "experiment.json").exists(), "the folder can be used again"


@thorough
def test_two_workers_of_different_settings_both_end_and_name_them(crew: Crew) -> None:
    pair = replace(
        SHORT, platforms=SHORT.platforms[:2], algorithm=replace(EPOCHS, topology=complete(2))
    )
    slower = replace(pair, task=replace(pair.task, batch_size=16))
    crew.start(pair, 0)
    crew.start(slower, 1)
    ends = crew.join(0, 1)
    assert "worker 1 has task.batch_size 16, this one 8" in str(ends[0])
    assert "worker 0 has task.batch_size 8, this one 16" in str(ends[1])
    assert all(isinstance(end, NetworkError) for end in ends)
    # Started again with equal settings and the same folders, they take part.
    crew.start(pair, 0, 1)
    assert crew.join(0, 1) == ["finished"] * 2


def test_a_run_does_not_begin_alone(crew: Crew) -> None:
    crew.start(SHORT, 0, settings=replace(WITHIN, meet_seconds=0.05))
    [error] = crew.join(0)
    assert isinstance(error, NetworkError)
    assert "1 of the 2 workers that a run needs to begin came within 0.05 s" in str(error)
    assert "workers 1, 2, 3 cannot be reached" in str(error)


def test_names_tell_runs_apart_and_settings_do_not() -> None:
    others = replace(SHORT, seed=4)
    assert run_key(SHORT, None) == run_key(others, None) == "epoch-gossip"
    assert run_key(SHORT, "mine.py:cancer", "b c") == "b_c:cancer"
    assert run_id("cancer") != run_id("cancer.b_c")


@pytest.mark.slow
def test_one_that_comes_back_with_a_checkpoint_rejoins_those_who_went_on(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, others_went_on, is_back = (threading.Event() for _ in range(3))

    def watch(state: Any, event: Event) -> None:  # noqa: ANN401
        if state.rank == 1 and state.round == 3 and not has_failed.is_set():
            has_failed.set()
            raise TrainingError("the loss became nan")
        if state.rank == 0 and has_failed.is_set() and state.round >= 9:
            others_went_on.set()
        if state.rank == 1 and others_went_on.is_set():
            seen.add(state.round)
            if state.round >= 12:
                is_back.set()

    seen: set[int] = set()
    before_each_event(monkeypatch, watch)
    monkeypatch.setattr(worker_module, "_SHOW", 0.01)
    with sleeping() as parent:
        settings = replace(WITHIN, parent=parent.pid)
        crew.start(ENDLESS, *range(NUM_WORKERS), settings=settings)
        assert isinstance(crew.join(1)[0], TrainingError)
        assert (crew.folder(1) / "checkpoint.safetensors").exists()
        assert others_went_on.wait(60)
        crew.start(ENDLESS, 1, settings=settings)
        assert is_back.wait(60)
    crew.join(*range(NUM_WORKERS))
    assert events(crew.folder(1), "recovered")
    assert not seen & {3, 4, 5}, "it has done again what was done without it"
    times = [each["time"] for each in events(crew.folder(1), "trained")]
    assert times == sorted(times), "its clock is the run's"
