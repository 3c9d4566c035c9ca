"""Prose about a run, made from its numbers."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Literal, TypeAlias

from edgegossip.contract.metrics import ACCURACY
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import described, mean_shares, mean_waiting
from edgegossip.report.servers import search_sentences
from edgegossip.report.stages import stage_sentence
from edgegossip.report.timeline import balance
from edgegossip.report.units import (
    capitalized,
    data_size,
    energy,
    listing,
    metric_value,
    named_value,
    number,
    percent,
    seconds,
    times,
)
from edgegossip.runs.describe import with_article
from edgegossip.runs.results import ALL_CRASHED, EARLY_STOP

Tile: TypeAlias = tuple[str, str]
"""An important number and its label."""

MAX_SPEEDS = 8
MAX_CRASHES = 6
LEAST_BOUND = 1.05


def story(folder: ReportData) -> list[str]:
    """Describe the setting, outcome, traffic and faults, each in a sentence or two."""
    if folder.is_comparison:
        parts = [_setting(folder), _race(folder), balance(folder)]
        parts += [" ".join([_traffic(folder), _energy(folder)]).strip(), _bound(folder)]
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
    by_sentence: dict[str, list[str]] = {}
    for run in folder.runs:
        if sentence := _faults(run):
            by_sentence.setdefault(sentence, []).append(run.name)
    return [
        sentence if len(names) == len(folder.runs) else f"{listing(names)}: {sentence}"
        for sentence, names in by_sentence.items()
    ]


def highlights(folder: ReportData) -> list[Tile]:
    """Pick the most important numbers."""
    tiles = (_time_tile, _end_tile, _data_tile, _waiting_tile)
    return [found for tile in tiles if (found := tile(folder)) is not None]


def _time_tile(folder: ReportData) -> Tile | None:
    reached = _times_to_target(folder)
    if not reached or folder.target is None:
        return None
    who = f"{listing(_soonest(reached))} to" if folder.is_comparison else "to"
    label = f"{who} {named_value(folder.target, folder.metric)}"
    if factor := _head_start(folder):
        label += f"; {folder.baseline} took {times(factor)} as long"
    return seconds(min(reached.values())), label


def _end_tile(folder: ReportData) -> Tile | None:
    """The value at the end; the best value during the run may be a chance peak.

    A model that was chosen by validation is named instead of that peak.
    """
    name, value = _best(folder, "final_value")
    if value is None:
        return None
    label = f"{folder.metric.name} at the end" + (f", {name}" if folder.is_comparison else "")
    chosen, kept = _best(folder, "kept_value")
    if kept is not None:
        where = f" of {chosen}" if chosen != name else ""
        label += f"; best model by validation{where} {metric_value(kept, folder.metric)}"
        return metric_value(value, folder.metric), label
    peak, best = _best(folder, "best_value")
    if best is not None and folder.metric.shortfall(value, best) > 0:
        where = f" of {peak}" if peak != name else ""
        label += f"; best value during the run{where} {metric_value(best, folder.metric)}"
    return metric_value(value, folder.metric), label


def _data_tile(folder: ReportData) -> Tile | None:
    if not folder.is_comparison:
        total = folder.runs[0].summary.bytes_sent
        return None if total is None else (data_size(total), "data sent")
    if not (sent := _data_to_target(folder)):
        return None
    least = next(iter(sent))
    goal = metric_value(folder.target, folder.metric)
    return data_size(sent[least]), f"least data to {goal}, {least}"


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
    how = f"in {len(run.log.stages)} stages" if run.log.stages else "together"
    who = f"{_crew(run)} trained one model {how}{data}"
    if speeds[0] == speeds[-1]:
        return f"{who}, each at {number(speeds[0])} samples/s."
    if len(speeds) <= MAX_SPEEDS:
        pace = f"at {listing([number(speed) for speed in speeds])} samples/s"
    else:
        pace = f"at {number(speeds[-1])} to {number(speeds[0])} samples/s"
    return (
        f"{who}, {pace}: the fastest is {times(speeds[0] / speeds[-1])} as fast as the slowest."
    )


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
    if folder.target is None:
        return _best_run(folder)
    reached = _times_to_target(folder)
    if not reached:
        goal = metric_value(folder.target, folder.metric)
        return f"No run reached the target of {goal}. {_best_run(folder)}"
    first, goal = _soonest(reached), named_value(folder.target, folder.metric)
    text = f"{listing(first)} reached {goal} first, after {seconds(reached[first[0]])}"
    if factor := _head_start(folder):
        text += f"; the baseline {folder.baseline} took {times(factor)} as long"
    sentences = [f"{text}."]
    if later := [f"{name} ({seconds(reached[name])})" for name in reached if name not in first]:
        who = "It was" if len(first) == 1 else "They were"
        sentences.append(f"{who} followed by {listing(later)}.")
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
    known = {run.name: run.summary.time_to_target for run in folder.runs}
    reached = [(name, time) for name, time in known.items() if time is not None]
    return dict(sorted(reached, key=lambda item: item[1]))


def _soonest(reached: dict[str, float]) -> list[str]:
    """The runs that arrived first; those that are looked at together often tie."""
    return [name for name, time in reached.items() if time == min(reached.values())]


def _head_start(folder: ReportData) -> float | None:
    """The baseline's time to the target divided by the fastest run's; None unless above 1."""
    reached = _times_to_target(folder)
    soonest, own = min(reached.values(), default=0.0), reached.get(folder.baseline or "", 0.0)
    return own / soonest if 0 < soonest < own else None


def _best_run(folder: ReportData) -> str:
    name, value = _best(folder, "final_value")
    if value is None:
        return "No run was evaluated."
    if folder.metric == ACCURACY:
        return f"The most accurate at the end was {name} with {percent(value)}."
    return f"The best at the end was {name} with {named_value(value, folder.metric)}."


def _best(
    folder: ReportData, field: Literal["final_value", "best_value", "kept_value"]
) -> tuple[str, float | None]:
    """The run whose summary is best in this field, and the value; None if none is known."""
    values = [(run.name, getattr(run.summary, field)) for run in folder.runs]
    known = [(name, value) for name, value in values if value is not None]
    if not known:
        return folder.runs[0].name, None
    best = folder.metric.best(value for _, value in known)
    return next(each for each in known if each[1] == best)


def _data_to_target(folder: ReportData) -> dict[str, float]:
    """Bytes that each run had sent when it reached the target, fewest first."""
    reached = [(run.name, run.log.first_at(folder.target)) for run in folder.runs]
    sent = [(name, first.bytes_sent) for name, first in reached if first is not None]
    return dict(sorted(sent, key=lambda item: item[1]))


def _traffic(folder: ReportData) -> str:
    """Compare the data sent to reach the same target, because whole runs end differently."""
    sent = _data_to_target(folder)
    if len(sent) < 2:
        return ""
    least, *_, most = sent
    goal = metric_value(folder.target, folder.metric)
    text = f"Until it reached {goal}, {least} sent the least data ({data_size(sent[least])})"
    if 0 < sent[least] < sent[most]:
        factor = times(sent[most] / sent[least])
        text += f" and {most} the most ({data_size(sent[most])}, {factor} as much)"
    return f"{text}."


def _energy(folder: ReportData) -> str:
    """Compare the energy until the same target; follows the sentence of `_traffic`."""
    known = {run.name: run.summary.joules_to_target for run in folder.runs}
    needed = {name: joules for name, joules in known.items() if joules is not None}
    if len(needed) < 2:
        return ""
    least, most = min(needed, key=needed.__getitem__), max(needed, key=needed.__getitem__)
    return (
        f"Until then, {least} needed the least energy by the model of the machines and links "
        f"({energy(needed[least])}), and {most} the most ({energy(needed[most])})."
    )


def _bound(folder: ReportData) -> str:
    if folder.throughput_bound is None or folder.throughput_bound < LEAST_BOUND:
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
    end = f"ended at {value} after {seconds(summary.virtual_seconds)}{_clock(run)}"
    if target is None:
        return f"{run.name} {end}.{_kept(run)}"
    goal = metric_value(target, folder.metric)
    if summary.time_to_target is None:
        return f"{run.name} {end} and did not reach its target of {goal}.{_kept(run)}"
    reached = f"reached its target of {goal} after {seconds(summary.time_to_target)}"
    return f"{run.name} {reached} and {end}.{_kept(run)}"


def _kept(run: Run) -> str:
    """Describe the best model by validation, and an early stop."""
    summary, metric = run.summary, run.log.metric
    if summary.kept_value is None:
        return ""
    value = named_value(summary.kept_value, metric)
    text = (
        f" Its best model by validation, of {seconds(summary.kept_time)}, has {value} on the "
        "test data"
    )
    ended = run.log.ended
    if ended is not None and ended.reason == EARLY_STOP:
        return f"{text}; the run ended because none was better for so long."
    return f"{text}."


def _time_spent(run: Run) -> str:
    if not run.trainers:
        return ""
    return f"Its workers spent their time, on average: {described(mean_shares(run.trainers))}."


def _faults(run: Run) -> str:
    crashes = sum(len(worker.crashes) for worker in run.log.workers)
    parts = _each_crash(run) if crashes <= MAX_CRASHES else [_all_crashes(run, crashes)]
    if run.log.lost:
        reasons = [f"{number(count)} {reason}" for reason, count in run.log.lost.most_common()]
        total = run.log.lost.total()
        verb = "message was" if total == 1 else "messages were"
        parts.append(f"{number(total)} {verb} lost ({listing(reasons)}).")
    return " ".join(parts)


def _all_crashes(run: Run, number_of_crashes: int) -> str:
    away = [
        back - crash
        for worker in run.log.workers
        for crash, back in zip(worker.crashes, worker.recoveries, strict=False)
    ]
    text = f"Workers crashed {number(number_of_crashes)} times"
    if not away:
        return f"{text}, and none came back."
    usual = seconds(median(away))
    return f"{text}, and came back {number(len(away))} times, after {usual} in the median."


def _each_crash(run: Run) -> list[str]:
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
    return parts
