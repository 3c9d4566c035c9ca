"""The runs of a plan: a ladder of short runs for each candidate, and whole runs of the best."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Seconds, Steps, Train
from edgegossip.plan.candidates import Proposal
from edgegossip.plan.halving import Cost, Ranking, ladders
from edgegossip.plan.machines import Machine, links_between
from edgegossip.plan.ranking import (
    by,
    carried_out,
    curve,
    default_target,
    diverged,
    has_learned,
    in_order,
    ranked,
    use_of_machines,
)
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.runner import run
from edgegossip.runs.study import Cell, Row, Session
from edgegossip.runs.tracking import Progress, Status
from edgegossip.runs.tuning import TUNING_SEED, without_test_data
from edgegossip.training.task import Workload

LOOKS = 60
"""Number of evaluations in a whole run."""
LEAST_LOOKS = 20
"""Minimum number of evaluations in a short run."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The machines on which candidates are tried, and the common settings of all runs.

    Args:
        machines: One for each rank.
        measured: Samples per second of this machine, for relative speeds.
        seconds: Duration of a whole run.
        held_out: Share of the training samples on which runs are judged; 0 for the test split.
        target: Value of the metric to reach; None for the default.
        tuning_until: Wall-clock time, in seconds since 1970, from which on no more runs for
            tuning begin; None for no such time.
        until: The same for runs with more than one seed.
    """

    machines: tuple[Machine, ...]
    measured: float
    seconds: Seconds
    held_out: float
    target: float | None
    tuning_until: float | None = None
    until: float | None = None

    @property
    def speeds(self) -> list[float]:
        """Samples per second of each machine."""
        return [each.platform(self.measured).throughput for each in self.machines]

    def experiment(self, proposal: Proposal, seed: int, share: float = 1.0) -> Experiment:
        """Make the experiment that runs a proposal on these machines."""
        seconds = share * self.seconds
        experiment = proposal.experiment(seed, seconds)
        dataset = experiment.task.dataset
        if self.held_out:
            dataset = without_test_data(dataset, self.held_out)
        experiment = replace(experiment, task=replace(experiment.task, dataset=dataset))
        return self.placed(experiment, seconds, max(LEAST_LOOKS, round(LOOKS * share)))

    def placed(
        self, experiment: Experiment, seconds: Seconds, num_evaluations: int
    ) -> Experiment:
        """Put an experiment on these machines for this time, evaluated so many times."""
        return replace(
            experiment,
            platforms=tuple(each.platform(self.measured) for each in self.machines),
            links=links_between(self.machines),
            max_seconds=seconds,
            evaluation_interval=seconds / num_evaluations,
            evaluation_epochs=None,
            profiles={},
        )

    def row(
        self,
        proposal: Proposal,
        seed: int,
        share: float,
        session: Session,
        until: float | None = None,
    ) -> Row:
        """Run a proposal and return its row; the run may diverge.

        Args:
            proposal: The proposal.
            seed: Seed of the run.
            share: Length, as a share of a whole run.
            session: Resources for the run.
            until: Wall-clock time from which on the run is left out; None for no such time.
        """
        found: dict[str, Any] = {
            "run": proposal.label,
            "algorithm": proposal.only,
            "seed": seed,
            "share": share,
        }
        experiment = self.experiment(proposal, seed, share)
        if until is not None and time.time() >= until:
            return {**found, **diverged(experiment.task.metric), "is_skipped": True}
        try:
            results = session.run(experiment)
        except TrainingError as error:  # it has diverged: a result, and not a failed plan
            lost = diverged(experiment.task.metric)
            return {**found, **lost, "idle": 0.0, "uplink": 0.0, "error": str(error)}
        use = {} if share < 1 else use_of_machines(session.folder, self.speeds)
        return {**found, **curve(results), **use}


def cells_of(
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
    whole_runs: float,
    seeds: Sequence[int],
) -> tuple[Cell, ...]:
    """All runs: the rungs of each candidate, then whole runs of its best setting.

    The seeds of rungs begin with `TUNING_SEED`.

    Args:
        fleet: The machines.
        proposals: Settings to try for each algorithm.
        whole_runs: Budget for tuning one algorithm, in whole runs; see `ladders`.
        seeds: Seeds of the whole runs.
    """
    numbers = {only: len(some) for only, some in proposals.items()}
    tuning, last = list[Cell](), dict[str, list[str]]()
    tune = partial(_run_placed, fleet, until=fleet.tuning_until)
    rank = partial(_run_placed, fleet, place=0, share=1.0, rung={})
    for only, ladder in ladders(numbers, whole_runs).items():
        some = tuple(proposals[only][: ladder.num_settings])
        before, seed = list[str](), TUNING_SEED
        for number, rung in enumerate(ladder.rungs, start=1):
            about = {"rung": number, "num_rungs": len(ladder.rungs)}
            run = partial(tune, some, share=rung.share, rung=about)
            cells = [
                Cell(
                    name=f"tuning/{only}/rung{number}/{place + 1}/seed{each}",
                    group="tuning",
                    work=partial(run, place=place, seed=each),
                    after=tuple(before),
                )
                for place in range(rung.num_settings)
                for each in range(seed, seed + rung.num_seeds)
            ]
            tuning += cells
            before, seed = [cell.name for cell in cells], seed + rung.num_seeds
        last[only] = before
    # All candidates wait for the last rungs of all, because these set the common target.
    after = tuple(name for names in last.values() for name in names)
    ranking = [
        Cell(
            name=f"{only}/seed{seed}",
            group="ranking",
            work=partial(
                rank,
                tuple(proposals[only]),
                seed=seed,
                # The first seed is run in any case, so that there is a ranking.
                until=fleet.until if seed != seeds[0] else None,
            ),
            after=after,
        )
        for seed in seeds  # outside, so that all have as many if the budget runs out
        for only in proposals
    ]
    return (*tuning, *ranking, *_finals(fleet, proposals, ranking, seeds))


def _finals(
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
    ranking: Sequence[Cell],
    seeds: Sequence[int],
) -> Iterator[Cell]:
    """More seeds for the best candidates, because few seeds rank close candidates by chance."""
    known = {each.label: each for some in proposals.values() for each in some}
    race = Ranking(len(proposals), len(seeds))
    for place in range(race.num_finalists):
        for seed in range(max(seeds) + 1, max(seeds) + 1 + race.num_final_seeds):
            yield Cell(
                name=f"finalist{place + 1}/seed{seed}",
                group="ranking",
                work=partial(_run_finalist, fleet, known, place, seed),
                after=tuple(cell.name for cell in ranking),
            )


def _run_finalist(
    fleet: Fleet, known: Mapping[str, Proposal], place: int, seed: int, session: Session
) -> Row:
    _, order = ranked(carried_out(session.rows.values()), fleet.target)
    run = order[min(place, len(order) - 1)].run
    return {**fleet.row(known[run], seed, 1.0, session, fleet.until), "is_final": True}


def _run_placed(
    fleet: Fleet,
    proposals: tuple[Proposal, ...],
    session: Session,
    *,
    place: int,
    share: float,
    rung: Mapping[str, int],
    seed: int,
    until: float | None,
) -> Row:
    """Run the proposal of one algorithm that is at a place in the ranking so far."""
    proposal = best_of(proposals, session.rows, fleet.target, place)
    return {**fleet.row(proposal, seed, share, session, until), **rung}


def best_of(
    proposals: Sequence[Proposal],
    rows: Mapping[str, Row],
    target: float | None,
    place: int = 0,
) -> Proposal:
    """The proposal of one algorithm at a place in the ranking, by default the best.

    Before any run, and if no run of this algorithm has learned anything, the order of
    `proposals` applies, because the runs' own would be chance.

    Args:
        proposals: Proposals of one algorithm, in the order that applies before any run.
        rows: Rows of the rungs, of any algorithms.
        target: Value of the metric to reach; None for the default.
        place: Place in the ranking, from 0.
    """
    done = carried_out(rows.values())
    mine = by("algorithm", done).get(proposals[0].only)
    if mine is None or not has_learned(mine):
        return proposals[place]
    order = in_order(mine, default_target(done) if target is None else target)
    known = {each.label: each for each in proposals}
    return known[order[min(place, len(order) - 1)]]


# How long it takes.


def measured_throughput(experiment: Experiment, seconds: Seconds = 2.0) -> float:
    """Measure the training samples per second of one core of this machine."""
    ranks = experiment.data_ranks
    workload = Workload(experiment.task, ranks, experiment.seed, experiment.algorithm.role)
    trainer, params = workload.make_trainer(ranks[0]), workload.initial_params(ranks[0])
    num_samples, began = 0, None
    with one_intra_op_thread():
        while began is None or time.perf_counter() - began < seconds:
            result = trainer.train(Train(params, Steps(5)))
            if began is None:  # the first steps are a warmup
                began = time.perf_counter()
            else:
                num_samples += result.num_samples
    return num_samples / (time.perf_counter() - began)


def measured_cost(fleet: Fleet, proposal: Proposal, seconds: Seconds = 1.0) -> Cost:
    """Time the beginning of a proposal's whole run, for at least `seconds` seconds."""
    watch, began = _Watch(seconds), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, suppress(_EnoughError):
        experiment = fleet.experiment(proposal, TUNING_SEED)
        run(experiment, out=Path(folder) / "pilot", num_threads=0, progress=watch)
    (first, _), *_, (last, time_there) = watch.seen  # the first one is at time 0
    whole = (last - first) * fleet.seconds / time_there
    return Cost(start=first - began, whole=whole)


class _EnoughError(Exception):
    """Signals that enough of a run has been timed."""


class _Watch(Progress):
    """Ends a run after some seconds, at one of its evaluations."""

    def __init__(self, seconds: Seconds) -> None:
        self.seen: list[tuple[float, Seconds]] = []
        self._seconds = seconds

    def update(self, status: Status) -> None:
        self.seen.append((time.perf_counter(), status.time))
        if len(self.seen) > 1 and self.seen[-1][0] - self.seen[0][0] >= self._seconds:
            raise _EnoughError
