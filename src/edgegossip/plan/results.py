"""The results of a plan: table, recommendation, commands and figures."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from edgegossip.plan.candidates import Proposal
from edgegossip.plan.ranking import (
    Outlook,
    by,
    carried_out,
    final_value,
    has_learned,
    no_winner,
    ranked,
    reason,
    tied,
)
from edgegossip.plan.study import Fleet
from edgegossip.report import units
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.runs.scoreboard import metric_of, unit_of, values_of
from edgegossip.runs.study import Row

SHOWN = 5
"""Number of candidates whose curves are drawn."""


def ranking_rows(rows: Mapping[str, Row]) -> list[Row]:
    """The rows of the runs that rank the candidates."""
    return [row for row in carried_out(rows.values()) if "rung" not in row]


def print_ranking(order: Sequence[Outlook], target: float) -> None:
    """Print the ranked table."""
    table = RichTable(box=None, padding=(0, 1))
    metric = order[0].metric
    goal = units.metric_value(target, metric)
    for column in ("", f"time to {goal}", "sent", "energy", "idle", metric.name):
        justify: Any = "right" if column else "left"
        table.add_column(column, justify=justify, no_wrap=bool(column))
    for each in order:
        table.add_row(
            escape(each.run),
            each.time_text,
            units.data_size(each.num_bytes),
            units.energy(each.joules),
            units.percent(each.idle, 0),
            units.metric_value(each.value, metric),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def advice(
    target: float,
    order: Sequence[Outlook],
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
) -> Iterator[str]:
    """Write the recommendation, its reason, and the commands.

    Args:
        target: Value of the metric to reach.
        order: Candidates, best first.
        fleet: The machines.
        proposals: Settings that were tried for each algorithm.
    """
    yield from recommendation(target, order, proposals)
    if no_winner(order) is None:
        yield from _commands(chosen(order, proposals), fleet)


def chosen(order: Sequence[Outlook], proposals: Mapping[str, Sequence[Proposal]]) -> Proposal:
    """The proposal of the first candidate."""
    return next(each for each in proposals[order[0].only] if each.label == order[0].run)


def recommendation(
    target: float, order: Sequence[Outlook], proposals: Mapping[str, Sequence[Proposal]]
) -> Iterator[str]:
    """Write the recommendation and its reason; see `advice`."""
    best = order[0]
    goal = units.metric_value(target, best.metric)
    if (why := no_winner(order, goal)) is not None:
        is_missed = math.isinf(best.seconds)
        change = "a lower" if best.metric.higher_is_better == is_missed else "a higher"
        remedy = f"give {change} --target" + (", or more --max-seconds" if is_missed else "")
        yield f"{why}; {remedy}"
        return
    yield _answer(order, goal, len(proposals))
    yield reason(order)
    yield from _least_energy(order)
    yield from _at_an_end(chosen(order, proposals), proposals[best.only])


def _commands(best: Proposal, fleet: Fleet) -> Iterator[str]:
    yield (
        f"these commands stop after {units.seconds(fleet.seconds)}, like the runs of this "
        "plan; raise their time limit to train for longer"
    )
    yield f"try it on this machine: {best.command('launch', fleet.seconds)}"
    yield from _on_each_machine(best.command("worker", fleet.seconds), fleet)


def _answer(order: Sequence[Outlook], goal: str, num_algorithms: int) -> str:
    """Name the best candidate, and those that are as good, in one sentence."""
    best, number = order[0], len(order[0].times)
    if number == 1:
        spread = "with one seed (n = 1), so the order may be chance; more --seeds tell"
    else:
        spread = f"n = {number} seeds"
    found = f"best: {best.run}, the first of {num_algorithms} algorithms to reach {goal}"
    found += f", after {best.time_text}, {spread}"
    if names := [each.run for each in tied(order)]:
        found += f"; a tie, within the spread of the seeds, with {' and with '.join(names)}"
    return found


def _on_each_machine(start: str, fleet: Fleet) -> Iterator[str]:
    """The commands that train on the real machines."""
    endpoints = [machine.endpoint for machine in fleet.machines]
    if None in endpoints:
        lack = sum(each is None for each in endpoints)
        yield (
            f"for the command of each machine, give each [[machine]] its endpoint, such as "
            f"tls/desk:7447, which {lack} of {len(endpoints)} lack, and --resume this plan"
        )
        return
    ranks = " ".join(f"--rank {rank}" for rank in range(len(endpoints)))
    is_secured = all(each.startswith("tls/") for each in endpoints if each)
    security = " --tls certs" if is_secured else " --insecure"
    if is_secured:
        yield (
            f"first, once: edgegossip certs init; edgegossip certs issue {ranks}; then copy to "
            "each machine, as its folder certs, what this names"
        )
    for rank, machine in enumerate(fleet.machines):
        others = " ".join(each for each in endpoints[:rank] if each)
        connect = f" --connect {others}" if others else ""
        yield (
            f"on {machine.name}: {start} --rank {rank} --listen {machine.endpoint}{connect}"
            f"{security}"
        )


def _least_energy(order: Sequence[Outlook]) -> Iterator[str]:
    """Yield a note if another candidate reaches the target with less energy than the first."""
    best, reached = order[0], [each for each in order if math.isfinite(each.seconds)]
    least = min(reached, key=lambda each: each.joules)
    if least.joules < best.joules:
        yield (
            f"note: {least.run} needs less energy to the target, "
            f"{units.energy(least.joules)} instead of {units.energy(best.joules)}, but "
            f"{units.seconds(least.seconds)}"
        )


def _at_an_end(best: Proposal, tried: Sequence[Proposal]) -> Iterator[str]:
    """Yield a note for each setting whose best value is the smallest or largest tried."""
    for name, value in best.setting.values.items():
        others = {each.setting.values[name] for each in tried}
        is_number = all(isinstance(each, int | float) for each in others)
        # Two values of which one is the least may be all that there are: true and false.
        if len(others) > 1 and is_number and bool not in map(type, others):
            option, text = name.replace("_", "-"), best.setting.texts[name]
            for end, extreme in (("least", min), ("greatest", max)):
                if value == extreme(others):
                    yield f"note: --{option} {text} is the {end} value tried; extend the range"


def answered(
    target: float | None,
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
    ranking: Collection[str],
    rows: Mapping[str, Row],
) -> Exhibits:
    """The exhibits, with the machines, and with the answer once all of `ranking` have run."""
    found = exhibits(target, rows)
    if not found.tables:
        return found
    tables = (*found.tables, _machine_table(fleet))
    if not rows.keys() >= {*ranking}:
        return replace(found, tables=tables)
    goal, order = ranked(ranking_rows(rows), target)
    said = (*advice(goal, order, fleet, proposals), *_cautions(rows))
    return replace(found, tables=tables, summary=said)


def _cautions(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield notes about tuning that says nothing, and about runs that the budget left out."""
    tried = by("algorithm", (row for row in carried_out(rows.values()) if "rung" in row))
    if vain := [only for only, some in tried.items() if not has_learned(some)]:
        yield (
            f"note: tuning was too short to tell settings of {', '.join(vain)} apart: no run "
            "became better than an untrained model, so the recipe's own settings were ranked; "
            "give more --budget or --max-seconds"
        )
    if skipped := len(rows) - len(carried_out(rows.values())):
        yield (
            f"note: {skipped} of {len(rows)} runs were left out, because runs took longer than "
            "their beginnings promised and the budget was used up"
        )


def _machine_table(fleet: Fleet) -> Table:
    rows = tuple(
        (
            str(rank),
            machine.name,
            speed,
            None if math.isinf(machine.mbits) else machine.mbits,
            machine.latency,
            machine.idle_watts,
            machine.busy_watts,
        )
        for rank, (machine, speed) in enumerate(zip(fleet.machines, fleet.speeds, strict=True))
    )
    return Table(
        heading="Machines",
        columns=(
            ("rank", "text"),
            ("machine", "text"),
            ("samples/s", "number"),
            ("Mbit/s", "number"),
            ("latency", "seconds"),
            ("idle W", "number"),
            ("busy W", "number"),
        ),
        rows=rows,
        note="As given, or measured here; a dash: no limit. A message between two machines "
        "takes the sum of their latencies.",
    )


def exhibits(target: float | None, rows: Mapping[str, Row]) -> Exhibits:
    """Figures and tables of the rows so far."""
    ranking = ranking_rows(rows)
    if not ranking:
        return Exhibits()
    goal, order = ranked(ranking, target)
    metric = order[0].metric
    first = min(row["seed"] for row in ranking)
    shown = {each.run for each in order[:SHOWN]}
    curves = tuple(
        Series(name=row["run"], x=tuple(row["times"]), y=tuple(values_of(row)))
        for row in ranking
        if row["seed"] == first and row["run"] in shown
    )
    panel = Panel(
        title="The best candidates",
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label=metric.name,
        y_unit=unit_of(metric),
        series=curves,
    )
    figure = Figure(
        name="plan",
        heading=f"{units.capitalized(metric.name)} over time",
        caption="On virtual machines like the given ones; one seed.",
        panels=(panel,),
    )
    return Exhibits(
        figures=(figure,), tables=(_ranking_table(order, goal), *_tuning_tables(rows))
    )


def _ranking_table(order: Sequence[Outlook], goal: float) -> Table:
    metric = order[0].metric
    return Table(
        heading="Candidates, best first",
        columns=(
            ("run", "text"),
            ("time to target", "seconds"),
            ("soonest", "seconds"),
            ("latest", "seconds"),
            (metric.name, unit_of(metric)),
            ("sent", "bytes"),
            ("energy", "joules"),
            ("samples", "number"),
            ("idle", "percent"),
            ("busiest uplink", "percent"),
        ),
        rows=tuple(_line(each) for each in order),
        note="Time to the target: of the mean over seeds that were not used to choose "
        "settings; soonest and latest: of single seeds; others are medians over the seeds. "
        "Measured on held-out training samples; the target is "
        f"{units.metric_value(goal, metric, 2)}. {reason(order)} Sent, "
        "energy and samples: of all machines, up to the target; energy follows from the "
        "machines' watts and joules per byte. Idle: share of the machines' capacity "
        "that does not train; a server's machine does not. Busiest uplink: share of time in "
        "which it sends.",
    )


def _line(each: Outlook) -> tuple[str | float | None, ...]:
    times = (each.seconds, min(each.times), max(each.times))
    known = (None if math.isinf(time) else time for time in times)
    counts = (each.num_bytes, each.joules, each.samples, each.idle, each.uplink)
    return (each.run, *known, each.value, *counts)


def _tuning_tables(rows: Mapping[str, Row]) -> Iterator[Table]:
    tried = [row for row in carried_out(rows.values()) if "rung" in row]
    if not tried:
        return
    metric = metric_of(tried[0])
    # The longest runs of each algorithm come first, and of these the best.
    tried.sort(key=lambda row: metric.shortfall(final_value([row]), 0.0))
    tried.sort(key=lambda row: (row["algorithm"], -row["rung"]))
    lines = [
        (
            row["run"],
            f"{row['rung']} of {row['num_rungs']}",
            row["times"][-1] if row["times"] else None,
            metric.best(values_of(row)) if row["times"] else None,
        )
        for row in tried
    ]
    yield Table(
        heading="Tuning",
        columns=(
            ("run", "text"),
            ("rung", "text"),
            ("duration", "seconds"),
            (f"best {metric.name}", unit_of(metric)),
        ),
        rows=tuple(lines),
        note="Each rung keeps the best third, for runs that are three times as long; a dash: "
        "it diverged.",
    )
