"""Simulated workers end with the mean of all models, and its time and bytes count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import (
    ALGORITHMS,
    FAULTS,
    NUM_WORKERS,
    ctrl_c_at,
    events,
    quick,
    small_run,
    tensors,
    with_rounds,
)
from tests.stage_runs import run_of_kind
from tests.stopped_runs import left
from tests.tiers import by_name, first, thorough

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.cli.commands import RunOptions
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import Interrupted, UsageError
from edgegossip.contract.topology import ring
from edgegossip.runs.describe import header
from edgegossip.runs.final_average import FinalAverage
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Drop

GOSSIP = Gossip(topology=ring(NUM_WORKERS), num_rounds=6, timeout=0.5)
CASES = {
    **ALGORITHMS,
    "edge-gossip": EdgeGossip(inner=ALGORITHMS["epoch-gossip"]),
    "trailing": TrailingAverage(inner=GOSSIP, window=3),
}


@pytest.mark.parametrize("algorithm", by_name(CASES, ["gosgd"]))
def test_all_workers_end_with_one_model_and_its_bytes_and_time_count(
    tmp_path: Path, algorithm: Algorithm[Any]
) -> None:
    experiment = replace(small_run(), algorithm=algorithm)
    apart = run(experiment, out=tmp_path / "apart", num_threads=0)
    results = run(replace(experiment, final_average=True), out=tmp_path / "mean", num_threads=0)
    assert results.reason == "finished"
    # The model of each worker is measured, and they are the same.
    assert len(set(results.worker_values)) == 1
    num_params = sum(each.numel() for each in tensors(tmp_path / "mean").values())
    num_models = NUM_WORKERS * (NUM_WORKERS - 1)
    sent = results.history[-1].bytes_sent - apart.history[-1].bytes_sent
    assert results.history[-1].consensus_distance <= 1e-6
    if algorithm.traits.is_synchronous:
        # A header takes about a hundred bytes, and so does a list of models.
        assert 0 <= sent - 4 * num_params * num_models < 1000 * num_models
        at_least = 0.01 + 4 * num_params / 1e6  # the link's latency and bandwidth
        assert results.virtual_seconds > apart.virtual_seconds + at_least
        # The mean of all is what was measured anyway.
        assert results.history[-1].loss == pytest.approx(apart.history[-1].loss, rel=1e-5)
    else:  # without waiting, workers send their models at different times
        assert sent > 0


def test_without_the_average_the_same_workers_end_apart(tmp_path: Path) -> None:
    results = run(small_run("gosgd"), out=tmp_path, num_threads=0)
    assert results.history[-1].consensus_distance > 1e-3


def test_a_time_limit_changes_nothing_before_the_exchange(tmp_path: Path) -> None:
    limited = with_rounds(small_run("gosgd", max_seconds=0.33), 1000)
    apart = run(limited, out=tmp_path / "apart", num_threads=0)
    results = run(replace(limited, final_average=True), out=tmp_path / "mean", num_threads=0)
    assert results.reason == "time limit"
    assert results.history[:-1] == apart.history
    assert results.virtual_seconds == results.history[-1].time > 0.33 + 0.01
    assert len(set(results.worker_values)) == 1
    # Training that the limit cut off neither counts nor makes others wait for its end.
    assert results.history[-1].samples_processed < apart.history[-1].samples_processed + 8 * 4


def test_workers_that_wait_at_the_limit_have_not_been_cut_off(tmp_path: Path) -> None:
    whole = run(quick(), out=tmp_path / "whole", num_threads=0)
    # After the last training, but before the exchange is over.
    limit = whole.virtual_seconds + 0.005
    results = run(
        quick(max_seconds=limit, final_average=True), out=tmp_path / "cut", num_threads=0
    )
    assert results.reason == "finished"
    assert results.virtual_seconds > limit
    assert len(set(results.worker_values)) == 1


@thorough
@pytest.mark.parametrize("name", first(3, ALGORITHMS))
def test_workers_that_crash_return_or_are_cut_off_end_with_one_model(
    tmp_path: Path, name: str
) -> None:
    script = tuple(each for each in FAULTS.script if not isinstance(each, Drop))
    faults = replace(FAULTS, script=script)
    experiment = small_run(name, faults=faults, final_average=True)
    results = run(experiment, out=tmp_path, num_threads=0)
    assert len(set(results.worker_values)) == 1
    assert results.history[-1].consensus_distance <= 1e-6


@thorough
def test_a_run_stopped_within_the_exchange_is_the_whole_run(tmp_path: Path) -> None:
    experiment = with_rounds(small_run("gosgd", max_seconds=0.2, final_average=True), 1000)
    run(experiment, out=tmp_path / "whole", num_threads=0)
    average = FinalAverage(inner=experiment.algorithm, num_workers=NUM_WORKERS)
    num_stopped_late = 0
    for at in range(30, 10_000, 4):
        out = tmp_path / str(at)
        try:
            with ctrl_c_at(at, average):
                run(experiment, out=out, num_threads=0)
        except Interrupted:
            num_stopped_late += any(each["time"] == 0.2 for each in events(out, "evaluated"))
            run(experiment, out=out, num_threads=0, resume=True)
            assert left(out) == left(tmp_path / "whole"), f"stopped at event {at}"
        else:
            break
    assert num_stopped_late > 2


def test_workers_that_hold_parts_of_a_model_cannot_be_averaged() -> None:
    with pytest.raises(ValueError, match="final_average needs workers that hold whole models"):
        replace(run_of_kind("pipelined"), final_average=True)
    with pytest.raises(UsageError, match="leave it out"):
        RunOptions(final_average=True).applied_to(run_of_kind("pipelined"))


def test_the_command_line_has_the_option_and_the_folder_records_it() -> None:
    plain = small_run()
    assert RunOptions().applied_to(plain) is plain
    averaged = RunOptions(final_average=True).applied_to(plain)
    assert averaged == replace(plain, final_average=True)
    assert header(averaged, None)["final_average"] is True
    # Absent, so that folders and comparisons of workers' settings from before still fit.
    assert "final_average" not in header(plain, None)
