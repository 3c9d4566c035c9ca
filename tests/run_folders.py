"""Run folders made by hand: what a run leaves, without running anything."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgegossip.report.log import RunLog, WorkerLog

NUM_TRAIN = 1000
SPEEDS = (1000.0, 500.0, 250.0, 125.0)
MESSAGE_BYTES = 40_000
UPLINK = 400_000.0

Event = dict[str, Any]


def header(name: str, speeds: Iterable[float] = SPEEDS) -> Event:
    speeds = list(speeds)
    return {
        "type": "experiment",
        "schema": 1,
        "name": name,
        "recipe": "quickstart",
        "seed": 0,
        "num_workers": len(speeds),
        "algorithm": {"type": "EpochGossip", "num_epochs": 10, "topology": {"type": "Ring"}},
        "platforms": [
            {"name": f"platform-{rank}", "throughput": speed, "executors": 1}
            for rank, speed in enumerate(speeds)
        ],
        "versions": {"edgegossip": "0.1.0", "torch": "2.13.0"},
        "num_train": NUM_TRAIN,
        "wall_started": "2026-11-21T10:00:00Z",
    }


def rounds(
    num_rounds: int,
    speeds: Iterable[float] = SPEEDS,
    *,
    has_barrier: bool,
    samples: int = 250,
    end: float = math.inf,
) -> list[Event]:
    """Train and send `num_rounds` times on each worker, with or without meeting in between."""
    speeds = list(speeds)
    events: list[Event] = []
    for rank, speed in enumerate(speeds):
        own = samples / speed
        period = samples / min(speeds) + 2 * MESSAGE_BYTES / UPLINK if has_barrier else own
        for index in range(num_rounds):
            start, trained = index * period, index * period + own
            events += [
                {
                    "type": "trained",
                    "time": trained,
                    "start": start,
                    "rank": rank,
                    "num_steps": 8,
                    "num_samples": samples,
                    "loss": 0.5,
                },
                {
                    "type": "sent",
                    "time": trained,
                    "rank": rank,
                    "kind": "params",
                    "round": index,
                    "receivers": [0, 1],
                    "num_bytes": 2 * MESSAGE_BYTES,
                    "start": trained,
                    "end": trained + 2 * MESSAGE_BYTES / UPLINK,
                },
            ]
        events.append({"type": "finished", "time": num_rounds * period, "rank": rank})
    return sorted((event for event in events if event["time"] <= end), key=lambda e: e["time"])


def evaluations(events: list[Event], rate: float = 0.35, every: float = 0.5) -> list[Event]:
    """Let accuracy grow with the samples processed, from 0.1 towards 0.98."""
    duration = events[-1]["time"]
    result = []
    for tick in range(int(duration / every) + 1):
        past = [event for event in events if event["time"] <= tick * every]
        samples = sum(event.get("num_samples", 0) for event in past)
        epochs = samples / NUM_TRAIN
        result.append(
            {
                "type": "evaluated",
                "time": tick * every,
                "epochs": epochs,
                "accuracy": 0.98 - 0.88 * math.exp(-rate * epochs),
                "loss": 1.0,
                "consensus_distance": 0.1,
                "bytes_sent": sum(event.get("num_bytes", 0) for event in past),
                "samples_processed": samples,
            }
        )
    return result


def ended(time: float, reason: str = "finished", error: str | None = None) -> Event:
    return {
        "type": "ended",
        "time": time,
        "reason": reason,
        "error": error,
        "wall_seconds": 1.5,
    }


def write_run(folder: Path, events: list[Event], summary: Event | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def whole_run(
    name: str, *, has_barrier: bool, num_rounds: int = 10, rate: float = 0.35
) -> list[Event]:
    events = rounds(num_rounds, has_barrier=has_barrier)
    both = sorted([*events, *evaluations(events, rate)], key=lambda event: event["time"])
    return [header(name), *both, ended(both[-1]["time"])]


def comparison(folder: Path, *, target: float = 0.9) -> Path:
    """A barrier against none, with the summary that a comparison writes."""
    logs = {
        "all-reduce": whole_run("all-reduce", has_barrier=True),
        "gossip": whole_run("gossip", has_barrier=False),
    }
    times = {
        name: next(
            e["time"] for e in log if e["type"] == "evaluated" and e["accuracy"] >= target
        )
        for name, log in logs.items()
    }
    runs = {
        name: {"time_to_target": time, "speedup": times["all-reduce"] / time}
        for name, time in times.items()
    }
    for name, log in logs.items():
        write_run(folder / name, log)
    summary = {
        "recipe": "quickstart",
        "baseline": "all-reduce",
        "target_accuracy": target,
        "throughput_bound": sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS)),
        "runs": runs,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def log_of(events: list[Event], speeds: Iterable[float] = SPEEDS) -> RunLog:
    log = RunLog(header("test", speeds), [WorkerLog() for _ in speeds])
    for event in events:
        log.record(event)
    return log
