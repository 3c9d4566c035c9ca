"""Local losses: a stage learns to predict the labels from its own outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.core.ranges import check_ranges
from edgegossip.learning.stages.teacher import Shape, Teacher, TeacherFactory, one_hot


@dataclass(frozen=True, kw_only=True)
class LocalLosses(TeacherFactory):
    r"""Train a stage to separate classes, by prediction and by similarity.

    .. math::
        L = (1 - \beta) \, \mathrm{CE}(A\, \mathrm{pool}(h), y)
            + \frac{\beta}{n^2} \, \| S(B(h)) - S(\mathrm{onehot}(y)) \|_F^2

    for a batch of :math:`n` samples, with a linear classifier :math:`A`, a layer :math:`B` (a
    3x3 convolution for pictures, otherwise a dense layer), and the matrix :math:`S` of cosine
    similarities between the centered samples of the batch. For a picture, :math:`S` uses the
    standard deviation of each channel. Average pooling reduces pictures to about `num_pooled`
    features for the classifier.

    Args:
        lr: Learning rate of Adam for :math:`A` and :math:`B`, above 0.
        similarity: :math:`\beta`, in [0, 1]; 0 is prediction alone.
        num_pooled: Approximate maximum number of features for the classifier.

    Raises:
        ValueError: If a number is out of range.

    References:
        Nokland & Eidnes, "Training neural networks with local error signals", ICML 2019,
        arXiv:1901.06656, "predsim". Departure: a stage of several layers has one loss, at its
        end.
    """

    lr: float = 1e-3
    similarity: float = 0.99
    num_pooled: int = 1024

    def __post_init__(self) -> None:
        check_ranges(self, lr="above 0 and finite", similarity="in [0, 1]")
        check_ranges(self, num_pooled="at least 1")

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        return LocalLoss(self, shape, num_classes)


class LocalLoss(Teacher):
    """The loss of one stage; see `LocalLosses`.

    Args:
        settings: Weights and sizes.
        shape: Shape of a sample's activations.
        num_classes: Number of labels.
    """

    def __init__(self, settings: LocalLosses, shape: Shape, num_classes: int) -> None:
        self._similarity, self._num_classes = settings.similarity, num_classes
        self._is_picture = len(shape) == 3
        numel = math.prod(shape)
        parts = nn.ModuleDict()
        if self._is_picture:
            # Average pooling to a square with about `num_pooled` features.
            self._side = min(shape[1], max(1, int(math.sqrt(settings.num_pooled / shape[0]))))
            numel = shape[0] * self._side**2
            parts["similarity"] = nn.Conv2d(shape[0], shape[0], 3, padding=1)
        else:
            parts["similarity"] = nn.Linear(numel, numel)
        parts["prediction"] = nn.Linear(numel, num_classes)
        super().__init__(parts, settings.lr)
        self._parts = parts

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        parts: nn.ModuleDict = self._parts
        loss = outputs.new_zeros(())
        if self._similarity < 1:
            predicted = parts["prediction"](self._pooled(outputs))
            loss = loss + (1 - self._similarity) * F.cross_entropy(predicted, labels)
        if self._similarity > 0:
            given = outputs if self._is_picture else outputs.flatten(1)
            features = parts["similarity"](given)
            wanted = similarities(one_hot(labels, self._num_classes))
            loss = loss + self._similarity * F.mse_loss(similarities(features), wanted)
        return loss

    def _pooled(self, outputs: Tensor) -> Tensor:
        if self._is_picture:
            outputs = F.adaptive_avg_pool2d(outputs, self._side)
        return outputs.flatten(1)


def similarities(features: Tensor) -> Tensor:
    """Cosine similarity of each pair of samples, [n, n].

    Args:
        features: [n, d], or [n, channels, height, width], reduced to the standard deviation of
            each channel.

    >>> import torch
    >>> similarities(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).round()
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    if features.ndim == 4:
        is_point = features[0, 0].numel() == 1
        features = features.flatten(1) if is_point else features.flatten(2).std(2)
    features = features - features.mean(1, keepdim=True)
    features = F.normalize(features, dim=1)
    return (features @ features.T).clamp(-1, 1)
