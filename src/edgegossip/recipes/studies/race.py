"""EpochGossip against others, on the same data and machines: cells of one run each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.core.algorithm import Algorithm
from edgegossip.core.errors import TrainingError
from edgegossip.core.protocol import (
    Seconds,
)
from edgegossip.core.topology import complete
from edgegossip.experiments.describe import describe
from edgegossip.experiments.experiment import Experiment, throughput_bound
from edgegossip.experiments.results import Results
from edgegossip.experiments.study import Cell, Row, Session
from edgegossip.learning.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.learning.task import Workload
from edgegossip.recipes.baselines import HOME_LINK, UNTIL_CUT_OFF
from edgegossip.recipes.recipe_settings import ACCURACY_AWARE
from edgegossip.recipes.rehearsal import epoch_gossip_seconds
from edgegossip.recipes.studies.events import TrainingEvents
from edgegossip.recipes.studies.platforms import time_ratio
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform


@dataclass(frozen=True)
class Contender:
    """Who races against EpochGossip.

    Args:
        accuracy_aware: How EdgeGossip chooses samples; None to do without EdgeGossip.
        inner: What EdgeGossip goes around, or what runs without it.
    """

    accuracy_aware: AccuracyAware | None = ACCURACY_AWARE
    inner: Literal["epoch-gossip", "gosgd"] = "epoch-gossip"


Runs: TypeAlias = Mapping[str, Contender]
"""Contenders by the name of the run."""

BASELINE = "epoch-gossip"
MAX_WORK = 1.2


def work_limit(settings: StudySettings, wanted: float | None = MAX_WORK) -> float | None:
    """What a study's races are limited to; see `Race`."""
    # In the short form they would be over before anybody gets anywhere.
    return None if settings.short else wanted


def less_work(wanted: float | None = MAX_WORK) -> tuple[str, ...]:
    """What a report says of that limit."""
    if wanted is None:
        return ()
    return (
        f"The others run until they have processed {wanted:g} times as many samples as "
        "EpochGossip, or for its time if that is shorter; all of them for the same virtual "
        "time.",
    )


def how_contenders_run() -> dict[str, Any]:
    """What rows depend on besides the problem, in JSON: `EdgeGossip` as it is by default."""
    edge_gossip = EdgeGossip(inner=EpochGossip(topology=complete(1), num_rounds=1))
    described = describe(edge_gossip)
    del described["inner"]
    return {"accuracy_aware": describe(ACCURACY_AWARE), "edge_gossip": described}


CONTROLS: Runs = {
    "random": Contender(PLAIN),
    "gosgd": Contender(None, "gosgd"),
}
"""What EdgeGossip has to beat: the same shares of data chosen at random, and no barrier."""

CONTENDERS: Runs = {"edge-gossip": Contender(), **CONTROLS}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Machines to race on.

    Args:
        name: E.g. "imbalance 4".
        platforms: One for each worker.
        runs: Who races against EpochGossip, by the name of the run.
    """

    name: str
    platforms: tuple[Platform, ...]
    runs: Runs


@dataclass(frozen=True, kw_only=True)
class Race:
    """One problem and seed, on machines of the same number but different speeds.

    EpochGossip is trained once: the accuracies after its epochs do not depend on speeds, only
    their times do, and those are simulated without training. The others run for EpochGossip's
    time, or until they have processed `max_work` times as many samples if that is sooner.

    Args:
        group: What `--only` picks.
        problem: What is learnt.
        setups: Machines to race on, with equally many workers.
        seed: Of everything random.
        max_work: Samples they process, in multiples of EpochGossip's; None for no such limit.
    """

    group: str
    problem: Problem
    setups: tuple[Setup, ...]
    seed: int
    max_work: float | None = None

    @property
    def num_workers(self) -> int:
        """Of each setup."""
        return len(self.setups[0].platforms)

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        """The runs; data is read when the first of them begins."""
        folder = f"{self.group}/{self.num_workers}-workers/seed{self.seed}"
        baseline = f"{folder}/{BASELINE}"
        cell = partial(Cell, group=self.group, scaled_down=self.problem.scaled_down)
        yield cell(name=baseline, work=partial(self._baseline, data_dir))
        for setup in self.setups:
            for name in setup.runs:
                yield cell(
                    name=f"{folder}/{setup.name.replace(' ', '-')}/{name}",
                    work=partial(self._contender, data_dir, baseline, setup, name),
                )

    def _baseline(self, data_dir: Path, session: Session) -> Row:
        """Train EpochGossip on equal platforms, and say when its epochs end on each setup."""
        settings = self.problem.settings
        task = self.problem.task(data_dir)
        workload = Workload(task, range(self.num_workers), self.seed)
        largest = max(len(shard) for shard in workload.shards.values())
        results = session.run(
            Experiment(
                task=task,
                algorithm=self._epoch_gossip(settings.num_epochs),
                platforms=(Platform(throughput=settings.throughput),) * self.num_workers,
                seed=self.seed,
                # A hair after each epoch: later nobody has got through the next one.
                evaluation_interval=largest / settings.throughput * (1 + 1e-9),
                name=BASELINE,
            )
        )
        return self._facts(None, BASELINE) | {
            "accuracies": [evaluation.accuracy for evaluation in results.history],
            "num_epochs": settings.num_epochs,
            "num_train": len(task.dataset.train),
            "setups": {setup.name: self._times(workload, setup) for setup in self.setups},
        }

    def _times(self, workload: Workload, setup: Setup) -> dict[str, Any]:
        num_epochs, platforms = self.problem.settings.num_epochs, setup.platforms
        fastest = max(platforms, key=lambda platform: platform.total_throughput)
        equal = (fastest,) * len(platforms)
        seconds = partial(epoch_gossip_seconds, workload, link=HOME_LINK)
        return {
            "epoch_ends": [
                0.0,
                *(seconds(platforms, num_epochs=k + 1) for k in range(num_epochs)),
            ],
            "round_seconds": seconds(equal, num_epochs=1),
            "throughput_bound": throughput_bound(platforms),
            "time_ratio": time_ratio(platforms),
        }

    def _contender(
        self, data_dir: Path, baseline: str, setup: Setup, name: str, session: Session
    ) -> Row:
        """Run one of the others on one setup."""
        if baseline not in session.rows:
            raise TrainingError(
                f"nothing to compare with: {baseline} failed, or is not among --runs"
            )
        times = session.rows[baseline]["setups"][setup.name]
        task = self.problem.task(data_dir)
        contender = setup.runs[name]
        is_gosgd = contender.inner == "gosgd"
        if contender.accuracy_aware is not None:
            task = replace(task, accuracy_aware=contender.accuracy_aware)
        results = session.run(
            Experiment(
                task=task,
                algorithm=self._algorithm(contender),
                platforms=setup.platforms,
                links=Links(default=HOME_LINK),
                seed=self.seed,
                max_seconds=self._max_seconds(times),
                # What has not changed is not measured again; GoSGD's model always has.
                evaluation_interval=times["round_seconds"] / (2 if is_gosgd else 10),
                name=name,
            )
        )
        return self._facts(setup.name, name) | _found(results, session.folder, self.problem)

    def _facts(self, setup: str | None, run: str) -> dict[str, Any]:
        return {
            "group": self.group,
            "problem": self.problem.name,
            "setup": setup,
            "run": run,
            "seed": self.seed,
        }

    def _max_seconds(self, times: Mapping[str, Any]) -> Seconds:
        whole: Seconds = times["epoch_ends"][-1]
        if self.max_work is None:
            return whole
        # In this time those who never wait process `max_work` times as many samples.
        return min(whole, self.max_work * whole / float(times["throughput_bound"]))

    def _epoch_gossip(self, num_rounds: int) -> EpochGossip:
        return EpochGossip(topology=complete(self.num_workers), num_rounds=num_rounds)

    def _algorithm(self, contender: Contender) -> Algorithm[Any]:
        inner: Algorithm[Any] = (
            self._gosgd() if contender.inner == "gosgd" else self._epoch_gossip(UNTIL_CUT_OFF)
        )
        return inner if contender.accuracy_aware is None else EdgeGossip(inner=inner)

    def _gosgd(self) -> GoSGD:
        return GoSGD(
            topology=complete(self.num_workers),
            num_rounds=UNTIL_CUT_OFF,
            exchange_probability=self.problem.settings.exchange_probability,
            seed=self.seed,
        )


def _found(results: Results, folder: Path, problem: Problem) -> dict[str, Any]:
    """What a run has shown: its curve, and what its events say about shares and looks."""
    events = TrainingEvents(folder / "events.jsonl")
    left = events.sent_by(problem.settings.num_epochs)
    before = [None, *(evaluation.accuracy for evaluation in results.history)]
    kept = [
        evaluation
        for evaluation, earlier in zip(results.history, before, strict=False)
        if evaluation.accuracy != earlier or evaluation is results.history[-1]
    ]
    return {
        # When it changed, and the end.
        "times": [evaluation.time for evaluation in kept],
        "accuracies": [evaluation.accuracy for evaluation in kept],
        "equal_epochs_time": None if left is None else left + HOME_LINK.latency,
        "kept_shares": events.kept_shares(),
        "look_share": events.look_share(),
        "samples_processed": results.history[-1].samples_processed,
        "bytes_sent": results.history[-1].bytes_sent,
    }


def races_of(
    problem: Problem, setups: tuple[Setup, ...], settings: StudySettings
) -> list[Race]:
    """The races on these machines, one for each seed."""
    return [
        Race(
            group=problem.name,
            problem=problem,
            setups=setups,
            seed=seed,
            max_work=work_limit(settings),
        )
        for seed in settings.seeds
    ]
