"""The baselines and EdgeGossip on pictures: MNIST and CIFAR-10 on uneven platforms."""

from __future__ import annotations

from pathlib import Path

from edgegossip.data.pictures import flip_and_crop
from edgegossip.data.readers import cifar10, mnist
from edgegossip.models import lenet5, resnet20
from edgegossip.recipes.baselines import compare_baselines
from edgegossip.recipes.tasks import Settings, default_data_dir
from edgegossip.runs.experiment import Comparison
from edgegossip.sim.platform import uneven

MNIST_LENET5_SETTINGS = Settings(throughput=2000.0)
CIFAR10_LENET5_SETTINGS = Settings(num_epochs=20)
CIFAR10_RESNET20_SETTINGS = Settings(
    num_epochs=30, throughput=200.0, batch_size=32, lr=0.05, weight_decay=1e-4
)


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
