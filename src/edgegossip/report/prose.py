"""Prose about a run, made from its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from edgegossip.contract.metrics import ACCURACY
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import described, mean_shares, mean_waiting
from edgegossip.report.servers import search_sentences
from edgegossip.report.stages import stage_sentence
from edgegossip.report.timeline import balance
from edgegossip.report.units import (
    capitalized,
    data_size,
    listing,
    metric_value,
    named_value,
    number,
    percent,
    seconds,
    times,
)
from edgegossip.runs.describe import with_article
from edgegossip.runs.results import ALL_CRASHED

Tile: TypeAlias = tuple[str, str]
"""An important number and its label."""

MAX_SPEEDS = 8


def story(folder: ReportData) -> list[str]:
    """Describe the setting, outcome, traffic and faults, each in a sentence or two."""
    if folder.is_comparison:
        parts = [_setting(folder), _race(folder), balance(folder)]
        parts += [_traffic(folder), _bound(folder)]
    else:
        parts = [_setting(folder), _outcome(folder), balance(folder)]
        parts += [_time_spent(folder.runs[0]), stage_sentence(folder.runs[0])]
    return [part for part in [*parts, *search_sentences(folder), *faults(folder)] if part]


def notices(folder: ReportData) -> list[str]:
    """Warn about every unfinished run."""
    return [text for run in folder.runs if (text := _notice(run))]


def disagreements(folder: ReportData) -> list[str]:
    """Warn about workers of a real run that ended with different models."""
    return [
        text for run in folder.runs if run.log.ended for text in run.log.ended.disagreements
    ]


def faults(folder: ReportData) -> list[str]:
    """Describe crashes and lost messages, once for all runs with equal faults."""
    told: dict[str, list[str]] = {}
    for run in folder.runs:
        sentence = _faults(run)
        if sentence:
            told.setdefault(sentence, []).append(run.name)
    return [
        sentence if len(names) == len(folder.runs) else f"{listing(names)}: {sentence}"
        for sentence, names in told.items()
    ]


def highlights(folder: ReportData) -> list[Tile]:
    """Pick the most important numbers."""
    tiles = (_time_tile, _end_tile, _data_tile, _waiting_tile)
    return [found for tile in tiles if (found := tile(folder)) is not None]


def _time_tile(folder: ReportData) -> Tile | None:
    reached = _times_to_target(folder)
    if not reached or folder.target is None:
        return None
    first = next(iter(reached))
    who = f"{first} to" if folder.is_comparison else "to"
    factor = _head_start(folder)
    lead = "" if factor is None else f", {times(factor)} sooner than {folder.baseline}"
    return seconds(reached[first]), f"{who} {named_value(folder.target, folder.metric)}{lead}"


def _end_tile(folder: ReportData) -> Tile | None:
    """The value at the end; the best value during the run may be a chance peak."""
    name, value = _best(folder, {run.name: run.summary.final_value for run in folder.runs})
    if value is None:
        return None
    label = f"{folder.metric.name} at the end" + (f", {name}" if folder.is_comparison else "")
    peak, best = _best(folder, {run.name: run.summary.best_value for run in folder.runs})
    if best is None or not folder.metric.shortfall(value, best) > 0:
        return metric_value(value, folder.metric), label
    where = f" of {peak}" if peak != name else ""
    return (
        metric_value(value, folder.metric),
        f"{label}; best on the way{where} {metric_value(best, folder.metric)}",
    )


def _data_tile(folder: ReportData) -> Tile | None:
    sent = _data_to_target(folder)
    if folder.is_comparison and sent and folder.target is not None:
        least = next(iter(sent))
        return data_size(sent[least]), f"least data to {_goal(folder)}, {least}"
    total = folder.runs[0].summary.bytes_sent
    if folder.is_comparison or total is None:
        return None
    return data_size(total), "data sent"


def _waiting_tile(folder: ReportData) -> Tile | None:
    known = {run.name: mean_waiting(run.trainers) for run in folder.runs}
    shares = {name: share for name, share in known.items() if share is not None}
    if not shares:
        return None
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    where = f" in {most}, {percent(shares[least], 0)} in {least}" if most != least else ""
    return percent(shares[most], 0), f"of the workers\u2019 time spent waiting{where}"


def _clock(run: Run) -> str:
    """The kind of time, as text; empty for real machines, which have only one kind."""
    return "" if run.log.header.get("driver") == "network" else " of virtual time"


def _notice(run: Run) -> str | None:
    ended, at = run.log.ended, seconds(run.log.duration)
    if ended is None:
        return (
            f"{run.name} has no end in its log: the process was killed or is still running. "
            f"This report covers the time up to {at}{_clock(run)}."
        )
    if run.is_complete:
        return None
    if ended.reason == "interrupted":
        return f"{run.name} was interrupted after {at}{_clock(run)}; its numbers are partial."
    if ended.reason == ALL_CRASHED:
        return f"All workers of {run.name} had crashed after {at}{_clock(run)}."
    error = f": {ended.error}" if ended.error else ""
    return f"{run.name} {ended.reason} after {at}{_clock(run)}{error}"


def _setting(folder: ReportData) -> str:
    run = folder.runs[0]
    speeds = sorted(run.speeds.values(), reverse=True)
    samples = run.log.header.get("num_train")
    data = f" on {number(samples)} training samples" if samples else ""
    if len(speeds) == 1 and len(run.log.workers) == 1:
        return f"1 worker trained{data}, at {number(speeds[0])} samples/s."
    who = f"{_crew(run)} trained one model {_how(run)}{data}"
    if speeds[0] == speeds[-1]:
        return f"{who}, each at {number(speeds[0])} samples/s."
    if len(speeds) <= MAX_SPEEDS:
        pace = f"at {listing([number(speed) for speed in speeds])} samples/s"
    else:
        pace = f"at {number(speeds[-1])} to {number(speeds[0])} samples/s"
    return (
        f"{who}, {pace}: the fastest is {times(speeds[0] / speeds[-1])} as fast as the slowest."
    )


def _how(run: Run) -> str:
    return f"in {len(run.log.stages)} stages" if run.log.stages else "together"


def _crew(run: Run) -> str:
    """Count the ranks by role, training ranks first."""
    if run.log.stages:
        return f"{len(run.log.workers)} workers"
    roles, trainers = run.log.roles, run.log.trainers
    counts = Counter(roles[rank] for rank in trainers)
    # Spares are workers, too, but do not train yet.
    counts += Counter(each for each in roles if each not in counts)
    words = [f"{num} {role}s" if num > 1 else f"a {role}" for role, num in counts.items()]
    return listing(words)


def _race(folder: ReportData) -> str:
    """State which runs reached the target first, later and never."""
    target, baseline = folder.target, folder.baseline
    if target is None:
        return _best_run(folder)
    reached = _times_to_target(folder)
    if not reached:
        return f"No run reached the target of {_goal(folder)}. {_best_run(folder)}"
    first, goal = next(iter(reached)), named_value(target, folder.metric)
    lead = f"{first} reached {goal} first, after {seconds(reached[first])}"
    factor = _head_start(folder)
    if factor is not None and baseline is not None:
        lead += f", {times(factor)} sooner than the baseline {baseline}"
    sentences = [f"{lead}."]
    later = [f"{name} ({seconds(time)})" for name, time in reached.items() if name != first]
    if later:
        sentences.append(f"Then came {listing(later)}.")
    missed = [
        f"{run.name} (best {metric_value(run.summary.best_value, folder.metric)})"
        for run in folder.runs
        if run.name not in reached
    ]
    if missed:
        sentences.append(f"{listing(missed)} did not reach it.")
    return " ".join(sentences)


def _times_to_target(folder: ReportData) -> dict[str, float]:
    """The time to the target of each run that reached it, fastest first."""
    reached = {
        run.name: run.summary.time_to_target
        for run in folder.runs
        if run.summary.time_to_target is not None
    }
    return dict(sorted(reached.items(), key=lambda item: item[1]))


def _head_start(folder: ReportData) -> float | None:
    """The baseline's time to the target divided by the fastest run's; None unless above 1."""
    reached = _times_to_target(folder)
    if folder.baseline is None or folder.baseline not in reached:
        return None
    soonest = next(iter(reached.values()))
    return (
        reached[folder.baseline] / soonest if 0 < soonest < reached[folder.baseline] else None
    )


def _goal(folder: ReportData) -> str:
    return metric_value(folder.target, folder.metric)


def _best_run(folder: ReportData) -> str:
    name, value = _best(folder, {run.name: run.summary.final_value for run in folder.runs})
    if value is None:
        return "No run was evaluated."
    if folder.metric == ACCURACY:
        return f"The most accurate at the end was {name} with {percent(value)}."
    return f"The best at the end was {name} with {named_value(value, folder.metric)}."


def _best(folder: ReportData, values: Mapping[str, float | None]) -> tuple[str, float | None]:
    """The run with the best of these values, and that value; None if no value is known."""
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return folder.runs[0].name, None
    best = folder.metric.best(known.values())
    return next((name, value) for name, value in known.items() if value == best)


def _data_to_target(folder: ReportData) -> dict[str, float]:
    """Bytes that each run had sent when it reached the target, fewest first."""
    sent = {
        run.name: reached.bytes_sent
        for run in folder.runs
        if (reached := run.log.first_at(folder.target)) is not None
    }
    return dict(sorted(sent.items(), key=lambda item: item[1]))


def _traffic(folder: ReportData) -> str:
    """Compare the data sent to reach the same target, because whole runs end differently."""
    sent = _data_to_target(folder)
    if len(sent) < 2:
        return ""
    least, most = next(iter(sent)), next(reversed(sent))
    goal = _goal(folder)
    lead = f"On the way to {goal}, {least} sent the least data ({data_size(sent[least])})"
    if not 0 < sent[least] < sent[most]:
        return f"{lead}."
    factor = times(sent[most] / sent[least])
    return f"{lead} and {most} the most ({data_size(sent[most])}, {factor} as much)."


def _bound(folder: ReportData) -> str:
    if folder.throughput_bound is None:
        return ""
    return (
        f"With these speeds, workers that never wait process {times(folder.throughput_bound)} "
        "as many samples per second as workers that meet at a barrier each epoch."
    )


def _outcome(folder: ReportData) -> str:
    run, target = folder.runs[0], folder.target
    summary = run.summary
    if summary.final_value is None:
        return f"{run.name} was not evaluated."
    value = named_value(summary.final_value, folder.metric)
    final = f"{value} after {seconds(summary.virtual_seconds)}"
    if target is None:
        return f"{run.name} came to {final}{_clock(run)}."
    if summary.time_to_target is None:
        return f"{run.name} came to {final} and did not reach its target of {_goal(folder)}."
    return (
        f"{run.name} reached its target of {_goal(folder)} after "
        f"{seconds(summary.time_to_target)} and came to {final}{_clock(run)}."
    )


def _time_spent(run: Run) -> str:
    if not run.trainers:
        return ""
    return f"Time of its workers on average: {described(mean_shares(run.trainers))}."


def _faults(run: Run) -> str:
    parts = []
    for rank, worker in enumerate(run.log.workers):
        for index, crash in enumerate(worker.crashes):
            back = worker.recoveries[index : index + 1]
            name = capitalized(with_article(run.log.roles, rank))
            if back and crash <= 0:  # absent from the beginning: it was only late
                parts.append(f"{name} joined at {seconds(back[0])}.")
                continue
            end = f"came back at {seconds(back[0])}" if back else "did not come back"
            parts.append(f"{name} crashed at {seconds(crash)} and {end}.")
    if run.log.lost:
        reasons = [f"{number(count)} {reason}" for reason, count in run.log.lost.most_common()]
        total = run.log.lost.total()
        verb = "message was" if total == 1 else "messages were"
        parts.append(f"{number(total)} {verb} lost ({listing(reasons)}).")
    return " ".join(parts)
