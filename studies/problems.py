"""The problems of the studies, scaled down for two cores, with the settings of races."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import edgegossip as eg
from edgegossip.data.pictures import flip_and_crop
from edgegossip.models import alexnet, mobilenet_v2, resnet20, squeezenet, vgg11
from edgegossip.recipes import problems
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import Settings

MNIST_LENET5 = replace(
    problems.MNIST_LENET5, settings=Settings(num_epochs=15, throughput=2000.0)
)
CIFAR10_LENET5 = replace(problems.CIFAR10_LENET5, settings=Settings(num_epochs=24))
CIFAR10_LENET5_AUGMENTED = replace(
    CIFAR10_LENET5, name="cifar10-lenet5-augmented", augmentation=flip_and_crop
)
HAR_CNN = replace(
    problems.HAR_CNN,
    settings=Settings(num_epochs=40, throughput=500.0, exchange_probability=0.1),
)
HAR_BY_SUBJECT = replace(HAR_CNN, name="har-by-subject", partition=eg.BySubject())
CIFAR10_RESNET20 = Problem(
    name="cifar10-resnet20",
    dataset="cifar10",
    model=resnet20,
    num_train=10_000,
    num_test=5_000,
    settings=Settings(
        num_epochs=12, throughput=200.0, batch_size=32, lr=0.05, weight_decay=1e-4
    ),
    augmentation=flip_and_crop,
    scaled_down="ResNet-20 (not in the paper) learns from 10,000 of the 50,000 pictures of "
    "CIFAR-10 for 12 epochs, and is tested on 5,000 of the 10,000.",
)
IMAGENET8X8_EIGHT_LAYERS = Problem(
    name="imagenet8x8-eight-layers",
    dataset="imagenet8x8",
    model=eg.eight_layers,
    num_train=40_000,
    settings=Settings(num_epochs=40, throughput=1000.0),
    scaled_down="Four convolutions and four linear layers replace AlexNet; they learn from "
    "40,000 pictures of ImageNet 8x8 for 40 epochs.",
)
CIFAR10_ALEXNET = Problem(
    name="cifar10-alexnet",
    dataset="cifar10",
    model=alexnet,
    num_train=2_000,
    num_test=1_000,
    settings=Settings(num_epochs=6, throughput=50.0, batch_size=32, exchange_probability=0.1),
    scaled_down="AlexNet (57 million parameters) learns from 2,000 of the 50,000 pictures of "
    "CIFAR-10 for 6 epochs, and is tested on 1,000 of the 10,000.",
)
CIFAR10_ALEXNET_QUARTER = Problem(
    name="cifar10-alexnet-quarter",
    dataset="cifar10",
    model=partial(alexnet, width=0.25),
    num_train=10_000,
    num_test=2_000,
    settings=Settings(num_epochs=12, throughput=500.0, batch_size=32, exchange_probability=0.1),
    scaled_down="AlexNet with a quarter of its channels and hidden units (3.6 of 57 million "
    "parameters) learns from 10,000 of the 50,000 pictures of CIFAR-10 for 12 epochs, and is "
    "tested on 2,000 of the 10,000.",
)
CIFAR10_SQUEEZENET = Problem(
    name="cifar10-squeezenet",
    dataset="cifar10",
    model=squeezenet,
    num_train=5_000,
    num_test=2_000,
    settings=Settings(num_epochs=15, throughput=300.0, batch_size=32, exchange_probability=0.1),
    scaled_down="SqueezeNet learns from 5,000 of the 50,000 pictures of CIFAR-10 for 15 "
    "epochs, and is tested on 2,000 of the 10,000.",
)
CIFAR10_MOBILENET_V2_QUARTER = Problem(
    name="cifar10-mobilenet-v2-quarter",
    dataset="cifar10",
    model=partial(mobilenet_v2, width=0.25),
    num_train=5_000,
    num_test=2_000,
    settings=Settings(
        num_epochs=8, throughput=150.0, batch_size=16, lr=0.02, exchange_probability=0.1
    ),
    scaled_down="MobileNet-v2 with a quarter of its channels (251 thousand parameters of 2.2 "
    "million) learns from 5,000 of the 50,000 pictures of CIFAR-10 for 8 epochs, and is tested "
    "on 2,000 of the 10,000.",
)
CIFAR10_VGG11_QUARTER = Problem(
    name="cifar10-vgg11-quarter",
    dataset="cifar10",
    model=partial(vgg11, width=0.25),
    num_train=6_000,
    num_test=3_000,
    augmentation=flip_and_crop,
    scaled_down="VGG11 with a quarter of its channels and hidden units (0.6 of 9.5 million "
    "parameters) learns from 6,000 of the 50,000 pictures of CIFAR-10 for 30 epochs, and is "
    "tested on 3,000 of the 10,000. `edgegossip compare sparse-push/cifar10-vgg11` has all.",
)
DIGITS_MLP = Problem(
    name="digits-mlp",
    dataset="digits",
    # All epochs of a smaller model would take less time than aggregation.
    model=partial(eg.mlp, hidden=(512, 512)),
    num_train=400,
    num_test=200,
    settings=Settings(
        num_epochs=4, batch_size=16, lr=0.02, throughput=100.0, exchange_probability=0.1
    ),
    scaled_down="The short form: 400 handwritten digits of 8 x 8 pixels and a small "
    "perceptron replace the data and the model. Its numbers mean nothing.",
)
MNIST_MLP = replace(
    problems.MNIST_MLP,
    settings=Settings(batch_size=32, throughput=1000.0, momentum=0.0),
    scaled_down="MNIST and a perceptron with 64 hidden units (50,890 parameters); 5,000 of its "
    "10,000 test pictures.",
)
SMALL_MLP = replace(
    DIGITS_MLP,
    model=partial(eg.mlp, hidden=(32,)),
    settings=replace(DIGITS_MLP.settings, momentum=0.0),
)


def with_epochs(problem: Problem, num_epochs: int) -> Problem:
    """Return `problem` with a different number of EpochGossip's epochs."""
    settings = replace(problem.settings, num_epochs=num_epochs)
    reason = f"{problem.name}: {num_epochs} epochs of EpochGossip; the paper prints no number."
    if problem.scaled_down:
        reason = f"{problem.scaled_down} Here, EpochGossip trains for {num_epochs} epochs."
    return replace(problem, settings=settings, scaled_down=reason)
