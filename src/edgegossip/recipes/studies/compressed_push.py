"""Tables of Sparse-Push and related algorithms: even data, skewed data, varying graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.quasi_global_gossip import QuasiGlobalGossip
from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    intermittent,
    one_peer_exponential,
    random_one_peer,
    ring,
)
from edgegossip.data.partition import IID, BySubject, Dirichlet, LabelSkew, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import lenet5, mlp, resnet20, sensor_cnn, vgg11
from edgegossip.recipes import push_sum_comparison as recipes
from edgegossip.recipes.push_sum_comparison import (
    DENSE,
    PushSettings,
    bold_step,
    compressor,
)
from edgegossip.recipes.studies.contest import Contender, Contenders, settings_and_cells
from edgegossip.recipes.studies.problems import DIGITS_MLP, Problem
from edgegossip.recipes.studies.slow_links import SlowLinkContest, contest_exhibits
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.study import Study

Graph: TypeAlias = Callable[[int], Topology]
"""Makes a topology from the number of workers."""
ContestSettings: TypeAlias = Mapping[str, tuple[Partition, Contenders]]
"""Partition and contenders by name of the setting."""

NUM_WORKERS = 8
NUM_WORKERS_BY_SUBJECT = 7
"""Each worker has the data of three of the 21 people."""

PRINTED = (
    "The abstract prints one number: 466 times less communication at about 1 % loss of "
    "accuracy, ResNet-20 and VGG11 on CIFAR-10. This is the factor of the largest 1 % in 32 "
    "bits with 16-bit positions (66.7), multiplied by the 7 neighbors in a complete graph of "
    "8.",
    "Its tables of accuracy were not available to us.",
)


def _problem(
    name: str,
    dataset: str,
    model: Callable[..., Any],
    settings: PushSettings,
    **others: Any,  # noqa: ANN401
) -> Problem:
    """Make the problem of a recipe."""
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
    scaled_down="CIFAR-10 is also learned by LeNet-5: ResNet-20 takes hours on two cores.",
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
CIFAR10_VGG11_QUARTER = _problem(
    "cifar10-vgg11-quarter",
    "cifar10",
    partial(vgg11, width=0.25),
    recipes.CIFAR10_VGG11,
    augmentation=flip_and_crop,
    num_train=6_000,
    num_test=3_000,
    scaled_down="VGG11 with a quarter of its channels and hidden units (0.6 of 9.5 million "
    "parameters) learns from 6,000 of the 50,000 pictures of CIFAR-10 for 30 epochs, and is "
    "tested on 3,000 of the 10,000. `edgegossip compare sparse-push/cifar10-vgg11` has all.",
)
SHORT = replace(
    DIGITS_MLP,
    model=partial(mlp, hidden=(32,)),
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


def _dense(topology: Graph = directed_ring) -> Contenders:
    return {DENSE: Contender(algorithm=StochasticGradientPush, topology=topology)}


def _compressed(
    algorithm: Callable[..., Any],
    rung: Rung,
    topology: Graph = directed_ring,
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


def difference_push(rung: Rung, topology: Graph = directed_ring, **others: Any) -> Contender:  # noqa: ANN401
    step = bold_step(rung.keep_ratio)
    return _compressed(DifferencePush, rung, topology, consensus_step=step, **others)


# Momentum over rounds makes steps three times as long.
OUTER_LR_FACTOR = 0.5


def diloco(topology: Graph = directed_ring) -> Contender:
    return replace(_compressed(DiLoCo, FLOODED, topology), lr_factor=OUTER_LR_FACTOR)


def double_squeeze(rung: Rung = SQUEEZED) -> Contender:
    return replace(_compressed(DoubleSqueeze, rung, complete), lr_factor=OUTER_LR_FACTOR)


_skew_compensated = partial(_compressed, SkewCompensatedSparsePush, PAPER)
SKEW_RUNS: Contenders = {
    **_dense(),
    "quasi-global-gossip": Contender(
        algorithm=QuasiGlobalGossip, topology=ring, has_momentum=False
    ),
    "sparse-push": _compressed(SparsePush, PAPER),
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
        "gossip, complete graph": Contender(algorithm=Gossip, topology=complete),
        f"choco-gossip {PAPER}": _compressed(ChocoGossip, PAPER, ring),
        **{f"sparse-push {each}": _compressed(SparsePush, each) for each in sparse},
        **{f"difference-push {each}": difference_push(each) for each in difference},
        f"sparse-push {PAPER} per layer": _compressed(SparsePush, PAPER, per_layer=True),
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
        "Dirichlet 1": Dirichlet(1.0),
        "Dirichlet 0.1": Dirichlet(0.1),
    }
    if settings.short:
        partitions = {"skew 0.8": LabelSkew(0.8), "Dirichlet 0.1": Dirichlet(0.1)}

    return _study(
        "sparse-push/table-skew",
        "How much accuracy does skewed data cost, and what restores it?",
        settings,
        lambda problem: {
            setting: (partition, SKEW_RUNS)
            for setting, partition in (
                {"by subject": BySubject()} if problem is HAR_CNN else partitions
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
        "directed ring": directed_ring,
        "one-peer exponential": one_peer_exponential,
        "random peers": partial(random_one_peer, period=64, seed=0),
        "links come and go": _come_and_go,
    }
    held: ContestSettings = {
        setting: (
            IID(),
            {
                **_dense(topology),
                "sparse-push": _compressed(SparsePush, PAPER, topology),
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
            num_workers=NUM_WORKERS_BY_SUBJECT if partition == BySubject() else NUM_WORKERS,
        )
        for problem in ((SHORT,) if settings.short else problems)
        for seed in settings.seeds
        for setting, (partition, runs) in held(problem).items()
    ]
    first = [each for each in contests if each.seed == settings.seeds[0]]
    depends_on, cells = settings_and_cells(contests, settings)
    return Study(
        name=name,
        title=title,
        printed=PRINTED,
        settings={**depends_on, "contests": [each.plain() for each in first]},
        cells=cells,
        exhibit=partial(contest_exhibits, name.rpartition("/")[2], first, has_bars),
    )
