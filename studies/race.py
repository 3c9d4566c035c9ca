"""Races of EpochGossip against other algorithms on the same data and machines.

Fields of a row:
    group, problem, setup, run, seed: Names of the race and the run.
    contender, throughputs, link: What ran, on which machines; not in EpochGossip's row.
    waits: Whether fast workers wait for slow ones after each epoch; not in EpochGossip's row.
    accuracies: EpochGossip's at the start and after each of its epochs; a contender's, with
        `times`, at each change and at the end.
    setups: In EpochGossip's row, for each set of machines: `epoch_ends`, `round_seconds` (an
        epoch of the fastest platform), `throughput_bound` and `time_ratio` (T_max / T_min).
    equal_epochs_time: Time after as many rounds as EpochGossip has epochs.
    kept_shares: Mean share of its data that each worker trained on per round.
    look_share: Share of the training cost that was spent on looks.
    samples_processed, bytes_sent: Totals of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import edgegossip as eg
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.data.partition import Proportional
from edgegossip.recipes.baselines import HOME_LINK, averaged, rounds_per_epoch
from edgegossip.recipes.epoch_times import epoch_gossip_seconds
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.published import BALANCING, READINGS, published_samples
from edgegossip.recipes.tasks import ACCURACY_AWARE, Window
from edgegossip.runs.describe import describe
from edgegossip.runs.events import EventReader
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import throughput_bound
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.platform import UNEVEN_SPEEDS
from edgegossip.training.sampling.accuracy_aware import PLAIN
from edgegossip.training.task import Workload
from studies.contest import Contender, Contenders, Contest, StudySettings, contest_study


def imbalanced(
    num_workers: int = 4, throughput: float = 1000.0, imbalance: float = 4.0
) -> tuple[eg.Platform, ...]:
    """Make platforms like `uneven`, with the fastest `imbalance` times as fast as the slowest.

    The speeds 1 : 0.8 : 0.33 : 0.25 are raised to the power log(imbalance) / log(4), which
    keeps the shape of their spread.

    Args:
        num_workers: Number of platforms, at least 1.
        throughput: Training samples per second of the fastest platform.
        imbalance: T_max / T_min, at least 1.

    Raises:
        ValueError: If `imbalance` is below 1.

    >>> [round(platform.throughput) for platform in imbalanced(imbalance=16)]
    [1000, 640, 109, 62]
    """
    check_range("imbalance", imbalance, "at least 1 and finite")
    exponent = math.log(imbalance) / math.log(1 / min(UNEVEN_SPEEDS))
    speeds = [speed**exponent for speed in UNEVEN_SPEEDS]
    return eg.uneven(num_workers, throughput, speeds)


def fast_and_slow(factor: float, throughput: float = 1000.0) -> tuple[eg.Platform, ...]:
    """Make two fast platforms, and two that are `factor` times slower.

    >>> [platform.throughput for platform in fast_and_slow(5)]
    [1000.0, 1000.0, 200.0, 200.0]
    """
    return eg.uneven(4, throughput, (1.0, 1.0, 1 / factor, 1 / factor))


def time_ratio(platforms: tuple[eg.Platform, ...]) -> float:
    """T_max / T_min for equal shards on idle platforms.

    >>> time_ratio(fast_and_slow(5))
    5.0
    """
    speeds = [platform.total_throughput for platform in platforms]
    return max(speeds) / min(speeds)


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """One round of a worker, from one message with its parameters to the next.

    Attributes:
        seconds: Length of the round; it begins with the previous round's exchange.
        num_blocks: Blocks of training, each after a forecast.
        num_samples: Samples that the worker trained on.
        cost: Cost of training and of looks at aggregated points, in training samples.
    """

    seconds: Seconds
    num_blocks: int
    num_samples: int
    cost: float


class TrainingEvents:
    """The lines of an `events.jsonl` about training and about parameters sent in rounds.

    Args:
        path: The file, which has at least its first line.

    Raises:
        RunFolderError: If the file cannot be read, or its first line is damaged.
    """

    def __init__(self, path: Path) -> None:
        reader = EventReader(path)
        self._sizes: list[int] = reader.header["shard_sizes"]
        lines = reader.of_type("trained", "sent")
        self._trained = [line for line in lines if line["type"] == "trained"]
        self._sent: dict[tuple[Rank, int], Any] = {
            (line["rank"], line["round"]): line
            for line in lines
            if line["type"] == "sent" and line["kind"] == "params"
        }

    def sent_by(self, num_rounds: int) -> Seconds | None:
        """Time at which all workers have sent their parameters of round `num_rounds` (from 1).

        None if a worker has not sent them, or the algorithm has no rounds.
        """
        lines = [self._sent.get((rank, num_rounds - 1)) for rank in range(len(self._sizes))]
        ends = [line["end"] for line in lines if line is not None]
        return max(ends) if len(ends) == len(lines) else None

    def kept_shares(self) -> list[float] | None:
        """The mean share of its samples that each worker trained on per round.

        None if a worker has not finished a round.
        """
        if {rank for rank, _ in self._sent} != set(range(len(self._sizes))):
            return None
        return [self._kept_share(rank, size) for rank, size in enumerate(self._sizes)]

    def _kept_share(self, rank: Rank, size: int) -> float:
        num_rounds = 1 + max(round_ for other, round_ in self._sent if other == rank)
        end = self._sent[rank, num_rounds - 1]["time"]
        done = sum(line["num_samples"] for line in self._training(rank, -math.inf, end))
        return done / (num_rounds * size) if size else 0.0

    def _training(self, rank: Rank, begin: Seconds, end: Seconds) -> list[Any]:
        """Lines of a worker's training after `begin`, up to `end`."""
        own = (line for line in self._trained if line["rank"] == rank)
        return [line for line in own if begin < line["time"] <= end]

    def round_work(self, rank: Rank, round_: int) -> RoundWork:
        """The work of `rank` in a round that it sent, except round 0, which has no start."""
        begin, end = (self._sent[rank, number]["time"] for number in (round_ - 1, round_))
        lines = self._training(rank, begin, end)
        return RoundWork(
            seconds=end - begin,
            num_blocks=len(lines),
            num_samples=sum(line["num_samples"] for line in lines),
            cost=sum(line["cost"] for line in lines),
        )

    def look_share(self, rank: Rank | None = None) -> float | None:
        """Share of training time that `rank` (or all ranks) spent looking at aggregated points.

        None without training.
        """
        lines = [line for line in self._trained if rank in (None, line["rank"])]
        cost = sum(line["cost"] for line in lines)
        samples = sum(line["num_samples"] for line in lines)
        return (cost - samples) / cost if cost else None


BASELINE = "epoch-gossip"
MAX_WORK = 1.2


def work_limit(settings: StudySettings, wanted: float | None = MAX_WORK) -> float | None:
    """The limit on work in a study's races; see `Race.max_work`."""
    # In the short form, races would end before any worker makes progress.
    return None if settings.short else wanted


def less_work(wanted: float | None = MAX_WORK) -> tuple[str, ...]:
    """A report's sentence about the limit on work; empty without a limit."""
    if wanted is None:
        return ()
    return (
        f"The others run until they have processed {wanted:g} times as many samples as "
        "EpochGossip, or for its time if that is shorter; all of them run for the same "
        "virtual time.",
    )


EDGE_GOSSIP = Contender(
    algorithm=eg.EpochGossip, topology=eg.complete, accuracy_aware=ACCURACY_AWARE
)
SELECTED = replace(EDGE_GOSSIP, is_balanced=False)
"""EpochGossip with EdgeGossip's choice of samples alone: what remains without balancing."""
CONTROLS: Contenders = {
    "random": replace(EDGE_GOSSIP, accuracy_aware=PLAIN),
    "gosgd": Contender(algorithm=eg.GoSGD, topology=eg.complete, draws_exchanges=True),
}
"""Runs that EdgeGossip must beat: shares of data chosen at random, and no barrier."""

CONTENDERS: Contenders = {"edge-gossip": EDGE_GOSSIP, **CONTROLS}

PUBLISHED: Contenders = {
    f"published-{reading}": replace(
        EDGE_GOSSIP,
        accuracy_aware=published_samples(reading),
        balancing=BALANCING,
        has_profiles=True,
    )
    for reading in READINGS
}
"""The paper's whole system (`as_published`), in each reading of Algorithm 2."""

WITH_PAPER: Contenders = {**CONTENDERS, **PUBLISHED}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Machines of a race.

    Args:
        name: Name, such as "4 times".
        platforms: Platform of each worker.
        runs: Contenders against EpochGossip, by name of the run.
    """

    name: str
    platforms: tuple[eg.Platform, ...]
    runs: Contenders

    def with_loads(self, seed: int) -> Setup:
        """The same machines, loaded by jobs like WordCount and Sort that `seed` draws."""
        first = seed * len(self.platforms)
        loaded = (
            replace(each, trace=eg.batch_jobs(seed=first + rank))
            for rank, each in enumerate(self.platforms)
        )
        return replace(self, platforms=tuple(loaded))


@dataclass(frozen=True, kw_only=True)
class Race(Contest):
    """One problem and seed, on several equally large sets of machines of different speeds.

    EpochGossip is trained once: the accuracies after its epochs do not depend on speeds, and
    the times of the epochs are simulated without training. The contenders run for EpochGossip's
    time, or for as long as workers that never wait take for `max_work` times as many samples,
    whichever is shorter.

    Args:
        setups: Sets of machines, each with the same number of workers.
        max_work: Limit on the contenders' samples, in multiples of EpochGossip's; None for no
            limit.
        window: Epochs' worth of samples over which all models are averaged before evaluation
            (`TrailingAverage`); None evaluates the newest models.
    """

    setups: tuple[Setup, ...]
    max_work: float | None = None
    window: Window = None

    def __post_init__(self) -> None:
        check_ranges(self, window='above 0, "auto" or None')

    @property
    def num_workers(self) -> int:
        """Number of workers in each setup."""
        return len(self.setups[0].platforms)

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{self.num_workers}-workers/seed{self.seed}"
        baseline = f"{folder}/{BASELINE}"
        yield self.cell(baseline, partial(self.run_baseline, data_dir))
        for setup in self.setups:
            for name in setup.runs:
                yield self.cell(
                    f"{folder}/{setup.name.replace(' ', '-')}/{name}",
                    partial(self.run_contender, data_dir, baseline, setup, name),
                    after=(baseline,),
                )

    def run_baseline(self, data_dir: Path, session: Session) -> Row:
        """Train EpochGossip on equal platforms; simulate its epochs' end times per setup."""
        settings = self.problem.settings
        task = self.problem.task(data_dir)
        workload = Workload(task, range(self.num_workers), self.seed)
        largest = max(len(shard) for shard in workload.shards.values())
        results = session.run(
            eg.Experiment(
                task=task,
                algorithm=averaged(
                    eg.EpochGossip(
                        topology=eg.complete(self.num_workers), num_rounds=settings.num_epochs
                    ),
                    self.window,
                    rounds=1.0,
                ),
                platforms=(eg.Platform(throughput=settings.throughput),) * self.num_workers,
                seed=self.seed,
                # Just after each epoch, when no worker has completed the next one.
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

    def run_contender(
        self,
        data_dir: Path,
        baseline: str,
        setup: Setup,
        name: str,
        session: Session,
        until: Seconds = math.inf,
    ) -> Row:
        """Run a contender on one setup, `until` the time of the cell `baseline` at most."""
        if baseline not in session.rows:
            raise TrainingError(
                f"nothing to compare with: {baseline} failed, or is not among --runs"
            )
        times = session.rows[baseline]["setups"][setup.name]
        contender = setup.runs[name]
        settings = self.problem.settings
        exchange = {"exchange_probability": settings.exchange_probability, "seed": self.seed}
        algorithm = contender.build(
            self.num_workers, eg.UNTIL_CUT_OFF, **exchange if contender.draws_exchanges else {}
        )
        is_synchronous = algorithm.traits.is_synchronous
        if contender.is_shared:
            rounds = 1.0
        elif is_synchronous:
            rounds = rounds_per_epoch(setup.platforms)
        else:  # each round is a step
            num_train = session.rows[baseline]["num_train"]
            rounds = num_train / self.num_workers / settings.batch_size
        profiles = {rank: eg.profile(p, seed=rank) for rank, p in enumerate(setup.platforms)}
        # An unchanged model is not measured again; without rounds, models always change.
        looks = 10 if is_synchronous else 2
        task = contender.task(self.problem.task(data_dir))
        if contender.is_proportional:
            speeds = tuple(platform.total_throughput for platform in setup.platforms)
            task = replace(task, partition=Proportional(speeds))
        if contender.is_shared:
            task = replace(task, partition=eg.Shared())
        results = session.run(
            eg.Experiment(
                task=task,
                algorithm=averaged(algorithm, self.window, rounds),
                platforms=setup.platforms,
                profiles=profiles if contender.has_profiles else {},
                links=eg.Links(default=HOME_LINK),
                seed=self.seed,
                max_seconds=min(until, self._max_seconds(times, contender)),
                evaluation_interval=times["round_seconds"] / looks,
                name=name,
            )
        )
        machines = {
            "contender": contender.plain(self.num_workers),
            "waits": contender.waits,
            "throughputs": [platform.total_throughput for platform in setup.platforms],
            "link": describe(HOME_LINK),
        }
        found = _found(results, session.folder, self.problem)
        return self._facts(setup.name, name) | machines | found

    def _facts(self, setup: str | None, run: str) -> dict[str, Any]:
        return {
            "group": self.group,
            "problem": self.problem.name,
            "setup": setup,
            "run": run,
            "seed": self.seed,
        }

    def _max_seconds(self, times: Mapping[str, Any], contender: Contender) -> Seconds:
        whole: Seconds = times["epoch_ends"][-1]
        if self.max_work is None or contender.waits:
            return whole
        # In this time, workers that never wait process `max_work` times as many samples.
        return min(whole, self.max_work * whole / float(times["throughput_bound"]))


def _found(results: eg.Results, folder: Path, problem: Problem) -> dict[str, Any]:
    """The results of a run: its curve, and shares and looks from its events."""
    events = TrainingEvents(folder / "events.jsonl")
    left = events.sent_by(problem.settings.num_epochs)
    before = [None, *(evaluation.accuracy for evaluation in results.history)]
    kept = [
        evaluation
        for evaluation, earlier in zip(results.history, before, strict=False)
        if evaluation.accuracy != earlier or evaluation is results.history[-1]
    ]
    return {
        # Changes of the accuracy, and the end.
        "times": [evaluation.time for evaluation in kept],
        "accuracies": [evaluation.accuracy for evaluation in kept],
        "equal_epochs_time": None if left is None else left + HOME_LINK.latency,
        "kept_shares": events.kept_shares(),
        "look_share": events.look_share(),
        "samples_processed": results.history[-1].samples_processed,
        "bytes_sent": results.history[-1].bytes_sent,
    }


def races_of(
    problems: Iterable[Problem],
    setups: Callable[[Problem], tuple[Setup, ...]],
    settings: StudySettings,
    max_work: float | None = MAX_WORK,
    window: Window = None,
    *,
    loaded: bool = False,
) -> list[Race]:
    """Make the races on these machines, `loaded` by other programs or not, one per seed."""
    limit = work_limit(settings, max_work)
    return [
        Race(
            problem=problem,
            setups=tuple(each.with_loads(seed) if loaded else each for each in setups(problem)),
            seed=seed,
            max_work=limit,
            window=window,
        )
        for problem in problems
        for seed in settings.seeds
    ]


def race_study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Sequence[Contest],
    exhibit: Callable[[Mapping[str, Row]], Exhibits],
    **others: Any,  # noqa: ANN401
) -> Study:
    """Make a study of races; `others` are further arguments of `contest_study`."""
    edge_gossip = describe(
        eg.EdgeGossip(inner=eg.EpochGossip(topology=eg.complete(1), num_rounds=1))
    )
    del edge_gossip["inner"]
    return contest_study(
        f"edgegossip/{name}",
        title,
        settings,
        contests,
        exhibit,
        **others,
        accuracy_aware=describe(ACCURACY_AWARE),
        edge_gossip=edge_gossip,
    )
