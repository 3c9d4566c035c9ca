"""Real Lightning trains models that workers exchange."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
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


SPLIT = """
import json, os
from pathlib import Path
import lightning as L
from tests.averaging_by_hand import network, numbers
from tests.unit.test_real_lightning import lightning_module, lightning_trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
import edgegossip as eg

worker = eg.script_worker()
n = 2 - worker.rank  # worker 0 has two processes
trainer = lightning_trainer(
    L, eg.lightning_callback(eg.averaging(every=2)), accumulate_grad_batches=2,
    gradient_clip_val=0.5, use_distributed_sampler=False, devices=n,
    strategy=STRATEGY if n > 1 else "auto",
)
model, share = network(), worker.own_share(numbers())
module = lightning_module(model, L)
if n > 1 and not isinstance(trainer.strategy, L.pytorch.strategies.DDPStrategy):
    shard = lambda: fully_shard(model, mesh=module.device_mesh["data_parallel"])
    module.configure_model = shard
process = int(os.environ.get("LOCAL_RANK", 0))
sampler = DistributedSampler(share, n, process, shuffle=False)
trainer.fit(module, DataLoader(share, batch_size=4 // n, sampler=sampler))
wholes = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in model.parameters()]
found = json.dumps([each.tolist() for each in wholes])
Path(f"found-{worker.rank}-{process}.json").write_text(found)
"""


@pytest.mark.parametrize(
    "strategy", ['"ddp"', "L.pytorch.strategies.ModelParallelStrategy(n, 1)"]
)
def test_lightning_in_two_processes_does_what_one_does(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning", reason="needs pip install 'edgegossip[lightning]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    Path("train.py").write_text(SPLIT.replace("STRATEGY", strategy))
    script = [sys.executable, "-m", "edgegossip", "script", "-n", "2", "--out", "out"]
    subprocess.run([*script, "train.py"], check=True, timeout=300)
    found = [json.loads(each.read_text()) for each in Path().glob("found-*.json")]
    assert len(found) == 3
    by_hand = [network(), network()]
    clipped_steps(by_hand)
    for params in found:
        assert params == found[0]
        for ours, theirs in zip(params, by_hand[0].parameters(), strict=True):
            expected = theirs.detach()
            torch.testing.assert_close(torch.tensor(ours), expected, rtol=1e-4, atol=1e-6)
