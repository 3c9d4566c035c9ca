"""Parameter servers: barriers, bounded lag, and no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

from edgegossip.algorithms.server.adacomm import ADACOMM
from edgegossip.algorithms.server.adsp import ADSP, ADSPPlus
from edgegossip.algorithms.server.methods import ASP, BSP, SSP, FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.data.dataset import Dataset
from edgegossip.data.hold_out import hold_out
from edgegossip.data.readers import cifar10, digits, har, mnist
from edgegossip.models import lenet5, lrn_cnn, mlp
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.tasks import counts_around, default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform
from edgegossip.training.loss import Loss


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the recipes for parameter servers; each recipe has its own defaults.

    Args:
        seconds: Virtual seconds of each run, above 0.
        num_workers: Number of workers, not counting servers.
        throughput: Training samples per second of the fastest worker, and of the server.
        heterogeneity: Mean of the workers' speeds relative to the slowest, at least 1.
        batch_size: Samples per step and worker.
        lr: Learning rate.
        momentum: Explicit momentum of the workers' SGD, in [0, 1); asynchrony adds implicit
            momentum.
        weight_decay: Weight decay of SGD.
        window: Seconds in a check period of ADSP, ADSP+ and ADACOMM, above 0.
        min_interval: Minimum seconds between two commits of ADSP and ADSP+, below `window`.
        rate: Commits per window of ADSP+, at least 1.
        slack: Steps by which a worker of SSP may lead the slowest, at least 1.
        tau: Local steps of FixedADACOMM, and initial local steps of ADACOMM, at least 1.
        validation_share: Share of the training samples to hold out for the search of ADSP and
            the steps of ADACOMM, in (0, 1).
        standby: Number of workers that are kept up to date to replace the server, at most
            `num_workers`; see `Standby`. With 0, none can.
        num_servers: Number of servers that share the model, at least 1; see `Shards`. A
            positive `standby` needs exactly 1.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.
    """

    seconds: Seconds = 60.0
    num_workers: int = 6
    throughput: float = 1000.0
    heterogeneity: float = 2.0
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    window: Seconds = 3.0
    min_interval: Seconds = 0.25
    rate: int = 4
    slack: int = 40
    tau: int = 40
    validation_share: float = 0.1
    standby: int = 0
    num_servers: int = 1
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, seconds="above 0", num_workers="at least 1")
        check_ranges(self, num_servers="at least 1")
        if not 0 <= self.standby <= self.num_workers:
            raise ValueError(
                f"standby must be in [0, num_workers], got {self.standby} of "
                f"{self.num_workers}; it is the number of workers to keep up to date"
            )
        if self.num_servers > 1 and self.standby:
            raise ValueError(
                f"num_servers must be 1 with standby={self.standby}, got {self.num_servers}; "
                "no worker can be elected for a slice of the model, so set only one of them"
            )
        check_ranges(self, heterogeneity="at least 1", validation_share="in (0, 1)")


QUICKSTART = ServerSettings(batch_size=16, seconds=30.0)
MNIST_LENET5 = ServerSettings(
    num_workers=4, throughput=2000.0, batch_size=64, lr=0.1, seconds=120.0, window=10.0
)
CIFAR10_LENET5 = ServerSettings(
    num_workers=18, seconds=600.0, batch_size=64, window=30.0, min_interval=2.0
)
CIFAR10_CNN = replace(
    CIFAR10_LENET5, throughput=250.0, batch_size=128, weight_decay=0.004, lr=0.1
)
HAR_SVM = ServerSettings(seconds=30.0, lr=0.02)


def heterogeneous(num_workers: int, throughput: float, heterogeneity: float) -> list[Platform]:
    """Make platforms with evenly spread speeds and a given ratio of mean to minimum.

    >>> [each.throughput for each in heterogeneous(3, 900.0, 2.0)]
    [300.0, 600.0, 900.0]

    Args:
        num_workers: Number of platforms.
        throughput: Throughput of the fastest platform, in samples per second.
        heterogeneity: H, the ratio of the mean speed to the lowest, at least 1.
    """
    check_range("heterogeneity", heterogeneity, "at least 1")
    widest = 2 * heterogeneity - 1  # the fastest over the slowest
    slowest = throughput / widest
    gap = (throughput - slowest) / max(1, num_workers - 1)
    return [Platform(throughput=slowest + i * gap) for i in range(num_workers)]


def quickstart(settings: ServerSettings = QUICKSTART) -> Comparison:
    """Seven parameter servers on handwritten digits (embedded), a small MLP: seconds."""
    return compare_servers(digits(), partial(mlp, hidden=(64,)), settings)


def mnist_lenet5(
    settings: ServerSettings = MNIST_LENET5, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """MNIST, LeNet-5, a server and 4 workers of unequal speed, seven methods.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with mnist/*-ubyte.gz; by default $EDGEGOSSIP_DATA.
    """
    return compare_servers(mnist(data_dir), lenet5, settings)


def cifar10_lenet5(
    settings: ServerSettings = CIFAR10_LENET5, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """CIFAR-10, LeNet-5, a server and 18 workers of unequal speed, seven methods.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder of the data; by default $EDGEGOSSIP_DATA.
    """
    return compare_servers(cifar10(data_dir), lenet5, settings)


def cifar10_cnn(
    settings: ServerSettings = CIFAR10_CNN, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """CIFAR-10, the ADSP paper's network, a server and 18 workers, seven methods: hours.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder of the data; by default $EDGEGOSSIP_DATA.
    """
    return compare_servers(cifar10(data_dir), lrn_cnn, settings)


def har_svm(
    settings: ServerSettings = HAR_SVM, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """Activities of 21 people, a linear support vector machine (hinge loss), seven methods.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder of the data; by default $EDGEGOSSIP_DATA.
    """
    linear = partial(mlp, hidden=())
    return compare_servers(har(data_dir), linear, settings, loss=F.multi_margin_loss)


def compare_servers(
    dataset: Dataset,
    model: Callable[..., nn.Module],
    settings: ServerSettings,
    loss: Loss = F.cross_entropy,
) -> Comparison:
    """Compare all methods for `settings.seconds` on the same platforms, links and data."""
    held_out = hold_out(dataset, settings.validation_share, seed=settings.seed)
    task = make_task(held_out, model, settings, batch_size=settings.batch_size, loss=loss)
    speeds = settings.num_workers, settings.throughput, settings.heterogeneity
    servers = [Platform(throughput=settings.throughput)] * settings.num_servers
    platforms = *servers, *heterogeneous(*speeds)
    experiments = {
        name: Experiment(
            task=task,
            algorithm=algorithm,
            platforms=platforms,
            links=Links(default=HOME_LINK),
            seed=settings.seed,
            max_seconds=settings.seconds,
        )
        for name, algorithm in methods(settings).items()
    }
    return Comparison(experiments=experiments, baseline="bsp", tunable=_tunable(settings))


def _tunable(settings: ServerSettings) -> dict[str, dict[str, tuple[float, ...]]]:
    """Settings to tune by method, each with its value, a lower one and a higher one to try."""
    return {
        "ssp": {"slack": counts_around(settings.slack)},
        "fixed-adacomm": {"tau": counts_around(settings.tau)},
        "adacomm": {"tau": counts_around(settings.tau)},
        "adsp-plus": {"rate": counts_around(settings.rate)},
    }


def methods(settings: ServerSettings) -> dict[str, Algorithm[Any]]:
    """Build all methods from the settings, by name."""
    common: dict[str, Any] = {
        "num_workers": settings.num_workers,
        "num_rounds": UNTIL_CUT_OFF,
    }
    window = settings.window
    timed = {**common, "window": window, "min_interval": settings.min_interval}
    servers: dict[str, ParameterServer] = {
        "bsp": BSP(**common),
        "ssp": SSP(**common, slack=settings.slack),
        "asp": ASP(**common),
        "fixed-adacomm": FixedADACOMM(**common, tau=settings.tau),
        "adacomm": ADACOMM(**common, tau=settings.tau, window=window),
        "adsp-plus": ADSPPlus(**timed, rate=settings.rate),
        "adsp": ADSP(**timed),
    }
    if settings.standby:
        standby = settings.standby
        return {n: Standby(inner=each, num_standbys=standby) for n, each in servers.items()}
    if settings.num_servers > 1:
        several = settings.num_servers
        return {n: Shards(inner=each, num_servers=several) for n, each in servers.items()}
    return dict(servers)
