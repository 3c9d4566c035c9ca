"""Real Transformers and PEFT train models that workers exchange."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.averaging_by_hand import NUM_SAMPLES, moments
from tests.script_workers import workers_in_threads
from torch import Tensor, nn

from edgegossip.integrations.transformers import transformers_callback
from edgegossip.real.script import ScriptWorker
from edgegossip.recipes.script_averaging import averaging

# They warn of their own dependencies, and of what they will change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


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


SPLIT = """
import json, os, sys
from pathlib import Path
from tests.unit.test_real_transformers import sentences, small_gpt, trainer_of
import edgegossip as eg

worker, n = eg.script_worker(), int(os.environ.get("WORLD_SIZE", 1))
callback = eg.transformers_callback(eg.averaging(every=2), worker)
step, told = callback._joined.step, []
callback._joined.step = lambda loss, number: (told.append((loss, number)), step(loss, number))
trainer = trainer_of(
    small_gpt(), worker.own_share(sentences()), callback, Path("out"),
    per_device_train_batch_size=8 // n, gradient_accumulation_steps=1, logging_steps=1,
    train_sampling_strategy="sequential", max_grad_norm=0.0, **json.loads(sys.argv[1]),
)
trainer.train()
logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
params = [*trainer.model.parameters()]
wholes = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in params]
found = json.dumps([logged, told, [each.tolist() for each in wholes]])
Path(f"found-{worker.rank}-{trainer.args.process_index}.json").write_text(found)
"""
TWO = ["--", "python", "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def found_by(command: list[str], changes: dict[str, object]) -> list[Any]:
    """Logged losses, told losses and samples, and parameters of each process of two workers."""
    Path("train.py").write_text(SPLIT)
    script = [sys.executable, "-m", "edgegossip", "script", "-n", "2", "--out", "out"]
    subprocess.run(
        [*script, *command, "train.py", json.dumps(changes)], check=True, timeout=300
    )
    files = sorted(Path().glob("found-*.json"))
    found = [json.loads(each.read_text()) for each in files]
    for each in files:
        each.unlink()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"ddp_backend": "gloo"},
        {"ddp_backend": "gloo", "average_tokens_across_devices": False},
        {"fsdp": "full_shard", "fsdp_config": {"version": 2}},
    ],
    ids=["ddp", "ddp-own-tokens", "fsdp"],
)
def test_transformers_in_two_processes_does_what_one_does(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_transformers()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    alone = found_by([], {})
    split = found_by(TWO, changes)
    assert (len(alone), len(split)) == (2, 4)
    for first, second in (split[:2], split[2:]):
        told = [
            ((a + b) / 2, m + n) for (a, m), (b, n) in zip(first[1], second[1], strict=True)
        ]
        assert [loss for loss, _ in told] == pytest.approx(first[0], rel=1e-3)
        assert sum(number for _, number in told) == NUM_SAMPLES
    for _, _, params in split:
        assert params == split[0][2]
        for ours, theirs in zip(params, alone[0][2], strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-4
            )
