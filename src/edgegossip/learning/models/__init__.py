"""Models; all except `gpt` take the shape of one sample and the number of classes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from edgegossip.learning.models.alexnet import alexnet
from edgegossip.learning.models.eight_layers import eight_layers
from edgegossip.learning.models.gpt import gpt
from edgegossip.learning.models.lenet5 import lenet5
from edgegossip.learning.models.lrn_cnn import lrn_cnn
from edgegossip.learning.models.mlp import mlp
from edgegossip.learning.models.mobilenet_v2 import mobilenet_v2
from edgegossip.learning.models.resnet20 import resnet20
from edgegossip.learning.models.sensor_cnn import sensor_cnn
from edgegossip.learning.models.squeezenet import squeezenet
from edgegossip.learning.models.vgg import vgg11, vgg16

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
