"""Ways to train one model in stages: what decoupling costs in accuracy, and what it saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.experiments.exhibits import Exhibits, Figure, Panel, Series
from edgegossip.experiments.study import Cell, Row, Session, Study
from edgegossip.learning.models.eight_layers import eight_layers
from edgegossip.recipes.recipe_settings import Settings
from edgegossip.recipes.staged_training import (
    COMPETITORS,
    METHODS,
    StageSettings,
    stage_run,
)
from edgegossip.recipes.studies.contest import Contest, settings_and_cells
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.scoreboard import Score, bars, contest_key, score_table
from edgegossip.recipes.studies.server_contest import slug
from edgegossip.recipes.studies.server_tuning import (
    TUNING_SEED,
    most_accurate,
    without_test_data,
)
from edgegossip.recipes.studies.study_settings import StudySettings

WHOLE = "whole"
RATES = (0.01, 0.003, 0.03)
"""Learning rates that are tried for each method; see `StageSettings.momentum`."""
TWO_LAYERS_EACH = StageSettings(
    width=0.5, cut_at=(2, 4, 6), in_flight=4, latency=0.001, bandwidth=125e6
)
"""Four equal machines; a slow link would have most of the layers in one stage."""
NUM_LOOKS = 25
LAST_LOOKS = 5
HELD_OUT = 0.1
"""Share of the training samples that learning rates are judged by, and nobody trains on."""

MNIST = Problem(
    name="mnist",
    dataset="mnist",
    model=eight_layers,
    num_train=20_000,
    settings=Settings(num_epochs=4),
    scaled_down="A third of MNIST's pictures, a third of CIFAR-10's, tested on 2,000; half of "
    "the model's width.",
    num_test=2_000,
)
CIFAR10 = Problem(
    name="cifar10",
    dataset="cifar10",
    model=eight_layers,
    num_train=15_000,
    settings=Settings(num_epochs=8),
    num_test=2_000,
)
DIGITS = Problem(
    name="digits", dataset="digits", model=eight_layers, settings=Settings(num_epochs=1)
)


@dataclass(frozen=True, kw_only=True)
class StageContest(Contest):
    """One problem learnt in all ways: candidates on one seed, the best of them on others.

    Args:
        stages: Machines, links, sizes.
        methods: Names in `COMPETITORS` and `METHODS`.
        seeds: Of the results.
    """

    stages: StageSettings
    methods: tuple[str, ...]
    seeds: tuple[int, ...]

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for name in self.methods:
            for lr in RATES:
                work = partial(self._run, data_dir, name, lr, TUNING_SEED)
                yield self.cell(f"{self.group}/tuning-lr-{lr:g}/{slug(name)}", work)
            for seed in self.seeds:
                work = partial(self._result, data_dir, name, seed)
                yield self.cell(f"{self.group}/seed{seed}/{slug(name)}", work)

    def _result(self, data_dir: Path, name: str, seed: int, session: Session) -> Row:
        best = most_accurate(session, group=self.group, run=name)
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
            "setting": "",
            "run": name,
            "seed": seed,
            "is_tuning": is_tuning,
            "lr": lr,
            "accuracy": sum(accuracies[-LAST_LOOKS:]) / len(accuracies[-LAST_LOOKS:]),
            "seconds": history[-1].time,
            "bytes": history[-1].bytes_sent,
            "times": [each.time for each in history],
            "accuracies": accuracies,
        }

    def plain(self) -> dict[str, object]:
        """Describe in JSON what its rows depend on, but for problem and seed."""
        return {"stages": asdict(self.stages), "rates": RATES, "methods": self.methods}


def methods(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """Eight ways to train eight layers in four stages, tuned alike: accuracy, time, bytes.

    Args:
        settings: What to change.
    """
    names = (*COMPETITORS, *METHODS)
    stages = TWO_LAYERS_EACH
    problems: tuple[Problem, ...] = (MNIST, CIFAR10)
    if settings.short:
        names, problems = (WHOLE, "greedy"), (DIGITS,)
        stages = StageSettings(width=0.1, num_stages=2)
    contests = [
        StageContest(
            problem=problem,
            seed=settings.seeds[0],
            stages=stages,
            methods=names,
            seeds=settings.seeds,
        )
        for problem in problems
    ]
    depends_on, cells = settings_and_cells(contests, settings)
    return Study(
        name="synthetic-gradients/methods",
        title="What does it cost, and save, to train the stages of a model apart?",
        printed=(
            "Eight layers, convolutional and fully connected: accuracy comparable to "
            "back-propagation, 11 % faster on several limited containers than the whole model "
            "on an unlimited machine (HotEdge 2019; only the abstract is known to us).",
        ),
        scaled_down=(),
        settings={**depends_on, "contest": contests[0].plain()},
        cells=cells,
        exhibit=_exhibits,
    )


NOTE = (
    "Medians over the seeds; as many samples for all, virtual time on equally fast machines."
    " Accuracy is the mean of the last five looks, on test data. The learning rate is the "
    "best of three, on held-out data with another seed. The whole model is trained on one "
    "machine."
)


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    results = [row for row in rows.values() if not row["is_tuning"]]
    if not results:
        return Exhibits()
    scores = _scores(results)
    groups = dict.fromkeys(row["group"] for row in results)
    panels = [_curves(results, group) for group in groups]
    figure = Figure(
        name="methods",
        heading="Accuracy of models that are trained in stages",
        caption="Bars: medians over the seeds, thin lines their range. Curves: one seed.",
        panels=(bars(scores, "accuracy", y_label="accuracy"), *panels),
    )
    table = score_table(scores, heading="Ours", note=NOTE, setting="")
    return Exhibits(figures=(figure,), tables=(table,))


def _curves(rows: Iterable[Row], group: str) -> Panel:
    mine = [row for row in rows if row["group"] == group]
    first = [row for row in mine if row["seed"] == min(each["seed"] for each in mine)]
    return Panel(
        title=group,
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label="accuracy",
        y_unit="percent",
        series=tuple(
            Series(name=row["run"], x=tuple(row["times"]), y=tuple(row["accuracies"]))
            for row in first
        ),
    )


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
                "learning rate": ("number", row["lr"]),
            },
        )
        for row in rows
    ]


def _more(row: Row, whole: Row | None) -> float | None:
    return None if whole is None else row["accuracy"] - whole["accuracy"]
