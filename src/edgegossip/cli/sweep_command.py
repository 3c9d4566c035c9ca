"""The command for many settings and seeds of a recipe. Importing this module imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from edgegossip.cli.options import ClusterOptions
from edgegossip.cli.recipe import parse_recipe, parse_with_seed, pick, recipe_name
from edgegossip.cli.study_command import carry_out
from edgegossip.cli.swept_values import SeveralSeeds, Words, label, split_values
from edgegossip.contract.metrics import ACCURACY
from edgegossip.report.units import capitalized
from edgegossip.runs.exhibits import Exhibits, Figure, Value
from edgegossip.runs.scoreboard import Score, bars, metric_of, score_table, unit_of
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.runs.tuning import slug, without_test_data


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SeveralSeeds, ClusterOptions):
    """Options for a sweep; each option of the recipe may have several values.

    Args:
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
    """

    only: str | None = None


def sweep_command(arguments: list[str]) -> int:
    """`edgegossip sweep`."""
    options, study = parse_sweep(arguments)
    carry_out(study, options, "sweep", arguments, at_once=options.at_once)
    return 0


def parse_sweep(arguments: Sequence[str]) -> tuple[SweepOptions, Study]:
    """Make a study of all combinations of option values.

    Raises:
        UsageError: If the recipe or one of its settings is invalid.
    """
    name, words = recipe_name("sweep", SweepOptions, arguments)
    values = split_values("sweep", name, words)
    # All experiments are made before the first one runs, so that errors do not surface hours
    # later.
    for point in values.points:
        _, options, chosen = parse_recipe("sweep", SweepOptions, [name, *values.fixed, *point])
        pick(name, chosen, options.only)
    cells = tuple(
        Cell(
            name=f"{slug(label(point)) or 'as-given'}/seed{seed}",
            group="sweep",
            work=partial(_run, [name, *values.fixed, *point], seed, label(point)),
        )
        for point in values.points
        for seed in options.seeds
    )
    judged_by = f"{options.held_out:.0%} of the training samples" if options.held_out else ""
    study = Study(
        name=f"sweep/{name.rpartition(':')[2]}",
        title=f"Which settings of {name} are best?",
        printed=(),
        settings={"recipe": name, "arguments": values.kept()},
        cells=cells,
        exhibit=partial(_exhibits, judged_by or "the test split"),
    )
    return options, study


def _run(words: Words, seed: int, label: str, session: Session) -> Row:
    options, chosen = parse_with_seed("sweep", SweepOptions, words, seed)
    experiment = pick(words[0], chosen, options.only)
    if options.held_out:
        dataset = without_test_data(experiment.task.dataset, options.held_out)
        experiment = replace(experiment, task=replace(experiment.task, dataset=dataset))
    results = session.run(experiment)
    last, metric = results.history[-1], results.metric
    return {
        "run": label,
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
    return Exhibits(figures=(figure,), tables=(replace(table, rows=tuple(best)),))


def _place(sign: int, line: tuple[Value, ...]) -> float:
    """Sort key for a line: its first number, with the sign that puts the best first."""
    return math.inf if line[1] is None else sign * float(line[1])
