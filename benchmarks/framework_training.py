"""Training loops of frameworks, with and without a callback, for `benchmarks/overhead.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.topology import complete
from edgegossip.integrations.lightning import lightning_callback
from edgegossip.integrations.transformers import transformers_callback
from edgegossip.net.address import Address
from edgegossip.real.join import Connection
from edgegossip.real.script import ScriptWorker

Setting = tuple[nn.Module, torch.optim.Optimizer, TensorDataset, int, int]
"""Model, optimizer, samples, samples of a batch, number of epochs."""


def callback_of(
    make: Callable[..., Any], rank: int, num_workers: int, address: Address, num_epochs: int
) -> Any:  # noqa: ANN401
    """A callback that averages with all others after each epoch."""
    worker = ScriptWorker(
        rank=rank,
        num_workers=num_workers,
        connection=Connection(address=address),
        name="overhead",
    )
    algorithm = EpochGossip(topology=complete(num_workers), num_rounds=num_epochs)
    return make(algorithm, worker, final_average=False)


def lightning_ends(setting: Setting, callbacks: Sequence[Any]) -> list[float]:
    """Train with Lightning; the times at which epochs end."""
    import lightning as L
    from lightning.pytorch import Callback

    model, optimizer, samples, batch_size, num_epochs = setting
    ends: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Clock(Callback):
        def on_train_epoch_end(self, trainer: object, pl_module: object) -> None:
            ends.append(time.perf_counter())

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=num_epochs,
        callbacks=[*callbacks, Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(samples, batch_size, shuffle=True))
    return ends


class WithLoss(nn.Module):
    """A model as the Trainer of Transformers wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


def transformers_ends(setting: Setting, callbacks: Sequence[Any]) -> list[float]:
    """Train with the Trainer of Transformers; the times at which epochs end."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, optimizer, samples, batch_size, num_epochs = setting
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_epoch_end(self, *events: object, **other: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=num_epochs,
            per_device_train_batch_size=batch_size,
            use_cpu=True,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(
            model=WithLoss(model),
            args=arguments,
            train_dataset=samples,
            data_collator=_collate,
            optimizers=(optimizer, None),
            callbacks=[*callbacks, Clock()],
        ).train()
    return ends


FRAMEWORKS: dict[str, tuple[Callable[[Setting, Sequence[Any]], list[float]], Any]] = {
    "lightning": (lightning_ends, lightning_callback),
    "transformers": (transformers_ends, transformers_callback),
}
