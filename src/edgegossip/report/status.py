"""The state of a run, from the logs in its folder: for a terminal and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.report.watching import logs_of, run_names
from edgegossip.runs.events import Event, EventReader

_SLACK: Seconds = 0.5
"""Seconds for which what a worker logged just before its end may be late."""
_SILENCE: Seconds = 3.0
"""Seconds without a line after which a real worker counts as silent, or three trainings."""


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """The state of one worker.

    Attributes:
        rank: The worker.
        state: `"running"`, `"finished"`, `"stopped"`, `"lost"`, `"cut"` (others have no link
            with it, but its log goes on) or `"silent"`.
        round: Its last round with a message; None before.
        samples: Training samples so far.
        samples_per_second: Speed of its last training; None before.
        loss: Mean loss of its last training; None before.
        heard_at: Time of its last line, in seconds since the run began.
        without_link: Workers that have no link with it.
    """

    rank: Rank
    state: str = "running"
    round: int | None = None
    samples: int = 0
    samples_per_second: float | None = None
    loss: float | None = None
    heard_at: Seconds = 0.0
    without_link: list[Rank] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        run: Path of the run in the folder, "." for the folder itself.
        name: Name of the experiment; None if no log says it.
        seconds: Time of the last event.
        reason: Why the run has ended; None if it has not.
        workers: The workers, by rank.
    """

    run: str
    name: str | None = None
    seconds: Seconds = 0.0
    reason: str | None = None
    workers: list[WorkerState] = field(default_factory=list)


def run_state(folder: Path) -> RunState | None:
    """The state of the newest run in a folder; None if there is none.

    Raises:
        RunFolderError: If a log cannot be read.
    """
    if not (names := run_names(folder)):
        return None
    reading = _Reading(names[0])
    for log in logs_of(folder / names[0]):
        EventReader(log).each(reading.take)
    return reading.result()


class _Reading:
    """Adds up the events of a run; the logs of its workers may come in any order."""

    def __init__(self, run: str) -> None:
        self._found = RunState(run=run)
        self._workers: dict[Rank, WorkerState] = {}
        self._changes: dict[Rank, list[tuple[Seconds, str]]] = {}
        self._views: dict[tuple[Rank, Rank], tuple[Seconds, bool]] = {}
        self._longest: dict[Rank, Seconds] = {}
        self._is_real = False

    def take(self, event: Event) -> None:
        """Use an event."""
        kind, time = event["type"], event.get("time", 0.0)
        self._found.seconds = max(self._found.seconds, time)
        if kind in ("experiment", "worker"):
            self._found.name = event["name"]
            self._is_real |= kind == "worker"
            for rank in range(event["num_workers"]):
                self._worker(rank)
            if kind == "worker":  # also when it resumes
                self._change(event["rank"], self._worker(event["rank"]).heard_at, "running")
        elif kind == "ended" and "rank" not in event:
            self._found.reason = event["reason"]
        elif "rank" in event:
            worker = self._worker(event["rank"])
            worker.heard_at = max(worker.heard_at, time)
            self._use(kind, time, worker, event)

    def _use(self, kind: str, time: Seconds, worker: WorkerState, event: Event) -> None:
        match kind:
            case "trained" if event["num_samples"]:
                seconds = time - event["start"]
                worker.samples += event["num_samples"]
                worker.loss = event["loss"]
                worker.samples_per_second = event["num_samples"] / max(seconds, 1e-9)
                longest = self._longest.get(worker.rank, 0.0)
                self._longest[worker.rank] = max(longest, seconds)
            case "sent":
                worker.round = max(worker.round or 0, event["round"])
            case "crashed" | "recovered" | "finished":
                states = {"crashed": "lost", "recovered": "running", "finished": "finished"}
                self._change(worker.rank, time, states[kind])
            case "ended":
                is_done = event["reason"] in ("finished", "time limit")
                self._change(worker.rank, time, "finished" if is_done else "stopped")
            case "disconnected" | "connected":
                self._worker(event["peer"])
                self._views[event["peer"], worker.rank] = (time, kind == "connected")

    def _worker(self, rank: Rank) -> WorkerState:
        return self._workers.setdefault(rank, WorkerState(rank=rank))

    def _change(self, rank: Rank, time: Seconds, state: str) -> None:
        self._changes.setdefault(rank, []).append((time, state))

    def result(self) -> RunState:
        """The state after all events."""
        self._found.workers = [self._workers[rank] for rank in sorted(self._workers)]
        for worker in self._found.workers:
            changes = sorted(self._changes.get(worker.rank, []), key=lambda each: each[0])
            state = changes[-1][1] if changes else "running"
            down = {
                by: at
                for (peer, by), (at, is_up) in self._views.items()
                if peer == worker.rank and not is_up
            }
            worker.without_link = sorted(down)
            worker.state = self._seen_by_others(worker, down) if state == "running" else state
        return self._found

    def _seen_by_others(self, worker: WorkerState, down: dict[Rank, Seconds]) -> str:
        if down:
            is_mutual = any(not self._views.get((by, worker.rank), (0, True))[1] for by in down)
            goes_on = worker.heard_at > min(down.values()) + _SLACK
            return "cut" if is_mutual or goes_on else "lost"
        silence = max(_SILENCE, 3 * self._longest.get(worker.rank, 0.0))
        is_over = self._found.reason is not None
        if self._is_real and not is_over and self._found.seconds - worker.heard_at > silence:
            return "silent"
        return "finished" if is_over else "running"


def as_table(state: RunState) -> str:
    """The state as lines for a terminal."""
    head = f"{state.name or state.run}: {state.seconds:.1f} s"
    head += ", in progress" if state.reason is None else f", ended ({state.reason})"
    titles = (
        "worker",
        "state",
        "round",
        "samples",
        "samples/s",
        "loss",
        "heard",
        "no link with",
    )
    rows: list[Sequence[str]] = [titles, *map(_row, state.workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([head, *lines])


def _row(worker: WorkerState) -> tuple[str, ...]:
    def number(value: Any, form: str) -> str:  # noqa: ANN401
        return "-" if value is None else format(value, form)

    return (
        str(worker.rank),
        worker.state,
        number(worker.round, "d"),
        str(worker.samples),
        number(worker.samples_per_second, ".1f"),
        number(worker.loss, ".4g"),
        f"{worker.heard_at:.1f} s",
        ", ".join(map(str, worker.without_link)) or "-",
    )
