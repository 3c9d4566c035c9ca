"""Workers' activity: time spent training, sending, waiting and crashed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgegossip.core.protocol import Seconds, Span
from edgegossip.report.log import RunLog, WorkerLog
from edgegossip.report.units import percent

Spans: TypeAlias = NDArray[np.float64]
"""Starts and ends, [num_spans, 2]; spans may overlap unless merged."""
MAX_UNKNOWN = 0.1
"""Maximum unknown share of time beside which the share of waiting is stated."""


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """The spans of one worker, clipped to the run.

    Attributes:
        training: Spans of training, including training that the end of the run cut off.
        sending: Spans of a busy uplink, often during training.
        crashed: Spans from crashes to recoveries, or to the end of the run.
        unfinished: Spans from the last log entry to a crash, and to the end of a log that does
            not say who was training. Work that was cut off there is not in the log, so training
            cannot be distinguished from waiting.
        present: All time, outages included, except from a finish to a later crash or the end of
            the run.
        shares: Share of the run's virtual time for each kind. Each moment counts as the first
            of these that applies: crashed, training, sending, unfinished, waiting, finished.
    """

    training: Spans
    sending: Spans
    crashed: Spans
    unfinished: Spans
    present: Spans
    shares: dict[str, float]


def described(shares: Mapping[str, float]) -> str:
    r"""The shares as text; kinds other than training appear only from half a percent on.

    >>> described({"crashed": 0.0, "training": 0.25, "sending": 0.05, "waiting": 0.7})
    'training 25\xa0%, sending only 5\xa0%, waiting 70\xa0%'
    """
    words = {
        "training": "training",
        "sending": "sending only",
        "waiting": "waiting",
        "unfinished": "waiting or cut off",
        "crashed": "crashed",
        "finished": "finished",
    }
    return ", ".join(
        f"{word} {percent(shares[kind], 0)}"
        for kind, word in words.items()
        if kind == "training" or shares.get(kind, 0) >= 0.005
    )


def mean_shares(workers: Sequence[Activity]) -> dict[str, float]:
    """Each kind's share of time, averaged over one or more workers."""
    kinds = workers[0].shares
    return {
        kind: sum(worker.shares[kind] for worker in workers) / len(workers) for kind in kinds
    }


def mean_waiting(workers: Sequence[Activity]) -> float | None:
    """Mean share of time that the workers waited; None without workers or if it is unknown.

    A worker waits while it is present and has not finished, and neither trains nor sends. A
    wait that is open at the end of the run lasts until then.
    """
    if not workers:
        return None
    shares = mean_shares(workers)
    return None if shares["unfinished"] > MAX_UNKNOWN else shares["waiting"]


def activities(log: RunLog) -> list[Activity]:
    """Divide each worker's time in a run by activity; empty if no virtual time passed."""
    if log.duration <= 0:
        return []
    cut_off = log.ended.cut_off if log.ended else None
    return [
        _activity(worker, log.duration, cut_off is not None, (cut_off or {}).get(rank))
        for rank, worker in enumerate(log.workers)
    ]


def merged(spans: Spans) -> Spans:
    """Join overlapping or adjacent spans.

    >>> merged(np.array([[4.0, 5.0], [0.0, 2.0], [1.0, 3.0]])).tolist()
    [[0.0, 3.0], [4.0, 5.0]]
    """
    if not len(spans):
        return spans
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    is_first = np.append(True, ordered[1:, 0] > reach[:-1])
    is_last = np.append(is_first[1:], True)
    return np.column_stack([ordered[is_first, 0], reach[is_last]])


def total(spans: Spans) -> Seconds:
    """Time covered by `spans`, each moment counted once.

    >>> total(np.array([[0.0, 2.0], [1.0, 3.0]]))
    3.0
    """
    joined = merged(spans)
    return float((joined[:, 1] - joined[:, 0]).sum())


def clipped(spans: Iterable[Span] | Spans, end: Seconds) -> Spans:
    """Clip `spans` at `end` and drop empty spans.

    >>> clipped([(0.0, 2.0), (3.0, 4.0)], end=1.0).tolist()
    [[0.0, 1.0]]
    """
    array = np.asarray(spans, dtype=np.float64).reshape(-1, 2).clip(max=end)
    return array[array[:, 1] > array[:, 0]]


def _activity(
    worker: WorkerLog, duration: Seconds, knows_end: bool, cut_off: Seconds | None
) -> Activity:
    """Divide a worker's time.

    Args:
        worker: The worker's log.
        duration: Duration of the run.
        knows_end: Whether it is known what the worker did at the end.
        cut_off: Start of the training that the end cut off, if it is known and there was any.
    """
    training = worker.training if cut_off is None else [*worker.training, (cut_off, duration)]
    # The last outage has no recovery if the worker stayed away.
    recoveries = [*worker.recoveries, duration][: len(worker.crashes)]
    layers = {
        "crashed": clipped(list(zip(worker.crashes, recoveries, strict=True)), duration),
        "training": clipped(training, duration),
        "sending": clipped(worker.sending, duration),
        "unfinished": clipped(_unknown(worker, duration, knows_end), duration),
        "waiting": clipped(_present(worker, duration), duration),
    }
    shares: dict[str, float] = {}
    covered = np.empty((0, 2))
    for kind, spans in layers.items():
        before = total(covered)
        covered = merged(np.concatenate([covered, spans]))
        shares[kind] = (total(covered) - before) / duration
    shares["finished"] = max(0.0, 1 - total(covered) / duration)
    return Activity(
        training=layers["training"],
        sending=layers["sending"],
        crashed=layers["crashed"],
        unfinished=layers["unfinished"],
        present=layers["waiting"],
        shares=shares,
    )


def _present(worker: WorkerLog, duration: Seconds) -> list[Span]:
    """All time, except from a finish to a crash, and after the final finish."""
    until = duration if worker.finished is None else worker.finished
    starts = [0.0, *(end for _, end in worker.rests)]
    return list(zip(starts, [*(start for start, _ in worker.rests), until], strict=True))


def _unknown(worker: WorkerLog, duration: Seconds, knows_end: bool) -> list[Span]:
    """Spans from the last log entry to each crash, and to an end that is unknown."""
    at_rest = {end for _, end in worker.rests}
    stops = [stop for stop in worker.crashes if stop not in at_rest]
    is_away = len(worker.crashes) > len(worker.recoveries)
    stops += [duration] if worker.finished is None and not is_away and not knows_end else []
    ends = np.array(
        [0.0, *(end for _, end in (*worker.training, *worker.sending)), *worker.recoveries]
    )
    return [(float(ends[ends <= stop].max()), stop) for stop in stops]
