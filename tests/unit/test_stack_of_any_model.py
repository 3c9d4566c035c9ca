"""Models with a twist: in a stack, their learners still find what each finds alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import flat_data
from tests.tiers import thorough
from tests.unit.test_stack import assert_equal_alone_and_together, double
from torch import Tensor, nn

from edgegossip.contract.protocol import Steps
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.nested import Nested
from edgegossip.runs.batching import try_together
from edgegossip.training.loss import model_and_batch
from edgegossip.training.metrics import R2
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task


def padded_text() -> Dataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(16, (60, 9), generator=random)
    x[::2, 5:] = 3
    split = ArraySplit(x, torch.randint(3, (60,), generator=random))
    return Dataset("padded", split, split, num_classes=3, input_shape=(9,))


class Padding(nn.Module):
    """Row 3 of the embedding is padding, which never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.embedding(x).mean(1))
        return outputs


class Looking(nn.Module):
    """Looks at its layers: their class, their attributes, and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([self.first, nn.LayerNorm(8), self.last])
        self.constant = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, self.first.in_features)
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.LayerNorm):
                x = x.tanh()
        x = x @ F.normalize(self.last.weight @ self.last.weight.mT)
        outputs: Tensor = x + self.constant(self.scale) + self.constant(x.new_ones(1, 4))
        return outputs


class Skipping(nn.Sequential):
    """Adds its input, which a plain sequence does not."""

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + changed


def skipping() -> nn.Module:
    layers = (nn.Linear(36, 36), nn.Tanh())
    return nn.Sequential(nn.Flatten(), Skipping(*layers), nn.Linear(36, 3))


def pooling_rows() -> nn.Module:
    """Pools samples without channels: PyTorch takes the batch for the channels."""
    return nn.Sequential(
        nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(9, 8), nn.AvgPool1d(3, 2), nn.Linear(3, 3)
    )


class Attentive(nn.Module):
    """Attention with a mask, and again with dropout, whose masks have four dimensions."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 24), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x).transpose(1, 2)).transpose(1, 2)
        q, k, v = torch.unflatten(x, 2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, self.mask)
        shares = (q @ k.mT).masked_fill(~self.mask, -torch.inf).softmax(-1)
        x = (attended + self.dropout(shares) @ v).transpose(1, 2).flatten(2)
        outputs: Tensor = self.last(x.mean(1))
        return outputs


class Encoding(nn.Module):
    """PyTorch's own layer of a transformer, with dropout, also of the attention's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layer(x).mean(1))
        return outputs


def penalized(model: nn.Module, batch: Nested) -> Tensor:
    x, y = batch
    penalty = torch.stack([each.square().sum() for each in model.parameters()]).sum()
    return F.cross_entropy(model(x), y) + 0.01 * penalty


def small_dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.PReLU(8), nn.Linear(8, 3))


PICTURES = flat_data(60, (1, 6, 6))
TASKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "padding": (Padding, {"dataset": padded_text(), "augmentation": None}),
    "looking": (Looking, {"dataset": PICTURES}),
    "skipping": (skipping, {"dataset": PICTURES}),
    "pooling rows": (pooling_rows, {"dataset": flat_data(60, (7, 7))}),
    "attentive": (Attentive, {"dataset": flat_data(60, (5, 4))}),
    "encoding": (Encoding, {"dataset": flat_data(60, (5, 4))}),
    "penalized": (
        small_dense,
        {
            "dataset": PICTURES,
            "forward": model_and_batch,
            "loss": penalized,
            "metrics": (R2(),),
        },
    ),
}


@thorough
@pytest.mark.parametrize("name", TASKS)
def test_models_with_a_twist_train_together(name: str) -> None:
    make, settings = TASKS[name]
    usual: dict[str, Any] = {"optimizer": SGD(lr=0.05), "batch_size": 4, "augmentation": double}
    task = Task(**usual | settings, model=lambda: make().double())
    assert try_together(task).reason is None
    assert_equal_alone_and_together(task, Steps(6))
