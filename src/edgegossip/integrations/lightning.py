"""Lightning: a callback that exchanges the model of a `Trainer` with other workers."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from edgegossip.contract.errors import UsageError, require_extra
from edgegossip.integrations.joined_training import JoinedTraining, mean_loss
from edgegossip.real.script import AlgorithmOrMaker, ScriptWorker
from edgegossip.runs.best import BestModel


def lightning_callback(
    algorithm: AlgorithmOrMaker,
    worker: ScriptWorker | None = None,
    *,
    num_samples: int | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Make a callback with which Lightning's `Trainer` takes part in a run.

    The script controls training: its optimizer, precision, clipping and accumulation. Each
    optimizer step counts as one step of the algorithm. Trainable parameters are exchanged in
    place, and the optimizer keeps its state. The Trainer stops when the algorithm has finished;
    all workers then have the mean of their models (`final_average`).

    If the Trainer trains in several processes, with DDP or `fully_shard`, the first one takes
    part in the run, and the others follow it.

    Args:
        algorithm: The algorithm, equal for all workers; or a function that makes it from the
            numbers of workers and of the Trainer's optimizer steps.
        worker: This process; None reads the variables that `edgegossip script` sets.
        num_samples: Number of samples in an epoch of all processes; None for that of the
            Trainer's data loader.
        options: Other arguments of `TrainingLoop`, such as `max_seconds`, or `keep` with
            `evaluate`; the callback's `best` is then `TrainingLoop.best`.

    Returns:
        A `Callback` of the package that the script has imported, `lightning` or
        `pytorch_lightning`.

    Raises:
        UsageError: If neither package is installed, or the variables that `edgegossip script`
            sets are invalid.
    """
    older = "pytorch_lightning"
    package = older if older in sys.modules else "lightning.pytorch"
    if package != older:
        require_extra("Lightning", "lightning")
    callback = importlib.import_module(package).Callback
    kind = type("EdgeGossipCallback", (LightningHooks, callback), {})
    return kind(JoinedTraining(algorithm, worker, num_samples, options))


class LightningHooks:
    """The hooks of the callback.

    Args:
        joined: The training that takes part in the run.
    """

    def __init__(self, joined: JoinedTraining) -> None:
        self._joined = joined
        self._losses: list[Tensor] = []
        self._num_samples = 0
        self._num_steps = 0

    @property
    def best(self) -> BestModel | None:
        """The best average of the workers' models by validation; see `TrainingLoop.best`."""
        return self._joined.best

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        self._losses, self._num_samples = [], 0
        self._num_steps = trainer.global_step
        most = trainer.estimated_stepping_batches
        # Not `pl_module`: DDP around it knows the processes that train together.
        self._joined.begin(
            trainer.model,
            trainer.optimizers,
            _epoch_samples(trainer),
            0 if math.isinf(most) else int(most) - self._num_steps,
            trainer.world_size,
        )

    def on_train_batch_end(
        self,
        trainer: Any,  # noqa: ANN401
        pl_module: Any,  # noqa: ANN401
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss.detach())
        self._num_samples += _length(batch)
        if trainer.global_step == self._num_steps:
            return  # gradients are being accumulated
        self._num_steps = trainer.global_step
        # Automatic optimization has divided each loss by their number.
        mean = mean_loss(self._losses, are_shares=pl_module.automatic_optimization)
        self._joined.step(mean, self._num_samples)
        self._losses, self._num_samples = [], 0
        if self._joined.is_over:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        self._joined.end()

    def on_exception(
        self,
        trainer: Any,  # noqa: ANN401
        pl_module: Any,  # noqa: ANN401
        exception: BaseException,
    ) -> None:
        self._joined.end(exception)


def _epoch_samples(trainer: Any) -> int | None:  # noqa: ANN401
    """Samples that an epoch of all processes visits; None if the loader does not say."""
    loader = trainer.train_dataloader
    try:
        number = len(loader.dataset)
        size = loader.batch_size or 0
    except (AttributeError, TypeError, NotImplementedError):
        return None
    if math.isinf(trainer.num_training_batches):
        return None
    most = trainer.num_training_batches * size * trainer.world_size
    return min(number, most) if size else number


def _length(batch: Any) -> int:  # noqa: ANN401
    """Number of samples in a batch: the length of its first tensor."""
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise UsageError(
        f"a batch is a {type(batch).__name__} without tensors, so its number of samples "
        "is unknown; let it have one with an entry for each sample"
    )
