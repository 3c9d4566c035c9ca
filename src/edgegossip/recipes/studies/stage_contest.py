"""Contests between methods that train one model in stages, equally tuned.

Fields of a row:
    lr, is_tuning: Learning rate, and whether the run only tried it.
    accuracy, seconds: Mean of the last five evaluations; virtual time of the end.
    bytes: Bytes sent over all links.
    staleness: Mean number of a stage's unanswered batches in the stages above it.
    times, accuracies: One number per evaluation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.recipes.staged_training import StageSettings, stage_run
from edgegossip.recipes.studies.contest import Contest
from edgegossip.recipes.studies.server_contest import slug
from edgegossip.recipes.studies.server_tuning import (
    TUNING_SEED,
    most_accurate,
    without_test_data,
)
from edgegossip.runs.events import EventReader
from edgegossip.runs.exhibits import Exhibits, Figure, Panel
from edgegossip.runs.scoreboard import Score, bars, contest_key, curves, last_looks, score_table
from edgegossip.runs.study import Cell, Row, Session

WHOLE = "whole"
RATES = (0.01, 0.003, 0.03)
"""Candidate learning rates of each method; see `StageSettings.momentum`."""
NUM_LOOKS = 25
HELD_OUT = 0.1
"""Share of the training samples to hold out for ranking learning rates."""


@dataclass(frozen=True, kw_only=True)
class StageContest(Contest):
    """One problem with all methods: one seed for all candidates, other seeds for the best.

    Args:
        stages: Settings of machines, links and sizes.
        methods: Names in `COMPETITORS` and `METHODS`.
        seeds: Seeds of the results.
        setting: Distinguishing feature of this contest among the contests of its problem.
    """

    stages: StageSettings
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    setting: str = ""

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{slug(self.setting)}" if self.setting else self.group
        for name in self.methods:
            tried = {lr: f"{folder}/tuning-lr-{lr:g}/{slug(name)}" for lr in RATES}
            for lr, place in tried.items():
                yield self.cell(place, partial(self._run, data_dir, name, lr, TUNING_SEED))
            for seed in self.seeds:
                work = partial(self._result, data_dir, name, seed)
                yield self.cell(f"{folder}/seed{seed}/{slug(name)}", work, [*tried.values()])

    def _result(self, data_dir: Path, name: str, seed: int, session: Session) -> Row:
        best = most_accurate(session, group=self.group, setting=self.setting, run=name)
        return self._run(data_dir, name, best["lr"], seed, session)

    def _run(self, data_dir: Path, name: str, lr: float, seed: int, session: Session) -> Row:
        dataset, is_tuning = self.problem.load(data_dir), seed == TUNING_SEED
        if is_tuning:
            dataset = without_test_data(dataset, HELD_OUT)
        settings = replace(
            self.stages, num_epochs=self.problem.settings.num_epochs, lr=lr, seed=seed
        )
        experiment = stage_run(name, dataset, self.problem.model, settings)
        looks = self.problem.settings.num_epochs / NUM_LOOKS
        experiment = replace(experiment, name=slug(name), evaluation_epochs=looks)
        history = session.run(experiment).history
        accuracies = [each.accuracy for each in history]
        return {
            "group": self.group,
            "setting": self.setting,
            "run": name,
            "seed": seed,
            "is_tuning": is_tuning,
            "lr": lr,
            "accuracy": last_looks(accuracies),
            "seconds": history[-1].time,
            "bytes": history[-1].bytes_sent,
            "staleness": staleness(session.folder),
            "times": [each.time for each in history],
            "accuracies": accuracies,
        }

    def plain(self) -> dict[str, object]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {"stages": asdict(self.stages), "rates": RATES, "methods": self.methods}


def staleness(folder: Path) -> float | None:
    """The mean number, over a run, of a stage's unanswered batches in the stages above it.

    This is the staleness, in updates, of a true gradient and of the targets of a
    synthetic-gradient module.
    """
    notes = EventReader(folder / "events.jsonl").notes("stage")
    late = [(note["stage"], note["pending"]) for note in notes]
    last = max((stage for stage, _ in late), default=0)
    return statistics.fmean([pending for stage, pending in late if stage < last] or [0.0])


def stage_exhibits(name: str, setting: str, note: str, rows: Mapping[str, Row]) -> Exhibits:
    """Draw accuracies, with a table of costs.

    Args:
        name: Name of the figure.
        setting: Label of the settings; empty if there is only one.
        note: Note below the table.
        rows: Rows of the cells.
    """
    results = [row for row in rows.values() if not row["is_tuning"]]
    if not results:
        return Exhibits()
    scores = _scores(results)
    groups = dict.fromkeys(row["group"] for row in results)
    panels = [panel for group in groups for panel in _panels(results, scores, group)]
    figure = Figure(
        name=name,
        heading="Accuracy of models trained in stages",
        caption="Bars: medians over the seeds; thin lines: their range. Curves: one seed.",
        panels=tuple(panels),
    )
    table = score_table(scores, heading="Ours", note=note, setting=setting)
    return Exhibits(figures=(figure,), tables=(table,))


def _panels(rows: Iterable[Row], scores: Iterable[Score], group: str) -> Iterator[Panel]:
    mine = [row for row in rows if row["group"] == group]
    found = [each for each in scores if each.group == group]
    yield bars(found, "accuracy", y_label="accuracy", title=group)
    first = min(row["seed"] for row in mine)
    for setting in dict.fromkeys(row["setting"] for row in mine):
        contest = group, setting, first
        yield curves(mine, contest, setting or group, "virtual time", x_unit="seconds")


def _scores(rows: Iterable[Row]) -> list[Score]:
    rows = list(rows)
    whole = {contest_key(row): row for row in rows if row["run"] == WHOLE}
    return [
        Score(
            **{name: row[name] for name in ("group", "setting", "run", "seed")},
            target=None,
            measures={
                "accuracy": ("percent", row["accuracy"]),
                "more than whole": ("points", _more(row, whole.get(contest_key(row)))),
                "time": ("seconds", row["seconds"]),
                "bytes": ("bytes", row["bytes"]),
                "batches late": ("number", row.get("staleness")),
                "learning rate": ("number", row["lr"]),
            },
        )
        for row in rows
    ]


def _more(row: Row, whole: Row | None) -> float | None:
    return None if whole is None else row["accuracy"] - whole["accuracy"]
