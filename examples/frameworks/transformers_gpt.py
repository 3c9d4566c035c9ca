"""A small GPT with Hugging Face's Trainer, whose script takes part in a run by three lines.

    edgegossip script -n 4 examples/frameworks/transformers_gpt.py --text BOOK.txt OTHER.txt

Started with python, it trains alone. Needs pip install 'edgegossip[transformers]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import edgegossip as eg  # 1

CONTEXT = 32


def pieces(files: list[Path], most: int) -> list[dict[str, Tensor]]:
    """Pieces of the files, in bytes, evenly spaced if there are more than `most`."""
    read = [torch.tensor(list(each.read_bytes())) for each in files]
    found = torch.cat([each[: len(each) // CONTEXT * CONTEXT] for each in read])
    chosen = found.view(-1, CONTEXT)
    chosen = chosen[:: max(1, len(chosen) // most)][:most]
    return [{"input_ids": each, "labels": each} for each in chosen]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/gpt")
    options = parser.parse_args()
    set_seed(options.seed)
    samples = pieces(options.text, options.samples)
    train, test = [s for i, s in enumerate(samples) if i % 10], samples[::10]
    train = eg.own_share(train)  # 2
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        callbacks=[eg.transformers_callback(eg.averaging(every=4))],  # 3
    )
    trainer.train()
    print(f"test loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
