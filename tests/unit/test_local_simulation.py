"""Runs with data of the workers' own in the simulator."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.local_data import SIZES, Files, local, local_run, own_data, plain_model
from tests.small_runs import (
    FAULTS,
    SHAPE,
    ctrl_c_at,
    events,
    parameters,
    repeatable_events,
    small_task,
)
from tests.tiers import by_name, first, thorough

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.state import BalancedState
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import Interrupted
from edgegossip.contract.protocol import Assigned, Event, Rank, Seconds
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models.small import mlp
from edgegossip.report.page import write_report
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.sim.platform import Platform
from edgegossip.training.evaluator import Evaluator
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Focused

EPOCHS = EpochGossip(topology=complete(4), num_rounds=6)


def balanced(**settings: Any) -> EdgeGossip:  # noqa: ANN401
    return EdgeGossip(**{"inner": EPOCHS} | settings)


def test_the_log_says_how_much_data_each_worker_has(tmp_path: Path) -> None:
    files = Files()
    run(local_run(load=files.load), out=tmp_path)
    begun = events(tmp_path, "experiment")[0]
    assert begun["shard_sizes"] == [32, 8, 19, 13]
    assert begun["num_train"] == 72
    assert sorted(files.reads) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_report_is_drawn_and_knows_the_number_of_samples(tmp_path: Path) -> None:
    run(local_run(), out=tmp_path)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"Training samples\s*</\w+>\s*<\w+>\s*72", page)


def test_reports_measure_the_validation_samples_of_all_workers_together(tmp_path: Path) -> None:
    experiment = local_run()
    results = run(experiment, out=tmp_path)
    splits = [local().of(rank).validation for rank in range(4)]
    found = [split for split in splits if isinstance(split, ArraySplit)]
    together = ArraySplit(
        torch.cat([each.x for each in found]), torch.cat([each.y for each in found])
    )
    whole = replace(own_data(0), test=together)
    workload = experiment.workload()
    evaluator = Evaluator(model=plain_model(), loss=experiment.task.loss, dataset=whole)
    loss, metrics = evaluator.evaluate(workload.initial_params())
    assert results.history[0].loss == pytest.approx(loss)
    assert results.history[0].metrics == pytest.approx(metrics)


@thorough
@pytest.mark.parametrize(
    "algorithm",
    [EPOCHS, balanced(), balanced(spread="gossip"), balanced(block_share=1.0)],
    ids=["epochs", "balanced", "spread", "whole-blocks"],
)
def test_a_run_stopped_and_resumed_is_the_whole_run(
    tmp_path: Path, algorithm: Algorithm[Any]
) -> None:
    experiment = replace(local_run(faults=replace(FAULTS, script=())), algorithm=algorithm)
    run(experiment, out=tmp_path / "whole")
    with ctrl_c_at(30, algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path / "stopped")
    run(experiment, out=tmp_path / "stopped", resume=True)
    for read in (repeatable_events, parameters):
        assert read(tmp_path / "whole") == read(tmp_path / "stopped")


def test_a_run_with_selection_by_loss_goes_by_each_workers_own_points(tmp_path: Path) -> None:
    experiment = replace(local_run(), algorithm=balanced())
    accuracy_aware = AccuracyAware(selection=Focused())
    task = replace(experiment.task, accuracy_aware=accuracy_aware)
    results = run(replace(experiment, task=task), out=tmp_path)
    assert results.reason == "finished"


# Balancing.


def round_spreads(folder: Path) -> list[float]:
    """Spread of the ends of each round but the first, over its duration."""
    ends: dict[int, dict[int, float]] = {}
    for line in events(folder, "sent"):
        if line["kind"] == "params":
            ends.setdefault(line["round"], {}).setdefault(line["rank"], line["time"])
    whole = [sorted(ends[each].values()) for each in sorted(ends)]
    return [(each[-1] - each[0]) / (each[-1] - before[-1]) for before, each in pairwise(whole)]


def large(rank: int) -> Dataset:
    """As much more data, in the same proportions."""
    own = own_data(rank)
    assert isinstance(own.train, ArraySplit)
    x, y = (each.repeat(16, *[1] * (each.ndim - 1)) for each in (own.train.x, own.train.y))
    return replace(own, train=ArraySplit(x, y))


def uneven_run(algorithm: Algorithm[Any]) -> Experiment:
    platforms = tuple(Platform(throughput=v) for v in (400.0, 320.0, 130.0, 100.0))
    dense = partial(mlp, SHAPE, 3, hidden=())
    task = small_task(dataset=local(large), batch_size=8, model=dense, augmentation=None)
    return Experiment(task=task, algorithm=algorithm, platforms=platforms, seed=1)


@thorough
@pytest.mark.parametrize(
    "inner",
    by_name(
        {
            "epochs": EpochGossip(topology=complete(4), num_rounds=8),
            "steps": Gossip(topology=complete(4), num_rounds=6, local_steps=60),
        },
        ["epochs"],
    ),
)
def test_workers_of_unequal_sizes_and_speeds_end_their_rounds_together(
    tmp_path: Path, inner: Algorithm[Any]
) -> None:
    run(uneven_run(inner), out=tmp_path / "alone")
    run(uneven_run(balanced(inner=inner)), out=tmp_path / "balanced")
    assert statistics.median(round_spreads(tmp_path / "alone")) > 0.5
    assert max(round_spreads(tmp_path / "balanced")) < 0.05


# Data that moves.


def test_the_data_of_a_lost_worker_is_read_by_its_heir_if_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = EdgeGossip.handle
    assigned: dict[Rank, int] = {}

    def watched(self: EdgeGossip, state: BalancedState, event: Event, now: Seconds) -> Any:  # noqa: ANN401
        if isinstance(event, Assigned):
            assigned[state.rank] = event.num_samples
        return handle(self, state, event, now)

    monkeypatch.setattr(EdgeGossip, "handle", watched)
    crash = Faults(script=(Crash(at=0.1, rank=3),), detection_time=0.02)
    experiment = replace(
        local_run(data={"may_share": True}, faults=crash),
        algorithm=balanced(inner=replace(EPOCHS, num_rounds=20), on_failure="reassign"),
    )
    results = run(experiment, out=tmp_path)
    assert results.reason == "finished"
    assert assigned == {0: 32 + 13}  # its own samples, and those of worker 3


def test_a_worker_that_asks_to_evaluate_is_measured_on_its_own_data() -> None:
    workload = local_run().workload()
    sizes = [workload.validator(rank) for rank in range(4)]
    costs = [0.0 if each is None else each.cost for each in sizes]
    held_out = [round(0.2 * size) for size in SIZES]
    assert costs == pytest.approx([number / 3 for number in held_out])
    assert workload.validator(7) is None


# Parameter servers.


def test_a_server_reads_no_data(tmp_path: Path) -> None:
    files = Files()
    experiment = replace(local_run(load=files.load), algorithm=BSP(num_workers=3, num_rounds=4))
    results = run(experiment, out=tmp_path)
    assert results.reason == "finished"
    assert sorted(files.reads) == [1, 2, 3]
    assert events(tmp_path, "experiment")[0]["shard_sizes"] == [0, 8, 19, 13]


SEARCH = ADSP(num_workers=3, num_rounds=40, window=0.2, min_interval=0.05)


@thorough
@pytest.mark.parametrize("num_servers", first(1, [1, 2]))
def test_a_server_evaluates_on_data_of_its_own(tmp_path: Path, num_servers: int) -> None:
    files = Files()
    search = replace(SEARCH, num_workers=4 - num_servers)
    several = num_servers > 1
    algorithm = Shards(inner=search, num_servers=num_servers) if several else search
    experiment = local_run(load=files.load)
    run(replace(experiment, algorithm=algorithm, max_seconds=2.0), out=tmp_path)
    assert any("loss" in note["numbers"] for note in events(tmp_path, "noted"))
    # Only the first of several servers evaluates.
    assert sorted(files.reads) == [0, *range(num_servers, 4)]
    sizes = events(tmp_path, "experiment")[0]["shard_sizes"]
    assert sizes == [0] * num_servers + [32, 8, 19, 13][num_servers:]


def test_all_samples_of_a_server_are_for_validation() -> None:
    experiment = replace(local_run(), algorithm=SEARCH)
    workload = experiment.workload(reads=(0,))
    validator = workload.validator(0)
    assert validator is not None
    assert validator.cost == pytest.approx(SIZES[0] / 3)
    reported = experiment.workload()
    loss, _ = reported.evaluate(reported.initial_params())
    workers_only = experiment.workload(reads=(1, 2, 3))  # the server's data are not reported
    assert workers_only.evaluate(workers_only.initial_params())[0] == loss


def test_a_rank_may_be_a_server_in_one_run_and_a_worker_in_another() -> None:
    data = local()
    assert len(data.for_validation(0).train) == SIZES[0]
    assert len(data.of(0).train) == 32
