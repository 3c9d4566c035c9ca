"""Small runs whose data lies with the workers, who write down who reads what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.small_runs import SHAPE, pictures, small_run, small_task
from torch import nn

from edgegossip.contract.protocol import Rank
from edgegossip.data.dataset import Dataset
from edgegossip.data.local import Local
from edgegossip.runs.experiment import Experiment

SIZES = (40, 10, 24, 16)
"""Samples of each worker, before some are held out."""


class Files:
    """The data of all workers; each test says who may read it.

    Attributes:
        reads: The ranks that were read, in order.
    """

    def __init__(self) -> None:
        self.reads: list[Rank] = []

    def load(self, rank: Rank) -> Dataset:
        self.reads.append(rank)
        return own_data(rank)


def plain_model() -> nn.Module:
    """A model without batch norm, whose statistics fit no single worker."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def own_data(rank: Rank, **changes: Any) -> Dataset:  # noqa: ANN401
    settings: dict[str, Any] = {
        "name": f"file {rank}",
        "train": pictures(SIZES[rank], seed=rank),
        "num_classes": 3,
        "input_shape": SHAPE,
    }
    return Dataset(**settings | changes)


def local(load: Callable[[Rank], Dataset] = own_data, **changes: Any) -> Local:  # noqa: ANN401
    settings: dict[str, Any] = {
        "classes": ("dark", "gray", "bright"),
        "input_shape": SHAPE,
        "held_out": 0.2,
    }
    return Local("own pictures", load=load, **settings | changes)


def local_run(
    algorithm: str = "epoch-gossip",
    load: Callable[[Rank], Dataset] = own_data,
    data: dict[str, Any] | None = None,
    **changes: Any,  # noqa: ANN401
) -> Experiment:
    """Four workers of unequal speed with data of unequal size."""
    task = small_task(dataset=local(load, **(data or {})), model=plain_model)
    return small_run(algorithm, task=task, **changes)
