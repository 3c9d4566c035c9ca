"""Workers' commits to a server, and the search for the commit rate, in numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.experiments.roles import rank_spans
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import SERVER, Noted
from edgegossip.report.units import listing, number

SEARCH = "search"
"""The kind of note that a server makes at the end of each window of its search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRow:
    """A row in the table of runs with a server.

    Attributes:
        run: Run of the row.
        servers: Ranks of the servers, in words; empty if no rank has a server's role.
        total: Commits of all workers.
        least: Commits of the worker with the fewest commits.
        most: Commits of the worker with the most commits.
        seconds: Mean seconds between two commits of a worker; None without commits.
        num_steps: Mean steps between two commits of a worker; None without commits.
        explicit_momentum: Momentum of the workers' optimizer; None if unknown.
        implicit_momentum: Median implicit momentum over the windows of a search; None without
            notes.
    """

    run: Run
    servers: str
    total: int
    least: int
    most: int
    seconds: Seconds | None
    num_steps: float | None
    explicit_momentum: float | None
    implicit_momentum: float | None


def commit_rows(folder: ReportData) -> list[CommitRow]:
    """Count the commits of each run with a server."""
    return [_row(run) for run in folder.runs if has_commits(run)]


def has_commits(run: Run) -> bool:
    """Whether any worker has committed to a server."""
    return any(worker.commits for worker in run.log.workers)


def servers(run: Run) -> list[Rank]:
    """The ranks of the servers; if there are several, they share the model."""
    return [rank for rank, role in enumerate(run.log.roles) if role == SERVER]


def server_words(runs: Sequence[Run]) -> str:
    """Name the servers of `runs`."""
    return "the servers" if any(len(servers(run)) > 1 for run in runs) else "the server"


def _row(run: Run) -> CommitRow:
    workers = [run.log.workers[rank] for rank in run.log.trainers]
    counts = [len(worker.commits) for worker in workers]
    total = sum(counts)
    implicit = [
        note.numbers["implicit_momentum"]
        for note in windows(run)
        if "implicit_momentum" in note.numbers
    ]
    return CommitRow(
        run=run,
        servers=rank_spans(servers(run)),
        total=total,
        least=min(counts),
        most=max(counts),
        seconds=run.log.duration * len(workers) / total if total else None,
        num_steps=sum(worker.num_steps for worker in workers) / total if total else None,
        explicit_momentum=explicit_momentum(run),
        implicit_momentum=statistics.median(implicit) if implicit else None,
    )


def explicit_momentum(run: Run) -> float | None:
    """The momentum of the workers' optimizer; None if its settings have none."""
    optimizer = run.log.header.get("task", {}).get("optimizer")
    value = optimizer.get("momentum") if isinstance(optimizer, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def windows(run: Run) -> list[Noted]:
    """The search notes of a run that have both a window number and a rate."""
    notes = [note for note in run.log.notes if note.kind == SEARCH]
    return [note for note in notes if {"window", "rate"} <= {*note.numbers}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for the commit rate, up to the beginning of the next search.

    Attributes:
        rewards: The rates that were tried and their rewards, in order.
        chosen: The final rate; None for an unfinished search.
    """

    rewards: Sequence[tuple[float, float]]
    chosen: float | None


def searches(notes: Sequence[Noted]) -> list[Search]:
    """Separate the searches in `windows`: each search begins with window 1."""
    begins = [i for i, note in enumerate(notes) if i == 0 or note.numbers["window"] == 1]
    return [_search(notes[i:j]) for i, j in itertools.pairwise([*begins, len(notes)])]


def _search(notes: Sequence[Noted]) -> Search:
    tried = [each.numbers for each in notes if "reward" in each.numbers]
    # A window without a reward comes after the search: its rate is the one found.
    last = notes[-1].numbers
    return Search(
        rewards=[(each["rate"], each["reward"]) for each in tried],
        chosen=None if "reward" in last else last["rate"],
    )


def search_sentences(folder: ReportData) -> list[str]:
    """Describe the rates that each run with a search tried, and the final rate."""
    return [_sentence(run) for run in folder.runs if windows(run)]


def _sentence(run: Run) -> str:
    notes = windows(run)
    found = searches(notes)
    tried = sorted({rate for each in found for rate, _ in each.rewards})
    kept = [number(each.chosen) for each in found if each.chosen is not None]
    rates = number(tried[0]) if tried else ""
    if len(tried) > 1:
        rates += f" to {number(tried[-1])}"
    outcome = f"kept {listing(list(dict.fromkeys(kept)))}" if kept else "did not finish"
    who = server_words([run])
    text = f"In {run.name} {who} tried {rates} commits per window and {outcome}."
    momentum, explicit = _row(run).implicit_momentum, explicit_momentum(run)
    if momentum is None:
        return text
    beside = "" if explicit is None else f", plus an explicit one of {number(explicit)}"
    return f"{text} The implicit momentum was {number(momentum)} in the median window{beside}."
