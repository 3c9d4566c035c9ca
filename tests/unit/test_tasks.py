"""Regressions, language models and others through whole runs, and what is refused."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.run_folders import whole_run, write_run
from tests.small_runs import (
    ctrl_c_at,
    events,
    parameters,
    repeatable_events,
    small_task,
    summary,
)
from tests.small_tasks import (
    experiment,
    labelling,
    language,
    numbers,
    regression,
    regression_data,
    windows,
)
from tests.tiers import thorough
from tests.worker_threads import WITHIN, Crew
from torch import Tensor, nn

from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.core.errors import (
    DataError,
    Interrupted,
    NetworkError,
    RunFolderError,
    TrainingError,
)
from edgegossip.core.protocol import Epochs, Train
from edgegossip.core.topology import complete
from edgegossip.deploy.gathering import Gathering
from edgegossip.deploy.introducing import introduce
from edgegossip.experiments.comparison import compare
from edgegossip.experiments.describe import describe
from edgegossip.experiments.experiment import Comparison
from edgegossip.experiments.results import Evaluation
from edgegossip.experiments.run_folder import load_results
from edgegossip.experiments.run_target import MetricTarget
from edgegossip.experiments.runner import run
from edgegossip.learning.built_in_metrics import R2, Accuracy, MeanAbsoluteError
from edgegossip.learning.dataset import Dataset, from_tensors
from edgegossip.learning.holding_out import hold_out
from edgegossip.learning.loss import Loss, model_and_batch
from edgegossip.learning.metric import MeanMetric
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.sampling.accuracy_aware import AccuracyAware
from edgegossip.learning.sampling.selection import Focused, Ranked
from edgegossip.learning.stages.pipelined_stage import PipelinedStage
from edgegossip.learning.stages.staged import staged
from edgegossip.learning.task import _TAKEN, Task, Workload
from edgegossip.net.introduction import Introductions
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.report.prose import highlights, story

# What is learned, and what a folder says of it.


@thorough
def test_a_regression_is_learned_and_kept_by_its_own_metrics(tmp_path: Path) -> None:
    results = run(experiment(regression(), num_rounds=40), out=tmp_path, num_threads=0)
    assert (results.metric.name, results.metric.unit) == ("MAE", "years")
    assert results.final_value == results.history[-1].metrics["MAE"] < 0.5
    assert results.history[-1].metrics["R2"] > 0.9
    assert results.history[0].metrics["R2"] < 0.1
    found, last = summary(tmp_path), events(tmp_path, "evaluated")[-1]
    assert (found["metric"], found["final_mae"]) == ("MAE", results.final_value)
    assert found["best_mae"] == min(each.value for each in results.history)
    assert found["final_r2"] == last["r2"] == results.history[-1].metrics["R2"]
    assert found["worker_mae_max"] == max(found["worker_values"])
    text = (tmp_path / "summary.json").read_text() + (tmp_path / "events.jsonl").read_text()
    assert "accura" not in text.replace("accuracy_aware", "").replace("AccuracyAware", "")
    again = load_results(tmp_path)
    assert again.metric == results.metric
    assert again.history == results.history
    assert again.worker_values == results.worker_values


def test_a_language_model_is_measured_by_token(tmp_path: Path) -> None:
    results = run(experiment(language(), num_rounds=30), out=tmp_path, num_threads=0)
    first, last = results.history[0], results.history[-1]
    assert last.value == last.metrics["perplexity"] < 0.5 * first.value
    assert last.metrics["bits per character"] == pytest.approx(math.log2(last.value))
    assert last.loss == pytest.approx(math.log(last.value), rel=1e-5)
    assert summary(tmp_path)["final_bits_per_character"] == last.metrics["bits per character"]


def test_several_labels_a_sample_are_learned(tmp_path: Path) -> None:
    results = run(experiment(labelling(), num_rounds=30), out=tmp_path, num_threads=0)
    assert results.final_value > 0.8 > results.history[0].value
    assert 0.5 < results.history[-1].metrics["exact match"] <= results.final_value


def test_the_chosen_metric_comes_first_whatever_the_order(tmp_path: Path) -> None:
    task = regression(target_metric="R2")
    results = run(experiment(task), out=tmp_path, num_threads=0)
    assert results.metric.name == "R2"
    assert [*results.history[0].metrics] == ["R2", "MAE"]
    assert results.best_value == max(each.metrics["R2"] for each in results.history)
    assert load_results(tmp_path).metric.name == "R2"
    assert read_folder(tmp_path).metric.name == "R2"


def test_what_has_no_accuracy_does_not_tell_one(tmp_path: Path) -> None:
    results = run(experiment(regression()), out=tmp_path, num_threads=0)
    with pytest.raises(AttributeError, match="no accuracy, only MAE, R2; read `value` or"):
        _ = results.final_accuracy
    with pytest.raises(AttributeError, match="measured by MAE, not by accuracy; read"):
        _ = results.worker_accuracies


# The same bits.


def dict_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def test_dicts_through_a_loss_of_model_and_batch_train_as_pairs_do(tmp_path: Path) -> None:
    x, y = numbers()
    data = from_tensors("dicts", {"x": x[:64], "y": y[:64]}, {"x": x[64:], "y": y[64:]})
    error = MeanMetric(name="MSE", of=dict_loss, higher_is_better=False)
    task = regression(dataset=data, forward=model_and_batch, loss=dict_loss, metrics=(error,))
    pairs = run(experiment(regression()), out=tmp_path / "pairs", num_threads=0)
    dicts = run(experiment(task), out=tmp_path / "dicts", num_threads=0)
    assert parameters(tmp_path / "dicts") == parameters(tmp_path / "pairs")
    assert [each.loss for each in dicts.history] == [each.loss for each in pairs.history]
    assert dicts.final_value == pytest.approx(dicts.history[-1].loss)


@pytest.mark.parametrize("task", [regression(), language()], ids=["numbers", "text"])
def test_a_run_stopped_and_resumed_is_the_whole_run(tmp_path: Path, task: Task) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(experiment(task), out=whole, num_threads=0)
    with ctrl_c_at(40, experiment(task).algorithm), pytest.raises(Interrupted):
        run(experiment(task), out=parts, num_threads=0)
    run(experiment(task), out=parts, num_threads=2, resume=True)
    assert repeatable_events(parts) == repeatable_events(whole)
    assert parameters(parts) == parameters(whole)


def test_a_classification_is_described_as_it_always_was() -> None:
    described = describe(small_task())
    assert not {"metrics", "target_metric", "forward"} & set(described)
    assert describe(regression(target_metric="R2"))["target_metric"] == "R2"
    assert describe(language())["forward"] == "speak"


def test_fields_of_the_log_are_taken_names() -> None:
    line = Evaluation(
        time=0.0,
        epochs=0.0,
        metrics={},
        loss=0.0,
        consensus_distance=0.0,
        bytes_sent=0,
        samples_processed=0,
    ).line()
    assert {"type", *line} == _TAKEN


# Targets.


def test_speed_ups_go_by_a_metric_that_falls(tmp_path: Path) -> None:
    runs = {"few": experiment(regression(), 4), "many": experiment(regression(), 12)}
    comparison = Comparison(experiments=runs, baseline="few", target_gap=0.1)
    results = compare(comparison, out=tmp_path, num_threads=0)
    kept = summary(tmp_path)
    assert kept["target_mae"] == pytest.approx(1.1 * results["few"].best_value)
    for name, result in results.items():
        reached = [each.time for each in result.history if each.value <= kept["target_mae"]]
        assert kept["runs"][name]["time_to_target"] == reached[0]
    folder = read_folder(tmp_path)
    assert folder.target == kept["target_mae"]
    told = " ".join(story(folder)) + " ".join(f"{n} {label}" for n, label in highlights(folder))
    assert "reached MAE" in told
    assert "years MAE at the end, many" in told
    assert "accura" not in told
    assert "%\u00a0accuracy" not in told


def test_a_target_of_a_metric_ends_a_run(tmp_path: Path) -> None:
    until = MetricTarget(value=0.5, metric="R2")
    results = run(experiment(regression(), 40, until=until), out=tmp_path, num_threads=0)
    values = [each.metrics["R2"] for each in results.history]
    assert results.reason == "target"
    assert values[-1] >= 0.5 > max(values[:-1])


@thorough
def test_reports_of_falling_metrics_are_drawn(tmp_path: Path) -> None:
    run(experiment(language()), out=tmp_path, num_threads=0)
    page = write_report(tmp_path).read_text()
    assert "How perplexity fell" in page
    assert "Final bits per character" in page
    assert "ccuracy" not in page
    assert (tmp_path / "figures/perplexity-time.png").exists()


@thorough
def test_runs_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    runs = {"one": experiment(regression()), "two": experiment(regression(target_metric="R2"))}
    with pytest.raises(
        ValueError, match="two is measured by R2, and one by MAE; give the tasks"
    ):
        Comparison(experiments=runs, baseline="one")
    for name, each in runs.items():
        run(each, out=tmp_path / name, num_threads=0)
    with pytest.raises(RunFolderError, match="measured by MAE and by R2, which cannot be comp"):
        read_folder(tmp_path)


# Old folders.


def test_folders_that_name_no_metric_are_of_classifications(tmp_path: Path) -> None:
    log = whole_run("gossip", has_barrier=False)
    run_folder = write_run(tmp_path, log)
    folder = read_folder(run_folder)
    assert (folder.metric.name, folder.metric.unit) == ("accuracy", "percent")
    accuracies = [each["accuracy"] for each in log if each["type"] == "evaluated"]
    assert [each.accuracy for each in folder.runs[0].log.evaluations] == accuracies


@pytest.mark.parametrize(
    "metrics",
    ["R2", [5], [{"name": "R2"}], [{"name": "R2", "unit": 5, "higher_is_better": True}]],
)
def test_a_damaged_list_of_metrics_is_refused(tmp_path: Path, metrics: Any) -> None:  # noqa: ANN401
    log = whole_run("gossip", has_barrier=False)
    log[0]["task"] = {"metrics": metrics}
    with pytest.raises(RunFolderError, match="line 1: expected the experiment"):
        read_folder(write_run(tmp_path, log))


# Samples chosen by their losses.


def test_losses_of_samples_are_those_of_the_task() -> None:
    task = regression(
        accuracy_aware=AccuracyAware(selection=Focused()), optimizer=SGD(lr=0.0, momentum=0.0)
    )
    workload = Workload(task, [0], seed=0)
    learner: Any = workload.make_trainer(0)
    learner.train(Train(workload.initial_params(), Epochs()))
    x, y = task.dataset.train.batch(learner.shard)
    with torch.no_grad():
        errors = (learner.model.module(x) - y).square().flatten()
    sampler = learner.batches.sampler
    torch.testing.assert_close(sampler._sample_losses, errors)
    aggregated = task.accuracy_aware.aggregator.fit(x, torch.zeros(64, dtype=torch.int64))
    with torch.no_grad():
        points = learner.model.module(aggregated.x) - aggregated.means(y)
    looked_at = sampler._losses.isfinite()
    assert looked_at.any()
    torch.testing.assert_close(sampler._losses[looked_at], points.square().flatten()[looked_at])


def test_edge_gossip_around_a_regression_chooses_samples_of_high_loss(tmp_path: Path) -> None:
    algorithm = EdgeGossip(inner=EpochGossip(topology=complete(3), num_rounds=10))
    task = regression(accuracy_aware=AccuracyAware(selection=Ranked()))
    results = run(experiment(task, algorithm=algorithm), out=tmp_path, num_threads=0)
    assert results.final_value < 0.5 * results.history[0].value


def test_tokens_have_no_means_to_choose_by() -> None:
    x, y = numbers()
    tokens = from_tensors("tokens", (x.long(), y), (x.long(), y))
    focused = AccuracyAware(selection=Focused())
    for make in (language, partial(regression, dataset=tokens)):
        with pytest.raises(DataError, match=r"Focused uses .* choose Random\(\) or Cyclic"):
            make(accuracy_aware=focused)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_metric": "r2"}, "unknown target_metric 'r2'; choose one of 'MAE', 'R2'"),
        ({"metrics": ()}, r"metrics is empty; name at least one"),
        ({"metrics": (R2(), R2())}, "a metric cannot be called 'R2', which is the name of an"),
        ({"metrics": (R2(name="Loss"),)}, "a metric cannot be called 'Loss'"),
        (
            {"metrics": (Accuracy(),)},
            "accuracy needs classes, and 'numbers' has none; give the",
        ),
    ],
)
def test_metrics_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regression(**changes)


def test_targets_of_unknown_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown metric 'F1'; choose one of 'MAE', 'R2'"):
        experiment(regression(), until=MetricTarget(value=0.5, metric="F1"))


@pytest.mark.parametrize(("target", "gap"), [(math.nan, 0.1), (1.0, 1.5)])
def test_targets_out_of_range_are_refused(target: float, gap: float) -> None:
    with pytest.raises(ValueError, match=r"target( must be finite|_gap must be in \[0, 1\])"):
        Comparison(
            experiments={"one": experiment(regression())},
            baseline="one",
            target=target,
            target_gap=gap,
        )


def test_a_batch_that_is_no_pair_needs_a_forward(tmp_path: Path) -> None:
    x, y = numbers()
    data = from_tensors("dicts", {"x": x, "y": y}, {"x": x, "y": y})
    with pytest.raises(
        DataError, match=r"batch is a dict with \['x', 'y'\], not a pair .* give"
    ):
        run(experiment(regression(dataset=data)), out=tmp_path, num_threads=0)


def test_what_has_no_classes_is_not_cut_into_stages() -> None:
    with pytest.raises(ValueError, match=r"stages send labels .* 'numbers' has none"):
        staged(regression(), [2], PipelinedStage)


class OddSplit:
    """Gives batches whose tensors differ in length."""

    def __init__(self, num_samples: int = 64) -> None:
        self.samples = numbers(num_samples)

    def __len__(self) -> int:
        return len(self.samples[0])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.samples
        return x[indices], y[indices[: max(1, len(indices) - 1)]]

    @property
    def labels(self) -> Tensor:
        return torch.zeros(len(self), dtype=torch.int64)


def test_batches_of_odd_structure_end_a_run_with_one_line(tmp_path: Path) -> None:
    data = Dataset("odd", OddSplit(), regression_data().test)
    with pytest.raises(DataError, match=r"unequal length, 8 at \[0\] and 7 at \[1\]") as caught:
        run(experiment(regression(dataset=data)), out=tmp_path, num_threads=0)
    assert "\n" not in str(caught.value)


# Metrics that are not finite.


def constant_test() -> Dataset:
    x, y = numbers()
    return from_tensors("flat", train=(x[:64], y[:64]), test=(x[64:], torch.ones(32, 1)))


def test_a_metric_that_is_not_finite_ends_a_run_before_it_is_trained(tmp_path: Path) -> None:
    task = regression(dataset=constant_test(), target_metric="R2")
    with pytest.raises(TrainingError, match="metric 'R2' is nan on the test split, where the"):
        run(experiment(task), out=tmp_path, num_threads=0)
    assert summary(tmp_path)["reason"] == "failed"
    assert events(tmp_path, "trained") == []
    assert summary(tmp_path)["final_r2"] is None
    assert "R2" in write_report(tmp_path).read_text()


@thorough
def test_a_metric_that_is_not_finite_later_is_a_warning_and_counts_as_never_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def sometimes(outputs: Tensor, targets: Tensor) -> float:
        calls.append(1)
        return 1.0 if len(calls) == 1 else math.inf

    task = regression(metrics=(MeanMetric(name="odd", of=sometimes), R2()))
    with caplog.at_level(logging.WARNING):
        results = run(experiment(task), out=tmp_path, num_threads=0)
    assert results.reason == "finished"
    assert caplog.text.count("metric 'odd' is inf on the test split") == 1
    assert [each["odd"] for each in events(tmp_path, "evaluated")[:2]] == [1.0, None]
    assert math.isnan(load_results(tmp_path).final_value)
    write_report(tmp_path)


# Workers whose tasks differ.


def difference(one: Task, other: Task) -> str:
    """Return the message to a worker with the first task about one with the second."""
    own, theirs = (experiment(each) for each in (one, other))
    met = Introductions(2, introduce(own, own.workload()))
    met.appeared(1, 1)
    met.take(1, introduce(theirs, theirs.workload()).message())
    return met.difference(1)


def test_workers_whose_tasks_differ_are_named_the_difference() -> None:
    assert difference(regression(), regression()) == ""
    other = replace(regression(), metrics=(MeanAbsoluteError(unit="days"), R2()))
    assert difference(regression(), other) == 'task.metrics.0.unit "days", this one "years"'
    chosen = difference(regression(), regression(target_metric="R2"))
    assert chosen == "'task.target_metric' \"R2\", this one none"
    assert difference(language(), language(loss=F.cross_entropy)).startswith("task.loss ")
    assert difference(language(), language(forward=model_and_batch)).startswith("task.forward")


def scaled(factor: float, noise: float = 0.0) -> Loss:
    def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * F.mse_loss(outputs, targets) + noise * torch.rand(())

    return squared_error


def test_functions_of_one_name_that_give_different_losses_are_different_tasks() -> None:
    named = difference(regression(loss=scaled(1.0)), regression(loss=scaled(2.0)))
    assert named == "other loss of the initial parameters"
    assert difference(regression(loss=scaled(1.0)), regression(loss=scaled(1.0))) == ""
    # Different values of a random loss do not show that the tasks differ.
    own, other = (regression(loss=scaled(1.0, noise=1.0)) for _ in range(2))
    assert difference(own, other) == ""


def test_workers_whose_nested_data_differ_are_told_where() -> None:
    samples = windows()
    samples["next"] = samples["next"].roll(5, dims=0)
    parts = [
        {n: each[some] for n, each in samples.items()}
        for some in (slice(-20), slice(-20, None))
    ]
    other = language(dataset=from_tensors("text", *parts))
    assert difference(language(), other).startswith("other training samples['next']")


@thorough
def test_workers_with_a_regression_end_where_the_simulator_does(tmp_path: Path) -> None:
    data = hold_out(regression_data(), 0.25)
    trained = experiment(regression(dataset=data), num_rounds=4)
    crew = Crew(tmp_path / "run")
    assert crew.all(trained) == ["finished"] * 3
    results = Gathering(trained, crew.out).finish()
    run(trained, out=tmp_path / "simulated", num_threads=0)
    assert parameters(crew.out) == parameters(tmp_path / "simulated")
    assert results.metric.name == "MAE"
    assert summary(crew.out)["final_mae"] == summary(tmp_path / "simulated")["final_mae"]
    assert 0 < summary(crew.folder(0))["validation_mae"] < 10
    assert summary(crew.folder(0))["validation_r2"] < 1


@thorough
def test_workers_whose_tasks_differ_do_not_train_together(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    one = experiment(regression(), num_rounds=4)
    other = experiment(regression(target_metric="R2"), num_rounds=4)
    settings = replace(WITHIN, meet_seconds=0.5)
    crew.start(one, 0, 1, settings=settings)
    crew.start(other, 2, settings=settings)
    assert crew.join(0, 1) == ["finished"] * 2
    [error] = crew.join(2)
    assert isinstance(error, NetworkError)
    assert 'task.target_metric none, this one "R2"' in str(error)
