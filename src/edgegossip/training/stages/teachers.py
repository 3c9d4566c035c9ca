"""Gradients for the outputs of a stage, before any stage above has computed them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.contract.randomness import derive_seed
from edgegossip.contract.ranges import check_ranges
from edgegossip.models.blocks import drawn_from

Shape: TypeAlias = tuple[int, ...]


class Teacher(ABC):
    """Provides the gradient for the training of one stage.

    Args:
        module: Module that the teacher trains.
        lr: Learning rate of Adam for this module.

    Attributes:
        has_loss: Whether `teach` returns a real loss, not a product with a gradient.
    """

    has_loss: bool = True

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module = module
        self._optimizer = torch.optim.Adam(module.parameters(), lr=lr)

    @abstractmethod
    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar whose backward pass produces the gradient at `outputs`.

        Args:
            outputs: [n, ...] outputs of the stage, with their graph.
            labels: [n].
        """

    def step(self) -> None:
        """Update from the gradients of `module` after the backward pass."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float | None:
        """Learn from the returned gradient of the mean loss for `activations`.

        Returns:
            The cosine between the predicted and the returned gradient; None without a
            prediction.
        """
        return None

    @property
    def is_sound(self) -> bool:
        """Whether the teacher's state is finite."""
        return all(bool(x.isfinite().all()) for x in self.module.state_dict().values())

    def state_dict(self) -> dict[str, Any]:
        """All state that changes during training."""
        return {"module": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])


class TeacherFactory(ABC):
    """Settings of a teacher; makes one for each stage except the last.

    Attributes:
        learns_from_gradients: Whether the teacher needs returned gradients.
    """

    learns_from_gradients: bool = False

    @abstractmethod
    def build(self, shape: Shape, num_classes: int) -> Teacher:
        """Make the teacher of a stage whose outputs for one sample have `shape`."""

    def make(self, shape: Shape, num_classes: int, seed: int, *key: int | str) -> Teacher:
        """Make the teacher with weights from the random stream of `key`."""
        with drawn_from(derive_seed(seed, *key, "teacher")):
            return self.build(shape, num_classes)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Labels [n] as float rows [n, num_classes]."""
    return torch.nn.functional.one_hot(labels, num_classes).to(torch.float32)


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
            pooled = outputs
            if self._is_picture:
                pooled = F.adaptive_avg_pool2d(outputs, self._side)
            predicted = parts["prediction"](pooled.flatten(1))
            loss = loss + (1 - self._similarity) * F.cross_entropy(predicted, labels)
        if self._similarity > 0:
            given = outputs if self._is_picture else outputs.flatten(1)
            features = parts["similarity"](given)
            wanted = similarities(one_hot(labels, self._num_classes))
            loss = loss + self._similarity * F.mse_loss(similarities(features), wanted)
        return loss


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
        super().__init__(_predictor(settings, shape, self._num_classes), settings.lr)
        # Mean square of the targets; kept with the module.
        self.module.register_buffer("mean_square", torch.zeros(()))

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            predicted = self._predict(outputs, labels) * (self._scale / len(outputs))
        return (outputs * predicted).sum()

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float:
        target = gradient * len(gradient)
        # Before the division: the scale of the first target includes this target.
        known = self.module.get_buffer("mean_square")
        known.lerp_(target.square().mean(), _NEW if known else 1.0)
        target = target / self._scale
        predicted = self._predict(activations, labels)
        F.mse_loss(predicted, target).backward()  # type: ignore[no-untyped-call]
        super().step()
        flat, wanted = predicted.detach().flatten(), target.flatten()
        return float(F.cosine_similarity(flat, wanted, dim=0))

    @property
    def _scale(self) -> Tensor:
        return self.module.get_buffer("mean_square").sqrt().clamp_min(_TINY)

    def step(self) -> None:
        """Do nothing: the predictor learns only from returned gradients."""

    def _predict(self, activations: Tensor, labels: Tensor) -> Tensor:
        given = activations if self._is_picture else activations.flatten(1)
        if self._num_classes:
            condition = one_hot(labels, self._num_classes)
            if self._is_picture:
                condition = condition[:, :, None, None].expand(-1, -1, *given.shape[2:])
            given = torch.cat([given, condition], dim=1)
        # A batch of one sample has no variance; running statistics take its place.
        self.module.train(len(given) > 1)
        predicted: Tensor = self.module(given)
        return predicted.view(activations.shape)


def _predictor(settings: SyntheticGradients, shape: Shape, num_classes: int) -> nn.Module:
    make: Callable[[int, int], nn.Module]
    norm: type[nn.BatchNorm1d | nn.BatchNorm2d]
    if len(shape) == 3:
        make, norm = partial(nn.Conv2d, kernel_size=5, padding=2), nn.BatchNorm2d
        num_outputs, width = shape[0], settings.channels
    else:
        make, norm = nn.Linear, nn.BatchNorm1d
        num_outputs, width = math.prod(shape), settings.width
    layers, num_inputs = nn.Sequential(), num_outputs + num_classes
    for _ in range(settings.num_hidden):
        layers.append(make(num_inputs, width)).append(norm(width)).append(nn.ReLU())
        num_inputs = width
    last = make(num_inputs, num_outputs)
    for parameter in last.parameters():  # for an initial prediction of zero
        nn.init.zeros_(parameter)
    return layers.append(last)


@dataclass(frozen=True, kw_only=True)
class Both(TeacherFactory):
    """Train a stage with the sum of a synthetic gradient and a local loss.

    The local loss is useful from the first batch on, when the prediction is still zero. The
    gradient adds information from the stages above.

    Args:
        gradients: Predicts the gradient.
        losses: The local loss, or another teacher that does not learn from gradients.
        weight: Weight of the local loss, at least 0.

    Raises:
        ValueError: If `weight` is below 0.
    """

    gradients: SyntheticGradients = SyntheticGradients()
    losses: TeacherFactory = LocalLosses()
    weight: float = 1.0

    learns_from_gradients = True

    def __post_init__(self) -> None:
        check_ranges(self, weight="in [0, inf)")

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        gradient = self.gradients.build(shape, num_classes)
        return _Both(gradient, self.losses.build(shape, num_classes), self.weight)


class _Both(Teacher):
    has_loss = False

    def __init__(self, gradient: Teacher, loss: Teacher, weight: float) -> None:
        self._gradient, self._loss, self._weight = gradient, loss, weight
        super().__init__(nn.ModuleList([gradient.module, loss.module]), lr=0.0)  # they learn

    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        local = self._loss.teach(outputs, labels)
        return self._gradient.teach(outputs, labels) + self._weight * local

    def fit(self, activations: Tensor, labels: Tensor, gradient: Tensor) -> float | None:
        return self._gradient.fit(activations, labels, gradient)

    def step(self) -> None:
        self._loss.step()

    def state_dict(self) -> dict[str, Any]:
        return {"gradient": self._gradient.state_dict(), "loss": self._loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gradient.load_state_dict(state["gradient"])
        self._loss.load_state_dict(state["loss"])
