"""The experiments of the queue, (b) to (g), with all their settings.

Published settings come from the papers or, for Sparse-Push, from the first author's later code;
where a source does not give a setting, the comment at the setting says whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks.full_size.cells import Cell, Machine, Row, Rows
from studies.cifar10_pushes import COMPLETE, DENSE_PUSH, EIGHT, EVEN_RUNS, sparse_push
from studies.compressed_push import (
    OURS,
    PAPER,
    SlowLinkContest,
    difference_push,
    diloco,
    double_squeeze,
)
from studies.contest import Contender, Contenders
from studies.language_models import algorithms
from studies.race import CONTROLS, EDGE_GOSSIP, MAX_WORK, PUBLISHED, imbalanced

import edgegossip as eg
from edgegossip.contract.topology import Topology, torus
from edgegossip.data.partition import IID, LabelSkew, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.data.texts import books
from edgegossip.models import (
    alexnet,
    eight_layers,
    lenet5,
    mobilenet_v2,
    resnet20,
    squeezenet,
    vgg11,
    vgg16,
)
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.epoch_times import epoch_gossip_seconds
from edgegossip.recipes.language import LanguageSettings, language_task, slowest_seconds
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.push_sum_comparison import DENSE, compressor
from edgegossip.recipes.staged_training import METHODS, StageSettings, stage_run
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.describe import describe
from edgegossip.runs.experiment import MetricTarget, throughput_bound
from edgegossip.runs.scoreboard import last_looks
from edgegossip.runs.tuning import TUNING_SEED
from edgegossip.training.optimizer import Cosine, StepDecay, WarmUp
from edgegossip.training.stages.teachers import SyntheticGradients
from edgegossip.training.task import Workload

SEEDS = (0, 1, 2)


def cells() -> Iterator[Cell]:
    """All cells of (b) to (g), in the order of work.

    The first seed of every letter comes before the second seed of any. One seed shows whether a
    claim holds at full size, because the differences in question are of several points; two
    more seeds narrow an answer that is already known. So a third of the time answers all
    questions. Within a seed, the letters are in alphabetical order, and within a letter, the
    paper's own method and its reference come first.
    """
    for seed in SEEDS:
        for problem in (RESNET20, VGG11):
            yield from _pushes(problem, seed)
        for setting in STAGED:
            yield from _staged(setting, seed)
        for problem in RACES:
            yield from _races(problem, seed)
        yield from _language(seed)
        yield from _crowd(seed)


def _on(experiment: eg.Experiment, machine: Machine, **changes: Any) -> eg.Experiment:  # noqa: ANN401
    task = replace(experiment.task, torch_device=machine.torch_device, **changes)
    return replace(experiment, task=task)


# (b) and (c): few bytes.

NUM_PUSHING = 8
_PUSHED = Settings(
    num_epochs=200,
    batch_size=128 // NUM_PUSHING,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    throughput=200.0,  # ours; only times depend on it
)
_FIRST_EPOCH = WarmUp(share=1 / 200)  # at a tenth of the rate
RESNET20 = Problem(
    name="resnet20",
    dataset="cifar10",
    model=partial(resnet20, normalization="evonorm"),
    settings=_PUSHED,
    augmentation=flip_and_crop,
    schedule=StepDecay(milestones=(0.5, 0.75), decay=0.1, warm_up=_FIRST_EPOCH),
)
VGG11 = Problem(
    name="vgg11",
    dataset="cifar10",
    model=vgg11,
    # Half of the published rate, as in our recipe: the model has no normalization.
    settings=replace(_PUSHED, lr=0.05, throughput=100.0),
    augmentation=flip_and_crop,
    schedule=StepDecay(
        milestones=(0.15, 0.3, 0.45, 0.6, 0.75, 0.9), decay=0.5, warm_up=_FIRST_EPOCH
    ),
)
PUSHES: Contenders = {
    "sparse-push": sparse_push(PAPER),
    DENSE: DENSE_PUSH,
    "skew-compensated-sparse-push": sparse_push(
        PAPER, algorithm=eg.SkewCompensatedSparsePush, compensation_rounds=50
    ),
    "difference-push": difference_push(OURS),
    "difference-push, compensated": difference_push(
        OURS, ending="final", final_compressor=compressor(1, 3)
    ),
    "double-squeeze": double_squeeze(),
    "diloco": diloco(),
}
EVEN_PUSHES: Contenders = {
    **PUSHES,
    # More and fewer bytes than the published 1 % after each step, on the same graph.
    "sparse-push, 8 times less": sparse_push(EIGHT),
    "sparse-push, 466 times less": sparse_push(OURS),
    COMPLETE: EVEN_RUNS[COMPLETE],  # the control of `double-squeeze`
}
SETTINGS: dict[str, tuple[Partition, Contenders]] = {
    "even": (IID(), EVEN_PUSHES),
    "skew 0.8": (LabelSkew(0.8), PUSHES),
}


def _pushes(problem: Problem, seed: int) -> Iterator[Cell]:
    letter = "b" if problem is RESNET20 else "c"
    for setting, (partition, contenders) in SETTINGS.items():
        contest = SlowLinkContest(
            problem=problem,
            seed=seed,
            setting=setting,
            partition=partition,
            contenders=contenders,
            num_workers=NUM_PUSHING,
            nesterov=True,
        )
        plain = contest.plain()
        for name in contenders:
            yield Cell(
                name=_named(letter, problem.name, setting, name, seed),
                settings={
                    **problem.plain(),
                    **plain,
                    "runs": plain["runs"][name],
                    "model": describe(problem.model),
                    "nesterov": True,
                    "num_workers": NUM_PUSHING,
                    "seed": seed,
                },
                experiment=partial(_push, contest, name),
                num_epochs=problem.settings.num_epochs,
            )


def _push(contest: SlowLinkContest, name: str, machine: Machine, rows: Rows) -> eg.Experiment:
    experiment = contest.experiment(machine.data_dir, name)
    return _on(replace(experiment, name=name.replace(", ", "-").replace(" ", "-")), machine)


def _named(letter: str, *parts: object) -> str:
    *words, seed = map(str, parts)
    name = "-".join([letter, *words]).replace(", ", "-").replace(" ", "-")
    return f"{name}-seed{seed}"


# (d): models in stages. The paper names the two models, and no setting.


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A model in stages, on CIFAR-10 without augmentation."""

    problem: Problem
    stages: StageSettings


_STAGES = StageSettings(num_epochs=60, in_flight=4, latency=0.001, bandwidth=125e6)
STAGED = (
    Staged(
        problem=Problem(
            name="vgg16", dataset="cifar10", model=partial(vgg16, normalization="batch")
        ),
        stages=replace(_STAGES, cut_at=(10, 17, 24)),  # between poolings
    ),
    Staged(
        problem=Problem(name="eight-layers", dataset="cifar10", model=eight_layers),
        stages=replace(_STAGES, cut_at=(2, 4, 6)),
    ),
)
STAGE_RATES = {
    # The best of three in the studies of reduced models (benchmarks/results/stages.md).
    "whole": 0.01,
    "pipelined": 0.01,
    "local-prediction": 0.01,
    # A third of the lowest rate of those studies, which was their best.
    "synthetic-gradients": 0.001,
}
TEACHERS = {
    "synthetic-gradients": SyntheticGradients(),  # at its full size
    "local-prediction": METHODS["local-prediction"],
}
STAGE_LOOKS = 60


def _staged(setting: Staged, seed: int) -> Iterator[Cell]:
    for name in ("synthetic-gradients", "whole", "local-prediction", "pipelined"):
        stages = replace(setting.stages, lr=STAGE_RATES[name], seed=seed)
        # The teacher has the sizes of modules.
        others = ("seed", "torch_device", "num_hidden", "channels")
        plain = {k: v for k, v in asdict(stages).items() if k not in others}
        yield Cell(
            name=_named("d", setting.problem.name, name, seed),
            settings={
                **setting.problem.plain(),
                **plain,
                "cut_at": list(plain["cut_at"]),
                "speeds": list(plain["speeds"]),
                "model": describe(setting.problem.model),
                "method": name,
                "teacher": describe(TEACHERS.get(name)),
                "num_looks": STAGE_LOOKS,
                "seed": seed,
            },
            experiment=partial(_stage, setting.problem, name, stages),
            num_epochs=stages.num_epochs,
        )


def _stage(
    problem: Problem, name: str, stages: StageSettings, machine: Machine, rows: Rows
) -> eg.Experiment:
    experiment = stage_run(
        name,
        problem.load(machine.data_dir),
        problem.model,
        replace(stages, torch_device=machine.torch_device),
        TEACHERS,
    )
    looks = stages.num_epochs / STAGE_LOOKS
    return replace(experiment, name=name, evaluation_epochs=looks)


# (e): EdgeGossip and its rivals on uneven machines.

_RACED = Settings(
    num_epochs=60, batch_size=64, lr=0.01, momentum=0.9
)  # the paper's; our epochs
RACES = (
    Problem(
        name="resnet20",  # not in the paper: our studies' rate, batches and augmentation
        dataset="cifar10",
        model=resnet20,
        settings=replace(_RACED, lr=0.05, batch_size=32, weight_decay=1e-4, throughput=200.0),
        augmentation=flip_and_crop,
    ),
    Problem(
        name="alexnet",
        dataset="cifar10",
        model=alexnet,
        settings=replace(_RACED, throughput=50.0),
    ),
    Problem(
        name="mobilenet-v2",
        dataset="cifar10",
        model=mobilenet_v2,
        settings=replace(_RACED, throughput=50.0),
    ),
    Problem(
        name="squeezenet",
        dataset="cifar10",
        model=squeezenet,
        settings=replace(_RACED, throughput=300.0),
    ),
)
PLATFORMS = imbalanced(4, throughput=1.0, imbalance=4.0)
"""Relative speeds; each problem has its own throughput."""
RACERS: dict[str, Contender] = {
    "epoch-gossip": Contender(algorithm=eg.EpochGossip, topology=eg.complete),
    "edge-gossip": EDGE_GOSSIP,
    "published-shuffled": PUBLISHED["published-shuffled"],
    "random": CONTROLS["random"],
    "gosgd": CONTROLS["gosgd"],
}
GOSGD_FACTORS, GOSGD_EXCHANGES = (1.0, 2.0, 4.0), (0.02, 0.4)
"""Rates as multiples of the problem's, and probabilities of a push, that GoSGD tries."""
TUNING_SHARE = 0.25
"""Length of a trial, as a share of a result's run; measured on a held-out tenth."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """A run on uneven platforms.

    Args:
        problem: Problem, with the throughput of the fastest platform.
        run: Name in `RACERS`.
        seed: Seeds the random choices.
        num_workers: Number of platforms.
        graph: Makes the topology from the number of workers.
        until: Accuracy that ends the run; None to go on.
        balancing: Further arguments of `EdgeGossip`.
    """

    problem: Problem
    run: str
    seed: int
    num_workers: int = 4
    graph: Any = eg.complete
    until: float | None = None
    balancing: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Everything that the result depends on, as JSON values."""
        return {
            **self.problem.plain(),
            "model": describe(self.problem.model),
            "held_out": self.problem.held_out,
            "contender": self.contender.plain(self.num_workers),
            "platforms": describe(self.platforms),
            "link": describe(HOME_LINK),
            "max_work": MAX_WORK,
            "until": self.until,
            "seed": self.seed,
        }

    @property
    def contender(self) -> Contender:
        contender = replace(RACERS[self.run], topology=self.graph)
        if self.balancing is None or contender.accuracy_aware is None:
            return contender
        return replace(contender, balancing={**contender.balancing, **self.balancing})

    @property
    def platforms(self) -> tuple[eg.Platform, ...]:
        return imbalanced(self.num_workers, self.problem.settings.throughput, 4.0)

    def experiment(self, machine: Machine, rows: Rows) -> eg.Experiment:
        """EpochGossip for its epochs, or a rival for `MAX_WORK` times as many samples."""
        settings, contender = self.problem.settings, self.contender
        task = contender.task(self.problem.task(machine.data_dir))
        common: dict[str, Any] = {
            "task": replace(task, torch_device=machine.torch_device),
            "platforms": self.platforms,
            "links": eg.Links(default=HOME_LINK),
            "seed": self.seed,
            "evaluation_epochs": 0.5,
            "name": self.run,
            "until": None if self.until is None else MetricTarget(value=self.until),
        }
        if self.run == "epoch-gossip":
            return eg.Experiment(
                algorithm=contender.build(self.num_workers, settings.num_epochs), **common
            )
        exchange = {"exchange_probability": settings.exchange_probability, "seed": self.seed}
        algorithm = contender.build(
            self.num_workers,
            eg.UNTIL_CUT_OFF,
            **exchange if contender.draws_exchanges else {},
        )
        profiles = {rank: eg.profile(p, seed=rank) for rank, p in enumerate(self.platforms)}
        return eg.Experiment(
            algorithm=algorithm,
            profiles=profiles if contender.has_profiles else {},
            max_seconds=self._max_seconds(task),
            **common,
        )

    def _max_seconds(self, task: eg.Task) -> float:
        whole = self._epoch_gossip_seconds(task)
        return min(whole, MAX_WORK * whole / throughput_bound(self.platforms))

    def _epoch_gossip_seconds(self, task: eg.Task) -> float:
        num_epochs = self.problem.settings.num_epochs
        if self.graph is eg.complete:
            workload = Workload(task, range(self.num_workers), self.seed)
            return epoch_gossip_seconds(workload, self.platforms, HOME_LINK, num_epochs)
        # Without the exchanges, which are short on other graphs.
        slowest = min(platform.total_throughput for platform in self.platforms)
        return num_epochs * len(task.dataset.train) / self.num_workers / slowest


def _races(problem: Problem, seed: int) -> Iterator[Cell]:
    for name in RACERS:
        race = Race(problem=problem, run=name, seed=seed)
        if name == "gosgd":
            yield from _tuned(race)
        else:
            yield _raced("e", race)


def _raced(letter: str, race: Race) -> Cell:
    return Cell(
        name=_named(letter, race.problem.name, race.run, race.seed),
        settings=race.plain(),
        experiment=race.experiment,
        num_epochs=race.problem.settings.num_epochs * MAX_WORK,
    )


def _tuned(race: Race) -> Iterator[Cell]:
    """GoSGD's trials, before its first result, and a result with the best settings."""
    tried = dict(_trials(race.problem))
    trials = {
        f"e-{race.problem.name}-gosgd-tuning-{name}": replace(
            race, problem=problem, seed=TUNING_SEED
        )
        for name, problem in tried.items()
    }
    if race.seed == SEEDS[0]:
        for name, trial in trials.items():
            yield replace(_raced("e", trial), name=name)
    best = partial(_best, race, dict(zip(trials, tried.values(), strict=True)))
    yield replace(
        _raced("e", race),
        settings={**race.plain(), "trials": {k: each.plain() for k, each in trials.items()}},
        experiment=best,
        after=tuple(trials),
    )


def _trials(problem: Problem) -> Iterator[tuple[str, Problem]]:
    own = problem.settings
    for factor in GOSGD_FACTORS:
        for probability in GOSGD_EXCHANGES:
            settings = replace(
                own,
                lr=factor * own.lr,
                exchange_probability=probability,
                num_epochs=round(TUNING_SHARE * own.num_epochs),
            )
            name = f"lr{settings.lr:g}-p{probability:g}"
            yield name, replace(problem, settings=settings, held_out=0.1)


def _best(
    race: Race, trials: Mapping[str, Problem], machine: Machine, rows: Rows
) -> eg.Experiment:
    def merit(name: str) -> float:
        row = rows[name]
        return -1.0 if row.get("error") else last_looks(row["accuracy"])

    best = trials[max(trials, key=merit)].settings
    settings = replace(
        race.problem.settings, lr=best.lr, exchange_probability=best.exchange_probability
    )
    chosen = replace(race, problem=replace(race.problem, settings=settings))
    return chosen.experiment(machine, rows)


# (f): a language model.

GPT = LanguageSettings(
    num_epochs=4.0,
    num_workers=4,
    batch_size=8,
    local_steps=50,
    lr=4e-4,
    # GPT-2's 12 layers and context. Its 124 million parameters include 39 million in an
    # embedding of 50,257 tokens; with 256 bytes instead, a width of 924 (not 768) makes up for
    # them. 11 heads (not 12) of 84 units have the alignment that attention kernels need.
    context=1024,
    width=924,
    num_layers=12,
    num_heads=11,
    num_test=200,
)
GPT_SCHEDULE = Cosine(warm_up=WarmUp(share=0.05, rise="linear"))
"""As in DiLoCo's paper; at the full rate, the loss rises in the first steps."""
LANGUAGE_RUNS = ("edge-diloco-compressed", "diloco")


def _language(seed: int) -> Iterator[Cell]:
    for name in LANGUAGE_RUNS:
        settings = replace(GPT, seed=seed)
        plain = {k: v for k, v in asdict(settings).items() if k != "torch_device"}
        algorithm = algorithms(settings.local_steps)[name]
        yield Cell(
            name=_named("f", "gpt", name, seed),
            settings={
                **plain,
                "algorithm": describe(algorithm),
                "schedule": describe(GPT_SCHEDULE),
                "link": describe(HOME_LINK),
            },
            experiment=partial(_language_run, name, settings),
            num_epochs=settings.num_epochs * 2.38,
        )


def _language_run(
    name: str, settings: LanguageSettings, machine: Machine, rows: Rows
) -> eg.Experiment:
    task = language_task(books(machine.data_dir, settings.context), settings)
    platforms = eg.uneven(settings.num_workers, settings.throughput)
    seconds = slowest_seconds(settings, task, platforms)
    experiment = eg.Experiment(
        task=task,
        algorithm=algorithms(settings.local_steps)[name],
        platforms=platforms,
        links=eg.Links(default=HOME_LINK),
        seed=settings.seed,
        max_seconds=seconds,
        evaluation_interval=seconds / settings.num_evaluations,
        name=name,
    )
    return _on(experiment, machine, schedule=GPT_SCHEDULE)


# (g): many workers.

CROWD = Problem(
    name="lenet5-1000-workers",
    dataset="mnist",
    model=lenet5,
    settings=Settings(
        num_epochs=60, batch_size=10, lr=0.05, throughput=100.0, exchange_probability=0.4
    ),
)
NUM_CROWD = 1000
CROWD_TARGET = 0.97


def crowd_graph(num_workers: int) -> Topology:
    """A torus of 25 rows."""
    return torus(25, num_workers // 25)


def _crowd(seed: int) -> Iterator[Cell]:
    for name in ("epoch-gossip", "edge-gossip", "random", "gosgd"):
        race = Race(
            problem=CROWD,
            run=name,
            seed=seed,
            num_workers=NUM_CROWD,
            graph=crowd_graph,
            until=CROWD_TARGET,
            # Not all forecasts to all workers, which are a million messages for each block.
            balancing={"spread": "gossip"},
        )
        yield _raced("g", race)


def row_of(results: eg.Results) -> Row:
    """A run's findings: the curve of the averaged model, and the end."""
    history = results.history
    return {
        "reason": results.reason,
        "times": [each.time for each in history],
        "epochs": [each.epochs for each in history],
        results.metric.key: [each.value for each in history],
        "losses": [each.loss for each in history],
        "consensus_distances": [each.consensus_distance for each in history],
        "bytes_sent": [each.bytes_sent for each in history],
        "samples_processed": history[-1].samples_processed,
        "worker_values": results.worker_values,
        "virtual_seconds": results.virtual_seconds,
        "mean_staleness": results.mean_staleness,
    }
