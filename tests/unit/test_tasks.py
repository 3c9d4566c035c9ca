"""Regressions, language models and others through whole runs."""

from __future__ import annotations

import math
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
from tests.small_tasks import experiment, labelling, language, numbers, regression
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import DataError, Interrupted, RunFolderError
from edgegossip.contract.protocol import Epochs, Train
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import from_tensors
from edgegossip.machine.energy import Energy
from edgegossip.machine.goodput import NodeUse
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.report.prose import highlights, story
from edgegossip.runs.comparison import compare
from edgegossip.runs.describe import describe
from edgegossip.runs.experiment import Comparison, MetricTarget
from edgegossip.runs.folder import load_results
from edgegossip.runs.results import Evaluation
from edgegossip.runs.runner import run
from edgegossip.training.loss import model_and_batch
from edgegossip.training.metrics import RESERVED, MeanMetric
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Focused, Ranked
from edgegossip.training.task import Task, Workload

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


@thorough
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
        energy=Energy(),
        use=NodeUse(goodput=0.0, compute_used=0.0, node_seconds=0.0),
    ).line()
    assert {"type", *line} == RESERVED


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
    probed = sampler._losses.isfinite()
    assert probed.any()
    torch.testing.assert_close(sampler._losses[probed], points.square().flatten()[probed])


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
