"""Real Lightning trains models that workers exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.averaging_by_hand import (
    EPOCHS,
    NUM_SAMPLES,
    clipped_steps,
    loss_of,
    moments,
    network,
    numbers,
    require_same,
)
from tests.script_workers import workers_in_threads
from torch import Tensor, nn
from torch.utils.data import DataLoader

from edgegossip.contract.errors import UsageError
from edgegossip.integrations.lightning import lightning_callback
from edgegossip.real.script import ScriptWorker
from edgegossip.recipes.script_averaging import averaging

# They warn of their own dependencies, and of what they will change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def lightning_module(model: nn.Module, L: Any) -> Any:  # noqa: ANN401, N803
    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def lightning_trainer(L: Any, callback: object, **changes: Any) -> Any:  # noqa: ANN401, N803
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "callbacks": [callback],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **changes,
        }
    )


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_does_what_averaging_by_hand_does(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    L = pytest.importorskip(package, reason="needs pip install 'edgegossip[lightning]'")  # noqa: N806
    hide_other(package, monkeypatch)
    models = [network(), network()]
    optimizers: list[Any] = [None, None]

    def train(worker: ScriptWorker) -> None:
        callback = lightning_callback(averaging(every=2), worker)
        assert isinstance(callback, L.Callback)
        trainer = lightning_trainer(
            L, callback, accumulate_grad_batches=2, gradient_clip_val=0.5
        )
        loader = DataLoader(worker.own_share(numbers()), batch_size=4)
        trainer.fit(lightning_module(models[worker.rank], L), loader)
        optimizers[worker.rank] = trainer.optimizers[0]

    assert workers_in_threads(2, train) == [None, None]
    by_hand = [network(), network()]
    theirs = clipped_steps(by_hand)
    require_same(models, by_hand)
    for ours, other in zip(optimizers, theirs, strict=True):
        torch.testing.assert_close(moments(ours), moments(other), rtol=1e-3, atol=1e-6)


def hide_other(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it look as if a script had imported this package of Lightning alone."""
    import sys

    if package != "pytorch_lightning":
        for name in [*sys.modules]:
            if name.partition(".")[0] == "pytorch_lightning":
                monkeypatch.delitem(sys.modules, name)


def test_lightning_stops_when_the_algorithm_has_finished() -> None:
    L = pytest.importorskip("lightning", reason="needs pip install 'edgegossip[lightning]'")  # noqa: N806
    kept: list[Tensor] = []

    def three_steps(num_workers: int, num_steps: int) -> Any:  # noqa: ANN401
        assert num_steps == EPOCHS * NUM_SAMPLES // 8
        return averaging(every=3)(num_workers, 3)

    class Watch(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: object) -> None:  # noqa: ANN401
            kept.append(pl_module.model[2].weight.clone())

    callback = lightning_callback(three_steps, ScriptWorker())
    trainer = lightning_trainer(L, callback)
    trainer.callbacks.append(Watch())
    module = lightning_module(network(), L)
    trainer.fit(module, DataLoader(numbers(), batch_size=8))
    assert trainer.current_epoch == 1, "Lightning ends its first epoch in any case"
    assert torch.equal(module.model[2].weight, kept[2])
    assert not torch.equal(kept[2], kept[1])


def test_lightning_leaves_the_run_when_a_script_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    L = pytest.importorskip("lightning", reason="needs pip install 'edgegossip[lightning]'")  # noqa: N806
    callback = lightning_callback(averaging(), ScriptWorker())
    module = lightning_module(network(), L)

    def fail(batch: object, batch_idx: int) -> Tensor:
        raise ZeroDivisionError

    module.training_step = fail
    with pytest.raises(ZeroDivisionError):
        lightning_trainer(L, callback).fit(module, DataLoader(numbers(), batch_size=8))
    assert "training ended after 0 rounds, before the algorithm" in caplog.text


def test_a_loader_without_a_length_needs_a_number_of_samples() -> None:
    L = pytest.importorskip("lightning", reason="needs pip install 'edgegossip[lightning]'")  # noqa: N806

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:  # noqa: ANN401
            return iter([numbers()[0]] * 8)

    module, loader = lightning_module(network(), L), DataLoader(Stream(), batch_size=4)
    unknown = lightning_trainer(L, lightning_callback(averaging(), ScriptWorker()))
    with pytest.raises(UsageError, match="give the callback num_samples"):
        unknown.fit(module, loader)
    six = lightning_callback(lambda n, steps: averaging()(n, 6), ScriptWorker(), num_samples=8)
    trainer = lightning_trainer(L, six)
    trainer.fit(module, loader)
    assert trainer.global_step == 6
