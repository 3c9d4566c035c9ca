"""Models; all except `gpt` take the shape of one sample and the number of classes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from edgegossip.models.chains import alexnet, eight_layers, vgg11, vgg16
from edgegossip.models.gpt import gpt
from edgegossip.models.mobile import mobilenet_v2, squeezenet
from edgegossip.models.resnet20 import resnet20
from edgegossip.models.small import lenet5, lrn_cnn, mlp, sensor_cnn

__all__ = [
    "MODELS",
    "alexnet",
    "eight_layers",
    "gpt",
    "lenet5",
    "lrn_cnn",
    "mlp",
    "mobilenet_v2",
    "resnet20",
    "sensor_cnn",
    "squeezenet",
    "vgg11",
    "vgg16",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "eight-layers": eight_layers,
    "lenet5": lenet5,
    "lrn-cnn": lrn_cnn,
    "mlp": mlp,
    "mobilenet-v2": mobilenet_v2,
    "resnet20": resnet20,
    "sensor-cnn": sensor_cnn,
    "squeezenet": squeezenet,
    "vgg11": vgg11,
    "vgg16": vgg16,
}
"""Model builders by name: ``build(input_shape=, num_classes=)``.

All models draw their initial weights from PyTorch's global generator; seed it within
``torch.random.fork_rng()``.
"""
