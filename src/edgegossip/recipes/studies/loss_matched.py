"""The control for longer steps: random samples, weighted to the mean loss of chosen ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgegossip.training.sampling.selection import (
    Candidates,
    Choice,
    Focused,
    Random,
    with_unvisited,
)


@dataclass(frozen=True)
class LossMatched(Focused):
    """Random samples, all with the same weight, so that their loss is that of `Focused`.

    Samples with high losses have long gradients. In each epoch, this control lengthens the
    gradients of random samples instead: their weight is the mean last loss of the samples that
    `Focused` would choose over the mean of all. Gradients of cross-entropy grow less than
    losses, so the weight is rather too large. EdgeGossip's correction treats both selections
    alike, because `Choice.focus` is equal.
    """

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        chosen = super().choose(candidates, num_samples, random)
        if not chosen.focus:
            return chosen
        losses = with_unvisited(candidates.sample_losses)
        weight = float(losses[chosen.order].mean() / losses.mean().clamp(min=1e-12))
        order = Random().choose(candidates, num_samples, random).order
        return Choice(order, torch.full((num_samples,), weight), chosen.focus)
