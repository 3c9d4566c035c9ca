"""Dense push-sum against algorithms that send fewer bytes, on even, skewed and varying graphs.

Fields of a row:
    group, setting, run, seed: Names of the contest and the run.
    times, accuracies, bytes_per_worker, joules: One number per evaluation; joules are those of
        all machines and links. Older rows have no joules.
    link_joules: Energy of the links in the whole run.
    worker_accuracies, consensus_distance: Values at the end.
    traffic: `bytes_sent`, `samples_processed`, `num_workers` and the mean `out_degree`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import edgegossip as eg
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    intermittent,
    one_peer_exponential,
    random_one_peer,
)
from edgegossip.data.partition import IID, LabelSkew, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import resnet20
from edgegossip.recipes import push_sum_comparison as recipes
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.push_sum_comparison import (
    BYTES_PER_MEGABIT,
    DENSE,
    LATENCY,
    PushSettings,
    bold_step,
    compressor,
    num_steps,
    per_layer,
)
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.comparison import Traffic, traffic
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Unit
from edgegossip.runs.scoreboard import (
    ContestKey,
    Measures,
    Score,
    bars,
    curves,
    score_table,
    scores,
)
from edgegossip.runs.study import Cell, Row, Session, Study
from studies import problems
from studies.contest import (
    Contender,
    Contenders,
    Contest,
    StudySettings,
    accuracy_curve,
    contest_study,
)
from studies.problems import DIGITS_MLP

SLOW_LINK = eg.Link(latency=LATENCY, bandwidth=BYTES_PER_MEGABIT)
"""A link of 1 Mbit/s and 30 ms."""

NUM_EVALUATIONS = 60

TARGET_GAP = 0.01
"""The target is the dense run's best accuracy minus this gap."""

MEAN_WORKER, WORST_WORKER = "mean worker", "worst worker"


@dataclass(frozen=True, kw_only=True)
class SlowLinkContest(Contest):
    """One problem, partition and seed, with several contenders.

    Args:
        setting: Distinguishing feature of the contest, such as "skew 0.8".
        partition: Partition of the samples among the workers.
        contenders: Contenders, including `DENSE`, by name of the run.
        num_workers: Number of workers, on equal platforms.
        nesterov: Whether to use Nesterov's momentum.
        num_looks: Evaluations of each run, spread over its length.
    """

    setting: str
    partition: Partition
    contenders: Contenders
    num_workers: int = 8
    nesterov: bool = False
    num_looks: int = NUM_EVALUATIONS

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{self.setting.replace(' ', '-')}/seed{self.seed}"
        for name in self.contenders:
            work = partial(self.row, data_dir, name)
            yield self.cell(f"{folder}/{name.replace(' ', '-')}", work)

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {
            "group": self.group,
            "setting": self.setting,
            "partition": describe(self.partition),
            "runs": {
                name: each.plain(self.num_workers) for name, each in self.contenders.items()
            },
        }

    def experiment(self, data_dir: Path, name: str) -> eg.Experiment:
        """The experiment of a contender."""
        contender, settings = self.contenders[name], self.problem.settings
        task = replace(contender.task(self.problem.task(data_dir)), partition=self.partition)
        assert isinstance(task.optimizer, eg.SGD)  # a problem's optimizer is SGD
        task = replace(task, optimizer=replace(task.optimizer, nesterov=self.nesterov))
        steps = num_steps(task, self.num_workers, settings.num_epochs)
        others: dict[str, Any] = {}
        if contender.per_layer:
            others["compressor"] = per_layer(contender.options["compressor"], task)
        return eg.Experiment(
            task=task,
            algorithm=contender.build(self.num_workers, steps, **others),
            platforms=(eg.Platform(throughput=settings.throughput),) * self.num_workers,
            links=eg.Links(default=SLOW_LINK),
            seed=self.seed,
            evaluation_epochs=settings.num_epochs / self.num_looks,
            name=name.replace(" ", "-"),
        )

    def row(self, data_dir: Path, name: str, session: Session) -> Row:
        """Run a contender."""
        experiment = self.experiment(data_dir, name)
        results = session.run(experiment)
        sent = [each.bytes_sent / self.num_workers for each in results.history]
        energy = results.history[-1].energy
        return {
            "group": self.group,
            "setting": self.setting,
            "run": name,
            "seed": self.seed,
            **accuracy_curve(results),
            "bytes_per_worker": sent,
            "joules": [each.joules for each in results.history],
            "link_joules": None if energy is None else energy.links,
            "worker_accuracies": results.worker_values,
            "consensus_distance": results.history[-1].consensus_distance,
            "traffic": dataclasses.asdict(traffic(experiment, results)),
        }


def placings(rows: Iterable[Row]) -> list[Score]:
    """Compare each run with the dense run of its group, setting and seed.

    Args:
        rows: Rows of `SlowLinkContest.cells`, in any order.
    """
    return scores(rows, DENSE, TARGET_GAP, _measures)


def _measures(
    row: Row, dense: Row | None, time: Seconds | None, speedup: float | None
) -> Measures:
    own = Traffic(**row["traffic"])
    of_dense = None if dense is None else Traffic(**dense["traffic"])
    complete = own.ratios(of_dense)["bytes_ratio_complete_graph"]
    mean = _mean_worker(row)
    return {
        "averaged model": ("percent", row["accuracies"][-1]),
        MEAN_WORKER: ("percent", mean),
        WORST_WORKER: ("percent", min(row["worker_accuracies"])),
        "mean worker, lost": ("points", None if dense is None else _mean_worker(dense) - mean),
        "sent per worker": ("bytes", own.per_worker),
        "less": ("times", None if of_dense is None else own.times_less_than(of_dense)),
        "less, complete graph": ("times", complete),
        "time to target": ("seconds", time),
        "sooner": ("times", speedup),
        "energy to target": (
            "joules",
            None
            if time is None or "joules" not in row
            else row["joules"][row["times"].index(time)],
        ),
        "energy of links": ("joules", row.get("link_joules")),
    }


def _mean_worker(row: Row) -> float:
    return sum(row["worker_accuracies"]) / len(row["worker_accuracies"])


NOTE = (
    "Medians over the seeds; a dash: never, or nothing to compare with. Accuracies at the end "
    "are those of the averaged model and of the workers' own models. Lost: the mean accuracy "
    "of the dense run's workers minus that of this run's. Bytes include headers, positions and "
    "weights in all rounds. Less: bytes of the dense run for as many samples, or (as the paper "
    "seems to count) of one on the complete graph, divided by the run's bytes. The target is "
    "the dense run's best accuracy less "
    f"{100 * TARGET_GAP:g} pp; time is virtual, on uplinks of 1 Mbit/s and 30 ms. "
    "Energy follows from the model in docs/simulator.md; that of the links is of the whole run."
)


def contest_curves(rows: Iterable[Row], contest: ContestKey) -> list[Panel]:
    """Plot the averaged model's accuracy against bytes and against time for one contest."""
    axes: tuple[tuple[str, str, Unit], ...] = (
        ("bytes_per_worker", "sent per worker", "bytes"),
        ("times", "virtual time at 1 Mbit/s", "seconds"),
    )
    rows = list(rows)
    panels = [
        curves(rows, contest, contest[1], label, x=field, x_unit=unit, is_x_log=True)
        for field, label, unit in axes
    ]
    return [panel for panel in panels if panel.series]


def contest_exhibits(
    name: str, contests: Sequence[SlowLinkContest], has_bars: bool, rows: Mapping[str, Row]
) -> Exhibits:
    """Make a figure for each problem, with the curves of `contests`, and one table."""
    found = placings(rows.values())
    caption = f"Curves: the averaged model, seed {contests[0].seed}."
    if has_bars:
        caption += " Bars: medians over the seeds; thin lines: their range."
    figures = []
    for group in dict.fromkeys(each.group for each in contests):
        panels = [
            panel
            for each in contests
            if each.group == group
            for panel in contest_curves(rows.values(), (group, each.setting, each.seed))
        ]
        if has_bars and panels:
            mine = [each for each in found if each.group == group]
            workers = [
                bars(mine, measure, y_label="accuracy")
                for measure in (MEAN_WORKER, WORST_WORKER)
            ]
            panels = [*workers, *panels]
        if panels:
            heading = f"Accuracy against bytes and time: {group}"
            figures.append(
                Figure(
                    name=f"{name}-{group}",
                    heading=heading,
                    caption=caption,
                    panels=tuple(panels),
                )
            )
    tables = (score_table(found, heading="Ours", note=NOTE),) if found else ()
    return Exhibits(figures=tuple(figures), tables=tables)


Graph: TypeAlias = Callable[[int], Topology]
"""Makes a topology from the number of workers."""
ContestSettings: TypeAlias = Mapping[str, tuple[Partition, Contenders]]
"""Partition and contenders by name of the setting."""

NUM_WORKERS = 8
NUM_WORKERS_BY_SUBJECT = 7
"""Each worker has the data of three of the 21 people."""

PRINTED = (
    "The abstract prints one number: 466 times less communication at about 1 % loss of "
    "accuracy, ResNet-20 and VGG11 on CIFAR-10.",
    "Its tables of accuracy were not available to us.",
    "Our inference, which the paper does not print: 466 may be the factor of the largest 1 % "
    "in 32 bits with 16-bit positions (66.7), multiplied by the 7 neighbors in a complete "
    "graph of 8, or by 7 local steps.",
)


def pushed(problem: Problem, settings: PushSettings, **changes: Any) -> Problem:  # noqa: ANN401
    """A problem with the settings of its recipe."""
    return replace(
        problem,
        settings=Settings(
            num_epochs=settings.num_epochs,
            batch_size=settings.global_batch // settings.num_workers,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            throughput=settings.throughput,
        ),
        schedule=settings.schedule,
        **changes,
    )


MNIST_LENET5 = pushed(problems.MNIST_LENET5, recipes.MNIST_LENET5_SETTINGS)
HAR_CNN = pushed(problems.HAR_CNN, recipes.HAR_CNN_SETTINGS)
CIFAR10_LENET5 = pushed(
    problems.CIFAR10_LENET5,
    recipes.CIFAR10_LENET5_SETTINGS,
    augmentation=flip_and_crop,
    scaled_down="CIFAR-10 is also learned by LeNet-5: ResNet-20 takes hours on two cores.",
)
CIFAR10_RESNET20 = pushed(
    problems.CIFAR10_RESNET20,
    recipes.CIFAR10_RESNET20_SETTINGS,
    model=partial(resnet20, normalization="evonorm"),
    num_train=6_000,
    num_test=3_000,
    scaled_down="ResNet-20 (EvoNorm) learns from 6,000 of the 50,000 pictures of CIFAR-10 for "
    "30 epochs instead of 200, and is tested on 3,000 of the 10,000. "
    "`edgegossip compare sparse-push/cifar10-resnet20` has all of them.",
)
CIFAR10_VGG11_QUARTER = pushed(problems.CIFAR10_VGG11_QUARTER, recipes.CIFAR10_VGG11_SETTINGS)
SHORT = replace(
    DIGITS_MLP,
    model=partial(eg.mlp, hidden=(32,)),
    settings=replace(DIGITS_MLP.settings, batch_size=5),
    schedule=recipes.schedule("cosine", DIGITS_MLP.settings.num_epochs),
)
PROBLEMS = (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5, CIFAR10_RESNET20, CIFAR10_VGG11_QUARTER)


@dataclass(frozen=True)
class Rung:
    """An amount of communication.

    Args:
        keep_ratio: Share of the entries in a message.
        value_bits: Bits of each kept entry.
        local_steps: Steps between two messages.
    """

    keep_ratio: float
    value_bits: int
    local_steps: int = 1

    def __str__(self) -> str:
        steps = "" if self.local_steps == 1 else f" every {self.local_steps} steps"
        return f"{100 * self.keep_ratio:g} % {self.value_bits} bits{steps}"


PAPER = Rung(0.01, 32)
OURS = Rung(0.1, 4, local_steps=14)
"""Settings that send 466 times fewer bytes than dense push-sum, with LeNet-5."""
SPARSE = (Rung(0.1, 32), PAPER, Rung(0.01, 4), Rung(0.05, 4, local_steps=8))
DIFFERENCE = (Rung(0.01, 4), OURS, Rung(0.1, 4, local_steps=32))
"""Settings with rising compression."""
FLOODED = Rung(0.036, 2, local_steps=32)
"""Settings that send 466 times fewer bytes with LeNet-5 if 7 of 8 workers relay a message."""
OFTEN_SQUEEZED = Rung(0.022, 2, local_steps=9)
SQUEEZED = Rung(0.038, 2, local_steps=12)
"""Settings that send 466 times fewer bytes with LeNet-5 if each worker owns an eighth.

Headers weigh more in the messages of smaller models; there, only the second one does.
"""
FINAL = compressor(1, 3)
"""Compressor for the final averaging rounds, which add a tenth to a run's bytes."""


def _dense(topology: Graph = eg.directed_ring) -> Contenders:
    return {DENSE: Contender(algorithm=eg.StochasticGradientPush, topology=topology)}


def compressed(
    algorithm: Callable[..., Any],
    rung: Rung,
    topology: Graph = eg.directed_ring,
    *,
    ending: str | None = None,
    per_layer: bool = False,
    **options: object,
) -> Contender:
    options = {"compressor": compressor(rung.keep_ratio, rung.value_bits), **options}
    return Contender(
        algorithm=algorithm,
        topology=topology,
        local_steps=rung.local_steps,
        options=options,
        ending=ending,
        per_layer=per_layer,
    )


def difference_push(rung: Rung, topology: Graph = eg.directed_ring, **others: Any) -> Contender:  # noqa: ANN401
    step = bold_step(rung.keep_ratio)
    return compressed(eg.DifferencePush, rung, topology, consensus_step=step, **others)


# Momentum over rounds makes steps three times as long.
OUTER_LR_FACTOR = 0.5


def diloco(topology: Graph = eg.directed_ring) -> Contender:
    return replace(compressed(eg.DiLoCo, FLOODED, topology), lr_factor=OUTER_LR_FACTOR)


def double_squeeze(rung: Rung = SQUEEZED) -> Contender:
    return replace(compressed(eg.DoubleSqueeze, rung, complete), lr_factor=OUTER_LR_FACTOR)


_skew_compensated = partial(compressed, eg.SkewCompensatedSparsePush, PAPER)
SKEW_RUNS: Contenders = {
    **_dense(),
    "quasi-global-gossip": Contender(
        algorithm=eg.QuasiGlobalGossip, topology=eg.ring, has_momentum=False
    ),
    "sparse-push": compressed(eg.SparsePush, PAPER),
    "skew-compensated-sparse-push": _skew_compensated(compensation_rounds=50),
    "skew-compensated-sparse-push, 3 bits": _skew_compensated(
        ending="compensation", compensation_compressor=FINAL
    ),
    "difference-push": difference_push(OURS),
    "difference-push, compensated": difference_push(
        OURS, ending="final", final_compressor=FINAL
    ),
    "diloco": diloco(),
    "double-squeeze": double_squeeze(),
}


def table_iid(settings: StudySettings = StudySettings()) -> Study:
    """Even data: dense SGP, D-PSGD, CHOCO, and rising compression in a directed ring.

    D-PSGD and DoubleSqueeze use the complete graph, CHOCO the undirected ring of 8; DiLoCo is
    also compared. Data: MNIST, HAR and CIFAR-10. On one core, `mnist-lenet5` takes 50 minutes,
    `har-cnn` 25, each run of `cifar10-lenet5` 15, of `cifar10-resnet20` 40 and of
    `cifar10-vgg11-quarter` 10.

    Args:
        settings: Settings of the study.
    """
    sparse, difference = (
        (SPARSE[::3], DIFFERENCE[:2]) if settings.short else (SPARSE, DIFFERENCE)
    )
    runs: Contenders = {
        **_dense(),
        "gossip, complete graph": Contender(algorithm=eg.Gossip, topology=complete),
        f"choco-gossip {PAPER}": compressed(eg.ChocoGossip, PAPER, eg.ring),
        **{f"sparse-push {each}": compressed(eg.SparsePush, each) for each in sparse},
        **{f"difference-push {each}": difference_push(each) for each in difference},
        f"sparse-push {PAPER} per layer": compressed(eg.SparsePush, PAPER, per_layer=True),
        f"difference-push {OURS} per layer": difference_push(OURS, per_layer=True),
        f"diloco {FLOODED}": diloco(),
        **{
            f"double-squeeze {each}": double_squeeze(each)
            for each in (OFTEN_SQUEEZED, SQUEEZED)
        },
    }
    return _study(
        "sparse-push/table-iid",
        "How few bytes do workers in a directed ring need, and how much accuracy is lost?",
        settings,
        lambda problem: {"even data": (IID(), runs)},
    )


def table_skew(settings: StudySettings = StudySettings()) -> Study:
    """Skewed data: with and without compensation, and quasi-global momentum.

    Partitions: skew 0.8 and 1, Dirichlet 1 and 0.1, HAR by subject. DiLoCo is also compared.
    Data: MNIST, HAR and CIFAR-10. On one core, `har-cnn` takes 20 minutes and `mnist-lenet5` 2
    hours; CIFAR-10 was not run.

    Args:
        settings: Settings of the study.
    """
    partitions: dict[str, Partition] = {
        "skew 0.8": LabelSkew(0.8),
        "skew 1": LabelSkew(1.0),
        "Dirichlet 1": eg.Dirichlet(1.0),
        "Dirichlet 0.1": eg.Dirichlet(0.1),
    }
    if settings.short:
        partitions = {"skew 0.8": LabelSkew(0.8), "Dirichlet 0.1": eg.Dirichlet(0.1)}

    return _study(
        "sparse-push/table-skew",
        "How much accuracy does skewed data cost, and what restores it?",
        settings,
        lambda problem: {
            setting: (partition, SKEW_RUNS)
            for setting, partition in (
                {"by subject": eg.BySubject()} if problem is HAR_CNN else partitions
            ).items()
        },
        has_bars=True,
    )


def _come_and_go(num_workers: int) -> Topology:
    return intermittent(directed_exponential(num_workers), availability=0.5, period=64, seed=0)


def time_varying(settings: StudySettings = StudySettings()) -> Study:
    """Graphs that change in each round: dense push-sum, Sparse-Push and DifferencePush.

    Graphs: directed ring, one-peer exponential, random peers, and links that come and go. Data:
    MNIST and HAR. On one core, `har-cnn` takes 40 minutes; `mnist-lenet5` takes an hour and a
    half without `sparse-push`, which was not run.

    Args:
        settings: Settings of the study.
    """
    topologies: dict[str, Graph] = {
        "directed ring": eg.directed_ring,
        "one-peer exponential": one_peer_exponential,
        "random peers": partial(random_one_peer, period=64, seed=0),
        "links come and go": _come_and_go,
    }
    held: ContestSettings = {
        setting: (
            IID(),
            {
                **_dense(topology),
                "sparse-push": compressed(eg.SparsePush, PAPER, topology),
                "difference-push": difference_push(OURS, topology),
                "diloco": diloco(topology),
            },
        )
        for setting, topology in topologies.items()
    }
    return _study(
        "sparse-push/time-varying",
        "Are the results similar if the graph changes from round to round?",
        settings,
        lambda problem: held,
        problems=(MNIST_LENET5, HAR_CNN),
    )


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    held: Callable[[Problem], ContestSettings],
    *,
    problems: tuple[Problem, ...] = PROBLEMS,
    has_bars: bool = False,
) -> Study:
    contests = [
        SlowLinkContest(
            problem=problem,
            seed=seed,
            setting=setting,
            partition=partition,
            contenders=runs,
            num_workers=NUM_WORKERS_BY_SUBJECT if partition == eg.BySubject() else NUM_WORKERS,
        )
        for problem in ((SHORT,) if settings.short else problems)
        for seed in settings.seeds
        for setting, (partition, runs) in held(problem).items()
    ]
    first = [each for each in contests if each.seed == settings.seeds[0]]
    return contest_study(
        name,
        title,
        settings,
        contests,
        partial(contest_exhibits, name.rpartition("/")[2], first, has_bars),
        printed=PRINTED,
        contests=[each.plain() for each in first],
    )
