"""Learners that train one worker's batches together, each on an executor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.protocol import Seconds, Train
from edgegossip.contract.randomness import generator
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.links import ExecutorLostError, Group, Message
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.sampler import Batch
from edgegossip.training.step import Step

_TIMED = 16
"""Steps on a GPU per timed step; timing a step waits for the GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One executor's share of a step.

    Attributes:
        batch: Its samples.
        position: Its position among the members of the group.
        started: Time at which the executor began with the step.
        needs_losses: Whether the loss of each sample is needed.
        is_timed: Whether to measure the time that the executor computes.
    """

    batch: Batch
    position: int
    started: Seconds
    needs_losses: bool
    is_timed: bool


class ExecutorLearner(Learner):
    """Base of the learners of all executors of a worker; each has a full copy of the model.

    All executors add up a vector: the gradient of the sum of the losses, the number of their
    terms, this sum, and the seconds that each member has computed. Its terms are exact in
    float32, so half precision is not used.
    """

    def __init__(self, *args: Any, **others: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **others)
        own = self.settings
        self._step = Step(
            own.step, own.loss, own.forward, self._torch_device, counts_terms=True
        )
        self._vector: Tensor | None = None

    def _sums(self, backend: str, size: int) -> Tensor:
        """The vector, for a group of `size` members."""
        values = self.model.values
        length = len(values) + 2 + size
        torch_device = values.device if backend == "nccl" else torch.device("cpu")
        if self._vector is None or len(self._vector) != length:
            dtype = torch.promote_types(values.dtype, torch.float32)
            self._vector = torch.zeros(length, dtype=dtype, device=torch_device)
        return self._vector

    @property
    def _gradient(self) -> Tensor:
        gradient = self.model.trained.grad
        assert gradient is not None
        return gradient

    def _contribute(self, sums: Tensor, share: Share) -> Tensor | None:
        """Write this member's part into the vector; return the losses of its samples."""
        losses, number, end = None, 0, len(self._gradient)
        sums[end:].zero_()
        if len(share.batch):
            mean, losses, number = self._step.differentiate(
                self._at_work(),
                share.batch,
                self._samples(share.batch),
                needs_losses=share.needs_losses,
            )
        if number:
            sums[:end].copy_(self._gradient).mul_(number)
            sums[end], sums[end + 1] = number, mean * number
        else:  # the mean of no terms is not a number
            sums[:end].zero_()
        if share.is_timed:
            if self._torch_device.type == "cuda":
                torch.cuda.synchronize(self._torch_device)
            sums[end + 2 + share.position] = time.perf_counter() - share.started
        return losses

    def _conclude(self, sums: Tensor) -> Tensor:
        """Take the step that the sums over all members give; return the mean loss."""
        gradient, end = self._gradient, len(self._gradient)
        gradient.copy_(sums[:end]).div_(sums[end].to(gradient.device))
        self._step.update(self._at_work())
        return sums[end + 1] / sums[end]

    def _upcoming(self, num_batches: int) -> list[Tensor]:
        return []  # the shares of later batches are not known yet


class LeadingLearner(ExecutorLearner):
    """A `Learner` whose batches several executors train together; it is the first of them.

    Each executor computes the gradient on its share of a batch. Shares are in proportion to
    the executors' speeds. All add up their gradients and take the same step, with the gradient
    of the mean loss of the whole batch. Batches have the same samples as those of a `Learner`,
    so the trained parameters are the same except for rounding. These differences remain, as
    with `torch.nn.parallel.DistributedDataParallel`:

    - Batch normalization sees only shares. Running statistics and other buffers are those of
      the lead, which the other executors get at the beginning of each request.
    - Dropout and augmentation draw from a stream of each executor.

    If an executor is lost in a step, the others repeat this step without it. Samples are not
    read ahead.

    Args:
        args: Arguments of `Learner`.
        executors: The executors.
        others: Further arguments of `Learner`.
    """

    def __init__(self, *args: Any, executors: Executors, **others: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **others)
        self._executors = executors
        self._has_begun = False
        self._has_new_moments = False
        self._num_asked = 0
        self._following: Batch | None = None  # the next one of the request, if it is known
        self._asked: tuple[Batch, list[Batch], bool] | None = None

    def take(self, request: Train) -> Iterator[Batch]:
        """See `Learner.take`; also note the following batch."""
        batches = super().take(request)
        selection = self.settings.accuracy_aware.selection
        if selection.needs_losses or selection.needs_sample_losses:
            yield from batches  # the following batch depends on this one
            return
        batch = next(batches, None)
        while batch is not None:
            self._following = next(batches, None)
            yield batch
            batch, self._following = self._following, None

    def _tune(self, request: Train, progress: float) -> None:
        super()._tune(request, progress)
        self._has_begun = False

    def _step_on(self, batch: Batch) -> Tensor:
        while len(self._executors.members) > 1:
            try:
                if not (self._has_begun and self._executors.follows is self):
                    self._begin()
                return self._step_together(batch)
            except ExecutorLostError as error:
                # Some of the others may have taken the step that failed here; they get the
                # parameters and the optimizer's state of this executor, which has not.
                self._asked = None
                self._executors.form_again(error)
        self._executors.trained([len(batch)])
        return super()._step_on(batch)

    def _upcoming(self, num_batches: int) -> list[Tensor]:
        is_alone = len(self._executors.members) == 1
        return self.batches.upcoming(num_batches) if is_alone else []

    def _begin(self) -> None:
        """Tell the others the parameters, the rates and, if they lack it, all other state."""
        executors, copy = self._executors, self._at_work()
        lacks_state = executors.follows is not self
        # Without a key, the others' random streams go on.
        has_news = lacks_state or self._has_new_moments
        groups = copy.optimizer.param_groups
        message: Message = {
            "kind": "begin",
            "key": [*self._key, executors.generation] if lacks_state else None,
            "optimizer": copy.memory() if has_news else None,
            "buffers": copy.buffers(),
            "rates": [[float(each["lr"]), each.get("momentum")] for each in groups],
        }
        executors.send([message] * (len(executors.members) - 1))
        values = copy.model.values
        sums = self._sums(executors.backend, len(executors.members))
        executors.spread(sums[: len(values)].copy_(values))
        executors.follows, self._has_begun, self._has_new_moments = self, True, False

    def _replace_moments(self, request: Train) -> None:
        super()._replace_moments(request)
        self._has_new_moments |= bool(request.moments)

    def _step_together(self, batch: Batch) -> Tensor:
        executors, sampler = self._executors, self.batches.sampler
        needs_losses, started = sampler.selection.needs_sample_losses, time.perf_counter()
        if self._asked is None or self._asked[0] is not batch:
            self._ask(batch, needs_losses)
        assert self._asked is not None
        _, parts, is_timed = self._asked
        sizes = [len(part) for part in parts]
        sums = self._sums(executors.backend, len(sizes))
        own = Share(parts[0], 0, started, needs_losses, is_timed)
        losses = [self._contribute(sums, own)]
        if needs_losses or batch.weights is not None:
            # Before the sum: once all have taken the step, it can't be repeated.
            losses += [each["losses"] for each in executors.answers()]
        if self._following is not None:
            # Before the sum, so that the others need not wait for the lead after it.
            self._ask(self._following, needs_losses)
        executors.add_up(sums)
        mean = self._conclude(sums)
        executors.trained(sizes)
        if is_timed:
            executors.timed(sizes, sums[-len(sizes) :].tolist())
        found = [each.detach().cpu() for each in losses if each is not None]
        if found:
            sampler.record(batch.positions, torch.cat(found))
        return mean

    def _ask(self, batch: Batch, needs_losses: bool) -> None:
        """Ask the others to train their parts of a batch."""
        parts = _cut(batch, self._executors.shares(len(batch)))
        self._num_asked += 1
        is_timed = self._torch_device.type != "cuda" or self._num_asked % _TIMED == 0
        self._executors.send(
            [
                {
                    "kind": "step",
                    # In the data set, because the other executors know no shard.
                    "indices": self.shard[part.positions],
                    "weights": part.weights,
                    "needs_losses": needs_losses,
                    "is_timed": is_timed,
                }
                for part in parts[1:]
            ]
        )
        self._asked = batch, parts, is_timed

    def start_over(self) -> None:
        super().start_over()
        self._executors.follows = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._executors.follows = None


def _cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Cut a batch into consecutive parts."""
    positions = torch.split(batch.positions, sizes)
    weights = (
        [None] * len(sizes) if batch.weights is None else torch.split(batch.weights, sizes)
    )
    return [Batch(*part) for part in zip(positions, weights, strict=True)]


class FollowingLearner(ExecutorLearner):
    """Trains its shares of the batches of a `LeadingLearner`, in another process.

    It takes the arguments of `Learner`, and reads any sample of the worker's data set.
    """

    def __init__(self, *args: Any, **others: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **others)
        self._take_shard(torch.arange(len(self._dataset.train)))

    def begin(self, message: Message, group: Group) -> None:
        """Take over what the lead tells: parameters, rates, and perhaps all other state."""
        copy = self._at_work()
        if message["key"] is not None:
            # The group's number is part of it, so that no draw is repeated.
            self._key = (*message["key"], "executor", group.position)
            if self._random is not None:
                begun = generator(*self._key, "augmentation")
                self._random.set_state(begun.get_state())
            told = {"optimizer": message["optimizer"], "buffers": message["buffers"]}
            self._at_rest = self._copies.restored({**told, "dropout": None})
            self._restore(copy)
        elif message["optimizer"] is not None:
            copy.remember(self._copies.on_device(message["optimizer"]))
        copy.load_buffers(message["buffers"])
        for settings, (rate, momentum) in zip(
            copy.optimizer.param_groups, message["rates"], strict=True
        ):
            settings["lr"] = rate
            if momentum is not None:
                settings["momentum"] = momentum
        values = copy.model.values
        params = self._sums(group.backend, group.size)[: len(values)]
        group.spread(params)
        values.copy_(params)
        copy.model.module.train()

    def differentiate(self, message: Message, group: Group, started: Seconds) -> Message:
        """Compute the gradient on the share that the lead sends; return the samples' losses."""
        share = Share(
            Batch(message["indices"], message["weights"]),
            group.position,
            started,
            message["needs_losses"],
            message["is_timed"],
        )
        losses = self._contribute(self._sums(group.backend, group.size), share)
        empty = torch.empty(0)
        return {"kind": "losses", "losses": empty if losses is None else losses.detach().cpu()}

    def conclude(self, group: Group) -> None:
        """Take the step together with all members."""
        sums = self._sums(group.backend, group.size)
        group.add_up(sums)
        self._conclude(sums)
