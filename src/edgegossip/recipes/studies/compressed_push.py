"""Sparse-Push and its kin in tables: even data, skewed data, and graphs that vary in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from edgegossip.algorithms.choco_gossip import ChocoGossip
from edgegossip.algorithms.difference_push import DifferencePush
from edgegossip.algorithms.diloco import DiLoCo
from edgegossip.algorithms.gossip import Gossip
from edgegossip.algorithms.quasi_global_gossip import QuasiGlobalGossip
from edgegossip.algorithms.skew_compensated_sparse_push import SkewCompensatedSparsePush
from edgegossip.algorithms.sparse_push import SparsePush
from edgegossip.algorithms.stochastic_gradient_push import StochasticGradientPush
from edgegossip.core.topology import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    one_peer_exponential,
    ring,
)
from edgegossip.core.varying_topology import intermittent, random_one_peer
from edgegossip.experiments.exhibits import Exhibits, Figure, Panel
from edgegossip.experiments.study import Row, Study
from edgegossip.learning.augmentation import flip_and_crop
from edgegossip.learning.models import lenet5, mlp, resnet20, sensor_cnn
from edgegossip.learning.partition import IID, BySubject, Dirichlet, LabelSkew, Partition
from edgegossip.recipes import push_sum as recipes
from edgegossip.recipes.push_sum import (
    DENSE,
    PushSettings,
    bold_step,
    compressor,
)
from edgegossip.recipes.recipe_settings import Settings
from edgegossip.recipes.studies.contest import Contender, Contest
from edgegossip.recipes.studies.placings import (
    Placing,
    accuracy_bars,
    contest_curves,
    contest_table,
    placings,
)
from edgegossip.recipes.studies.problems import DIGITS_MLP, Problem
from edgegossip.recipes.studies.study_settings import StudySettings

Contenders: TypeAlias = Mapping[str, Contender]

NUM_WORKERS = 8
NUM_SUBJECTS = 21
RING = directed_ring(NUM_WORKERS)

PRINTED = (
    "The abstract prints one number: 466 times less communication at about 1 % loss of "
    "accuracy, ResNet-20 and VGG11 on CIFAR-10. It is what the largest 1 % in 32 bits with "
    "16-bit positions come to (66.7 times), times the 7 neighbors in a complete graph of 8.",
    "Its tables of accuracy were not available to us.",
)


def _problem(
    name: str,
    dataset: str,
    model: Callable[..., Any],
    settings: PushSettings,
    **others: Any,  # noqa: ANN401
) -> Problem:
    """A recipe's problem."""
    return Problem(
        name=name,
        dataset=dataset,
        model=model,
        settings=Settings(
            num_epochs=settings.num_epochs,
            batch_size=settings.global_batch // settings.num_workers,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            throughput=settings.throughput,
        ),
        schedule=settings.schedule,
        **others,
    )


MNIST_LENET5 = _problem("mnist-lenet5", "mnist", lenet5, recipes.MNIST_LENET5)
HAR_CNN = _problem("har-cnn", "har", sensor_cnn, recipes.HAR_CNN)
CIFAR10_LENET5 = _problem(
    "cifar10-lenet5",
    "cifar10",
    lenet5,
    recipes.CIFAR10_LENET5,
    augmentation=flip_and_crop,
    scaled_down="CIFAR-10 is also learnt by LeNet-5: ResNet-20 takes hours on two cores.",
)
CIFAR10_RESNET20 = _problem(
    "cifar10-resnet20",
    "cifar10",
    partial(resnet20, normalization="evonorm"),
    recipes.CIFAR10_RESNET20,
    augmentation=flip_and_crop,
    num_train=6_000,
    num_test=3_000,
    scaled_down="ResNet-20 (EvoNorm) learns from 6,000 of the 50,000 pictures of CIFAR-10 for "
    "30 epochs instead of 200, and is tested on 3,000 of the 10,000. "
    "`edgegossip compare sparse-push/cifar10-resnet20` has all of them.",
)
SHORT = replace(
    DIGITS_MLP,
    model=partial(mlp, hidden=(32,)),
    settings=replace(DIGITS_MLP.settings, batch_size=5),
    schedule=recipes.schedule("cosine", DIGITS_MLP.settings.num_epochs),
)
PROBLEMS = (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5, CIFAR10_RESNET20)


@dataclass(frozen=True)
class Rung:
    """How much is sent.

    Args:
        keep_ratio: Share of the entries in a message.
        value_bits: Of each of them.
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
"""466 times fewer bytes than dense push-sum, with LeNet-5."""
SPARSE = (Rung(0.1, 32), PAPER, Rung(0.01, 4), Rung(0.05, 4, local_steps=8))
DIFFERENCE = (Rung(0.01, 4), OURS, Rung(0.1, 4, local_steps=32))
"""Rising compression."""
FLOODED = Rung(0.036, 2, local_steps=32)
"""466 times fewer bytes, with LeNet-5, where a message is passed on by 7 of 8 workers."""
FINAL = compressor(1, 3)
"""Of the rounds of averaging that skewed data is compensated with, for a tenth of the bytes."""


def _dense(topology: Topology = RING) -> Contenders:
    return {DENSE: Contender(algorithm=StochasticGradientPush, topology=topology)}


def _compressed(
    algorithm: Callable[..., Any],
    topology: Topology,
    rung: Rung,
    ending: str | None = None,
    **options: object,
) -> Contender:
    options = {"compressor": compressor(rung.keep_ratio, rung.value_bits), **options}
    return Contender(
        algorithm=algorithm,
        topology=topology,
        local_steps=rung.local_steps,
        options=options,
        ending=ending,
    )


def _difference_push(
    topology: Topology, rung: Rung, ending: str | None = None, **options: object
) -> Contender:
    step = bold_step(rung.keep_ratio)
    return _compressed(DifferencePush, topology, rung, ending, consensus_step=step, **options)


def _diloco(topology: Topology, rung: Rung) -> Contender:
    # Momentum over rounds makes steps three times as long.
    return replace(_compressed(DiLoCo, topology, rung), lr_factor=0.5)


def table_iid(settings: StudySettings = StudySettings()) -> Study:
    """Even data: dense SGP, D-PSGD, CHOCO, and rising compression in a directed ring.

    Args:
        settings: What to change.
    """
    sparse, difference = (
        (SPARSE[::3], DIFFERENCE[:2]) if settings.short else (SPARSE, DIFFERENCE)
    )
    runs: Contenders = {
        **_dense(),
        "gossip, complete graph": Contender(algorithm=Gossip, topology=complete(NUM_WORKERS)),
        f"choco-gossip {PAPER}": _compressed(ChocoGossip, ring(NUM_WORKERS), PAPER),
        **{f"sparse-push {each}": _compressed(SparsePush, RING, each) for each in sparse},
        **{f"difference-push {each}": _difference_push(RING, each) for each in difference},
        f"diloco {FLOODED}": _diloco(RING, FLOODED),
    }

    def contests(problem: Problem, seed: int) -> Iterator[Contest]:
        yield _contest(problem, "even data", IID(), runs, seed)

    return _study(
        "sparse-push/table-iid",
        "How few bytes do workers in a directed ring need, and at what loss of accuracy?",
        settings,
        contests,
    )


def table_skew(settings: StudySettings = StudySettings()) -> Study:
    """Skewed data: with and without compensation, and quasi-global momentum.

    Args:
        settings: What to change.
    """
    partitions: dict[str, Partition] = {
        "skew 0.8": LabelSkew(0.8),
        "skew 1": LabelSkew(1.0),
        "Dirichlet 1": Dirichlet(1.0),
        "Dirichlet 0.1": Dirichlet(0.1),
    }
    if settings.short:
        partitions = {"skew 0.8": LabelSkew(0.8), "Dirichlet 0.1": Dirichlet(0.1)}

    def contests(problem: Problem, seed: int) -> Iterator[Contest]:
        if problem is HAR_CNN:  # three people at each worker
            runs = _skew_runs(NUM_SUBJECTS // 3)
            yield _contest(problem, "by subject", BySubject(), runs, seed)
            return
        for setting, partition in partitions.items():
            yield _contest(problem, setting, partition, _skew_runs(NUM_WORKERS), seed)

    return _study(
        "sparse-push/table-skew",
        "What does skewed data cost, and what brings it back?",
        settings,
        contests,
        has_bars=True,
    )


def _skew_runs(num_workers: int) -> Contenders:
    topology = directed_ring(num_workers)
    compensated = partial(_compressed, SkewCompensatedSparsePush, topology, PAPER)
    return {
        **_dense(topology),
        "quasi-global-gossip": Contender(
            algorithm=QuasiGlobalGossip, topology=ring(num_workers), has_momentum=False
        ),
        "sparse-push": _compressed(SparsePush, topology, PAPER),
        "skew-compensated-sparse-push": compensated(compensation_rounds=50),
        "skew-compensated-sparse-push, 3 bits": compensated(
            "compensation", compensation_compressor=FINAL
        ),
        "difference-push": _difference_push(topology, OURS),
        "difference-push, compensated": _difference_push(
            topology, OURS, ending="final", final_compressor=FINAL
        ),
        "diloco": _diloco(topology, FLOODED),
    }


def time_varying(settings: StudySettings = StudySettings()) -> Study:
    """Graphs that change from round to round: dense, Sparse-Push and DifferencePush.

    Args:
        settings: What to change.
    """
    everywhere = directed_exponential(NUM_WORKERS)
    topologies = {
        "directed ring": RING,
        "one-peer exponential": one_peer_exponential(NUM_WORKERS),
        "random peers": random_one_peer(NUM_WORKERS, period=64, seed=0),
        "links come and go": intermittent(everywhere, availability=0.5, period=64, seed=0),
    }

    def contests(problem: Problem, seed: int) -> Iterator[Contest]:
        for setting, topology in topologies.items():
            runs: Contenders = {
                **_dense(topology),
                "sparse-push": _compressed(SparsePush, topology, PAPER),
                "difference-push": _difference_push(topology, OURS),
                "diloco": _diloco(topology, FLOODED),
            }
            yield _contest(problem, setting, IID(), runs, seed)

    return _study(
        "sparse-push/time-varying",
        "Does it hold where the graph changes from round to round?",
        settings,
        contests,
        problems=(MNIST_LENET5, HAR_CNN),
    )


def _contest(
    problem: Problem, setting: str, partition: Partition, runs: Contenders, seed: int
) -> Contest:
    return Contest(
        group=problem.name,
        setting=setting,
        problem=problem,
        partition=partition,
        contenders=runs,
        seed=seed,
    )


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Callable[[Problem, int], Iterator[Contest]],
    *,
    problems: tuple[Problem, ...] = PROBLEMS,
    has_bars: bool = False,
) -> Study:
    chosen = (SHORT,) if settings.short else problems
    held = [
        each
        for problem in chosen
        for seed in settings.seeds
        for each in contests(problem, seed)
    ]
    first = [each for each in held if each.seed == settings.seeds[0]]
    return Study(
        name=name,
        title=title,
        printed=PRINTED,
        settings={
            **settings.plain(),
            "problems": [problem.plain() for problem in chosen],
            "contests": [each.plain() for each in first],
        },
        cells=tuple(cell for each in held for cell in each.cells(settings.data_dir)),
        exhibit=partial(_exhibits, name.rpartition("/")[2], first, has_bars),
    )


def _exhibits(
    name: str, contests: Sequence[Contest], has_bars: bool, rows: Mapping[str, Row]
) -> Exhibits:
    """A figure for each problem, with the curves of `contests`, and a table of all."""
    found = placings(rows.values())
    if not found:
        return Exhibits()
    caption = f"Curves: the averaged model, seed {contests[0].seed}."
    if has_bars:
        caption += " Bars: medians over the seeds, thin lines their range."
    figures = [
        Figure(
            name=f"{name}-{group}",
            heading=f"Accuracy against bytes and time: {group}",
            caption=caption,
            panels=(*(_bars(mine) if has_bars else ()), *panels),
        )
        for group in dict.fromkeys(each.group for each in contests)
        if (mine := [each for each in found if each.group == group])
        and (panels := _curves(rows, contests, group))
    ]
    return Exhibits(figures=tuple(figures), tables=(contest_table(found, "Ours"),))


def _bars(found: Sequence[Placing]) -> tuple[Panel, Panel]:
    return (
        accuracy_bars(found, lambda each: each.worker_mean, "Mean worker", ""),
        accuracy_bars(found, lambda each: each.worker_min, "Worst worker", ""),
    )


def _curves(
    rows: Mapping[str, Row], contests: Sequence[Contest], group: str
) -> tuple[Panel, ...]:
    return tuple(
        panel
        for each in contests
        if each.group == group
        for panel in contest_curves(rows.values(), group, each.setting, each.seed)
        if panel.series
    )
