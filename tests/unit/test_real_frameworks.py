"""Real Lightning, Transformers, Accelerate and PEFT train models that workers exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.script_workers import workers_in_threads
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edgegossip.core.errors import UsageError
from edgegossip.deploy.script_worker import ScriptWorker
from edgegossip.frameworks.lightning import lightning_callback
from edgegossip.frameworks.transformers import transformers_callback
from edgegossip.net.memory import MemoryNetwork
from edgegossip.recipes.script_averaging import averaging

# They warn of their own dependencies, and of what they will change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
NUM_SAMPLES, EPOCHS = 48, 3


def numbers() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 4, generator=random)
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def clipped_steps(models: list[nn.Sequential], every: int = 2) -> list[torch.optim.AdamW]:
    """By hand: AdamW on each worker's share, two batches accumulated, clipped, averaged.

    A step that is no whole round is left out.
    """
    n = len(models)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shares = [[*DataLoader(share_of(rank, n), batch_size=4)] for rank in range(n)]
    num_steps = EPOCHS * len(shares[0]) // 2
    for step in range(num_steps // every * every):
        for model, optimizer, batches in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            for number in (2 * step, 2 * step + 1):
                loss = loss_of(model, batches[number % len(batches)])
                (loss / 2).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if (step + 1) % every == 0:
            average(models)
    return optimizers


def share_of(rank: int, num_workers: int) -> Any:  # noqa: ANN401
    transport = MemoryNetwork().transport(rank)
    worker = ScriptWorker(rank=rank, num_workers=num_workers, transport=transport)
    return worker.own_share(numbers())


def average(models: list[nn.Sequential]) -> None:
    with torch.no_grad():
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([*pair]).mean(0)
            for each in pair:
                each.copy_(mean)


def moments(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([x.flatten() for s in optimizer.state.values() for x in s.values()])


# Lightning.


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


def require_same(models: list[nn.Sequential], by_hand: list[nn.Sequential]) -> None:
    for ours, theirs in zip(models, by_hand, strict=True):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    for same in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(same[0], same[-1])


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


# Transformers.


def small_gpt() -> Any:  # noqa: ANN401
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def sentences(number: int = NUM_SAMPLES) -> list[dict[str, Tensor]]:
    start = torch.arange(number)[:, None]
    tokens = (start + 3 * torch.arange(8)) % 32
    return [{"input_ids": each, "labels": each} for each in tokens]


def trainer_of(
    model: nn.Module,
    samples: Any,  # noqa: ANN401
    callback: object,
    out: Path,
    **changes: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        **{
            "output_dir": str(out),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "use_cpu": True,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **changes,
        }
    )
    return Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[callback])


def needs_transformers() -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="needs pip install 'edgegossip[transformers]'")


def joined_gpts(
    out: Path,
    make: Callable[[], Any] = small_gpt,
    **changes: Any,  # noqa: ANN401
) -> list[Any]:
    """Trainers of two workers that have exchanged their models.

    They do not accumulate gradients: all threads share what Accelerate knows of that.
    """
    changes = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        **changes,
    }
    models = [make(), make()]
    trainers: list[Any] = [None, None]

    def train(worker: ScriptWorker) -> None:
        callback = transformers_callback(averaging(every=2), worker)
        share = worker.own_share(sentences())
        made = trainer_of(
            models[worker.rank], share, callback, out / str(worker.rank), **changes
        )
        trainers[worker.rank] = made
        made.train()

    assert workers_in_threads(2, train) == [None, None]
    return trainers


def test_a_trainer_of_transformers_ends_with_the_common_model(tmp_path: Path) -> None:
    needs_transformers()
    first, second = joined_gpts(tmp_path)
    assert first.state.global_step == second.state.global_step == 6
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    start, tokens = small_gpt(), torch.stack([each["input_ids"] for each in sentences()])
    losses = [float(m(input_ids=tokens, labels=tokens).loss) for m in (start, first.model)]
    assert losses[1] < 0.95 * losses[0]
    ours, theirs = (moments(each.optimizer) for each in (first, second))
    assert not torch.equal(ours, theirs), "the optimizer's state stays local"
    steps = {int(state["step"]) for state in first.optimizer.state.values()}
    assert steps == {6}, "no exchange resets it"


def test_one_worker_alone_trains_as_without_the_callback(tmp_path: Path) -> None:
    needs_transformers()
    from transformers import TrainerCallback

    found = []
    for callback in (TrainerCallback(), transformers_callback(averaging(), ScriptWorker())):
        trainer = trainer_of(small_gpt(), sentences(), callback, tmp_path)
        trainer.train()
        found.append(trainer.model.state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_losses_of_transformers_are_those_of_whole_steps(tmp_path: Path) -> None:
    needs_transformers()
    callback = transformers_callback(averaging(), ScriptWorker())
    told: list[tuple[float | None, int]] = []
    callback._joined.step = lambda loss, number: told.append((loss, number))
    trainer = trainer_of(
        small_gpt(), sentences(44), callback, tmp_path, logging_steps=1, num_train_epochs=1
    )
    trainer.train()
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert [loss for loss, _ in told] == pytest.approx(logged, rel=1e-3)
    assert sum(number for _, number in told) == 44


def test_a_joined_model_is_saved_and_loaded_as_any_other(tmp_path: Path) -> None:
    needs_transformers()
    from transformers import GPT2LMHeadModel

    trainer = trainer_of(
        small_gpt(), sentences(), transformers_callback(averaging(), ScriptWorker()),
        tmp_path / "out", save_strategy="epoch", bf16=True,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    for (name, a), b in zip(trainer.model.named_parameters(), again.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b), name
    weights = sum(p.numel() for p in again.parameters()) * 4
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < weights + 10_000
    assert [*(tmp_path / "out").glob("checkpoint-*")]


def test_adapters_of_peft_travel_alone(tmp_path: Path) -> None:
    needs_transformers()
    peft = pytest.importorskip("peft", reason="needs pip install peft")

    def with_adapters() -> Any:  # noqa: ANN401
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(small_gpt(), config)

    trainers = joined_gpts(tmp_path, with_adapters)
    start = dict(small_gpt().named_parameters())
    first, second = (dict(each.model.named_parameters()) for each in trainers)
    assert sum(p.numel() for p in first.values() if p.requires_grad) == 2 * (16 + 48)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        if not parameter.requires_grad:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, start[plain]), name
    assert any(p.any() for name, p in first.items() if "lora_B" in name), "they have learned"


# Accelerate.


def test_accelerate_needs_a_training_loop_and_nothing_else() -> None:
    accelerate = pytest.importorskip(
        "accelerate", reason="needs pip install 'edgegossip[transformers]'"
    )
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain, worker = network(), ScriptWorker()  # its state is that of a process, no thread's
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=0.01),
        DataLoader(worker.own_share(numbers()), batch_size=4),
    )
    num_steps = EPOCHS * len(loader) // 2
    with worker.training_loop(
        model, averaging(every=2), num_samples=NUM_SAMPLES, num_steps=num_steps
    ) as loop:
        while not loop.is_over:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    loop.step(loss.item(), num_samples=8)
    by_hand = [network()]
    clipped_steps(by_hand)
    require_same([plain], by_hand)
