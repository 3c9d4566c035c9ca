"""A `TrainingLoop` within a framework's own training, event by event."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from edgegossip.contract.errors import UsageError
from edgegossip.real.script import AlgorithmOrMaker, ScriptWorker
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.runs.best import BestModel

_LOG = logging.getLogger("edgegossip.integrations")


class JoinedTraining:
    """Opens a loop when a framework begins to train, and closes it at the end.

    Args:
        algorithm: See `ScriptWorker.training_loop`.
        worker: This process; None reads the variables that `edgegossip script` sets.
        num_samples: Number of samples in an epoch; None for the framework's number.
        options: Other arguments of `TrainingLoop`.

    Attributes:
        num_samples: Number of samples in an epoch, once training has begun.
        best: The best average of the workers' models by validation, after training with
            `keep`; see `TrainingLoop.best`.
    """

    def __init__(
        self,
        algorithm: AlgorithmOrMaker,
        worker: ScriptWorker | None,
        num_samples: int | None,
        options: dict[str, Any],
    ) -> None:
        self._algorithm = algorithm
        self._worker = worker or ScriptWorker.from_environment()
        self._options = options
        self._given = num_samples
        self._loop: TrainingLoop | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._num_steps = self._num_taken = 0
        self.num_samples = 0
        self.best: BestModel | None = None

    @property
    def is_over(self) -> bool:
        """Whether the model has its final parameters."""
        return self._loop is not None and self._loop.is_over

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        num_samples: int | None,
        num_steps: int,
        num_processes: int,
    ) -> None:
        """Meet the other workers, and load the initial parameters into the model.

        Args:
            model: Model that the framework trains.
            optimizers: Optimizers, whose state is cleared after training has gone back.
            num_samples: Number of samples in an epoch, in all processes together, if the
                framework knows.
            num_steps: Optimizer steps that the framework will take.
            num_processes: Number of processes in which the framework trains this worker. The
                first one meets the other workers.

        Raises:
            UsageError: If the processes do not use `torch.distributed`, or the number of
                samples is unknown.
        """
        self.end()
        options = dict(self._options)
        if num_processes > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise UsageError(
                    f"this training is split among {num_processes} processes without "
                    "torch.distributed; use a strategy with it, such as DDP, or train each "
                    "worker in one process"
                )
            options.setdefault("process_group", dist.group.WORLD)
        number = num_samples if self._given is None else self._given
        if number is None:
            raise UsageError(
                "the training data has no known length, and epochs are counted in samples; "
                "give the callback num_samples"
            )
        self.num_samples = number
        self._optimizers = optimizers
        self._num_steps, self._num_taken = num_steps, 0
        loop = self._worker.training_loop(
            model, self._algorithm, num_samples=number, num_steps=num_steps, **options
        )
        self._loop = loop.__enter__()
        atexit.register(self.end)  # a script that fails must not keep its process

    def step(self, loss: float | None, num_samples: int) -> None:
        """Record an optimizer step of this process; see `TrainingLoop.step`."""
        assert self._loop is not None
        self._loop.step(loss, num_samples)
        self._num_taken += 1
        if self._loop.has_gone_back:
            for optimizer in self._optimizers:
                optimizer.state.clear()

    def end(self, error: BaseException | None = None) -> None:
        """Leave the run; warn if that is before its end.

        Args:
            error: The reason, for this worker's other processes.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            return
        atexit.unregister(self.end)
        if not loop.is_over:
            _LOG.warning(
                "training ended after %d rounds, before the algorithm did: this model is "
                "not the common one; give the algorithm fewer rounds, or train longer",
                loop.rounds,
            )
        elif self._num_taken < self._num_steps:
            _LOG.warning(
                "the algorithm has ended the training after %d of %d steps, so schedules and "
                "checkpoints do not get to the last ones; for all of them, let the steps of a "
                "round divide their number",
                self._num_taken,
                self._num_steps,
            )
        loop.__exit__(None if error is None else type(error), error, None)
        self.best = loop.best


def mean_loss(losses: Sequence[Tensor], *, are_shares: bool) -> float | None:
    """Mean loss of a step's batches, which may be shares of the mean; None without any."""
    if not losses:
        return None
    stacked = torch.stack([*losses])
    return float(stacked.sum() if are_shares else stacked.mean())
