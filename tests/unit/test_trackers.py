"""Trackers see a run's numbers in order, and change nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.complaints import complaint
from tests.small_runs import ALGORITHMS, ctrl_c_at, repeatable_events, small_run, summary
from tests.small_tasks import regression
from tests.tiers import thorough
from tests.unit.test_worker import SHORT
from tests.worker_threads import WITHIN, Crew

import edgegossip as eg
from edgegossip.cli.main import main
from edgegossip.contract.errors import Interrupted, UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.integrations.trackers import trackers
from edgegossip.real.gathering import Gathering
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import TrackedRun, track_results


@dataclass
class Notebook:
    """Writes down what it is told."""

    runs: list[TrackedRun] = field(default_factory=list)
    lines: list[tuple[dict[str, float], int, Seconds]] = field(default_factory=list)
    ends: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    fails_after: int | None = None

    def begin(self, run: TrackedRun) -> Notebook:
        self.runs.append(run)
        return self

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        if len(self.lines) == self.fails_after:
            raise OSError("no space is left")
        self.lines.append((dict(numbers), step, seconds))

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        self.ends.append((reason, dict(summary)))


def told_of(notebook: Notebook) -> list[float]:
    return [seconds for _, _, seconds in notebook.lines]


def test_a_tracker_sees_each_evaluation_once_and_the_end(tmp_path: Path) -> None:
    notebook = Notebook()
    results = run(small_run("gosgd"), out=tmp_path, num_threads=0, trackers=[notebook])
    assert [each.folder for each in notebook.runs] == [tmp_path]
    assert told_of(notebook) == [each.time for each in results.history]
    for (numbers, step, _), evaluation in zip(notebook.lines, results.history, strict=True):
        assert step == evaluation.samples_processed
        assert numbers["accuracy"] == evaluation.accuracy
        assert numbers["bytes_sent"] == evaluation.bytes_sent
    [(reason, ends)] = notebook.ends
    assert reason == "finished"
    assert ends["final_accuracy"] == summary(tmp_path)["final_accuracy"]
    assert "worker_accuracies" not in ends


def test_the_training_loss_is_that_since_the_last_evaluation(tmp_path: Path) -> None:
    notebook = Notebook()
    run(small_run("gosgd"), out=tmp_path, num_threads=0, trackers=[notebook])
    losses = [numbers.get("training_loss") for numbers, _, _ in notebook.lines]
    trained: list[list[tuple[float, int]]] = [[]]
    for event in eg_events(tmp_path):
        if event["type"] == "trained" and event["num_samples"]:
            trained[-1].append((event["loss"], event["num_samples"]))
        elif event["type"] == "evaluated":
            trained.append([])
    expected = [
        sum(loss * n for loss, n in part) / sum(n for _, n in part) if part else None
        for part in trained[:-1]
    ]
    assert losses == pytest.approx(expected)
    assert any(loss is not None for loss in losses)


def eg_events(folder: Path) -> list[dict[str, Any]]:
    from edgegossip.runs.events import parse_event, whole_lines

    return [parse_event(line) for line in whole_lines(folder / "events.jsonl")]


def test_metrics_have_their_own_names(tmp_path: Path) -> None:
    notebook = Notebook()
    experiment = eg.Experiment(
        task=regression(),
        algorithm=eg.Gossip(topology=eg.ring(3), num_rounds=4),
        platforms=eg.uneven(3),
    )
    run(experiment, out=tmp_path, num_threads=0, trackers=[notebook])
    numbers, _, _ = notebook.lines[-1]
    assert {"mae", "r2", "loss"} <= {*numbers}
    assert "accuracy" not in numbers
    assert "final_mae" in notebook.ends[0][1]


def test_a_run_is_the_same_with_and_without_trackers(tmp_path: Path) -> None:
    run(small_run(), out=tmp_path / "without", num_threads=0)
    run(small_run(), out=tmp_path / "with", num_threads=0, trackers=[Notebook()])
    assert repeatable_events(tmp_path / "with") == repeatable_events(tmp_path / "without")


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Notebook(fails_after=2), Notebook()
    with caplog.at_level(logging.WARNING):
        results = run(small_run(), out=tmp_path, num_threads=0, trackers=[broken, whole])
    assert results.reason == "finished"
    assert len(broken.lines) == 2
    assert broken.ends == []
    assert told_of(whole) == [each.time for each in results.history]
    [record] = caplog.records
    assert "Notebook failed (OSError: no space is left) - gossip continues" in record.message


@thorough
def test_a_resumed_run_is_told_from_its_beginning(tmp_path: Path) -> None:
    first, second = Notebook(), Notebook()
    with ctrl_c_at(8, ALGORITHMS["gosgd"]), pytest.raises(Interrupted):
        run(small_run("gosgd"), out=tmp_path, num_threads=0, trackers=[first])
    assert [reason for reason, _ in first.ends] == ["interrupted"]
    results = run(
        small_run("gosgd"), out=tmp_path, resume=True, num_threads=0, trackers=[second]
    )
    assert told_of(second) == [each.time for each in results.history]


@thorough
def test_each_run_of_a_comparison_is_tracked(tmp_path: Path) -> None:
    notebook = Notebook()
    runs = {name: small_run(name) for name in ("gosgd", "gossip")}
    comparison = eg.Comparison(experiments=runs, baseline="gossip")
    eg.compare(comparison, out=tmp_path, num_threads=0, trackers=[notebook])
    assert [(each.name, each.folder.name) for each in notebook.runs] == [
        ("gosgd", "gosgd"),
        ("gossip", "gossip"),
    ]
    assert [reason for reason, _ in notebook.ends] == ["finished", "finished"]


def test_a_run_that_is_over_can_be_told_later(tmp_path: Path) -> None:
    during, later = Notebook(), Notebook()
    results = run(small_run(), out=tmp_path, num_threads=0, trackers=[during])
    track_results(results, [later])
    assert told_of(later) == told_of(during)
    assert later.ends == during.ends


@thorough
def test_a_worker_tells_its_own_numbers_and_a_gathered_run_the_average(tmp_path: Path) -> None:
    crew, notebook = Crew(tmp_path), Notebook()
    crew.start(SHORT, 0, settings=replace(WITHIN, trackers=(notebook,)))
    crew.start(SHORT, 1, 2, 3)
    assert crew.join(0, 1, 2, 3) == ["finished"] * 4
    [tracked] = notebook.runs
    assert (tracked.name, tracked.folder) == ("epoch-gossip worker 0", crew.folder(0))
    numbers, step, _ = notebook.lines[-1]
    found = summary(crew.folder(0))
    assert step == found["samples_processed"]
    assert numbers["bytes_sent"] == found["bytes_sent"]
    assert any("training_loss" in each for each, _, _ in notebook.lines)
    [(reason, ends)] = notebook.ends
    assert (reason, ends["rounds"]) == ("finished", 3)

    gathered = Notebook()
    results = Gathering(SHORT, tmp_path).finish()
    track_results(results, [gathered])
    assert told_of(gathered) == [each.time for each in results.history]


def test_settings_are_short_and_by_path(tmp_path: Path) -> None:
    notebook = Notebook()
    results = run(small_run(), out=tmp_path, num_threads=0, trackers=[notebook])
    assert results.folder == tmp_path
    settings = notebook.runs[0].settings
    assert settings["seed"] == small_run().seed
    assert settings["task.batch_size"] == 8
    long = TrackedRun(name="x", folder=tmp_path, header={"text": "a" * 999, "many": [1] * 999})
    assert len(long.settings) == 200
    assert len(str(long.settings["text"])) == 250


@pytest.mark.parametrize("command", ["run", "compare", "launch", "gather"])
def test_trackers_are_named_on_the_command_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert main([command, "quickstart", "--track", "wandb", "--out", "none"]) == 2
    assert "pip install 'edgegossip[wandb]'" in complaint(capsys)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_before_anything_is_done(
    name: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(UsageError, match=rf"pip install 'edgegossip\[{name}\]'"):
        trackers([name])
