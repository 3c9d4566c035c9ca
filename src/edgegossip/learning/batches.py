"""Which samples a worker trains on next, drawn from a stream of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.core.protocol import Epochs, Steps, Work
from edgegossip.core.randomness import generator


@dataclass(slots=True, kw_only=True)
class BatchStream:
    """Endless passes over a shard, each in a new order that is keyed by the pass.

    `Steps` go on where the last work ended and always take whole batches: the rest of a pass
    that is too short for one is left out (another one each pass). `Epochs` begin a new pass
    and take all of it, the last batch being smaller if need be (but not a single sample, which
    joins the batch before).

    Args:
        shard: [n] indices into the training data, at least one.
        batch_size: At least 1; batches are smaller only where the shard is.
        key: (seed, rank, incarnation): names the random stream.

    >>> stream = BatchStream(shard=torch.arange(5), batch_size=2, key=(0, 0, 0))
    >>> [len(batch) for batch in stream.take(Epochs())]
    [2, 3]
    """

    shard: Tensor
    batch_size: int
    key: tuple[int, ...]
    epoch: int = 0  # passes begun
    position: int = 0  # samples of the present pass already taken
    order: Tensor = field(init=False)  # [n] the shard as the present pass visits it

    def __post_init__(self) -> None:
        if not len(self.shard):
            raise ValueError("a worker's shard is empty; use fewer workers or more data")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        self.batch_size = min(self.batch_size, len(self.shard))
        self._begin_pass()

    def num_samples(self, work: Work) -> int:
        """Samples that `take` will give for `work`."""
        match work:
            case Steps():
                return work.num_steps * self.batch_size
            case Epochs():
                # 0.07 * 100 is a hair above 7; that is no eighth sample.
                num_due = work.share * len(self.shard) - 1e-9
                num_batches = math.ceil(num_due / self.batch_size)
                return min(len(self.shard), num_batches * self.batch_size)

    def take(self, work: Work) -> list[Tensor]:
        """The batches of `work`: indices into the training data, [batch] each."""
        if isinstance(work, Steps):
            return [self._next_batch() for _ in range(work.num_steps)]
        if self.position:
            self._begin_pass()
        self.position = self.num_samples(work)
        batches = list(torch.split(self.order[: self.position], self.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1:
            # Batch normalisation cannot train on one sample alone.
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def _next_batch(self) -> Tensor:
        if self.position + self.batch_size > len(self.shard):
            self._begin_pass()
        self.position += self.batch_size
        return self.order[self.position - self.batch_size : self.position]

    def _begin_pass(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0
        self._draw_order()

    def _draw_order(self) -> None:
        random = generator(*self.key, "batches", self.epoch)
        self.order = self.shard[torch.randperm(len(self.shard), generator=random)]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._draw_order()
