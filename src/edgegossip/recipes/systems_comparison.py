"""Ten systems on the same machines: gossip, compressed push-sum, and parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.methods import BSP, SSP
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.topology import complete, directed_ring, ring
from edgegossip.data.hold_out import hold_out
from edgegossip.models import mlp
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.problems import HAR_CNN, MNIST_LENET5, MNIST_MLP, Problem
from edgegossip.recipes.published import Reading, as_published
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.tasks import IN_TURN, default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform, uneven


@dataclass(frozen=True, kw_only=True)
class SystemSettings:
    """Settings of the recipes for ten systems; each recipe has its own defaults.

    Args:
        num_workers: Number of machines, at least 3; a parameter server, if any, is the first.
        num_epochs: Epochs that the machines would complete in a run if they always trained.
        seconds: Duration of a run; None for the time of `num_epochs`.
        throughput: Training samples per second of the fastest machine.
        num_train: Training samples, drawn at random; None for all.
        num_test: Test samples, drawn at random; None for the problem's own number.
        batch_size: Samples per step and worker.
        lr: Learning rate.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Weight decay of SGD.
        local_steps: Steps of Gossip and DiLoCo between two exchanges.
        exchange_probability: Probability of a push after a step of GoSGD, in [0, 1].
        max_keep_ratio: Share of its data that EdgeGossip's fastest worker visits between two
            exchanges, in (0, 1].
        keep_ratio: Share of the entries that Sparse-Push sends, in (0, 1].
        slack: Steps by which a worker of SSP may lead the slowest, at least 1.
        windows: Number of check periods of ADSP in a run, at least 1.
        validation_share: Share of the training samples to hold out for the search of ADSP.
        as_published: Reading of Algorithm 2 with which EdgeGossip is the paper's whole system
            (`as_published`), without `max_keep_ratio`; None to balance only.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.
    """

    num_workers: int = 4
    num_epochs: float = 20.0
    seconds: Seconds | None = None
    throughput: float = 1000.0
    num_train: int | None = None
    num_test: int | None = None
    batch_size: int = 32
    lr: float = 0.15
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_steps: int = 8
    exchange_probability: float = 0.05
    max_keep_ratio: float = 0.3
    keep_ratio: float = 0.05
    slack: int = 40
    windows: int = 20
    validation_share: float = 0.03
    as_published: Reading | None = None
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, num_workers="at least 3", windows="at least 1")
        check_ranges(self, num_epochs="above 0 and finite", validation_share="in (0, 1)")
        check_ranges(self, seconds="above 0 and finite, or None")
        check_ranges(self, num_train="at least 1 or None", num_test="at least 1 or None")


DIGITS_MLP = Problem(name="digits-mlp", dataset="digits", model=partial(mlp, hidden=(64,)))
QUICKSTART = SystemSettings(num_epochs=40, batch_size=16, lr=0.1)
MNIST_MLP_SETTINGS = SystemSettings(num_epochs=12)
MNIST_LENET5_SETTINGS = SystemSettings(num_epochs=6)
HAR_CNN_SETTINGS = SystemSettings(num_epochs=20, throughput=500.0)


def quickstart(settings: SystemSettings = QUICKSTART) -> Comparison:
    """Ten systems on handwritten digits (embedded), a small MLP: seconds."""
    return compare_systems(DIGITS_MLP, settings, Path())


def mnist_mlp(
    settings: SystemSettings = MNIST_MLP_SETTINGS, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """MNIST, an MLP with 64 hidden units, ten systems.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with mnist/*-ubyte.gz; by default $EDGEGOSSIP_DATA.
    """
    return compare_systems(MNIST_MLP, settings, data_dir)


def mnist_lenet5(
    settings: SystemSettings = MNIST_LENET5_SETTINGS, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """MNIST, LeNet-5, ten systems.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with mnist/*-ubyte.gz; by default $EDGEGOSSIP_DATA.
    """
    return compare_systems(MNIST_LENET5, settings, data_dir)


def har_cnn(
    settings: SystemSettings = HAR_CNN_SETTINGS, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """Activities of people, a small CNN, ten systems; people are mixed across machines.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
    """
    return compare_systems(HAR_CNN, settings, data_dir)


def compare_systems(problem: Problem, settings: SystemSettings, data_dir: Path) -> Comparison:
    """Compare ten systems from the literature on the same machines for the same time.

    Args:
        problem: Data and model; its settings are ignored.
        settings: Settings of the recipe.
        data_dir: Folder of the data sets.
    """
    num_test = settings.num_test or problem.num_test
    some = replace(problem, num_train=settings.num_train, num_test=num_test)
    dataset = some.load(data_dir)
    held_out = hold_out(dataset, settings.validation_share)  # the same for all seeds
    task = make_task(held_out, problem.model, settings, batch_size=settings.batch_size)
    platforms = uneven(settings.num_workers, settings.throughput)
    seconds = settings.seconds or _seconds(len(held_out.train), platforms, settings)
    experiments = {
        name: Experiment(
            task=task,
            algorithm=algorithm,
            platforms=platforms,
            links=Links(default=HOME_LINK),
            seed=settings.seed,
            max_seconds=seconds,
            name=name,
        )
        for name, algorithm in _algorithms(settings, seconds).items()
    }
    tunable = TUNABLE
    if settings.as_published is None:
        own = replace(experiments["edge-gossip"], task=replace(task, accuracy_aware=IN_TURN))
    else:
        inner = replace(experiments["epoch-gossip"], name="edge-gossip")
        own = as_published(inner, settings.as_published)
        tunable = {**TUNABLE, "edge-gossip": {}}
    return Comparison(
        experiments=experiments | {"edge-gossip": own}, baseline="all-reduce", tunable=tunable
    )


def _seconds(
    num_samples: int, platforms: tuple[Platform, ...], settings: SystemSettings
) -> Seconds:
    """Time in which the machines could complete `num_epochs`, to three significant digits."""
    total = sum(platform.total_throughput for platform in platforms)
    return float(f"{settings.num_epochs * num_samples / total:.3g}")


TUNABLE: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "all-reduce": {},
    "gossip": {"local_steps": (8, 1, 32)},
    "epoch-gossip": {},
    "edge-gossip": {"max_keep_ratio": (0.3, 0.1, 1.0)},
    "gosgd": {"exchange_probability": (0.05, 0.01, 0.2)},
    "diloco": {"local_steps": (32, 8, 128)},
    "sparse-push": {"keep_ratio": (0.05, 0.01, 0.1)},
    "bsp": {},
    "ssp": {"slack": (40, 4, 160)},
    "adsp": {"windows": (20, 8, 50)},
}
"""Each system's setting to tune, with the values to try; see `Comparison.tunable`."""


def _algorithms(settings: SystemSettings, seconds: Seconds) -> dict[str, Algorithm[Any]]:
    """All systems for these machines, the first of which serves if the system has a server."""
    number, window = settings.num_workers, seconds / settings.windows
    everyone: dict[str, Any] = {"topology": complete(number), "num_rounds": UNTIL_CUT_OFF}
    served: dict[str, Any] = {"num_workers": number - 1, "num_rounds": UNTIL_CUT_OFF}
    in_ring = {**everyone, "topology": ring(number)}
    one_way = {**everyone, "topology": directed_ring(number)}
    epochs, sparse = EpochGossip(**everyone), compressor(settings.keep_ratio, 32)
    return {
        "all-reduce": AllReduce(**everyone),
        "gossip": Gossip(**in_ring, local_steps=settings.local_steps),
        "epoch-gossip": epochs,
        "edge-gossip": EdgeGossip(inner=epochs, max_keep_ratio=settings.max_keep_ratio),
        "gosgd": GoSGD(**everyone, exchange_probability=settings.exchange_probability),
        "diloco": DiLoCo(**everyone, local_steps=settings.local_steps),
        "sparse-push": SparsePush(**one_way, compressor=sparse),
        "bsp": BSP(**served),
        "ssp": SSP(**served, slack=settings.slack),
        "adsp": ADSP(**served, window=window, min_interval=window / 20),
    }
