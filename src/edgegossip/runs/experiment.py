"""Experiments, their targets and comparisons, as plain values."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from edgegossip.contract.algorithm import Algorithm, Setting, Wrapper
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_range, check_ranges, check_type
from edgegossip.data.local import Local
from edgegossip.data.partition import Shared
from edgegossip.machine.profile import Profile
from edgegossip.runs.best import KeepBest, kept_best
from edgegossip.runs.final_average import have_one_model
from edgegossip.runs.results import Evaluation
from edgegossip.sim.fault import Faults
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform
from edgegossip.training.task import Task, Workload


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run of one algorithm on one task.

    Args:
        task: Task to learn.
        algorithm: Algorithm of the workers.
        platforms: Hardware of each worker; their number is the number of workers.
        links: Links between the workers.
        faults: Script of the faults.
        profiles: Profiles of some workers' platforms, for the forecasts of EdgeGossip, made by
            `sim.profile` or measured. A worker without one learns the effect of loads during
            the run. Only the simulator uses them; real workers have ``--profile``.
        seed: Seed of everything random in the run, except faults and algorithms, which have
            seeds of their own.
        max_seconds: Virtual seconds after which the run is cut off; None to let the algorithm
            finish. Algorithms are compared fairly at equal time.
        until: Target of the averaged model that ends the simulated run earlier: a `LossTarget`
            or a `MetricTarget`.
        keep: Also keep the best averaged model by validation, and perhaps end the run when it
            no longer improves: a `KeepBest`, or "best" for its defaults. None keeps only the
            last model.
        final_average: After the last round, or at `max_seconds`, let all workers exchange their
            models, so that each ends with the mean of all (with a server: with its model). The
            time and the bytes count. Only simulated runs need it: real workers do so unless
            they get ``--no-final-average``. A run that ends early, by `until` or `keep`, has no
            such exchange.
        evaluation_interval: Virtual seconds between two evaluations of the averaged model,
            which begin at 0; None for a quarter of the slowest worker's epoch, at most a
            twentieth of `max_seconds`. Another evaluation is made at the end.
        evaluation_epochs: Epochs of all workers together between two evaluations, instead of
            `evaluation_interval`. This is fair to runs whose rounds differ greatly in duration.
        name: Name of the run; None for the algorithm's name in lower case, e.g. "epoch-gossip".

    Raises:
        ValueError: If the task or algorithm has the wrong type, such as a class instead of its
            instance; if a number or rank is out of range, there is no worker, the topology has
            a different number of workers, the task's models do not match the algorithm's roles,
            both evaluation settings are given, `until` or `keep` names an unknown metric,
            `keep` lacks a validation split, `final_average` is set for an algorithm whose ranks
            hold parts of a model, or the algorithm moves data that must not be moved, or does
            not divide data that is `Shared`.
    """

    task: Task
    algorithm: Algorithm[Any]
    platforms: tuple[Platform, ...]
    links: Links = Links()
    faults: Faults = Faults()
    profiles: Mapping[Rank, Profile] = field(default_factory=dict)
    seed: int = 0
    max_seconds: Seconds | None = None
    until: RunTarget | None = None
    keep: KeepBest | Literal["best"] | None = None
    final_average: bool = False
    evaluation_interval: Seconds | None = None
    evaluation_epochs: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_type("task", self.task, Task, "Task(dataset=dataset, model=make_model)")
        example = "Gossip(topology=ring(8), num_rounds=100)"
        check_type("algorithm", self.algorithm, Algorithm, example)
        if not self.platforms:
            raise ValueError("platforms is empty; a run needs at least one worker")
        for name in ("max_seconds", "evaluation_interval", "evaluation_epochs"):
            check_range(name, getattr(self, name), "above 0 and finite, or None")
        if self.evaluation_interval is not None and self.evaluation_epochs is not None:
            raise ValueError("give one of evaluation_interval and evaluation_epochs")
        links = {rank for pair in self.links.overrides for rank in pair}
        named = {"faults": self.faults.ranks, "links": links, "profiles": set(self.profiles)}
        for name, ranks in named.items():
            if strangers := sorted(ranks - set(range(self.num_workers))):
                raise ValueError(
                    f"{name} name worker {strangers[0]}; ranks are 0..{self.num_workers - 1}"
                )
        setting = Setting(
            momentum=getattr(self.task.optimizer, "momentum", 0.0),
            drops_messages=bool(self.faults.drops),
        )
        for warning in self.algorithm.warnings(setting):
            warnings.warn(warning, stacklevel=3)
        topology = self.algorithm.traits.topology
        if topology is not None and topology.num_workers != self.num_workers:
            raise ValueError(
                f"the topology {topology!r} has {topology.num_workers} workers, but there are "
                f"{self.num_workers} platforms; make them equal"
            )

        if isinstance(self.until, MetricTarget):
            self.until.find(self.task.chosen_first)
        self._check_keep()
        self._require_models_of_roles()
        self._check_data()

    def _check_data(self) -> None:
        if isinstance(self.task.partition, Shared) and not self.algorithm.traits.claims_units:
            raise ValueError(
                f"{self.algorithm!r:.60} does not divide the units of Shared data; put "
                "ClaimedWork around it, or choose another partition, such as IID()"
            )
        dataset = self.task.dataset
        moves = self.algorithm.traits.moves_data
        if moves and isinstance(dataset, Local) and not dataset.may_share:
            raise ValueError(
                "on_failure='reassign' lets workers read the data of failed ones, and Local "
                "data is not shared; choose on_failure='continue', or allow it with "
                "--may-share-data, which is Local(may_share=True)"
            )

    def _check_keep(self) -> None:
        # Resolved here, so that experiment.json has all its fields.
        object.__setattr__(self, "keep", kept_best(self.keep))
        if self.kept is None:
            return
        self.kept.find(self.task.chosen_first)
        dataset = self.task.dataset
        if dataset.validation is None and not isinstance(dataset, Local):
            raise ValueError(
                f"keep chooses a model by validation, and {dataset.name!r} has no validation "
                "split; give the task hold_out(dataset)"
            )

    @property
    def kept(self) -> KeepBest | None:
        """The setting `keep`, without its short form."""
        return self.keep if isinstance(self.keep, KeepBest) else None

    def _require_models_of_roles(self) -> None:
        roles = [self.algorithm.role(rank) for rank in range(self.num_workers)]
        held = {self.task.part(role.name) for role in roles}
        evaluated = {self.task.part(role.name) for role in roles if role.is_evaluated}
        if missing := held.union(self.task.models) - evaluated:
            raise ValueError(
                f"the model has a part {min(missing)!r}, but no worker that is evaluated holds "
                f"it; the roles are {sorted({role.name for role in roles})}"
            )
        if self.final_average and not have_one_model(roles):
            raise ValueError(
                "final_average needs workers that hold whole models, and the ranks of "
                f"{self.run_name} hold parts of one; leave it out"
            )

    @property
    def num_workers(self) -> int:
        return len(self.platforms)

    @property
    def roles(self) -> list[str]:
        """The name of each rank's role."""
        return [self.algorithm.role(rank).name for rank in range(self.num_workers)]

    @property
    def run_name(self) -> str:
        return self.name or algorithm_name(self.algorithm)

    def completed_share(self, now: Seconds, rounds: Sequence[int]) -> float:
        """Completed share of the run, in [0, 1], at a time and with the workers' rounds."""
        limit = self.max_seconds or math.inf
        last_round = self.algorithm.traits.num_rounds or math.inf
        return min(1.0, max(now / limit, sum(rounds) / len(rounds) / last_round))

    def workload(self, reads: Container[Rank] | None = None) -> Workload:
        """Prepare the task for this run.

        Args:
            reads: The workers whose `Local` data this process may read; None for all workers.
        """
        return Workload(
            self.task,
            self.data_ranks,
            self.seed,
            self.algorithm.role,
            reads,
            self.faults.flipped,
        )

    @property
    def data_ranks(self) -> list[Rank]:
        """The workers that get a shard of the training data."""
        return [rank for rank in range(self.num_workers) if self.algorithm.role(rank).has_data]


def algorithm_name(algorithm: Algorithm[Any]) -> str:
    """The name of an algorithm in lower case.

    >>> from edgegossip.algorithms.gossip.gosgd import GoSGD
    >>> from edgegossip.contract.topology import complete
    >>> algorithm_name(GoSGD(topology=complete(4), num_rounds=10))
    'gosgd'
    """
    while isinstance(algorithm, Wrapper) and algorithm.keeps_name:
        algorithm = algorithm.inner
    # A hyphen before a word, and before SGD after one, but none within GoSGD and DiLoCo.
    begins = r"(?<=[a-z])(?=[A-Z][a-z]{2}|DiLoCo)|(?<=[a-z]{3})(?=SGD)"
    return re.sub(begins, "-", type(algorithm).__name__).lower()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs of one task, side by side.

    Args:
        experiments: Experiments by the name of the run.
        baseline: Name of the reference run for speed-ups.
        target: Target of the task's chosen metric; None for the baseline's best value minus
            `target_gap`, or plus `target_gap` if lower values are better.
        target_gap: Distance of the target from the baseline's best value, in [0, 1]: a
            difference for metrics in percent, and a part of the value for other metrics.
        bytes_reference: Name of a dense run with one step per round, which defines the bytes of
            uncompressed push-sum; None to compute no ratios of bytes. See `Traffic.ratios`.
        tunable: For some runs, by name, arguments of the recipe that matter in addition to
            `lr`, with the values that `edgegossip plan` tries, the most promising first.

    Raises:
        ValueError: If a run's name cannot be a folder's; `baseline`, `bytes_reference` or
            `tunable` names an unknown run; the reference has several local steps; a number is
            out of range; or runs have different metrics.
    """

    experiments: Mapping[str, Experiment]
    baseline: str
    target: float | None = None
    target_gap: float = 0.005
    bytes_reference: str | None = None
    tunable: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def with_runs(self, runs: Sequence[str]) -> Comparison:
        """The comparison of some runs; without its baseline, the first of them takes its place.

        Args:
            runs: Names of the runs, at least one.

        Raises:
            UsageError: If there is no such run.
        """
        if unknown := [name for name in runs if name not in self.experiments]:
            raise UsageError(unknown_name("run", unknown[0], self.experiments))
        reference = self.bytes_reference
        return replace(
            self,
            experiments={name: self.experiments[name] for name in runs},
            baseline=self.baseline if self.baseline in runs else runs[0],
            bytes_reference=reference if reference in runs else None,
            tunable={name: some for name, some in self.tunable.items() if name in runs},
        )

    def __post_init__(self) -> None:
        for name in self.experiments:
            if not _RUN_NAME.fullmatch(name):
                raise ValueError(
                    f"a run cannot be called {name!r}, which is also the name of its folder; "
                    "use letters, digits, spaces and -_.,=%+ only"
                )
        for role in ("baseline", "bytes_reference"):
            name = getattr(self, role)
            if name is not None and name not in self.experiments:
                raise ValueError(unknown_name(role, name, self.experiments))
        for name in self.tunable:
            if name not in self.experiments:
                raise ValueError(unknown_name("run in tunable", name, self.experiments))
        if self.bytes_reference is not None:
            traits = self.experiments[self.bytes_reference].algorithm.traits
            if traits.local_steps not in (1, None):
                raise ValueError(
                    f"bytes_reference {self.bytes_reference!r} has "
                    f"local_steps={traits.local_steps}; "
                    "name a run that sends after each step"
                )
        for name, each in self.experiments.items():
            if each.task.metric != self.metric:
                raise ValueError(
                    f"{name} is measured by {each.task.metric.name}, and {self.baseline} by "
                    f"{self.metric.name}; give the tasks of a comparison one target_metric"
                )
        check_range("target_gap", self.target_gap, "in [0, 1]")
        if self.metric.is_share:
            check_range("target", self.target, "in [0, 1] or None")
        elif self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be finite or None, got {self.target!r}")

    @property
    def metric(self) -> MetricSpec:
        """The chosen metric of all runs."""
        return self.experiments[self.baseline].task.metric


_RUN_NAME = re.compile(r"(?!figures$)(?!\.)[\w .,=%+-]+")


def throughput_bound(platforms: tuple[Platform, ...]) -> float:
    """Ratio of samples per second without waiting to samples per second with a barrier.

    For E platforms of speeds v_i, this ratio is ``sum(v_i) / (E * v_min)``, if a barrier
    follows each epoch of equal shards and communication is free.

    >>> from edgegossip.sim.platform import uneven
    >>> throughput_bound(uneven(4))
    2.38
    """
    speeds = [platform.total_throughput for platform in platforms]
    return round(sum(speeds) / (len(speeds) * min(speeds)), 6)


# Targets.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A target loss that ends a run, for measurements of the time to this loss.

    Args:
        loss: Upper limit for the mean loss of the last `num_looks` evaluations, above 0.
        num_looks: Number of evaluations in the mean, at least 1; a single one is noisy.

    Raises:
        ValueError: If a number is out of range.
    """

    loss: float
    num_looks: int = 10

    def __post_init__(self) -> None:
        check_ranges(self, loss="above 0 and finite", num_looks="at least 1")

    def is_reached(self, losses: Sequence[float]) -> bool:
        """Whether a run with these losses, in order of time, has reached the target.

        >>> LossTarget(loss=1.0, num_looks=2).is_reached([3.0, 1.5, 0.5])
        True
        """
        last = losses[-self.num_looks :]
        return len(last) == self.num_looks and sum(last) <= self.loss * self.num_looks


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTarget:
    """A target of a metric that ends a run, for measurements of the time to this target.

    Args:
        value: Value that the mean of the last `num_looks` evaluations must reach: from below if
            higher values are better, otherwise from above.
        metric: Name of the metric; None for the task's chosen one.
        num_looks: Number of evaluations in the mean, at least 1; a single one is noisy.

    Raises:
        ValueError: If a number is out of range.
    """

    value: float
    metric: str | None = None
    num_looks: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, num_looks="at least 1")
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, got {self.value!r}")

    def find(self, metrics: Sequence[MetricSpec]) -> MetricSpec:
        """Find the metric among those of a task, the chosen one first.

        Raises:
            ValueError: If the metric is unknown.
        """
        by_name = {each.name: each for each in metrics}
        name = self.metric or metrics[0].name
        if name not in by_name:
            raise ValueError(unknown_name("metric", name, by_name))
        return by_name[name]

    def is_reached(self, values: Sequence[float], metric: MetricSpec) -> bool:
        """Whether a run with these values, in order of time, has reached the target.

        >>> falls = MetricSpec(name="perplexity", higher_is_better=False)
        >>> MetricTarget(value=2.0).is_reached([3.0, 1.9], falls)
        True
        """
        last = values[-self.num_looks :]
        is_long = len(last) == self.num_looks
        return is_long and metric.is_reached(sum(last) / len(last), self.value)


RunTarget: TypeAlias = LossTarget | MetricTarget


def is_target_reached(
    target: RunTarget | None, history: Sequence[Evaluation], metrics: Sequence[MetricSpec]
) -> bool:
    """Whether a run with these evaluations has reached its target; false without a target."""
    match target:
        case LossTarget():
            return target.is_reached([each.loss for each in history])
        case MetricTarget():
            metric = target.find(metrics)
            return target.is_reached([each.metrics[metric.name] for each in history], metric)
    return False
