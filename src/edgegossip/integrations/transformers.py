"""Hugging Face Transformers: a callback that exchanges the model with other workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from edgegossip.contract.errors import UsageError, require_extra
from edgegossip.integrations.joined_training import JoinedTraining, mean_loss
from edgegossip.real.script import AlgorithmOrMaker, ScriptWorker
from edgegossip.runs.best import BestModel


def transformers_callback(
    algorithm: AlgorithmOrMaker,
    worker: ScriptWorker | None = None,
    *,
    num_samples: int | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Make a `TrainerCallback` with which the Trainer of Transformers takes part in a run.

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

    Raises:
        UsageError: If `transformers` is not installed, or the variables that `edgegossip
            script` sets are invalid.
    """
    require_extra("Transformers", "transformers")
    from transformers import TrainerCallback

    kind = type("EdgeGossipCallback", (TransformersHooks, TrainerCallback), {})
    return kind(JoinedTraining(algorithm, worker, num_samples, options))


class TransformersHooks:
    """The hooks of the callback.

    The Trainer does not report losses. A hook of the model's forward pass records the loss, if
    the outputs have one.

    Args:
        joined: The training that takes part in the run.
    """

    def __init__(self, joined: JoinedTraining) -> None:
        self._joined = joined
        self._losses: list[Tensor] = []
        self._are_shares = False
        self._is_first = True
        self._scale = 1
        self._num_counted = 0
        self._hook: Any = None

    @property
    def best(self) -> BestModel | None:
        """The best average of the workers' models by validation; see `TrainingLoop.best`."""
        return self._joined.best

    def on_train_begin(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: Any,  # noqa: ANN401
        optimizer: Any,  # noqa: ANN401
        train_dataloader: Any,  # noqa: ANN401
        **other: Any,  # noqa: ANN401
    ) -> None:
        if args.deepspeed_plugin is not None:
            raise UsageError(
                "DeepSpeed's optimizer has its own copy of the parameters, which would replace "
                "exchanged ones; train with DDP or with fsdp_config={'version': 2}"
            )
        number = _epoch_samples(args, train_dataloader)
        num_steps = state.max_steps - state.global_step
        self._joined.begin(model, [optimizer], number, num_steps, args.world_size)
        self._losses = []
        self._is_first = args.process_index == 0
        # Items of all processes divide each one's loss, whose mean is to be that of the step.
        self._scale = args.world_size if args.average_tokens_across_devices else 1
        self._num_counted = self._num_seen(state)
        self._hook = model.register_forward_hook(self._note, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:  # noqa: ANN401
        seen = self._num_seen(state)
        loss = mean_loss(self._losses, are_shares=self._are_shares)
        if loss is not None and self._are_shares:
            loss *= self._scale
        # The count is that of all processes, so one of them tells it.
        self._joined.step(loss, seen - self._num_counted if self._is_first else 0)
        self._losses, self._num_counted = [], seen
        if self._joined.is_over:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:  # noqa: ANN401
        self._hook.remove()
        self._joined.end()

    def _num_seen(self, state: Any) -> int:  # noqa: ANN401
        """Samples since the first epoch began, by the Trainer's own count of epochs."""
        return round((state.epoch or 0.0) * self._joined.num_samples)

    def _note(
        self,
        module: Any,  # noqa: ANN401
        arguments: Any,  # noqa: ANN401
        named: Mapping[str, Any],
        outputs: Any,  # noqa: ANN401
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if module.training and loss is not None:
            self._losses.append(loss.detach().clone())  # the Trainer scales it in place
            # With the number of all tokens of a step, the loss is a share of their mean.
            self._are_shares = named.get("num_items_in_batch") is not None


def _epoch_samples(args: Any, loader: Any) -> int | None:  # noqa: ANN401
    """Samples that an epoch of all processes visits; None if the loader does not say."""
    number: int
    try:
        number = len(loader.dataset)
    except (AttributeError, TypeError):
        return None
    most: int = len(loader) * args.train_batch_size * args.world_size
    return min(number, most)
