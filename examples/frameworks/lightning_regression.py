"""A regression with Lightning, whose script takes part in a run by three lines.

    edgegossip script -n 4 examples/frameworks/lightning_regression.py

Started with python, it trains alone. Needs pip install 'edgegossip[lightning]'.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import edgegossip as eg  # 1


class Progression(L.LightningModule):
    """Predicts the progression of diabetes within a year from ten measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.5)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def patients() -> tuple[TensorDataset, TensorDataset]:
    """442 patients, a fifth of them for testing; all values standardized."""
    x, y = (torch.tensor(each, dtype=torch.float32) for each in load_diabetes(return_X_y=True))
    x, y = ((each - each.mean(0)) / each.std(0) for each in (x, y[:, None]))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[90:], y[90:]), TensorDataset(x[:90], y[:90])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    L.seed_everything(options.seed)
    train, test = patients()
    train = eg.own_share(train)  # 2
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[eg.lightning_callback(eg.averaging(every=2))],  # 3
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = Progression()
    trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True))
    [found] = trainer.test(model, DataLoader(test, batch_size=90), verbose=False)
    print(f"test loss {found['test_loss']:.4f}")


if __name__ == "__main__":
    main()
