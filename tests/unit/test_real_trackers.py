"""The real packages keep what a run tells its trackers."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import small_run

from edgegossip.integrations.trackers import MLflow, TensorBoard, Trackio, WandB
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import Tracker

# They warn of their own dependencies, and of what they will change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def tracked(out: Path, tracker: Tracker) -> Results:
    return run(small_run("gosgd"), out=out, num_threads=0, trackers=[tracker])


def steps(results: Results) -> list[int]:
    return [each.samples_processed for each in results.history]


def accuracies(results: Results) -> list[float]:
    return [each.accuracy for each in results.history]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_tensorboard_shows_the_curve_and_the_end(tmp_path: Path, is_elsewhere: bool) -> None:
    pytest.importorskip("tensorboard", reason="needs pip install 'edgegossip[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(folder=str(tmp_path / "all")) if is_elsewhere else TensorBoard()
    where = "all/gosgd" if is_elsewhere else "run/tensorboard"
    results = tracked(tmp_path / "run", tracker)
    kept = EventAccumulator(str(tmp_path / where))
    kept.Reload()
    scalars = kept.Scalars("accuracy")
    assert [each.step for each in scalars] == steps(results)
    assert [each.value for each in scalars] == pytest.approx(accuracies(results))
    gaps = [each.wall_time - scalars[0].wall_time for each in scalars]
    assert gaps == pytest.approx([each.time for each in results.history], abs=1e-5)
    [end] = kept.Scalars("end/final_accuracy")
    assert end.value == pytest.approx(results.final_accuracy)


def test_wandb_writes_the_curve_into_the_runs_folder_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'edgegossip[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    results = tracked(tmp_path, WandB())
    [path] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    records = [*records_of(path)]
    told = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in (each.history.item for each in records if each.HasField("history"))
    ]
    assert [each["samples_processed"] for each in told] == steps(results)
    assert [each["accuracy"] for each in told] == pytest.approx(accuracies(results))
    [exit] = [each.exit for each in records if each.HasField("exit")]
    assert exit.exit_code == 0


def records_of(path: Path) -> Iterator[Any]:
    """The records of a file of wandb: protobuf in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    content, block = path.read_bytes(), 32768
    place, parts = 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # too short for a header: zeros
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_mlflow_keeps_the_curve_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs pip install 'edgegossip[mlflow]'")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    results = tracked(tmp_path / "run", MLflow(tracking_uri=uri))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("edgegossip")
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("gosgd", "FINISHED")
    assert found.data.params["task.batch_size"] == "8"
    assert found.data.metrics["end/final_accuracy"] == pytest.approx(results.final_accuracy)
    curve = client.get_metric_history(found.info.run_id, "accuracy")
    pairs = sorted((each.timestamp, each.step, each.value) for each in curve)
    assert [step for _, step, _ in pairs] == steps(results)
    assert [value for _, _, value in pairs] == pytest.approx(accuracies(results))


def test_trackio_keeps_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Read when it is imported, which no other test does.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs pip install 'edgegossip[trackio]'")
    results = tracked(tmp_path / "run", Trackio(project="mine"))
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as kept:
        rows = kept.execute("select step, metrics from metrics order by id").fetchall()
    told = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [step for step, each in told if "accuracy" in each] == steps(results)
    values = [each["accuracy"] for _, each in told if "accuracy" in each]
    assert values == pytest.approx(accuracies(results))
    assert told[-1][1]["end/final_accuracy"] == pytest.approx(results.final_accuracy)
