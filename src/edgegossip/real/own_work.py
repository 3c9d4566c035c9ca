"""A `Trainer` that leaves training to the caller's loop, piece by piece."""

from __future__ import annotations

import math
import queue
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Epochs, Layout, Steps, Train
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.real.processes import StepTotals


class Stateful(Protocol):
    """Something with a state that a checkpoint can hold, such as an optimizer or a schedule."""

    def state_dict(self) -> dict[str, Any]:
        """The state: dicts, lists, tuples, numbers, strings and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:  # noqa: ANN401 - torch's vary
        """Restore a state."""
        ...


class Piece:
    """Work that the algorithm requested, while the caller's loop does it, step by step."""

    def __init__(self, params: Tensor, num_steps: float, num_due: float) -> None:
        self.params = params
        self._num_steps = 0
        self._num_samples = 0
        self._total_loss = 0.0
        self._steps_due = num_steps
        self._samples_due = num_due

    def add(self, steps: StepTotals) -> None:
        """Record steps."""
        self._num_steps += steps.num_steps
        self._num_samples += steps.num_samples
        self._total_loss += steps.total_loss

    @property
    def is_done(self) -> bool:
        return self._num_steps >= self._steps_due or self._num_samples >= self._samples_due

    @property
    def due(self) -> tuple[float, float]:
        """Steps and samples that are left; one of them is infinite."""
        return self._steps_due - self._num_steps, self._samples_due - self._num_samples

    def result(self, params: Tensor) -> TrainingResult:
        """Result so far."""
        return TrainingResult(
            params,
            self._num_samples,
            self._num_steps,
            self._total_loss / self._num_steps,
            cost=float(self._num_samples),  # a batch may end beyond what was asked for
        )


class OwnWork(Trainer):
    """A `Trainer` that leaves training to the caller's loop, which runs in another thread.

    Args:
        num_samples: Number of this worker's samples.
        layout: Layout of the exchanged vector.
        stateful: The caller's objects with state, by name.
    """

    def __init__(
        self, num_samples: int, layout: Layout, stateful: Mapping[str, Stateful]
    ) -> None:
        self._stateful = stateful
        self.progress = 0.0
        self.request = Train(torch.empty(0), Steps(1))
        self._layout = layout
        self.pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[TrainingResult | TrainingError | None] = (
            queue.SimpleQueue()
        )
        self._num_samples = num_samples
        self._batch_size = 1.0
        self.has_gone_back = False

    def start_over(self) -> None:
        """Set `has_gone_back`, which tells the caller's loop to clear its optimizer's state."""
        self.has_gone_back = True

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def layout(self) -> Layout:
        return self._layout

    def cost(self, request: Train) -> float:
        if isinstance(request.work, Steps):
            return request.work.num_steps * self._batch_size
        assert isinstance(request.work, Epochs)  # the data of a loop has no units
        return request.work.share * request.keep_ratio * self._num_samples

    def announce(self, request: Train, progress: float) -> None:
        """Pass the work to the loop at once, which saves a change of thread."""
        self.progress, self.request = progress, request
        # A piece ends after a number of steps or of samples, whichever the algorithm asked for.
        num_steps, num_due = math.inf, math.inf
        if isinstance(request.work, Steps):
            num_steps = request.work.num_steps
        else:
            num_due = self.cost(request)
        self.pieces.put(Piece(request.params, num_steps, num_due))

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Wait until the loop has done the work."""
        result = self.done.get()
        if result is None:
            raise LoopLeftError
        if isinstance(result, TrainingError):
            raise result
        # The next request's cost in steps is an estimate: only the caller knows its batches.
        self._batch_size = result.num_samples / result.num_steps
        return result

    def cancel(self) -> None:
        self.done.put(None)

    def state_dict(self) -> Mapping[str, Any]:
        # The host asks only while nothing trains, so the caller's thread waits for a piece.
        return {name: each.state_dict() for name, each in self._stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self._stateful.keys():
            raise ValueError(
                f"the checkpoint has the states of {sorted(state)}, and the loop's folder has "
                f"stateful objects {sorted(self._stateful)}"
            )
        for name, each in self._stateful.items():
            each.load_state_dict(state[name])


class LoopLeftError(Exception):
    """The caller has left its loop before the end of the run."""
