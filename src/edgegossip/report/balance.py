"""Workers' waits and the effect of balancing, as text."""

from __future__ import annotations

from edgegossip.report.activity import mean_waiting
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.units import listing, number, percent

MAX_NAMED = 8
"""Maximum number of workers that are named individually."""


def kept_shares(run: Run) -> list[float] | None:
    """Mean share of its data that each worker trained on in a round.

    None if the run was not balanced, or if a worker has not finished a round.
    """
    if not run.log.is_balanced:
        return None
    sizes = run.log.header.get("shard_sizes")
    if not sizes or not all(worker.num_rounds for worker in run.log.workers):
        return None
    return [
        worker.round_samples / (worker.num_rounds * size) if size else 0.0
        for worker, size in zip(run.log.workers, sizes, strict=True)
    ]


def kept_sentence(run: Run) -> str:
    """Describe the `kept_shares`; empty if there are none."""
    shares = kept_shares(run)
    if shares is None:
        return ""
    if len(shares) > MAX_NAMED:
        kept = f"its workers kept from {percent(min(shares), 0)} to {percent(max(shares), 0)}"
    else:
        last = len(shares) - 1
        kept = f"workers 0 to {last} kept {listing([percent(share, 0) for share in shares])}"
    return f"On average {kept} of their data in a round."


def balance(folder: ReportData) -> str:
    """Describe the waits without and with balancing; empty if no run was balanced."""
    balanced = [run for run in folder.runs if run.workers and kept_shares(run) is not None]
    if not balanced:
        return ""
    return " ".join([_before(folder), *map(_now, balanced)]).strip()


def _before(folder: ReportData) -> str:
    """Describe the waits in the baseline."""
    run = next((run for run in folder.runs if run.name == folder.baseline), None)
    if run is None or not run.workers or kept_shares(run) is not None:
        return ""
    speeds = run.speeds
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    waiting = mean_waiting([run.workers[fastest]])
    if waiting is None:
        return ""
    return (
        f"In {run.name}, worker {fastest} ({number(speeds[fastest])} samples/s) spent "
        f"{percent(waiting, 0)} of its time waiting for worker {slowest}, the slowest "
        f"({number(speeds[slowest])} samples/s)."
    )


def _now(run: Run) -> str:
    text = (
        f"In {run.name} every worker trains on only as much of its data as it has time for, so "
        f"all finish together. {kept_sentence(run)}"
    )
    each = [mean_waiting([worker]) for worker in run.workers]
    waiting = [share for share in each if share is not None]
    if len(waiting) < len(each):
        return text
    longest = waiting.index(max(waiting))
    return (
        f"{text} The longest wait was that of worker {longest}, "
        f"{percent(waiting[longest], 0)} of its time."
    )
