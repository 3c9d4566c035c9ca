"""The command that runs a recipe with many settings and seeds; importing this imports torch."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from edgegossip.cli.commands import repeatable
from edgegossip.cli.options import ManyRunsOptions
from edgegossip.cli.recipe import parse_recipe, pick
from edgegossip.cli.study_command import carry_out
from edgegossip.core.errors import UsageError
from edgegossip.core.ranges import check_range
from edgegossip.experiments.exhibits import Exhibits, Figure
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.study import Cell, Row, Session, Study
from edgegossip.recipes.registry import load_recipe
from edgegossip.recipes.studies.scoreboard import Score, bars, score_table
from edgegossip.recipes.studies.server_contest import slug
from edgegossip.recipes.studies.server_tuning import without_test_data

Words: TypeAlias = list[str]
FREE = ("--out", "--threads", "--processes", "--resume", "--seeds")
"""Options that change no run."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ManyRunsOptions):
    """How to sweep over settings; each option of the recipe may have several values.

    Args:
        only: The one algorithm of a comparison to run; by default its baseline.
        seeds: Each setting is run with all of these, e.g. 0 1 2 or 0..4.
        held_out: Share of the training samples by which settings are judged, and which nobody
            trains on. 0 judges by test samples; what is chosen so is no result.
    """

    only: str | None = None
    seeds: tuple[int, ...] = (0,)
    held_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("held_out", self.held_out, "in [0, 1)")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more, all different, got {self.seeds}")


def sweep_command(arguments: list[str]) -> int:
    """`edgegossip sweep`."""
    options, study = parse_sweep(arguments)
    carry_out(study, options, repeatable("sweep", arguments))
    return 0


def parse_sweep(arguments: Sequence[str]) -> tuple[SweepOptions, Study]:
    """Make a study of all combinations of the values that options have.

    Raises:
        UsageError: If the recipe, or a setting of it, is none.
    """
    name, fixed, swept = split_values(arguments)
    points = [
        [word for pair in zip(swept, values, strict=True) for word in pair]
        for values in itertools.product(*swept.values())
    ]
    # All are made before the first is run: a wrong one would be found hours later.
    all_options = [_make(name, [*fixed, *point])[0] for point in points]
    options = all_options[0]
    # With `--resume`, seeds and values may be added.
    kept = [[option, *values] for option, values in grouped(fixed) if option not in FREE]
    cells = tuple(
        Cell(
            name=f"{slug(label(point)) or 'as-given'}/seed{seed}",
            group="sweep",
            work=partial(_run, name, [*fixed, *point, "--seed", f"{seed}"], label(point)),
        )
        for point in points
        for seed in options.seeds
    )
    judged_by = f"{options.held_out:.0%} of the training samples" if options.held_out else ""
    study = Study(
        name=f"sweep/{name.rpartition(':')[2]}",
        title=f"Which settings of {name} are best?",
        printed=(),
        settings={"recipe": name, "arguments": kept},
        cells=cells,
        exhibit=partial(_exhibits, judged_by or "the test split"),
    )
    return options, study


def split_values(
    arguments: Sequence[str], command: str = "sweep"
) -> tuple[str, Words, dict[str, Words]]:
    """Tell the recipe's options that have several values from all others.

    Returns:
        The recipe's name, the words of all other options, and the values by option.

    >>> split_values(["quickstart", "--lr", "0.1", "0.2", "--seeds", "0..2"])
    ('quickstart', ['--seeds', '0', '1', '2'], {'--lr': ['0.1', '0.2']})
    """
    if not arguments or arguments[0].startswith("-"):
        parse_recipe(command, SweepOptions, [*arguments])  # it says what is missing
    name, *rest = arguments
    one_value = {f"--{each}" for each in _options_of_one_value(load_recipe(name))}
    fixed: Words = []
    swept: dict[str, Words] = {}
    for option, values in grouped(rest):
        if option == "--seed":
            raise UsageError(f"{command} has --seeds, such as 0..4; leave out --seed")
        if len(values) > 1 and option in one_value:
            swept[option] = [*dict.fromkeys(values)]
        else:
            fixed += [option, *(number for value in values for number in _numbers(value))]
    return name, fixed, swept


def grouped(words: Sequence[str]) -> Iterator[tuple[str, Words]]:
    option, values = "", Words()
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if option:
            yield option, values
        option, values = word, []
    if option:
        yield option, values


def _numbers(value: str) -> Iterator[str]:
    """Write a range out."""
    found = _RANGE.fullmatch(value)
    if found is None:
        yield value
    else:
        yield from map(str, range(int(found[1]), int(found[2]) + 1))


def _options_of_one_value(make: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(make).parameters.items():
        settings = parameter.default
        kinds = (
            {each.name: each.type for each in fields(settings)}
            if is_dataclass(settings)
            else {name: parameter.annotation}
        )
        for each, kind in kinds.items():
            if "tuple" not in str(kind):
                yield each.replace("_", "-")


def _make(name: str, words: Words) -> tuple[SweepOptions, Experiment]:
    _, options, chosen = parse_recipe("sweep", SweepOptions, [name, *words])
    return options, pick(name, chosen, options.only)


def label(point: Words) -> str:
    pairs = zip(point[::2], point[1::2], strict=True)
    return ", ".join(f"{option.removeprefix('--')} = {value}" for option, value in pairs)


def _run(name: str, words: Words, label: str, session: Session) -> Row:
    options, experiment = _make(name, words)
    if options.held_out:
        dataset = without_test_data(experiment.task.dataset, options.held_out)
        experiment = replace(experiment, task=replace(experiment.task, dataset=dataset))
    results = session.run(experiment)
    last = results.history[-1]
    return {
        "run": label,
        "seed": experiment.seed,
        "accuracy": last.accuracy,
        "best_accuracy": results.best_accuracy,
        "loss": last.loss,
        "seconds": last.time,
        "bytes": last.bytes_sent,
    }


def _exhibits(judged_by: str, rows: Mapping[str, Row]) -> Exhibits:
    found = [
        Score(
            group="",
            setting="",
            run=row["run"],
            seed=row["seed"],
            target=None,
            measures={
                "accuracy": ("percent", row["accuracy"]),
                "best accuracy": ("percent", row["best_accuracy"]),
                "loss": ("number", row["loss"]),
                "virtual time": ("seconds", row["seconds"]),
                "sent": ("bytes", row["bytes"]),
            },
        )
        for row in rows.values()
    ]
    if not found:
        return Exhibits()
    note = f"Medians over the seeds, at the end of the runs; judged by {judged_by}."
    figure = Figure(
        name="sweep",
        heading="Accuracy by setting",
        caption="Medians over the seeds, thin lines their range.",
        panels=(bars(found, "accuracy", y_label="accuracy"),),
    )
    table = score_table(found, heading="Settings", note=note)
    best = sorted(table.rows, key=lambda line: -float(line[1] or 0))
    return Exhibits(figures=(figure,), tables=(replace(table, rows=tuple(best)),))
