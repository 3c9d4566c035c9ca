"""Reading a run folder: one run, or a comparison with a subfolder for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.report.log import Activity, RunLog, activities, read_log
from edgegossip.runs.files import is_number, read_json
from edgegossip.runs.results import ALL_CRASHED, ENDS, Evaluation, joules_fields, use_fields

EVENTS = "events.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Numbers of one run; None if unknown or not reached. Values are of the run's metric.

    Those that begin with `kept` are of the best model by validation (`Experiment.keep`).
    """

    final_value: float | None = None
    best_value: float | None = None
    kept_value: float | None = None
    kept_time: Seconds | None = None
    worker_worst: float | None = None
    worker_mean: float | None = None
    time_to_target: Seconds | None = None
    speedup: float | None = None
    virtual_seconds: Seconds | None = None
    wall_seconds: Seconds | None = None
    bytes_sent: float | None = None
    joules: float | None = None
    busy_joules: float | None = None
    idle_joules: float | None = None
    link_joules: float | None = None
    joules_to_target: float | None = None
    goodput: float | None = None
    compute_used: float | None = None
    node_seconds: Seconds | None = None
    node_seconds_to_target: Seconds | None = None
    bytes_per_worker: float | None = None
    bytes_ratio_same_graph: float | None = None
    bytes_ratio_complete_graph: float | None = None
    samples_processed: float | None = None
    consensus_distance: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        name: Name of the run.
        log: Events of the run.
        summary: Numbers of the run.
        workers: Use of time by each rank; empty if no virtual time passed.
    """

    name: str
    log: RunLog
    summary: Summary
    workers: list[Activity]

    @property
    def is_complete(self) -> bool:
        """Whether the run ended by itself, and not because all workers crashed."""
        ended = self.log.ended
        return ended is not None and ended.reason in ENDS and ended.reason != ALL_CRASHED

    @property
    def kept(self) -> Evaluation | None:
        """The evaluation of the best model by validation, if it is known.

        On real machines, models are chosen at other moments than those of the log, so its bytes
        and samples are those of the last moment before.
        """
        time, value = self.summary.kept_time, self.summary.kept_value
        if time is None or value is None:
            return None
        before = [each for each in self.log.evaluations if each.time <= time]
        measured = {self.log.metric.name: value}
        return replace(before[-1], time=time, metrics=measured) if before else None

    @property
    def trainers(self) -> list[Activity]:
        """Use of time by the training workers; empty if no virtual time passed."""
        return [self.workers[rank] for rank in self.log.trainers] if self.workers else []

    @property
    def speeds(self) -> dict[Rank, float]:
        """Samples per second of the training workers."""
        return {rank: self.throughputs[rank] for rank in self.log.trainers}

    @property
    def throughputs(self) -> list[float]:
        """Samples per second of each worker, with all its executors, on an idle machine."""
        return [
            platform["throughput"] * platform["executors"]
            for platform in self.log.header["platforms"]
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """The run or comparison that a report describes.

    Attributes:
        title: The recipe, or the name of the only run.
        runs: Runs, at least one; a baseline comes first.
        baseline: Name of the reference run; None for a single run.
        target: Target of the chosen metric; None without one.
        throughput_bound: Samples per second without waiting, divided by samples per second with
            a barrier each epoch; None if unknown.
    """

    title: str
    runs: list[Run]
    baseline: str | None
    target: float | None
    throughput_bound: float | None

    @property
    def metric(self) -> MetricSpec:
        """The chosen metric of all runs."""
        return self.runs[0].log.metric

    @property
    def is_comparison(self) -> bool:
        """Whether there is more than one run."""
        return len(self.runs) > 1


def read_folder(path: Path) -> ReportData:
    """Read a run or a comparison in `path`, complete or not.

    Raises:
        RunFolderError: If there is no run in `path`, or a file is missing or damaged.
    """
    folders = run_folders(path)
    if folders == [path]:
        return _read_single(path)
    return _read_comparison(path, [folder.name for folder in folders])


def run_folders(path: Path) -> list[Path]:
    """The folder of a single run itself, or the folders of a comparison's runs.

    Raises:
        RunFolderError: If there is no run in `path`.
    """
    if (path / EVENTS).is_file():
        return [path]
    if folders := [events.parent for events in sorted(path.glob(f"*/{EVENTS}"))]:
        return folders
    raise RunFolderError(
        f"no run in {path}: expected {EVENTS} there or in its subfolders - "
        "give the folder that a run or a comparison wrote"
    )


def _read_single(path: Path) -> ReportData:
    own = _read_json(path / SUMMARY)
    log = read_log(path / EVENTS)
    target = _number(path / SUMMARY, {**log.header, **own}, f"target_{log.metric.key}")
    name = log.header["name"]
    return ReportData(
        title=name,
        runs=[Run(name, log, _summary(path / SUMMARY, log, target, own), activities(log))],
        baseline=None,
        target=target,
        throughput_bound=None,
    )


def _read_comparison(path: Path, names: list[str]) -> ReportData:
    summary_path = path / SUMMARY
    overall = _read_json(summary_path)
    listed = overall.get("runs", {})
    if not isinstance(listed, dict) or not all(
        isinstance(run, dict) for run in listed.values()
    ):
        raise _bad_summary(summary_path, "an object `runs` with one object for each run")
    logs = {name: read_log(path / name / EVENTS) for name in dict.fromkeys([*listed, *names])}
    metric = next(iter(logs.values())).metric
    for log in logs.values():
        if log.metric != metric:
            raise RunFolderError(
                f"runs in {path} are measured by {metric.name} and by {log.metric.name}, which "
                "cannot be compared; report each of them alone"
            )
    target = _number(summary_path, overall, f"target_{metric.key}")
    runs = []
    for name, log in logs.items():
        own = {**_read_json(path / name / SUMMARY), **listed.get(name, {})}
        summary = _summary(summary_path, log, target, own)
        runs.append(Run(name, log, summary, activities(log)))
    baseline = overall.get("baseline")
    runs.sort(key=lambda run: run.name != baseline)
    return ReportData(
        title=str(overall.get("recipe") or runs[0].log.header.get("recipe") or path.name),
        runs=runs,
        baseline=baseline if any(run.name == baseline for run in runs) else None,
        target=target,
        throughput_bound=_number(summary_path, overall, "throughput_bound"),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    """Read one object; {} if the file is missing, as in an interrupted run."""
    try:
        return read_json(path) if path.exists() else {}
    except RunFolderError as error:
        reason = error.__cause__ or "it is something else"
        raise _bad_summary(path, f"one JSON object ({reason})") from error


def _summary(
    path: Path, log: RunLog, target: float | None, given: Mapping[str, Any]
) -> Summary:
    """Use the given numbers, and compute missing numbers from the events."""
    numbers: dict[str, float | None] = {
        "virtual_seconds": log.duration,
        "wall_seconds": log.ended.wall_seconds if log.ended else None,
    }
    metric = log.metric
    if log.evaluations:
        last, reached = log.evaluations[-1], log.first_at(target)
        numbers |= {
            "final_value": _known(last.value),
            "best_value": _known(metric.best(each.value for each in log.evaluations)),
            "time_to_target": reached.time if reached else None,
            "bytes_sent": last.bytes_sent,
            "bytes_per_worker": last.bytes_sent / log.header["num_workers"],
            "samples_processed": last.samples_processed,
            "consensus_distance": _known(last.consensus_distance),
            "joules_to_target": reached.joules if reached else None,
            "node_seconds_to_target": (
                reached.use.node_seconds if reached and reached.use else None
            ),
        }
        numbers |= joules_fields(last.energy) | use_fields(last.use)
    keys = {
        "final_value": f"final_{metric.key}",
        "best_value": f"best_{metric.key}",
        "kept_value": f"kept_{metric.key}",
        "worker_worst": f"worker_{metric.key}_{'min' if metric.higher_is_better else 'max'}",
        "worker_mean": f"worker_{metric.key}_mean",
    }
    for field in fields(Summary):
        key = keys.get(field.name, field.name)
        if given.get(key) is not None:
            numbers[field.name] = _number(path, given, key)
    return Summary(**numbers)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(path: Path, given: Mapping[str, Any], key: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if not is_number(value):
        raise _bad_summary(path, f"a number or null for `{key}`, got {value!r}")
    return value


def _bad_summary(path: Path, expected: str) -> RunFolderError:
    return RunFolderError(
        f"{path}: expected {expected}; delete the file to report from the events alone, "
        "or run the experiment again"
    )
