"""Synthetic gradients: a small network predicts the gradient at a stage's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.core.ranges import check_ranges
from edgegossip.learning.stages.teacher import Shape, Teacher, TeacherFactory, one_hot

_NEW = 0.01
"""Weight of the newest target in the running mean square of the targets."""
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class SyntheticGradients(TeacherFactory):
    r"""Predict the gradient :math:`\delta_k` of the loss at the outputs :math:`h_k`.

    .. math::
        \hat\delta_k = s\, M_k(h_k, y), \qquad
        \min_{\phi_k} \; \| M_k(h_k, y) - \delta_k / s \|^2

    The target :math:`\delta_k` is the gradient at the next stage's inputs, from its own
    prediction (*bootstrapped*) or, in the last stage, from the true loss. The target is the
    gradient of each sample's loss. The gradient of the mean loss is smaller by a factor of the
    batch size, and :math:`M_k` would learn nothing from it. :math:`s` is a running root mean
    square of the targets. It is needed because targets are much smaller than 1, while the
    length of Adam's steps does not depend on the targets' scale.

    :math:`M_k` has `num_hidden` hidden layers with batch norm and rectified linear units. Its
    linear output begins at zero, so the stages below the cut do not change before :math:`M_k`
    has learned something. Pictures ([channels, height, width]) get 5x5 convolutions, other
    inputs dense layers. :math:`M_k` predicts the gradient at the cut, which may follow a
    nonlinearity.

    Args:
        lr: Learning rate of Adam for :math:`M_k`, above 0; 3e-5 in the paper, over 500,000
            steps.
        num_hidden: Number of hidden layers; 0 makes :math:`M_k` linear.
        width: Units of a hidden dense layer.
        channels: Channels of a hidden convolution.
        is_conditioned: Give :math:`M_k` the labels (cDNI), as one-hot rows or planes.

    Raises:
        ValueError: If a number is out of range.

    References:
        Jaderberg et al., "Decoupled neural interfaces using synthetic gradients", ICML 2017,
        arXiv:1608.05343, section 2 and appendix; used across cloud and edge by Chen, Zhao, Li
        & Zhao, HotEdge 2019. Departures: :math:`s`, without which Adam needs a learning rate a
        hundred times smaller; sizes, and padding that keeps the activations' shape.
    """

    lr: float = 1e-3
    num_hidden: int = 2
    width: int = 256
    channels: int = 32
    is_conditioned: bool = True

    learns_from_gradients = True

    def __post_init__(self) -> None:
        check_ranges(self, lr="above 0 and finite", num_hidden="at least 0")
        check_ranges(self, width="at least 1", channels="at least 1")

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        return SyntheticGradient(self, shape, num_classes)


class SyntheticGradient(Teacher):
    """The predictor of one stage; see `SyntheticGradients`.

    Args:
        settings: Size and learning rate.
        shape: Shape of a sample's activations.
        num_classes: Number of labels.
    """

    has_loss = False

    def __init__(self, settings: SyntheticGradients, shape: Shape, num_classes: int) -> None:
        self._num_classes = num_classes if settings.is_conditioned else 0
        self._is_picture = len(shape) == 3
        make = _convolutions if self._is_picture else _dense
        super().__init__(make(settings, shape, self._num_classes), settings.lr)
        # Mean square of the targets; kept with the module.
        self.module.register_buffer("mean_square", torch.zeros(()))

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            predicted = self._predict(outputs, labels) * (self._scale / len(outputs))
        return (outputs * predicted).sum()

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float:
        target = gradient * len(gradient)
        self._follow(target)
        target = target / self._scale
        predicted = self._predict(activations, labels)
        F.mse_loss(predicted, target).backward()  # type: ignore[no-untyped-call]
        super().step()
        flat, wanted = predicted.detach().flatten(), target.flatten()
        return float(F.cosine_similarity(flat, wanted, dim=0))

    @property
    def _scale(self) -> Tensor:
        return self.module.get_buffer("mean_square").sqrt().clamp_min(_TINY)

    def _follow(self, target: Tensor) -> None:
        known = self.module.get_buffer("mean_square")
        known.lerp_(target.square().mean(), _NEW if known else 1.0)

    def step(self) -> None:
        """Do nothing: the predictor learns only from returned gradients."""

    def _predict(self, activations: Tensor, labels: Tensor) -> Tensor:
        given = activations if self._is_picture else activations.flatten(1)
        if self._num_classes:
            told = one_hot(labels, self._num_classes)
            if self._is_picture:
                told = told[:, :, None, None].expand(-1, -1, *given.shape[2:])
            given = torch.cat([given, told], dim=1)
        # A batch of one sample has no variance; running statistics take its place.
        self.module.train(len(given) > 1)
        predicted: Tensor = self.module(given)
        return predicted.view(activations.shape)


def _dense(settings: SyntheticGradients, shape: Shape, num_classes: int) -> nn.Module:
    numel, layers = math.prod(shape), nn.Sequential()
    num_inputs = numel + num_classes
    for _ in range(settings.num_hidden):
        layers.append(nn.Linear(num_inputs, settings.width))
        layers.append(nn.BatchNorm1d(settings.width)).append(nn.ReLU())
        num_inputs = settings.width
    return layers.append(_zero(nn.Linear(num_inputs, numel)))


def _convolutions(settings: SyntheticGradients, shape: Shape, num_classes: int) -> nn.Module:
    layers, num_inputs = nn.Sequential(), shape[0] + num_classes
    for _ in range(settings.num_hidden):
        layers.append(nn.Conv2d(num_inputs, settings.channels, 5, padding=2))
        layers.append(nn.BatchNorm2d(settings.channels)).append(nn.ReLU())
        num_inputs = settings.channels
    return layers.append(_zero(nn.Conv2d(num_inputs, shape[0], 5, padding=2)))


def _zero(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Zero the parameters of `layer`, for an initial prediction of zero."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
