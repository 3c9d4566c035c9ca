"""A language model on uneven machines: bits per character against time and bytes.

Fields of a row:
    bound: Bound on the speed-up from not waiting.
    times, values, bytes, samples: One number per evaluation; bytes are per worker.
    metric: Metric of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import edgegossip as eg
import edgegossip.algorithms.gossip
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.language import LanguageSettings, language_task, slowest_seconds
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import throughput_bound
from edgegossip.runs.scoreboard import (
    Measures,
    contest_key,
    curves,
    learning_curve,
    metric_of,
    score_table,
    scores,
    values_of,
)
from edgegossip.runs.study import Row, Session, Study
from edgegossip.runs.tuning import without_test_data
from studies.contest import Attempt, StudySettings, Tried, TunedContest
from studies.exhibits import figure_and_tables

NUM_WORKERS = 4
BASELINE = "diloco"
RATES = (1e-3, 3e-3)
TUNING_SHARE = 0.25
"""Length of a run that tries a learning rate, as a share of the length of a result's run."""
VALIDATION_SHARE = 0.05
NUM_EVALUATIONS = 24
NUM_TUNING_EVALUATIONS = 4
SETTINGS = {
    "mixed": "all authors on all machines",
    "by-author": "two authors on each machine",
}
"""Where the pieces of text are, by part of the study."""
MODEL = LanguageSettings(num_epochs=4.0, num_workers=NUM_WORKERS, batch_size=8, num_test=200)
SHORT = replace(
    MODEL, num_epochs=2.0, local_steps=2, width=8, num_layers=1, num_heads=1, num_test=20
)


def algorithms(local_steps: int) -> dict[str, eg.Algorithm[Any]]:
    """The contenders; see `authors`."""
    everyone: dict[str, Any] = {
        "topology": eg.complete(NUM_WORKERS),
        "num_rounds": eg.UNTIL_CUT_OFF,
    }
    dense = eg.DiLoCo(**everyone, local_steps=local_steps)
    sparse = replace(dense, compressor=compressor(0.0625, 4))
    return {
        BASELINE: dense,
        "edge-diloco": eg.EdgeGossip(inner=dense),
        "diloco-compressed": sparse,
        "edge-diloco-compressed": eg.EdgeGossip(inner=sparse),
        "gossip": eg.Gossip(
            topology=eg.ring(NUM_WORKERS), num_rounds=eg.UNTIL_CUT_OFF, local_steps=8
        ),
        "all-reduce": eg.AllReduce(**everyone),
    }


@dataclass(frozen=True, kw_only=True)
class Books(Problem):
    """Texts of several authors, and a language model.

    Args:
        language: Settings of the model, the optimizer and the machines.
        is_short: Whether to learn from the package's own source instead of books.
    """

    dataset: str = "books"
    model: Callable[..., nn.Module] = eg.gpt
    language: LanguageSettings = MODEL
    is_short: bool = False

    def task(self, data_dir: Path) -> eg.Task:
        context = self.language.context
        dataset = _sources(context) if self.is_short else eg.books(data_dir, context)
        if self.held_out:
            dataset = without_test_data(dataset, self.held_out)
        return language_task(dataset, replace(self.language, lr=self.settings.lr))


@dataclass(frozen=True, kw_only=True)
class LanguageContest(TunedContest):
    """All contenders for the same time: rates are tried on one seed, results use other seeds.

    Args:
        names: Names of the contenders.
    """

    problem: Books
    names: tuple[str, ...]

    @property
    def held_out(self) -> float:
        return VALIDATION_SHARE

    @property
    def folder(self) -> str:
        return self.group  # there is one setting for each

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        return self.trials_of_rates(self.names, RATES)

    def facts(self) -> Row:
        return {"group": "", "setting": self.setting}

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return -min(values_of(trial))

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        model, num_evaluations = self.problem.language, NUM_EVALUATIONS
        task = self.problem_of(attempt).task(data_dir)
        platforms = eg.uneven(NUM_WORKERS, model.throughput)
        seconds = slowest_seconds(model, task, platforms)
        if attempt.is_tuning:
            seconds, num_evaluations = TUNING_SHARE * seconds, NUM_TUNING_EVALUATIONS
        results = session.run(
            eg.Experiment(
                task=task,
                algorithm=algorithms(model.local_steps)[attempt.run],
                platforms=platforms,
                links=eg.Links(default=HOME_LINK),
                seed=attempt.seed,
                max_seconds=seconds,
                evaluation_interval=seconds / num_evaluations,
                name=attempt.run,
            )
        )
        return {
            "bound": throughput_bound(platforms),
            **learning_curve(results),
            "bytes": [each.bytes_sent / NUM_WORKERS for each in results.history],
            "samples": [each.samples_processed for each in results.history],
        }


def _sources(context: int) -> eg.Dataset:
    """Four files of this package, as if by four authors."""
    folder = Path(edgegossip.algorithms.gossip.__file__).parent
    named = ("gossip", "gosgd", "adpsgd", "diloco")
    return eg.texts("sources", [folder / f"{name}.py" for name in named], context)


def authors(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2)),
    *,
    num_epochs: float = MODEL.num_epochs,
    width: int = MODEL.width,
    num_layers: int = MODEL.num_layers,
    throughput: float = MODEL.throughput,
) -> Study:
    """DiLoCo, EdgeGossip around it, gossip, all-reduce: bits per character, time, bytes.

    Args:
        settings: Settings of the study.
        num_epochs: Passes of the slowest machine over an even share of the data.
        width: Size of an embedding.
        num_layers: Blocks of the model.
        throughput: Training samples per second of the fastest machine.
    """
    check_range("width", width, "at least 1")
    model = SHORT
    if not settings.short:
        model = replace(MODEL, num_epochs=num_epochs, throughput=throughput)
        model = replace(model, width=width, num_layers=num_layers)
    runs = algorithms(model.local_steps)
    names = (BASELINE, "edge-diloco") if settings.short else tuple(runs)
    contests = [
        LanguageContest(
            problem=Books(
                name=name,
                language=replace(model, mixed=name == "mixed"),
                is_short=settings.short,
            ),
            setting=setting,
            names=names,
            seeds=settings.seeds,
        )
        for name, setting in SETTINGS.items()
    ]
    return Study(
        name="language/authors",
        title="How many bits per character are reached, in what time and with how many bytes?",
        printed=("No paper compares these systems on unequal machines.",),
        scaled_down=(_scale(model),),
        settings={
            **settings.plain(),
            "model": describe(model),
            "rates": list(RATES),
            "tuning_share": TUNING_SHARE,
            "algorithms": {name: describe(runs[name]) for name in names},
        },
        cells=tuple(cell for each in contests for cell in each.cells(settings.data_dir)),
        exhibit=_exhibits,
    )


def _scale(model: LanguageSettings) -> str:
    with torch.random.fork_rng(devices=[]):
        network = language_task(_sources(model.context), model).model
        assert not isinstance(network, Mapping)  # the model is whole
        number = sum(each.numel() for each in network().parameters())
    return f"The model has {number:,} parameters and sees {model.context} bytes at once."


NOTE = (
    "Medians over the seeds; four machines of speed 1, 0.8, 0.33 and 0.25, 100 Mbit/s, the "
    "same time and equally many evaluations for all. The target is the lowest bits per "
    "character of `diloco` with the same seed. The bound is the speed-up from eliminating "
    "waiting alone. The learning rate is the better of two, on held-out text with another "
    "seed. Bytes are the total sent, divided by the number of workers."
)


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    results = [row for row in rows.values() if not row["is_tuning"]]
    if not results:
        return Exhibits()
    dense = {contest_key(row): row for row in results if row["run"] == "all-reduce"}
    found = scores(results, BASELINE, 0.0, partial(_measures, dense))
    first = contest_key(results[0])
    axes = (
        ("times", "virtual time", "seconds", False),
        ("bytes", "sent per worker", "bytes", True),
        ("samples", "samples trained on", "number", False),
    )
    return figure_and_tables(
        "authors",
        "Bits per character against time, bytes and samples",
        f"{first[1].capitalize()}; one seed.",
        (
            curves(results, first, label.capitalize(), label, x=x, x_unit=unit, is_x_log=is_log)  # type: ignore[arg-type]
            for x, label, unit, is_log in axes
        ),
        score_table(found, heading="Ours", note=NOTE),
    )


def _measures(
    dense: Mapping[Any, Row],
    row: Row,
    baseline: Row | None,
    time: Seconds | None,
    speedup: float | None,
) -> Measures:
    values, beside = values_of(row), dense.get(contest_key(row))
    is_baseline = row["run"] == BASELINE
    of_bound = None if speedup is None or is_baseline else speedup / row["bound"]
    fewer = None if beside is None else beside["bytes"][-1] / row["bytes"][-1]
    return {
        f"best {metric_of(row).name}": ("number", min(values)),
        "at the end": ("number", values[-1]),
        "time to target": ("seconds", time),
        "speed-up": ("times", speedup),
        "of the bound": ("percent", of_bound),
        "sent": ("bytes", row["bytes"][-1]),
        "less than all-reduce": ("times", fewer),
        "samples": ("number", row["samples"][-1]),
        "learning rate": ("number", row["lr"]),
    }
