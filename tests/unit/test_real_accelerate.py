"""Real Accelerate trains a model that workers exchange."""

from __future__ import annotations

import pytest
import torch
from tests.averaging_by_hand import (
    EPOCHS,
    NUM_SAMPLES,
    clipped_steps,
    loss_of,
    network,
    numbers,
    require_same,
)
from torch.utils.data import DataLoader

from edgegossip.real.script import ScriptWorker
from edgegossip.recipes.script_averaging import averaging

# It warns of its own dependencies, and of what it will change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_accelerate_needs_a_training_loop_and_nothing_else() -> None:
    accelerate = pytest.importorskip(
        "accelerate", reason="needs pip install 'edgegossip[transformers]'"
    )
    # Transformers may have made one in this process, whose settings would stay.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
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
