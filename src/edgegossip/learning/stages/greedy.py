"""Greedy learning: each stage trains with its own small classifier on top."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.core.ranges import check_ranges
from edgegossip.learning.stages.teacher import Shape, Teacher, TeacherFactory


@dataclass(frozen=True, kw_only=True)
class Greedy(TeacherFactory):
    """Train each stage with the loss of a classifier on its outputs.

    The classifier pools pictures to a quarter of their side, at least 2, and has three 1x1
    convolutions before its dense layers ("MLP-SR-aux"). For other inputs, the classifier has
    one hidden layer. Stages may train on batches repeatedly: see `replay` of `DecoupledStage`.

    Args:
        lr: Learning rate of Adam for the classifier, above 0.
        width: Number of units of the classifier's hidden layer.

    Raises:
        ValueError: If a number is out of range.

    References:
        Belilovsky, Eickenberg & Oyallon, "Decoupled greedy learning of CNNs", ICML 2020,
        arXiv:1901.08164, sections 3 and 4.2.
    """

    lr: float = 1e-3
    width: int = 128

    def __post_init__(self) -> None:
        check_ranges(self, lr="above 0 and finite", width="at least 1")

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        return GreedyClassifier(self, shape, num_classes)


class GreedyClassifier(Teacher):
    """The classifier of one stage; see `Greedy`.

    Args:
        settings: Size and learning rate.
        shape: Shape of a sample's activations.
        num_classes: Number of labels.
    """

    def __init__(self, settings: Greedy, shape: Shape, num_classes: int) -> None:
        numel, layers = math.prod(shape), nn.Sequential()
        if len(shape) == 3:
            channels, side = shape[0], max(2, shape[1] // 4)
            layers.append(nn.AdaptiveAvgPool2d(side))
            for _ in range(3):
                layers.append(nn.Conv2d(channels, channels, 1)).append(nn.ReLU())
            layers.append(nn.AdaptiveAvgPool2d(2))
            numel = 4 * channels
        layers.append(nn.Flatten()).append(nn.Linear(numel, settings.width)).append(nn.ReLU())
        super().__init__(layers.append(nn.Linear(settings.width, num_classes)), settings.lr)

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.module(outputs), labels)
