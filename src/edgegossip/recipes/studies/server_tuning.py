"""Tuning parameter servers: learning rates, and values of each method's own setting."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.ranges import check_range
from edgegossip.data.dataset import Dataset
from edgegossip.data.hold_out import hold_out
from edgegossip.data.local import Local
from edgegossip.recipes.studies.server_contest import ServerContest, slug
from edgegossip.recipes.studies.server_methods import METHODS, RATES, Candidate
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table, Unit
from edgegossip.runs.study import Cell, Row, Session

TUNING_SEED = 100
"""Seed of tuning runs; results use other seeds."""


@dataclass(frozen=True, kw_only=True)
class Tuning(ServerContest):
    """Try three learning rates for each method, and three values of its own setting.

    The rates are tried with the second value; then the other values are tried with the best
    rate. Losses are measured on samples held out from the training data; no test sample is
    used. A candidate that takes longer than its method's best candidate so far is stopped.
    """

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for name in self.choices:
            folder = f"{self.group}/seed{self.seed}/{slug(name)}"
            method, tried = METHODS[name], list[str]()
            candidates: dict[str, Candidate | float] = {
                f"{folder}/lr-{lr:g}": Candidate(lr=lr, value=method.middle) for lr in RATES
            }
            others = [value for value in method.values if value != method.middle]
            candidates |= {f"{folder}/{method.option}-{value}": value for value in others}
            for place, candidate in candidates.items():
                work = partial(self._try, data_dir, name, candidate)
                yield self.cell(place, work, tried)
                tried.append(place)  # the best time so far limits the next candidate

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        values = {name: METHODS[name].values for name in self.choices}
        tried = {"rates": RATES, "values": values}
        return {**super().plain(), "choices": tried}

    def _try(
        self, data_dir: Path, name: str, candidate: Candidate | float, session: Session
    ) -> Row:
        tried = [
            row
            for row in session.rows.values()
            if (row["group"], row["run"], row["seed"]) == (self.group, name, self.seed)
        ]
        best = best_of(tried)
        if isinstance(candidate, float | int):
            candidate = Candidate(lr=best["lr"] if best else RATES[0], value=candidate)
        task, goal = self.problem.task(data_dir), self.goal
        held = without_test_data(task.dataset, goal.validation_share)
        if best is not None and best["seconds_to_loss"] is not None:
            goal = replace(goal, max_seconds=min(goal.max_seconds, best["seconds_to_loss"]))
        # An interrupted run may have had another limit.
        shutil.rmtree(session.folder, ignore_errors=True)
        return self.found(replace(task, dataset=held), goal, name, candidate, session)


def best_of(rows: list[Row]) -> Row | None:
    """Find the row that reached the loss first or came closest; None without rows."""

    def key(row: Row) -> tuple[bool, float]:
        time: float | None = row["seconds_to_loss"]
        loss = math.inf if row["final_loss"] is None else row["final_loss"]
        return (time is None, loss if time is None else time)

    return min(rows, key=key, default=None)


def most_accurate(session: Session, **facts: object) -> Row:
    """Find the most accurate tuning candidate among the rows with these values."""
    tried = [
        row
        for row in session.rows.values()
        if row["is_tuning"] and all(row[name] == fact for name, fact in facts.items())
    ]
    return max(tried, key=lambda row: row["accuracy"])


def check_factors(factors: Sequence[float]) -> None:
    """Check the multiples of a learning rate that contenders try.

    Raises:
        ValueError: If there is none, or one is not above 0 or given twice.
    """
    if not factors or len(set(factors)) < len(factors):
        raise ValueError(f"factors must be at least one number, all different, got {factors}")
    for factor in factors:
        check_range("factors", factor, "above 0 and finite")


def without_test_data(dataset: Dataset, share: float) -> Dataset:
    """Replace the test samples with held-out training samples; a validation split stays.

    `Local` data is unchanged, because reports never measure its test samples.
    """
    if isinstance(dataset, Local):
        return dataset
    held = hold_out(replace(dataset, validation=None), share, seed=TUNING_SEED)
    assert held.validation is not None
    return replace(held, test=held.validation, validation=dataset.validation)


def trials(rows: Iterable[Row], group: str, run: str) -> list[Row]:
    """The rows that are marked as trials of this run.

    Raises:
        TrainingError: If there are none.
    """
    tried = [
        row for row in rows if row["is_tuning"] and (row["group"], row["run"]) == (group, run)
    ]
    if not tried:
        raise TrainingError(f"no trial of {run} on {group} finished, so nothing is tuned")
    return tried


def tuning_exhibits(contests: Sequence[ServerContest], rows: Mapping[str, Row]) -> Exhibits:
    """Show the time of each candidate, and the best one of each method."""
    groups = dict.fromkeys(each.group for each in contests)
    told = [line for group in groups for line in _candidates(group, rows.values())]
    columns: tuple[tuple[str, Unit], ...] = (
        ("problem", "text"),
        ("method", "text"),
        ("learning rate", "number"),
        ("setting", "text"),
        ("time to loss", "seconds"),
        ("loss at its end", "number"),
        ("", "text"),
    )
    table = Table(heading="Candidates", columns=columns, rows=tuple(told), note=NOTE)
    points = [
        Panel(
            title=group,
            kind="bars",
            x_label="method",
            y_label="time of the best",
            y_unit="seconds",
            series=(
                Series(
                    name="best candidate",
                    x=tuple(row[1] for row in told if row[0] == group and row[-1]),
                    y=tuple(row[4] for row in told if row[0] == group and row[-1]),
                ),
            ),
        )
        for group in dict.fromkeys(row[0] for row in told)
    ]
    figure = Figure(
        name="tuning",
        heading="The best candidate of each method",
        caption="One seed, which no result uses.",
        panels=tuple(points),
    )
    return Exhibits(figures=(figure,), tables=(table,)) if told else Exhibits()


def _candidates(group: str, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """The lines of the table for one problem, method by method."""
    own = [row for row in rows if row["group"] == group]
    for name in METHODS:
        mine = [row for row in own if row["run"] == name]
        best = best_of(mine)
        for row in mine:
            value = "" if row["value"] is None else f"{METHODS[name].option} = {row['value']}"
            time, mark = row["seconds_to_loss"], "best" if row is best else ""
            yield group, name, row["lr"], value, time, row["final_loss"], mark


NOTE = (
    "A candidate is stopped when it takes longer than its method's best candidate so far. A "
    "dash: stopped, or the loss was not reached in time. Losses are measured on held-out "
    "training samples, which no result uses."
)
