"""A run repeats to the last byte, and its folder holds what its results say."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.small_runs import (
    ALGORITHMS,
    FAULTS,
    NUM_WORKERS,
    Recorder,
    ctrl_c_at,
    dataset,
    events,
    parameters,
    quick,
    repeatable_events,
    small_model,
    small_run,
    small_task,
    summary,
    tensors,
)
from tests.tiers import first, thorough

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.compression.compressor import Identity
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.topology import directed_ring, ring
from edgegossip.runs.experiment import Experiment, LossTarget
from edgegossip.runs.folder import load_results
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Learner

# The same every time.


@thorough
@pytest.mark.parametrize("name", first(3, ALGORITHMS))
def test_a_run_repeats_byte_for_byte_on_any_number_of_threads(
    tmp_path: Path, name: str
) -> None:
    for num_threads in (0, 2):
        out = tmp_path / str(num_threads)
        run(small_run(name, faults=FAULTS), out=out, num_threads=num_threads)
        assert repeatable_events(out) == repeatable_events(tmp_path / "0")
        assert parameters(out) == parameters(tmp_path / "0")


@thorough
def test_a_run_leaves_no_models_for_the_garbage_collector(tmp_path: Path) -> None:
    def num_learners() -> int:
        return sum(isinstance(each, Learner) for each in gc.get_objects())

    # The first optimizer of a process has torch import what keeps frames.
    run(quick(), out=tmp_path / "first", num_threads=0)
    gc.collect()
    gc.disable()
    try:
        before = num_learners()
        run(quick(), out=tmp_path / "second", num_threads=0)
        assert num_learners() == before
    finally:
        gc.enable()


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        run(quick(seed=seed), out=tmp_path / str(seed), num_threads=0)
    assert parameters(tmp_path / "1") != parameters(tmp_path / "2")


def test_only_fields_of_the_wall_clock_differ(tmp_path: Path) -> None:
    for name in "ab":
        run(quick(), out=tmp_path / name, num_threads=0)
    for one, other in zip(events(tmp_path / "a"), events(tmp_path / "b"), strict=True):
        differing = {key for key in one if one[key] != other[key]}
        assert all(key.startswith("wall_") for key in differing)


# What comes out.


def test_the_folder_holds_what_the_results_say(tmp_path: Path) -> None:
    results = run(small_run(), out=tmp_path, num_threads=0)
    kept = load_results(tmp_path)
    assert kept.history == results.history
    assert kept.summary() == results.summary()
    assert kept.worker_accuracies == results.worker_accuracies
    assert len(results.worker_accuracies) == NUM_WORKERS
    assert {path.name for path in tmp_path.iterdir()} == {
        "events.jsonl",
        "experiment.json",
        "params.safetensors",
        "summary.json",
    }


@pytest.mark.parametrize("has_buffers", [True, False])
def test_the_parameters_kept_score_the_accuracy_reported(
    tmp_path: Path, has_buffers: bool
) -> None:
    results = run(
        small_run("epoch-gossip", task=small_task(has_buffers=has_buffers)),
        out=tmp_path,
        num_threads=0,
    )
    model = small_model()
    model.load_state_dict(tensors(tmp_path))
    x, y = dataset().test.batch(torch.arange(24))
    outputs = model.eval()(dataset().prepare(x))
    assert float((outputs.argmax(1) == y).float().mean()) == pytest.approx(
        results.final_accuracy
    )


def test_totals_are_those_of_the_events(tmp_path: Path) -> None:
    results = run(small_run(faults=FAULTS), out=tmp_path, num_threads=0)
    last = results.history[-1]
    assert last.bytes_sent == sum(e["num_bytes"] for e in events(tmp_path, "sent"))
    assert last.samples_processed == sum(e["num_samples"] for e in events(tmp_path, "trained"))
    assert last.epochs == last.samples_processed / 64
    times = [event.get("time", 0.0) for event in events(tmp_path)]
    assert times == sorted(times)


def test_evaluations_may_go_by_samples_instead_of_time(tmp_path: Path) -> None:
    # A worker's whole pass takes 16 samples: 64 of all.
    experiment = small_run("gosgd", evaluation_interval=None, evaluation_epochs=0.5)
    results = run(experiment, out=tmp_path, num_threads=0)
    epochs = [evaluation.epochs for evaluation in results.history]
    assert epochs[0] == 0
    assert epochs[-1] == sum(e["num_samples"] for e in events(tmp_path, "trained")) / 64
    for number, found in enumerate(epochs[:-1]):
        assert 0.5 * number <= found < 0.5 * (number + 1)
    assert len(epochs) == pytest.approx(epochs[-1] / 0.5 + 1, abs=1.5)


def test_the_model_is_evaluated_on_the_grid_and_at_the_end(tmp_path: Path) -> None:
    results = run(small_run(evaluation_interval=0.125), out=tmp_path, num_threads=0)
    *grid, end = [evaluation.time for evaluation in results.history]
    assert grid == [k * 0.125 for k in range(len(grid))]
    assert grid[-1] < end == results.virtual_seconds <= grid[-1] + 0.125
    assert events(tmp_path)[-1]["time"] == end


def test_by_default_there_are_four_evaluations_in_the_slowest_epoch(tmp_path: Path) -> None:
    results = run(quick(evaluation_interval=None), out=tmp_path, num_threads=0)
    # 16 samples at 100 samples/s.
    assert results.history[1].time == pytest.approx(0.16 / 4)


def test_a_short_run_of_slow_machines_is_evaluated_more_often(tmp_path: Path) -> None:
    short = quick(evaluation_interval=None, max_seconds=0.2)
    results = run(short, out=tmp_path, num_threads=0)
    assert results.history[1].time == pytest.approx(0.2 / 20)


def test_a_run_is_cut_off_at_its_time_limit(tmp_path: Path) -> None:
    results = run(small_run(max_seconds=0.33), out=tmp_path, num_threads=0)
    assert results.reason == summary(tmp_path)["reason"] == "time limit"
    assert results.virtual_seconds == results.history[-1].time == 0.33
    assert [e.time for e in results.history[:-1]] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert max(event.get("time", 0.0) for event in events(tmp_path)) == 0.33
    assert results.history[-1].samples_processed > 0


def test_a_run_ends_when_the_mean_of_its_last_losses_is_low_enough(tmp_path: Path) -> None:
    whole = run(small_run(), out=tmp_path / "whole", num_threads=0).history
    target = LossTarget(loss=(whole[1].loss + whole[2].loss) / 2, num_looks=2)
    results = run(small_run(until=target), out=tmp_path / "cut", num_threads=0)
    assert results.reason == summary(tmp_path / "cut")["reason"] == "target"
    assert results.history == whole[:3]
    again = run(small_run(until=target), out=tmp_path / "cut", resume=True)
    assert again.history == results.history


def test_a_time_limit_on_the_grid_is_evaluated_once(tmp_path: Path) -> None:
    experiment = small_run(max_seconds=0.5, evaluation_interval=0.25)
    results = run(experiment, out=tmp_path, num_threads=0)
    assert [evaluation.time for evaluation in results.history] == [0.0, 0.25, 0.5]


def crashing(at: float) -> Experiment:
    """A run whose workers all crash."""
    script = tuple(Crash(at=at, rank=rank) for rank in range(NUM_WORKERS))
    return quick(faults=Faults(script=script), max_seconds=9.0)


def test_a_run_without_workers_has_not_finished(tmp_path: Path) -> None:
    experiment = crashing(at=0.03)
    results = run(experiment, out=tmp_path, num_threads=0)
    assert results.reason == summary(tmp_path)["reason"] == "all crashed"
    assert results.virtual_seconds == results.history[-1].time == 0.03
    again = run(experiment, out=tmp_path, resume=True)
    assert (again.reason, again.history) == (results.reason, results.history)


def test_a_run_with_workers_that_finished_before_all_crashed_has_finished(
    tmp_path: Path,
) -> None:
    end = run(quick(), out=tmp_path / "whole", num_threads=0).virtual_seconds
    first = min(e["time"] for e in events(tmp_path / "whole", "finished"))
    assert first < end
    experiment = crashing(at=(first + end) / 2)
    assert run(experiment, out=tmp_path / "cut", num_threads=0).reason == "finished"


def test_a_run_that_ends_before_its_limit_is_finished(tmp_path: Path) -> None:
    assert run(quick(max_seconds=1e6), out=tmp_path, num_threads=0).reason == "finished"


def test_a_worker_alone_trains_like_anybody(tmp_path: Path) -> None:
    alone = replace(
        quick(),
        platforms=(Platform(throughput=100.0),),
        algorithm=Gossip(topology=ring(1), num_rounds=3),
    )
    results = run(alone, out=tmp_path, num_threads=0)
    assert results.history[-1].bytes_sent == 0
    assert results.worker_accuracies == [results.final_accuracy]


def test_a_live_view_is_told_how_far_it_is(tmp_path: Path) -> None:
    recorder = Recorder()
    results = run(small_run(), out=tmp_path, num_threads=0, progress=recorder)
    assert [s.time for s in recorder.statuses] == [e.time for e in results.history]
    shares = [status.share for status in recorder.statuses]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert recorder.statuses[0].seconds_left is None
    assert recorder.statuses[-1].seconds_left == 0.0
    assert recorder.statuses[-1].evaluation == results.history[-1]


def test_rounds_after_the_last_training_are_part_of_the_way(tmp_path: Path) -> None:
    averaging = DifferencePush(
        topology=directed_ring(4), num_rounds=1, compressor=Identity(), final_rounds=30
    )
    recorder = Recorder()
    links = Links(default=Link(latency=1.0))
    experiment = replace(quick(), algorithm=averaging, links=links, max_seconds=None)
    run(experiment, out=tmp_path, num_threads=0, progress=recorder)
    shares = [status.share for status in recorder.statuses]
    assert max(shares[:-1]) < 1.0 == shares[-1]


# What a run leaves alone.


def test_signals_and_threads_are_as_they_were_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(2)
    try:
        run(quick(), out=tmp_path / "a", num_threads=1)
        assert torch.get_num_threads() == 2
        with (
            ctrl_c_at(5, ALGORITHMS["gosgd"]),
            pytest.raises(Interrupted),
        ):
            run(quick(), out=tmp_path / "b", num_threads=1)
    finally:
        torch.set_num_threads(1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_may_be_in_any_thread(tmp_path: Path) -> None:
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(run(quick(), out=tmp_path, num_threads=0).reason)
    )
    thread.start()
    thread.join()
    assert found == ["finished"]
