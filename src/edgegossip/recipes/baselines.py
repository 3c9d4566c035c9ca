"""The baselines and EdgeGossip on the same machines for the same virtual time.

The recipes are for pictures on uneven platforms, and for the sensor data of phones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.contract.topology import Topology, complete, ring
from edgegossip.data.dataset import Dataset
from edgegossip.data.partition import IID, BySubject, Partition, Shared
from edgegossip.data.pictures import flip_and_crop
from edgegossip.data.readers import cifar10, har, mnist
from edgegossip.models import lenet5, resnet20, sensor_cnn
from edgegossip.recipes.edge_squeeze import edge_squeeze
from edgegossip.recipes.epoch_times import epoch_gossip_seconds
from edgegossip.recipes.published import as_published
from edgegossip.recipes.tasks import (
    ACCURACY_AWARE,
    CommonSettings,
    Settings,
    Window,
    counts_around,
    default_data_dir,
    make_task,
)
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.traces import phones
from edgegossip.training.learner import Augmentation
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.task import Workload

HOME_LINK = Link(latency=0.005, bandwidth=12.5e6)
"""A link of 100 Mbit/s and 5 ms, as in a good home or campus network."""
PHONE_LINK = Link(latency=0.03, bandwidth=2.5e6)
"""A link of 20 Mbit/s and 30 ms, as in a mobile network."""
MNIST_LENET5_SETTINGS = Settings(throughput=2000.0)
CIFAR10_LENET5_SETTINGS = Settings(num_epochs=20)
CIFAR10_RESNET20_SETTINGS = Settings(
    num_epochs=30, throughput=200.0, batch_size=32, lr=0.05, weight_decay=1e-4
)
HAR_CNN_SETTINGS = Settings(
    num_epochs=30, num_workers=21, throughput=500.0, batch_size=32, exchange_probability=0.1
)


def compare_baselines(
    dataset: Dataset,
    model: Callable[..., nn.Module],
    platforms: tuple[Platform, ...],
    settings: Settings,
    *,
    partition: Partition = IID(),
    augmentation: Augmentation | None = None,
    link: Link = HOME_LINK,
    accuracy_aware: AccuracyAware = ACCURACY_AWARE,
    target: float | None = None,
) -> Comparison:
    """Run EpochGossip for ``settings.num_epochs``, and its rivals for the same virtual time.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        platforms: The hardware of each worker.
        settings: Settings of the recipe.
        partition: Partition of the samples among the workers.
        augmentation: Augmentation of the training batches.
        link: Link between any two workers.
        accuracy_aware: EdgeGossip's choice of samples; unused with ``as_published``.
        target: See `Comparison`.

    Raises:
        ValueError: If a setting is out of range, or settings contradict each other.
    """
    check_range("num_epochs", settings.num_epochs, "at least 1")
    check_ranges(settings, control='in [0, 1] or "auto"', window='above 0, "auto" or None')
    task = make_task(
        dataset,
        model,
        settings,
        batch_size=settings.batch_size,
        partition=partition,
        augmentation=augmentation,
    )
    workload = Workload(task, range(len(platforms)), settings.seed)
    max_seconds = epoch_gossip_seconds(workload, platforms, link, settings.num_epochs)

    run = partial(
        Experiment, platforms=platforms, links=Links(default=link), seed=settings.seed
    )
    timed = partial(run, max_seconds=max_seconds)
    # The paper averages no models over rounds.
    is_published = settings.as_published is not None and settings.window == "auto"
    served = partial(averaged, window=None if is_published else settings.window)
    epochs = partial(EpochGossip, topology=(everyone := complete(len(platforms))))
    gossip = timed(task=task, algorithm=epochs(num_rounds=UNTIL_CUT_OFF))
    own = _whole_system(gossip, settings, accuracy_aware)
    rounds = rounds_per_epoch(platforms)
    shares = own.algorithm if settings.shared else served(own.algorithm, rounds=rounds)
    steps = len(task.dataset.train) / len(platforms) / task.batch_size
    experiments = {  # names without wrappers, so that a sweep may change these
        "epoch-gossip": run(
            task=task, algorithm=served(epochs(num_rounds=settings.num_epochs), rounds=1.0)
        ),
        "edge-gossip": replace(own, algorithm=shares),
        **{
            name: timed(task=task, algorithm=served(each, rounds=steps * per_step))
            for name, (each, per_step) in _rivals(everyone, settings, rounds).items()
        },
    }
    return Comparison(
        experiments={name: replace(each, name=name) for name, each in experiments.items()},
        baseline="epoch-gossip",
        target=target,
        tunable=_tunable(settings),
    )


def _whole_system(
    gossip: Experiment, settings: Settings, accuracy_aware: AccuracyAware
) -> Experiment:
    """All parts of EdgeGossip around `gossip`, or claimed work: the paper's system, or ours."""
    if settings.shared:
        if settings.as_published is not None or settings.control not in (0, "auto"):
            raise ValueError(
                "ClaimedWork divides shared data, without control variates and not as the "
                "paper's system does; leave out shared, or as_published and control"
            )
        task = replace(gossip.task, partition=Shared())
        return replace(gossip, task=task, algorithm=ClaimedWork(inner=gossip.algorithm))
    if settings.as_published is None:
        return edge_gossip(gossip, accuracy_aware=accuracy_aware, control=settings.control)
    if settings.control not in (0, "auto"):
        raise ValueError(
            f"as_published is the paper's system, which has no control variates; leave out "
            f"control={settings.control} or as_published={settings.as_published!r}"
        )
    return as_published(gossip, settings.as_published)


def edge_gossip(
    experiment: Experiment,
    *,
    accuracy_aware: AccuracyAware = ACCURACY_AWARE,
    control: float | Literal["auto"] = "auto",
    **balancing: Any,  # noqa: ANN401 - of `EdgeGossip`
) -> Experiment:
    """Run `experiment` with all parts of EdgeGossip around its algorithm, with our defaults.

    `EdgeGossip` alone only balances; this also gives the task its choice of samples.
    `as_published` switches to the paper's settings.

    Args:
        experiment: An experiment with the base algorithm, such as `EpochGossip`.
        accuracy_aware: Choice of samples, with the aggregation that it needs.
        control: Weight of `ControlVariates` around `EdgeGossip`, in [0, 1], or "auto"; 0 for
            none.
        balancing: Arguments of `EdgeGossip`.
    """
    return replace(
        experiment,
        task=replace(experiment.task, accuracy_aware=accuracy_aware),
        algorithm=balanced(experiment.algorithm, control, **balancing),
    )


def balanced(
    inner: Algorithm[Any],
    control: float | Literal["auto"] = "auto",
    **balancing: Any,  # noqa: ANN401 - of `EdgeGossip`
) -> Algorithm[Any]:
    """Put `EdgeGossip` around `inner`, and around that `ControlVariates` of weight `control`.

    Args:
        inner: See `EdgeGossip`.
        control: 0 for no control variates, but EdgeGossip's correction: both remove the bias
            towards the data of fast workers, so by default only one is used.
        balancing: Other arguments of `EdgeGossip`.
    """
    if not control:
        return EdgeGossip(inner=inner, **balancing)
    balancing.setdefault("correction", 0.0)
    return ControlVariates(inner=EdgeGossip(inner=inner, **balancing), weight=control)


def averaged(algorithm: Algorithm[Any], window: Window, rounds: float) -> Algorithm[Any]:
    """Put `TrailingAverage` around `algorithm`, so that all runs average as many samples.

    Args:
        algorithm: Any algorithm that counts rounds.
        window: In epochs' worth of samples, at least a round; "auto" for a third of the run,
            None for no average.
        rounds: Number of the algorithm's rounds per epoch's worth of samples.
    """
    if window is None:
        return algorithm
    own = window if window == "auto" else max(1.0, window * rounds)
    return TrailingAverage(inner=algorithm, window=own)


def rounds_per_epoch(platforms: tuple[Platform, ...]) -> float:
    """EdgeGossip's rounds per epoch's worth of samples on idle platforms with equal shards.

    >>> from edgegossip.sim.platform import uneven
    >>> round(rounds_per_epoch(uneven(4)), 2)  # the fastest visits all data, the mean 60 %
    1.68
    """
    speeds = [platform.total_throughput for platform in platforms]
    return max(speeds) * len(speeds) / sum(speeds)


def _tunable(settings: Settings) -> dict[str, dict[str, tuple[float, ...]]]:
    """Settings to tune by algorithm, each with its value, a lower one and a higher one."""
    probability = settings.exchange_probability  # which may be 0
    around = dict.fromkeys((probability, probability / 4, min(1.0, 4 * probability)))
    return {
        "edge-squeeze": {"local_steps": counts_around(settings.local_steps)},
        "gosgd": {"exchange_probability": tuple(around)},
    }


def _rivals(
    everyone: Topology, settings: Settings, fastest: float
) -> dict[str, tuple[Algorithm[Any], float]]:
    """Algorithms by name, and their rounds per step of the average worker.

    Args:
        everyone: The complete graph.
        settings: Settings of the recipe.
        fastest: Steps of the fastest worker per step of the average one.
    """
    number = everyone.num_workers
    common: dict[str, Any] = {"topology": everyone, "num_rounds": UNTIL_CUT_OFF}
    squeezed = edge_squeeze(number, local_steps=settings.local_steps, seed=settings.seed)
    pushing = GoSGD(
        **common, exchange_probability=settings.exchange_probability, seed=settings.seed
    )
    return {
        "edge-squeeze": (squeezed, fastest / settings.local_steps),
        "gosgd": (pushing, 1.0),
        "all-reduce": (AllReduce(**common), 1.0),
        "gossip": (Gossip(topology=ring(number), num_rounds=UNTIL_CUT_OFF), 1.0),
    }


# Recipes.


def mnist_lenet5(
    settings: Settings = MNIST_LENET5_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """MNIST with LeNet-5 on 4 uneven platforms.

    `compare` takes about 5 minutes on two cores.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with mnist/*-ubyte.gz; by default $EDGEGOSSIP_DATA.
    """
    platforms = uneven(settings.num_workers, settings.throughput)
    return compare_baselines(mnist(data_dir), lenet5, platforms, settings)


def cifar10_lenet5(
    settings: Settings = CIFAR10_LENET5_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """CIFAR-10 with LeNet-5 on 4 uneven platforms.

    `compare` takes about 20 minutes on two cores.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with cifar-10-batches-bin; by default $EDGEGOSSIP_DATA.
    """
    platforms = uneven(settings.num_workers, settings.throughput)
    return compare_baselines(cifar10(data_dir), lenet5, platforms, settings)


def cifar10_resnet20(
    settings: Settings = CIFAR10_RESNET20_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """CIFAR-10 with ResNet-20 on 4 uneven platforms: hours on two cores.

    Pictures are flipped and cropped at random; normalization statistics are averaged with the
    parameters. `compare` takes 6 to 8 hours.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with cifar-10-batches-bin; by default $EDGEGOSSIP_DATA.
    """
    platforms = uneven(settings.num_workers, settings.throughput)
    return compare_baselines(
        cifar10(data_dir), resnet20, platforms, settings, augmentation=flip_and_crop
    )


def har_cnn(
    settings: Settings = HAR_CNN_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
    phone_trace: Path | None = None,
) -> Comparison:
    """Activities of 21 people on 21 phones of measured speeds, tested on 9 other people.

    Each worker has one person's data. `compare` takes about half an hour on two cores.

    Args:
        settings: Settings of the recipe; `throughput` is that of the trace's fastest phone.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
        phone_trace: AI-Benchmark scores of phones (see `sim.traces.phones`); by default
            raw_ai_benchmark_list.json.gz in `data_dir`.
    """
    platforms = phone_platforms(settings, data_dir, phone_trace)
    return compare_baselines(
        har(data_dir),
        sensor_cnn,
        platforms,
        settings,
        partition=BySubject(),
        link=PHONE_LINK,
    )


def phone_platforms(
    settings: CommonSettings, data_dir: Path, phone_trace: Path | None
) -> tuple[Platform, ...]:
    """Make phones with the speeds of a trace; see `har_cnn`."""
    trace = phone_trace or data_dir / "raw_ai_benchmark_list.json.gz"
    try:
        return phones(trace, settings.num_workers, settings.throughput, settings.seed)
    except DataError as error:
        raise DataError(
            f"{error}; name it by --phone-trace, or its folder by --data-dir or EDGEGOSSIP_DATA"
        ) from error
