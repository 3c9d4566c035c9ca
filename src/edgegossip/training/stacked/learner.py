"""Learners that train together with others of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Train
from edgegossip.contract.trainer import Outcome, TrainingResult
from edgegossip.data.dataset import WorkerData
from edgegossip.data.nested import Nested
from edgegossip.models.flat import FlatModel
from edgegossip.training.copies import ModelCopy
from edgegossip.training.feed import Feed
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.sampler import Batch
from edgegossip.training.stacked.layers import CONVOLUTIONS
from edgegossip.training.stacked.stack import Member, Stack


class StackedLearner(Learner):
    """A `Learner` that trains with other learners of the same model; see `Stack`.

    A few large kernels replace many small ones. Each learner gets the parameters that it would
    have alone, up to rounding, because kernels for stacks sum in another order. On a CPU, they
    do not depend at all on the other learners, as long as each learner's rows are aligned in
    memory: with a batch of 1, or odd numbers of samples and units, the last bits may depend on
    them.

    Learners may take different numbers of steps. A smaller batch, such as the last one of a
    pass, is trained in a stack with others of its size.

    Args:
        settings: As in `Learner`; the optimizer is edgegossip's `SGD` or PyTorch's own.
        data: As in `Learner`.
        arguments: Other arguments of `Learner`.

    Raises:
        ValueError: If steps have micro-batches or a compiled model, or for other optimizers.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        step = settings.step
        if step.micro_batch_size is not None or step.compile:
            raise ValueError(
                "StackedLearner supports neither micro-batches nor a compiled model, got "
                f"{step}; leave them out, or train with a Learner"
            )
        super().__init__(settings, data, **arguments)
        optimizer = settings.optimizer
        is_one_vector = getattr(optimizer, "is_elementwise", False)
        if not self._copies.can_be_lent or (is_one_vector and not isinstance(optimizer, SGD)):
            raise ValueError(
                "StackedLearner supports edgegossip's SGD and the optimizers of torch.optim, "
                f"not {self._copies.optimizer_name} as made by {optimizer!r}; choose one of "
                "those, or train with a Learner"
            )
        self._is_sharing = True
        self._probe: Callable[[], FlatModel] | None = None

    def prepare(self, request: Train, progress: float) -> StackedWork:
        """Begin training that other learners of the same model may join."""
        self._require_no_inputs(request)
        self._require_momentum(request)
        self.rest()
        self._replace_moments(request)
        return StackedWork(
            learner=self,
            request=request,
            factor=request.rate_ratio * self.settings.schedule.factor(progress),
        )

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train alone, with the same result as in a stack; see `Learner.train`."""
        (outcome,) = self.prepare(request, progress).train_with([])
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome

    @property
    def model_id(self) -> int:
        """Equal for learners that can train together, because they share copies of a model."""
        return id(self._copies)

    @property
    def may_lack_memory(self) -> bool:
        """Whether a stack may be too large for the memory of the device, a GPU's."""
        return self._torch_device.type != "cpu"

    def batches_of(
        self, request: Train, probe: Callable[[], FlatModel]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """The batches of a request, each with the indices of its samples in the data set.

        Args:
            request: The request.
            probe: Returns a model with this learner's present parameters.
        """
        self._probe = probe
        selection = self.settings.accuracy_aware.selection
        if selection.needs_losses or selection.needs_sample_losses:
            return (
                (batch, self._feed.indices[batch.positions]) for batch in self.take(request)
            )
        # At once: 32 learners' batches, one by one, take a tenth of an MLP's step.
        batches = [*self.take(request)]
        positions = torch.cat([batch.positions for batch in batches])
        sizes = [len(batch) for batch in batches]
        return zip(batches, torch.split(self._feed.indices[positions], sizes), strict=True)

    def _probed_model(self) -> FlatModel:
        assert self._probe is not None
        return self._probe()

    def member(self, work: StackedWork) -> Member:
        """The state from which a request begins."""
        kept = self._at_rest
        dropout = kept["dropout"]
        if dropout is None and self._copies.has_dropout:
            dropout = torch.Generator(self._torch_device).manual_seed(self._dropout_seed)
            dropout = dropout.get_state()
        return Member(
            params=work.request.params,
            # A restored state has the gaps of a GPU's vectors, which a stack does not have.
            optimizer=self._copies.portable(kept["optimizer"]),
            buffers=kept["buffers"],
            dropout=dropout,
            factor=work.factor,
        )

    def inputs_of(
        self,
        learners: Sequence[StackedLearner],
        batches: Sequence[Batch],
        indices: Sequence[Tensor],
    ) -> Nested:
        """Bring several learners' batches to the device, one after another; see `Feed`."""
        if self.settings.augmentation is None:
            return self._feed.inputs_at(torch.cat([*indices]))
        # Each draws from its own stream, and only once if it has a twin.
        raw = {
            learner: learner._feed.read(batch.positions, learner.batches.upcoming)
            for learner, batch in dict(zip(learners, batches, strict=True)).items()
        }
        samples = [raw[learner] for learner in learners]
        return self._feed.uploaded(
            _pytree.tree_map(lambda *leaves: torch.cat(leaves), *samples)
        )

    @property
    def feed(self) -> Feed:
        """Prepares the inputs, on the device."""
        return self._feed

    def record(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the samples' losses, [batch]."""
        self.batches.sampler.record(batch.positions, losses)

    def finish(
        self, request: Train, member: Member, losses: Tensor, num_samples: int
    ) -> TrainingResult:
        """Keep the state after a request, and return the result.

        Args:
            request: The request.
            member: The new state.
            losses: Losses of all steps, [num_steps].
            num_samples: Number of samples in all batches.

        Raises:
            TrainingError: If a loss is not finite.
        """
        kept = self._at_rest["optimizer"] if member.optimizer is None else member.optimizer
        self._at_rest = {
            "optimizer": kept,
            "dropout": member.dropout,
            "buffers": dict(member.buffers),
        }
        return self._summed_up(request, member.params, [*losses], num_samples)


MOST_TOGETHER = 32
"""Maximum number of learners that train together on a CPU; with more, their parameters would
not fit the cache."""
_MOST_STACKS = 2
"""Maximum number of stacks that a copy of a model keeps for the next time: one for most steps,
and one for those with smaller batches."""
_MOST_KEPT = 2**23
"""Maximum number of parameters of all models in a stack that a CPU keeps for the next time; to
make a large one anew takes little of its training time."""
FEWEST_APART = 16
"""Minimum number of learners that are split between two cores."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StackedWork:
    """Work that a `StackedLearner` is about to carry out.

    Args:
        learner: The learner.
        request: What to train.
        factor: Factor on the optimizer's learning rates.
    """

    learner: StackedLearner
    request: Train
    factor: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for work that can be done together."""
        learner = self.learner
        return learner.model_id, id(learner._dataset), self.request.momentum

    def size_of_groups(self, number: int) -> int:
        """On a CPU at most 32, in two groups from 16; on a GPU as many as its memory holds."""
        is_on_cpu = not self.learner.may_lack_memory
        most = MOST_TOGETHER if is_on_cpu else self.learner._copies.most_together
        fewest_groups = 2 if is_on_cpu and number >= FEWEST_APART else 1
        return math.ceil(number / max(fewest_groups, math.ceil(number / most)))

    def train_with(self, others: Sequence[StackedWork]) -> list[Outcome]:
        """Carry out this and other work of the same `key`; return all outcomes, this one's
        first.

        Work that does not fit into a GPU's memory is done in halves, and later work is not put
        together in such numbers again. Failures are separate: an outcome is a `TrainingError`
        if its own losses are not finite.
        """
        work, copies = [self, *others], self.learner._copies
        before = []
        if self.learner.may_lack_memory:
            before = [each.learner.state_dict() for each in work]
        copy = copies.borrow()
        try:
            copy.model.module.train()
            return _Together(copy, work).outcomes()
        except torch.OutOfMemoryError:
            if len(work) == 1 or not before:
                raise
            copy.stacks.clear()
        finally:
            if not self.learner.may_lack_memory:
                # A GPU's are kept whatever their size, because of their graphs.
                num_params = self.request.params.numel() * (1 + len(others))
                if num_params > _MOST_KEPT:
                    copy.stacks.clear()
            copies.give_back(copy)
        for each, state in zip(work, before, strict=True):
            each.learner.load_state_dict(state)
        half = math.ceil(len(work) / 2)
        copies.most_together = min(copies.most_together, half)
        return [
            outcome
            for first, *rest in (work[:half], work[half:])
            for outcome in first.train_with(rest)
        ]


class _Together:
    """Several learners' work, step by step.

    Args:
        copy: A copy of the model.
        work: The work; all of the same key.
    """

    def __init__(self, copy: ModelCopy, work: Sequence[StackedWork]) -> None:
        self._copy, self._work = copy, work
        self._first = work[0].learner
        self._members = [each.learner.member(each) for each in work]
        self._losses: list[list[Tensor]] = [[] for _ in work]
        self._num_samples = [0] * len(work)
        # The stack has the present values of these; `_members` those of the others.
        self._stacked: tuple[int, ...] = ()
        self._stack: Stack
        self._learners: list[StackedLearner]
        self._means: list[Tensor] = []  # of the stack's steps, and below their batches' sizes
        self._sizes: list[int] = []
        self._selection = self._first.settings.accuracy_aware.selection
        self._device = copy.model.values.device
        layers = copy.model.module.modules()
        has_convolutions = any(type(each) in CONVOLUTIONS for each in layers)
        # A convolution in one group has a kernel of its own, with other sums than any number of
        # groups has. A learner that trains alone gets a twin, so that the result is the same.
        self._needs_twin = has_convolutions and self._device.type == "cpu"

    def outcomes(self) -> list[Outcome]:
        """Train until all work is done."""
        streams = {
            number: each.learner.batches_of(each.request, partial(self._probed, number))
            for number, each in enumerate(self._work)
        }
        while streams:
            self._first._check_cancelled()
            alike: dict[tuple[int, bool], dict[int, tuple[Batch, Tensor]]] = {}
            for number, stream in [*streams.items()]:
                taken = next(stream, None)
                if taken is None:
                    del streams[number]
                    continue
                kind = taken[1].shape[0], taken[0].weights is None
                alike.setdefault(kind, {})[number] = taken
            for each in alike.values():
                self._step(each)
        self._unload()
        return [self._outcome(number) for number in range(len(self._work))]

    def _step(self, taken: dict[int, tuple[Batch, Tensor]]) -> None:
        """Take a step of those who have a batch of one size."""
        numbers = tuple(taken)
        if self._needs_twin and len(numbers) == 1:
            numbers *= 2
        if numbers != self._stacked:
            self._unload()
            self._load(numbers)
        batches, indices = zip(*(taken[number] for number in numbers), strict=True)
        inputs = self._first.inputs_of(self._learners, batches, indices)
        weights = None
        if batches[0].weights is not None:
            weights = torch.stack([each.weights for each in batches]).to(self._device)
        means, losses = self._stack.step(
            inputs, self._first.feed, weights, needs_losses=self._selection.needs_sample_losses
        )
        self._means.append(means)
        self._sizes.append(indices[0].shape[0])
        if losses is not None:
            for learner, batch, own in zip(self._learners, batches, losses, strict=True):
                learner.record(batch, own)

    def _load(self, numbers: tuple[int, ...]) -> None:
        momentum = self._work[0].request.momentum
        key, stacks = (len(numbers), momentum), self._copy.stacks
        if key not in stacks:
            if len(stacks) == _MOST_STACKS:
                del stacks[next(iter(stacks))]  # first: another may not fit into memory
            stacks[key] = Stack(self._copy, self._first.settings, *key)
        self._stack, self._stacked = stacks[key], numbers
        self._learners = [self._work[number].learner for number in numbers]
        self._stack.load([self._members[number] for number in numbers])

    def _unload(self) -> None:
        """Take the values of the stacked learners out of the stack."""
        if self._stacked:
            means = torch.stack(self._means).cpu()
            members = self._stack.members()
            for place, number in enumerate(dict.fromkeys(self._stacked)):
                self._members[number] = members[place]
                self._losses[number].append(means[:, place])
                self._num_samples[number] += sum(self._sizes)
        self._stacked, self._means, self._sizes = (), [], []

    def _probed(self, number: int) -> FlatModel:
        """A model with the present values of one learner."""
        if number in self._stacked:
            self._unload()
        member = self._members[number]
        self._copy.model.load(member.params)
        self._copy.load_buffers(dict(member.buffers))
        return self._copy.model

    def _outcome(self, number: int) -> Outcome:
        losses = torch.cat(self._losses[number])
        work, member = self._work[number], self._members[number]
        try:
            return work.learner.finish(work.request, member, losses, self._num_samples[number])
        except TrainingError as error:
            return error
