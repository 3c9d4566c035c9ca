"""The stages of a model in a run: work, waits and queues, in numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgegossip.core.protocol import Rank, Span
from edgegossip.experiments.roles import rank_spans
from edgegossip.report.activity import Activity, Spans, merged, total
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import Noted
from edgegossip.report.units import percent

STAGE = "stage"
"""The kind of note that a stage makes periodically."""
COSINE = "gradient_cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a run; unknown or missing numbers are None.

    Attributes:
        run: Run of the stage.
        stage: Number of the stage, from 0.
        ranks: Ranks of the stage, in words.
        worked: Mean share of the steady state spent training.
        waited: Mean share of the steady state in which a rank was not training, crashed or
            finished.
        num_batches: Total batches that updated the stage.
        num_given_up: Total batches that got no answer in time.
        most_waiting: Maximum number of batches from below that waited at one rank.
        most_pending: Maximum number of one rank's batches that had no answer from above.
        cosine: Cosine between the synthetic and the true gradient: median over the second half
            of the notes.
    """

    run: Run
    stage: int
    ranks: str
    worked: float | None
    waited: float | None
    num_batches: float | None
    num_given_up: float | None
    most_waiting: float | None
    most_pending: float | None
    cosine: float | None


def stage_rows(folder: ReportData) -> list[StageRow]:
    """Make a row for each stage of each run."""
    return [_row(run, stage) for run in folder.runs for stage in run.log.stages]


def stage_sentence(run: Run) -> str:
    """Describe the busiest and the longest-waiting stage; empty unless at least two worked."""
    rows = [_row(run, stage) for stage in run.log.stages]
    known = [(row.worked, row.waited or 0.0, row.stage) for row in rows if row.worked]
    if len(known) < 2:
        return ""
    worked, _, busiest = max(known)
    _, waited, idlest = max(known, key=lambda each: each[1])
    return (
        f"Once all stages had begun, stage {busiest} worked the most, {percent(worked, 0)} of "
        f"the time, and stage {idlest} waited the longest, {percent(waited, 0)}."
    )


def stage_notes(run: Run, rank: Rank, *names: str) -> list[Noted]:
    """The notes of a stage that have all numbers in `names`."""
    notes = [note for note in run.log.notes if (note.kind, note.rank) == (STAGE, rank)]
    return [note for note in notes if {*names} <= {*note.numbers}]


def steady_state(run: Run) -> Span:
    """The span from the time when all stages have begun to train until the first one stops.

    If this span is empty, the whole run is returned.
    """
    begins, ends = [], []
    for ranks in run.log.stages.values():
        spans = [span for rank in ranks for span in run.log.workers[rank].training]
        begins.append(min((start for start, _ in spans), default=run.log.duration))
        ends.append(max((end for _, end in spans), default=0.0))
    begin, end = max(begins), min(ends)
    return (begin, end) if begin < end else (0.0, run.log.duration)


def _row(run: Run, stage: int) -> StageRow:
    ranks = run.log.stages[stage]
    is_first, is_last = stage == 0, stage == max(run.log.stages)
    workers = [run.workers[rank] for rank in ranks] if run.workers else []
    shares = _shares(workers, steady_state(run))
    cosines = [_second_half(run, rank) for rank in ranks]
    known = [each for found in cosines for each in found]
    return StageRow(
        run=run,
        stage=stage,
        ranks=rank_spans(ranks),
        worked=shares[0],
        waited=shares[1],
        num_batches=_sum(run, ranks, "batches"),
        num_given_up=None if is_last else _sum(run, ranks, "given_up"),
        most_waiting=None if is_first else _most(run, ranks, "most_waiting"),
        most_pending=None if is_last else _most(run, ranks, "most_pending"),
        cosine=statistics.median(known) if known else None,
    )


def _shares(workers: Sequence[Activity], span: Span) -> tuple[float | None, float | None]:
    """The mean shares of `span` spent working and waiting."""
    if not workers:
        return None, None
    begin, end = span
    worked = waited = 0.0
    for worker in workers:
        trained, busy, there = (
            total(np.clip(spans, begin, end))
            for spans in (
                worker.training,
                np.concatenate([worker.training, worker.crashed]),
                np.concatenate([worker.training, worker.crashed, worker.present]),
            )
        )
        worked += trained
        waited += there - busy
    whole = (end - begin) * len(workers)
    return worked / whole, waited / whole


def _second_half(run: Run, rank: Rank) -> list[float]:
    found = [note.numbers[COSINE] for note in stage_notes(run, rank, COSINE)]
    return found[len(found) // 2 :]


def _most(run: Run, ranks: Iterable[Rank], name: str) -> float | None:
    notes = [note for rank in ranks for note in stage_notes(run, rank, name)]
    return max((note.numbers[name] for note in notes), default=None)


def _sum(run: Run, ranks: Iterable[Rank], name: str) -> float | None:
    """Add up the counts of each rank from before and after restarts."""
    counts = [[note.numbers[name] for note in stage_notes(run, rank, name)] for rank in ranks]
    if not any(counts):
        return None
    return sum(
        # A rank that has restarted counts from 0 again.
        after if after < before else after - before
        for found in counts
        for before, after in zip([0.0, *found], found, strict=False)
    )


def worked_shares(workers: Sequence[Activity], edges: Spans) -> Spans:
    """The mean share of time that `workers` spent training between consecutive `edges`.

    Args:
        workers: Workers, at least one.
        edges: Increasing times, [num_edges].

    Returns:
        Shares, [num_edges - 1].
    """
    covered = np.zeros(len(edges))
    for worker in workers:
        spans = merged(worker.training)
        if len(spans):
            lengths = np.cumsum(spans[:, 1] - spans[:, 0])
            trained = np.column_stack([lengths - (spans[:, 1] - spans[:, 0]), lengths])
            covered += np.interp(edges, spans.ravel(), trained.ravel())
    return np.asarray(np.diff(covered) / np.diff(edges) / len(workers))
