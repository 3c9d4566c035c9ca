"""A language model on uneven machines: bits per character against time and bytes.

Fields of a row:
    lr, is_tuning: Learning rate, and whether the run only tried it.
    bound: Bound on the speed-up from not waiting.
    times, values, bytes, samples: One number per evaluation; bytes are per worker.
    metric: Metric of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import edgegossip.algorithms.gossip
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.contract.topology import complete, ring
from edgegossip.data.dataset import Dataset
from edgegossip.data.texts import books, texts
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.language import LanguageSettings, language_task, slowest_seconds
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.studies.server_tuning import TUNING_SEED, without_test_data
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure
from edgegossip.runs.experiment import Experiment, throughput_bound
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
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.link import Links
from edgegossip.sim.platform import uneven
from edgegossip.training.task import Task

NUM_WORKERS = 4
BASELINE = "diloco"
RATES = (1e-3, 3e-3)
TUNING_SHARE = 0.25
"""Length of a run that tries a learning rate, as a share of the length of a result's run."""
VALIDATION_SHARE = 0.05
NUM_EVALUATIONS = 24
NUM_TUNING_EVALUATIONS = 4
SETTINGS = {"all authors on all machines": True, "two authors on each machine": False}
"""Whether the pieces of text are assigned at random, by setting."""
MODEL = LanguageSettings(num_epochs=4.0, num_workers=NUM_WORKERS, batch_size=8, num_test=200)
SHORT = replace(
    MODEL, num_epochs=2.0, local_steps=2, width=8, num_layers=1, num_heads=1, num_test=20
)


def algorithms(local_steps: int) -> dict[str, Algorithm[Any]]:
    """The contenders; see `authors`."""
    everyone: dict[str, Any] = {"topology": complete(NUM_WORKERS), "num_rounds": UNTIL_CUT_OFF}
    dense = DiLoCo(**everyone, local_steps=local_steps)
    sparse = replace(dense, compressor=compressor(0.0625, 4))
    return {
        BASELINE: dense,
        "edge-diloco": EdgeGossip(inner=dense),
        "diloco-compressed": sparse,
        "edge-diloco-compressed": EdgeGossip(inner=sparse),
        "gossip": Gossip(topology=ring(NUM_WORKERS), num_rounds=UNTIL_CUT_OFF, local_steps=8),
        "all-reduce": AllReduce(**everyone),
    }


@dataclass(frozen=True, kw_only=True)
class LanguageContest:
    """All contenders for the same time: rates are tried on one seed, results use other seeds.

    Args:
        setting: Key of `SETTINGS`.
        model: Settings of the model, the optimizer and the machines.
        names: Names of the contenders.
        seeds: Seeds of the results.
        is_short: Whether to learn from the package's own source instead of books.
    """

    setting: str
    model: LanguageSettings
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    is_short: bool

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        """Make the cells."""
        group = "mixed" if SETTINGS[self.setting] else "by-author"

        def cell(place: str, run: str, seed: int, lr: float | None, *after: str) -> Cell:
            work = partial(self._run, data_dir, run, seed, lr)
            return Cell(name=f"{group}/{place}/{run}", group=group, work=work, after=after)

        for run in self.names:
            rates = [cell(f"tuning/lr-{lr:g}", run, TUNING_SEED, lr) for lr in RATES]
            yield from rates
            for seed in self.seeds:
                yield cell(f"seed{seed}", run, seed, None, *(each.name for each in rates))

    def _task(self, data_dir: Path, lr: float, *, is_tuning: bool) -> Task:
        context = self.model.context
        dataset = _sources(context) if self.is_short else books(data_dir, context)
        if is_tuning:
            dataset = without_test_data(dataset, VALIDATION_SHARE)
        mixed = SETTINGS[self.setting]
        return language_task(dataset, replace(self.model, lr=lr, mixed=mixed))

    def _run(
        self, data_dir: Path, run: str, seed: int, lr: float | None, session: Session
    ) -> Row:
        is_tuning = lr is not None
        if lr is None:
            lr = _best_rate(session.rows.values(), self.setting, run)
        task = self._task(data_dir, lr, is_tuning=is_tuning)
        platforms = uneven(NUM_WORKERS, self.model.throughput)
        seconds = slowest_seconds(self.model, task, platforms)
        num_evaluations = NUM_EVALUATIONS
        if is_tuning:
            seconds, num_evaluations = TUNING_SHARE * seconds, NUM_TUNING_EVALUATIONS
        results = session.run(
            Experiment(
                task=task,
                algorithm=algorithms(self.model.local_steps)[run],
                platforms=platforms,
                links=Links(default=HOME_LINK),
                seed=seed,
                max_seconds=seconds,
                evaluation_interval=seconds / num_evaluations,
                name=run,
            )
        )
        return {
            "group": "",
            "setting": self.setting,
            "run": run,
            "seed": seed,
            "is_tuning": is_tuning,
            "lr": lr,
            "bound": throughput_bound(platforms),
            **learning_curve(results),
            "bytes": [each.bytes_sent / NUM_WORKERS for each in results.history],
            "samples": [each.samples_processed for each in results.history],
        }


def _sources(context: int) -> Dataset:
    """Four files of this package, as if by four authors."""
    folder = Path(edgegossip.algorithms.gossip.__file__).parent
    named = ("gossip", "gosgd", "adpsgd", "diloco")
    return texts("sources", [folder / f"{name}.py" for name in named], context)


def _best_rate(rows: Iterable[Row], setting: str, run: str) -> float:
    tried = [
        row
        for row in rows
        if row["is_tuning"] and (row["setting"], row["run"]) == (setting, run)
    ]
    best: Row = min(tried, key=lambda row: min(values_of(row)))
    return float(best["lr"])


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
            setting=setting,
            model=model,
            names=names,
            seeds=settings.seeds,
            is_short=settings.short,
        )
        for setting in SETTINGS
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
    figure = Figure(
        name="authors",
        heading="Bits per character against time, bytes and samples",
        caption=f"{first[1].capitalize()}; one seed.",
        panels=tuple(
            curves(results, first, label.capitalize(), label, x=x, x_unit=unit, is_x_log=is_log)  # type: ignore[arg-type]
            for x, label, unit, is_log in axes
        ),
    )
    return Exhibits(figures=(figure,), tables=(score_table(found, heading="Ours", note=NOTE),))


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
