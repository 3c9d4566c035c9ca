"""The best model by validation: chosen in a run, kept in its folder, shown in its report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.small_runs import (
    FAULTS,
    NUM_WORKERS,
    ctrl_c_at,
    dataset,
    events,
    quick,
    repeatable_events,
    small_run,
    small_task,
    summary,
)
from tests.small_tasks import experiment, regression, regression_data
from tests.tiers import thorough
from tests.unit.test_training_loop import BATCH, NUM_SAMPLES, Learner, side_by_side
from tests.worker_threads import Crew
from torch import Tensor, nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.cli.commands import RunOptions
from edgegossip.cli.options import KeepOptions
from edgegossip.contract.errors import Interrupted, UsageError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.topology import complete
from edgegossip.data.hold_out import hold_out
from edgegossip.data.local import Local
from edgegossip.integrations.joined_training import JoinedTraining
from edgegossip.integrations.lightning import LightningHooks
from edgegossip.integrations.transformers import TransformersHooks
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.gathering import Gathering
from edgegossip.real.launch import launch
from edgegossip.real.script import ScriptWorker
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.real.worker import take_part
from edgegossip.report.page import write_report
from edgegossip.runs.best import LOSS, KeepBest, Selection, kept_best
from edgegossip.runs.comparison import compare
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.runs.folder import load_results
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.training.task import Workload

HELD_OUT = small_task(dataset=hold_out(dataset(), 0.25))
ERROR = MetricSpec(name="error", higher_is_better=False)


def keeping(**keep: Any) -> Experiment:  # noqa: ANN401
    changes = {"task": HELD_OUT, "evaluation_interval": None}
    return small_run("epoch-gossip", **changes, keep=KeepBest(**keep))


def scripted(patch: pytest.MonkeyPatch, values: Iterable[float]) -> None:
    """Let validations of a run give these accuracies, one after the other."""
    given: Iterator[float] = iter(values)

    def validate(self: Workload, params: Tensor) -> tuple[float, dict[str, float]]:
        value = next(given)
        return 1 - value, {"accuracy": value}

    patch.setattr(Workload, "validate", validate)


def changes(results: Results) -> list[int]:
    """Indices of the evaluations of a new model: those that were measured."""
    distances = [(each.loss, each.samples_processed) for each in results.history]
    return [i for i, each in enumerate(distances) if i == 0 or each[0] != distances[i - 1][0]]


# The choice.


def select(metric: MetricSpec, values: Iterable[float], **keep: Any) -> Selection:  # noqa: ANN401
    found = Selection(KeepBest(**keep), metric)
    for index, value in enumerate(values):
        params = torch.tensor([float(index)])
        found.add(params, value, time=float(index), round=index, index=index)
    return found


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (ACCURACY, [0.1, 0.5, 0.9, 0.4], 2),
        (ACCURACY, [0.1, 0.9, 0.9, 0.4], 1),
        (ERROR, [3.0, 1.0, 2.0], 1),
        (ERROR, [math.nan, 5.0, math.inf], 1),
        (LOSS, [math.inf, 2.0, 2.0], 1),
    ],
)
def test_the_best_value_is_kept_and_of_equal_ones_the_earliest(
    metric: MetricSpec, values: list[float], best: int
) -> None:
    found = select(metric, values)
    assert found.params is not None
    assert (found.index, found.params.item(), found.value) == (best, best, values[best])
    assert found.num_worse == len(values) - 1 - best


def test_values_that_are_not_finite_keep_no_model() -> None:
    assert select(LOSS, [math.nan, math.inf]).params is None


def test_patience_counts_evaluations_since_the_best() -> None:
    assert select(ACCURACY, [0.1, 0.9, 0.2, 0.3], patience=2).is_over
    assert not select(ACCURACY, [0.1, 0.9, 0.2], patience=2).is_over
    assert not select(ACCURACY, [0.9, *repeat(0.1, 50)]).is_over


@pytest.mark.parametrize("wrong", ["last", 3, KeepBest])
def test_another_keep_is_refused(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match="keep must be 'best', a KeepBest"):
        kept_best(wrong)


def test_an_unknown_metric_and_data_without_validation_are_refused() -> None:
    with pytest.raises(ValueError, match="'accuracy'"):
        keeping(metric="accuracie")
    with pytest.raises(ValueError, match=r"no validation split; give the task hold_out"):
        small_run(keep="best")


# A simulated run.


def test_a_validation_that_rises_and_falls_keeps_the_model_at_its_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, chain([0.2, 0.4, 0.8], repeat(0.3)))
    results = run(keeping(), out=tmp_path / "kept")
    best, top = results.best, changes(results)[2]
    assert best is not None
    assert (best.validation_value, best.time) == (0.8, results.history[top].time)
    rounds = [each["round"] for each in events(tmp_path / "kept", "sent")]
    assert 0 <= best.round < max(rounds)
    assert best.metrics == results.history[top].metrics
    # The model of that moment is that of a run that ends there.
    short = replace(keeping(), keep=None, max_seconds=best.time)
    ended = run(short, out=tmp_path / "short")
    assert all(torch.equal(best.params[name], each) for name, each in ended.params.items())
    assert not torch.equal(best.params["0.weight"], results.params["0.weight"])


@thorough
def test_a_setting_that_only_watches_changes_nothing_else(tmp_path: Path) -> None:
    run(keeping(), out=tmp_path / "kept")
    run(replace(keeping(), keep=None), out=tmp_path / "plain")
    kept, plain = (repeatable_events(tmp_path / name).decode() for name in ("kept", "plain"))
    kept = re.sub(r',"validation_value":[^,}]*', "", kept)
    kept = re.sub(r'"keep":\{[^}]*\},', "", kept)
    assert kept == plain
    assert "keep" not in plain
    kept_summary, plain_summary = summary(tmp_path / "kept"), summary(tmp_path / "plain")
    assert not [name for name in plain_summary if name.startswith("kept_")]
    rest = {name: x for name, x in kept_summary.items() if not name.startswith("kept_")}
    del rest["wall_seconds"], plain_summary["wall_seconds"]
    assert rest == plain_summary


@thorough
def test_test_data_have_no_influence_on_the_choice(tmp_path: Path) -> None:
    found = run(keeping(metric="loss"), out=tmp_path / "one").best
    data = HELD_OUT.dataset
    flipped = replace(data, test=replace_labels(data.test))
    changed = replace(keeping(metric="loss"), task=replace(HELD_OUT, dataset=flipped))
    other = run(changed, out=tmp_path / "other").best
    assert found is not None
    assert other is not None
    assert found.time == other.time
    assert all(torch.equal(found.params[name], each) for name, each in other.params.items())
    assert found.value != other.value


def replace_labels(split: Any) -> Any:  # noqa: ANN401
    return type(split)(split.x, (split.y + 1) % 3)


def test_a_run_that_no_longer_improves_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, chain([0.2, 0.9], repeat(0.3)))
    results = run(keeping(patience=1), out=tmp_path)
    assert results.reason == events(tmp_path, "ended")[0]["reason"] == "early stop"
    assert len(changes(results)) == 3
    assert load_results(tmp_path).reason == "early stop"
    again = run(keeping(patience=1), out=tmp_path, resume=True)
    assert len(again.history) == len(results.history)


@thorough
def test_unchanged_models_are_no_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twenty looks in a round, in which the averaged model changes once.
    scripted(monkeypatch, chain([0.2, 0.9], repeat(0.3)))
    often = replace(keeping(patience=2), evaluation_interval=0.002)
    results = run(often, out=tmp_path)
    assert len(results.history) > 20
    assert len(changes(results)) == 4


@thorough
def test_the_files_of_the_best_model_are_read_again(tmp_path: Path) -> None:
    results = run(keeping(metric="loss"), out=tmp_path)
    read, best = load_results(tmp_path), results.best
    assert best is not None
    assert read.best is not None
    assert read.best.metric == best.metric == LOSS
    for name in ("time", "round", "validation_value", "value", "metrics"):
        assert getattr(read.best, name) == getattr(best, name)
    kept = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(kept[name], each) for name, each in best.params.items())
    values = [each.validation_value for each in read.history]
    assert values == [each.validation_value for each in results.history]
    assert min(x for x in values if x is not None) == best.validation_value
    assert summary(tmp_path)["kept_accuracy"] == best.value


def test_a_metric_that_must_be_low_is_minimized(tmp_path: Path) -> None:
    task = regression(dataset=hold_out(regression_data(), 0.2))
    chosen = replace(experiment(task), keep=KeepBest(metric="MAE"))
    results = run(chosen, out=tmp_path)
    values = [each.validation_value for each in results.history]
    assert results.best is not None
    assert not task.metrics[0].higher_is_better
    assert results.best.validation_value == min(x for x in values if x is not None)
    assert "kept_by" in summary(tmp_path)


@thorough
@pytest.mark.parametrize("at", [10, 20, 30])
def test_a_run_that_was_stopped_and_resumed_keeps_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    # The best model is the first one, which only the checkpoint still has.
    monkeypatch.setattr(Workload, "validate", lambda _, params: (1.0, {}))
    # Several looks at each model: a resumed run must not count one again.
    chosen = replace(
        keeping(patience=9, metric="loss"), faults=FAULTS, evaluation_interval=0.01
    )
    run(chosen, out=tmp_path / "whole", num_threads=0)
    stopped = tmp_path / "stopped"
    with ctrl_c_at(at, chosen.algorithm), pytest.raises(Interrupted):
        run(chosen, out=stopped, num_threads=0)
    assert (stopped / "best.safetensors").exists()  # as of the interruption
    run(chosen, out=stopped, num_threads=0, resume=True)
    assert repeatable_events(stopped) == repeatable_events(tmp_path / "whole")
    kept = [
        (tmp_path / name / "best.safetensors").read_bytes() for name in ("whole", "stopped")
    ]
    assert kept[0] == kept[1]


@thorough
def test_local_data_are_chosen_by_all_workers_held_out_samples(tmp_path: Path) -> None:
    local = Local(
        name="own",
        load=lambda rank: replace(dataset(), test=dataset().train),
        num_classes=3,
        input_shape=(1, 6, 6),
        mean=dataset().mean,
        std=dataset().std,
        held_out=0.25,
    )
    task = small_task(
        dataset=local, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    )
    results = run(quick(task=task, keep="best"), out=tmp_path)
    assert results.best is not None
    assert results.best.validation_value == results.best.value == results.best_value


# Comparisons and reports.


@thorough
def test_the_report_of_a_comparison_shows_both_models(tmp_path: Path) -> None:
    runs = {"one": keeping(), "two": replace(keeping(patience=2), seed=4)}
    results = compare(Comparison(experiments=runs, baseline="one"), out=tmp_path)
    listed = summary(tmp_path)["runs"]
    page = write_report(tmp_path).read_text()
    assert "Best by validation" in page
    for name, each in results.items():
        assert each.best is not None
        assert listed[name]["kept_accuracy"] == each.best.value
        assert f"{100 * each.best.value:.1f}" in page
    assert "A diamond marks the best model by validation." in page


@thorough
def test_a_report_without_the_setting_says_nothing_of_it(tmp_path: Path) -> None:
    run(replace(keeping(), keep=None), out=tmp_path)
    page = write_report(tmp_path).read_text()
    assert "by validation" not in page


@thorough
def test_the_report_says_why_a_run_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, chain([0.2, 0.9], repeat(0.3)))
    run(keeping(patience=1), out=tmp_path)
    page = write_report(tmp_path).read_text()
    assert "the run ended because none was better for so long" in page


# The command line.


def test_options_hold_out_a_tenth_unless_there_is_a_validation_split() -> None:
    plain = small_run()
    assert KeepOptions().applied_to(plain) is plain
    found = RunOptions(keep="best", patience=3).applied_to(plain)
    assert found.keep == KeepBest(patience=3)
    assert found.task.dataset.validation is not None
    assert len(found.task.dataset.validation) == 6
    kept = KeepOptions(keep="best").applied_to(small_run(task=HELD_OUT))
    assert kept.task.dataset is HELD_OUT.dataset
    # The runs of a comparison share their samples, as without the option.
    assert KeepOptions(keep="best").applied_to(plain).task.dataset is found.task.dataset


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KeepOptions(patience=3), "--patience is for --keep best"),
        (KeepOptions(keep="best", patience=0), "patience must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: KeepOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.applied_to(small_run())


# Workers on real machines.

SHORT = replace(
    keeping(),
    algorithm=EpochGossip(topology=complete(NUM_WORKERS), num_rounds=6),
)


@thorough
def test_workers_agree_on_the_best_and_the_gathering_measures_it(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "run")
    assert crew.all(SHORT) == ["finished"] * NUM_WORKERS
    found = [summary(crew.folder(rank))["best"] for rank in range(NUM_WORKERS)]
    assert len({tuple(each.items()) for each in found}) == 1
    models = {(crew.folder(rank) / "best.safetensors").read_bytes() for rank in range(4)}
    assert len(models) == 1
    results = Gathering(SHORT, crew.out).finish()
    assert results.best is not None
    # The model of that round is that of a simulated run that ends with it.
    short = replace(SHORT.algorithm, num_rounds=results.best.round)  # type: ignore[type-var]
    ended = run(replace(SHORT, algorithm=short), out=tmp_path / "simulated")
    assert all(torch.equal(results.best.params[n], each) for n, each in ended.params.items())
    assert results.best.metrics == ended.history[-1].metrics
    assert results.best.validation_value == ended.history[-1].validation_value
    assert "Best by validation" in write_report(crew.out).read_text()


@thorough
def test_workers_stop_early_in_the_same_round(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "run")
    endless = replace(SHORT.algorithm, num_rounds=10_000)  # type: ignore[type-var]
    chosen = replace(SHORT, algorithm=endless, keep=KeepBest(patience=2))
    assert crew.all(chosen) == ["finished"] * NUM_WORKERS
    found = [summary(crew.folder(rank)) for rank in range(NUM_WORKERS)]
    assert {each["rounds"] for each in found} == {found[0]["best"]["round"] + 3}
    results = Gathering(chosen, crew.out).finish()
    assert results.reason == "early stop"
    assert load_results(crew.out).best is not None


def test_local_data_on_real_machines_are_refused(tmp_path: Path) -> None:
    local = Local(name="own", load=lambda rank: dataset(), num_classes=3, held_out=0.25)
    chosen = small_run(task=small_task(dataset=local), keep="best")

    def made(*_: object) -> list[str]:
        raise AssertionError("no worker is started")

    with pytest.raises(ValueError, match="Local data stays with each worker"):
        take_part(chosen, 0, MemoryNetwork().transport(0), out=tmp_path / "own")
    with pytest.raises(ValueError, match="Local data stays with each worker"):
        launch(chosen, made, out=tmp_path / "all", make_measure=made)
    assert not [*tmp_path.rglob("*.json")]


# Training loops.


def validation(learner: Learner, model: nn.Module) -> float:
    """The loss towards a mean of both targets."""
    x = torch.cat(learner.batches)
    return float(model(x).square().mean().item())


def loop_of(
    learner: Learner,
    rank: int,
    network: MemoryNetwork,
    **options: Any,  # noqa: ANN401
) -> TrainingLoop:
    algorithm = EpochGossip(topology=complete(2), num_rounds=8)
    settings = {"evaluate": partial(validation, learner), "keep": "best", **options}
    transport = network.transport(rank)
    return TrainingLoop(
        *(learner.model, algorithm, rank, 2, transport),
        num_samples=NUM_SAMPLES,
        meet_seconds=20.0,
        **settings,
    )


def train(learner: Learner, loop: TrainingLoop) -> None:
    with loop:
        for x in cycle(learner.batches):
            loop.step(learner.step(x), BATCH)
            if loop.is_over:
                break


def both(**options: Any) -> tuple[list[Learner], list[TrainingLoop]]:  # noqa: ANN401
    network, learners = MemoryNetwork(), [Learner(0), Learner(1)]
    loops = [loop_of(learners[rank], rank, network, **options) for rank in (0, 1)]
    assert loops[0].best is None
    jobs = [partial(train, *each) for each in zip(learners, loops, strict=True)]
    assert side_by_side(*jobs) == [None, None]
    return learners, loops


@thorough
@pytest.mark.parametrize("final_average", [False, True])
def test_loops_know_the_same_best_model_under_its_names(final_average: bool) -> None:
    learners, loops = both(final_average=final_average)
    one, other = (loop.best for loop in loops)
    assert one is not None
    assert other is not None
    assert (one.round, one.time, one.validation_value) == (
        *(other.round, other.time, other.validation_value),
    )
    model = learners[0].model
    model.load_state_dict(one.params)
    assert validation(learners[0], model.eval()) == one.validation_value
    assert all(torch.equal(one.params[name], each) for name, each in other.params.items())


@thorough
def test_loops_end_early_in_the_same_round() -> None:
    # Each validation is worse than the one before.
    given = {rank: iter(range(1, 99)) for rank in (0, 1)}
    network, learners = MemoryNetwork(), [Learner(0), Learner(1)]
    loops = [
        loop_of(
            learners[rank],
            rank,
            network,
            keep=KeepBest(patience=2),
            evaluate=lambda model, rank=rank: float(next(given[rank])),
        )
        for rank in (0, 1)
    ]
    jobs = [partial(train, *each) for each in zip(learners, loops, strict=True)]
    assert side_by_side(*jobs) == [None, None]
    assert [loop.rounds for loop in loops] == [4, 4]
    assert torch.equal(learners[0].values, learners[1].values)


@thorough
def test_a_loop_that_is_left_early_has_the_best_model_so_far() -> None:
    learner = Learner(0)
    alone = EpochGossip(topology=complete(1), num_rounds=9)
    worker = ScriptWorker(rank=0, num_workers=1)
    options = {"keep": "best", "evaluate": partial(validation, learner)}
    joined = JoinedTraining(alone, worker, NUM_SAMPLES, options)
    joined.begin(learner.model, [learner.optimizer], NUM_SAMPLES, 9, 1)
    for x in chain.from_iterable(repeat(learner.batches, 3)):
        joined.step(learner.step(x), BATCH)
    assert not joined.is_over
    joined.end()
    assert joined.best is not None
    assert 1 <= joined.best.round <= 3
    assert math.isnan(joined.best.value)  # a loop has no test split


def test_a_loop_that_keeps_the_best_needs_validation() -> None:
    with pytest.raises(ValueError, match="give evaluate, a function"):
        loop_of(Learner(0), 0, MemoryNetwork(), evaluate=None)


@thorough
def test_a_framework_callback_has_the_best_model_after_training() -> None:
    learner = Learner(0)
    alone = EpochGossip(topology=complete(1), num_rounds=3)
    worker = ScriptWorker(rank=0, num_workers=1)
    options = {"keep": "best", "evaluate": partial(validation, learner)}
    joined = JoinedTraining(alone, worker, NUM_SAMPLES, options)
    joined.begin(learner.model, [learner.optimizer], NUM_SAMPLES, 9, 1)
    for x in chain.from_iterable(repeat(learner.batches, 3)):
        joined.step(learner.step(x), BATCH)
    assert joined.is_over
    joined.end()
    assert joined.best is not None
    assert joined.best.params.keys() == learner.model.state_dict().keys()
    assert LightningHooks(joined).best is TransformersHooks(joined).best is joined.best
