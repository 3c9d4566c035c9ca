"""A sweep: one run of a recipe with several settings and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.plan.grid import Grid, Setting, settings_of
from edgegossip.recipes.call import RecipeCall
from edgegossip.report.units import capitalized, metric_value
from edgegossip.runs.exhibits import Exhibits, Figure, Value
from edgegossip.runs.scoreboard import Score, bars, metric_of, score_table, unit_of
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.runs.tuning import slug, without_test_data


def sweep(
    call: RecipeCall,
    values: Grid,
    *,
    only: str | None = None,
    seeds: Sequence[int] = (0,),
    held_out: float = 0.1,
    record: Mapping[str, Any] | None = None,
) -> Study:
    """Make a study of all combinations of values and seeds.

    Args:
        call: The recipe, with the arguments that all runs have.
        values: Values of further arguments.
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        seeds: Seeds of each setting.
        held_out: Share of the training samples on which settings are ranked; 0 for the test
            split, whose accuracy is then not a valid result.
        record: Settings of the study, for its file; by default the recipe and its arguments.

    Raises:
        UsageError: If the recipe or one of its arguments is invalid.
    """
    settings = settings_of(values)
    # All experiments are made before the first one runs, so that errors do not surface hours
    # later.
    for each in settings:
        made = call.replace(**each.values)
        made.require_used(made.experiment(only))
    cells = tuple(
        Cell(
            name=f"{slug(each.label) or 'as-given'}/seed{seed}",
            group="sweep",
            work=partial(_run, call, each, only, held_out, seed),
        )
        for each in settings
        for seed in seeds
    )
    judged_by = f"{held_out:.0%} of the training samples" if held_out else "the test split"
    return Study(
        name=f"sweep/{call.name.rpartition(':')[2]}",
        title=f"Which settings of {call.name} are best?",
        printed=(),
        settings=record or {"recipe": call.name, "arguments": call.words()[1:]},
        cells=cells,
        exhibit=partial(_exhibits, judged_by),
    )


def _run(
    call: RecipeCall,
    setting: Setting,
    only: str | None,
    held_out: float,
    seed: int,
    session: Session,
) -> Row:
    experiment = call.replace(**setting.values).experiment(only, seed)
    if held_out:
        dataset = without_test_data(experiment.task.dataset, held_out)
        experiment = replace(experiment, task=replace(experiment.task, dataset=dataset))
    results = session.run(experiment)
    last, metric = results.history[-1], results.metric
    return {
        "run": setting.label,
        "seed": experiment.seed,
        metric.key: results.final_value,
        f"best_{metric.key}": results.best_value,
        **({} if metric == ACCURACY else {"metric": asdict(metric)}),
        "loss": last.loss,
        "seconds": last.time,
        "bytes": last.bytes_sent,
    }


def _exhibits(judged_by: str, rows: Mapping[str, Row]) -> Exhibits:
    if not rows:
        return Exhibits()
    metric = metric_of(next(iter(rows.values())))
    name, unit = metric.name, unit_of(metric)
    found = [
        Score(
            group="",
            setting="",
            run=row["run"],
            seed=row["seed"],
            target=None,
            measures={
                name: (unit, row[metric.key]),
                f"best {name}": (unit, row[f"best_{metric.key}"]),
                "loss": ("number", row["loss"]),
                "virtual time": ("seconds", row["seconds"]),
                "sent": ("bytes", row["bytes"]),
            },
        )
        for row in rows.values()
    ]
    note = f"Medians over the seeds, at the end of the runs, measured on {judged_by}."
    figure = Figure(
        name="sweep",
        heading=f"{capitalized(name)} by setting",
        caption="Medians over the seeds; thin lines: their range.",
        panels=(bars(found, name, y_label=name),),
    )
    table = score_table(found, heading="Settings", note=note)
    sign = -1 if metric.higher_is_better else 1
    best = sorted(table.rows, key=partial(_place, sign))
    told = _answer(found, best, metric)
    return Exhibits(
        figures=(figure,), tables=(replace(table, rows=tuple(best)),), summary=(told,)
    )


def _answer(
    found: Sequence[Score], best: Sequence[tuple[Value, ...]], metric: MetricSpec
) -> str:
    """Name the best setting so far, and those whose range over the seeds overlaps with its."""
    spans: dict[str, list[float]] = {}
    for each in found:
        value = each.measures[metric.name][1]
        spans.setdefault(each.run, []).append(math.nan if value is None else value)
    first, *others = (str(line[0]) for line in best)
    mine = spans[first]
    number = "one seed (n = 1)" if len(mine) == 1 else f"n = {len(mine)} seeds"
    value_text = metric_value(_number(best[0][1]), metric)
    said = f"best: {first or 'as given'}, {metric.name} {value_text}, {number}"
    ties = [
        other
        for other in others
        if len(mine) > 1 < len(spans[other])
        and min(spans[other]) <= max(mine)
        and min(mine) <= max(spans[other])
    ]
    return said + (
        f"; a tie, within the spread, with {' and with '.join(ties)}" if ties else ""
    )


def _number(value: Value) -> float | None:
    return None if value is None else float(value)


def _place(sign: int, line: tuple[Value, ...]) -> float:
    """Sort key for a line: its first number, with the sign that puts the best first."""
    value = _number(line[1])
    return math.inf if value is None else sign * value
