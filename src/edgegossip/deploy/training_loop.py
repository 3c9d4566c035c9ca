"""Take part in a run from a training loop of one's own."""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from edgegossip.core.algorithm import Algorithm
from edgegossip.core.errors import NetworkError, TrainingError
from edgegossip.core.protocol import Epochs, Layout, Rank, Seconds, Steps, Train
from edgegossip.core.ranges import check_range
from edgegossip.core.trainer import Trainer, TrainingResult
from edgegossip.deploy.final_average import FinalAverage
from edgegossip.deploy.introducing import run_id
from edgegossip.experiments.describe import describe, flatten, versions
from edgegossip.learning.flat import FlatModel
from edgegossip.net.host import Host
from edgegossip.net.host_settings import Forecaster, HostSettings
from edgegossip.net.introduction import Introduction
from edgegossip.net.transport import Transport

_LOG = logging.getLogger("edgegossip.deploy")


class TrainingLoop:
    """Exchanges a model with other workers while the caller's own loop trains it.

    Call `step` after each optimizer step. When the algorithm's present piece of work is done,
    the model is exchanged: a synchronous algorithm makes `step` wait for the others, an
    asynchronous one sends beside it. Afterwards the model has the parameters to go on from;
    the optimizer keeps its state. Once `is_over` is true they are the final ones, and are
    not to be trained on. Workers whose models start equal give the best start.

    The final parameters are those that the algorithm leaves this worker with. Synchronous
    algorithms that average with everybody leave all with the same; after others, and under
    GoSGD, each has its own. `final_average` gives all workers the mean of their models, or that
    of the server where there is one.

    A rank whose role has no data, as a server, trains nothing: it stays in the entrance of the
    `with` block until the run is over.

    Workers that are waited for, lost or back are logged (``edgegossip.net``), the end too
    (``edgegossip.deploy``, level INFO). An exception in the `with` block, Ctrl+C included,
    leaves the run, tells the others, and is passed on.

    Args:
        model: Trained by the caller; its parameters are laid into one vector, in place.
        algorithm: The same for all workers, with equal settings: one that differs is refused,
            and ends with an error that names the setting.
        rank: Rank of this worker.
        num_workers: Number of all workers.
        transport: Carries the messages.
        num_samples: Number of samples of this worker, which `step` counts through; 0 for a rank
            whose role has none.
        name: Name of the run, the same for all workers.
        forecaster: For `EdgeGossip`: a `Monitor` of this machine.
        meet_seconds: How long to wait for all workers before beginning without some.
        min_workers: With fewer, this one included, the run neither begins nor goes on, and
            `step` raises `NetworkError`; None to begin with at least one other, and go on with
            however few are left.
        max_seconds: When to stop, counted from the beginning.
        final_average: At the end, average the models of all workers whose role counts; each of
            them sends its own to all others once.
        evaluate: Gives mean loss and accuracy of a model on validation data, for algorithms
            that ask (`ADSP`, `ADACOMM`): called on another thread, with a copy of `model` in
            evaluation mode.
        has_buffers: Exchange floating-point buffers (running means) too.
        torch_device: Where the model lives.

    >>> import edgegossip as eg
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> alone = eg.EpochGossip(topology=eg.complete(1), num_rounds=2)
    >>> transport = eg.MemoryNetwork().transport(0)
    >>> with eg.TrainingLoop(model, alone, 0, 1, transport, num_samples=8) as loop:
    ...     while not loop.is_over:
    ...         loss = model(torch.ones(4, 2)).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         loop.step(loss.item(), num_samples=4)
    >>> loop.rounds
    2
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm[Any],
        rank: Rank,
        num_workers: int,
        transport: Transport,
        *,
        num_samples: int,
        name: str = "",
        forecaster: Forecaster | None = None,
        meet_seconds: Seconds = 60.0,
        min_workers: int | None = None,
        max_seconds: Seconds = math.inf,
        final_average: bool = False,
        evaluate: Callable[[nn.Module], tuple[float, float]] | None = None,
        has_buffers: bool = True,
        torch_device: torch.device | str = "cpu",
    ) -> None:
        has_data = algorithm.role(rank).has_data
        if algorithm.role(rank).num_slices > 1 and not final_average:
            raise ValueError(
                f"rank {rank} has a slice of the model alone, and no model to end with; give "
                "all ranks final_average=True"
            )
        check_range("num_samples", num_samples, "at least 1" if has_data else "at least 0")
        judge = None
        if evaluate is not None:
            copied = FlatModel(
                copy.deepcopy(model),
                has_buffers=has_buffers,
                channels_last=False,
                torch_device=torch_device,
            )
            judge = partial(_judge, evaluate, copied)
        # The caller's batches come as they are, so its weights stay as they are.
        self._flat = FlatModel(
            model, has_buffers=has_buffers, channels_last=False, torch_device=torch_device
        )
        self._work = _OwnWork(num_samples, Layout(self._flat.trained.numel()))
        params = self._flat.params.to("cpu", copy=True)
        described = {
            "num_workers": num_workers,
            "algorithm": describe(algorithm),
            "num_params": len(params),
            "final_average": final_average,
        }
        limits = {} if math.isinf(max_seconds) else {"max_seconds": max_seconds}
        if final_average:
            algorithm = FinalAverage(
                inner=algorithm, num_workers=num_workers, ends_at=max_seconds
            )
            max_seconds = math.inf
        self._host: Host[Any] = Host(
            algorithm,
            rank,
            num_workers,
            params,
            self._work,
            transport,
            settings=HostSettings(
                run=run_id(f"training loop {name}"),
                introduction=Introduction(
                    settings=flatten(described), versions={**versions(), **limits}
                ),
                meet_seconds=meet_seconds,
                min_to_begin=min_workers or 2,
                min_workers=min_workers or 1,
                max_seconds=max_seconds,
            ),
            forecaster=forecaster,
            evaluate=judge,
        )
        self._thread = threading.Thread(target=self._run, name=f"host {rank}", daemon=True)
        self._error: BaseException | None = None
        self._present: _Piece | None = None
        self.is_over = False

    @property
    def rounds(self) -> int:
        """Rounds that the algorithm has completed."""
        return int(self._host.state.round)

    @property
    def progress(self) -> float:
        """How much of the run is over, in [0, 1]; set the learning rate by it.

        All workers of a synchronous algorithm are at one value in one round.
        """
        return self._work.progress

    @property
    def batch_ratio(self) -> float:
        """Size that the next batch is to have over the usual one; `BatchTune` goes by speed.

        A loop that ignores it trains with batches as they are.
        """
        return self._work.request.batch_ratio

    @property
    def rate_ratio(self) -> float:
        """Learning rate of the next step over the usual one; 1 unless the algorithm asks."""
        return self._work.request.rate_ratio

    @property
    def momentum(self) -> float | None:
        """Momentum of the next step, if the algorithm asks for one."""
        return self._work.request.momentum

    def step(self, loss: float, num_samples: int) -> None:
        """The optimizer has made a step; exchange the model if it is time to.

        If the loss is not finite because of what another worker has sent, the model goes back
        to the last parameters that were sound; then call ``optimizer.state.clear()``, whose
        momentum is not finite either.

        Args:
            loss: Loss of the batch.
            num_samples: In the batch.

        Raises:
            TrainingError: If the loss is not finite and no other worker can be blamed for it,
                or the run has failed.
        """
        if self.is_over:
            return
        piece = self._present
        assert piece is not None, "step is called within `with`"
        if not math.isfinite(loss):
            wrong = f"the loss became {loss}; try a smaller learning rate"
            self._work.done.put(TrainingError(wrong))
            self._take_next()
            return
        piece.losses.append(loss)
        piece.num_samples += num_samples
        if piece.is_done or getattr(self._host.state, "is_ending", False):
            self._work.done.put(piece.result(self._flat))
            self._take_next()
        elif not self._thread.is_alive():  # the run is over, or has failed
            self._take_next()

    def _take_next(self) -> None:
        """Wait for what to train next, and load the parameters to start from."""
        piece = self._work.pieces.get()
        if piece is None:
            self.is_over = True
            if self._error is not None:
                raise self._error
            self._flat.params.copy_(self._host.state.estimate)
            return
        self._present = piece
        with torch.no_grad():
            self._flat.params.copy_(piece.params)

    def _run(self) -> None:
        host = self._host
        try:
            reason = host.run()
            _LOG.info("worker %d: %s after %d rounds", host.rank, reason, self.rounds)
            if host.meeting.shortage is not None:
                raise NetworkError(host.meeting.shortage)
        except BaseException as error:
            self._error = error
        finally:
            self._work.pieces.put(None)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._take_next()
        except BaseException as error:  # the wait for others is interrupted, or vain
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the run, in the midst of it if it is not over."""
        self._host.stop()
        self._work.cancel()
        self._thread.join()


def _judge(
    evaluate: Callable[[nn.Module], tuple[float, float]], model: FlatModel, params: Tensor
) -> tuple[float, float]:
    """Measure `params` ([num_params]) with the caller's function."""
    with torch.no_grad():
        model.params.copy_(params)
        loss, accuracy = evaluate(model.module.eval())
    return float(loss), float(accuracy)


class _Piece:
    """Some work that the algorithm has asked for."""

    def __init__(self, params: Tensor, num_steps: float, num_due: float) -> None:
        self.params = params
        self.losses: list[float] = []
        self.num_samples = 0
        self._num_steps = num_steps
        self._num_due = num_due

    @property
    def is_done(self) -> bool:
        return len(self.losses) >= self._num_steps or self.num_samples >= self._num_due

    def result(self, model: FlatModel) -> TrainingResult:
        """Result so far; parameters are copied."""
        return TrainingResult(
            model.params.to("cpu", copy=True),
            self.num_samples,
            len(self.losses),
            sum(self.losses) / len(self.losses),
            cost=float(self.num_samples),  # a batch may end beyond what was asked for
        )


class _OwnWork(Trainer):
    """A `Trainer` whose training is done by the caller's loop, on another thread."""

    def __init__(self, num_samples: int, layout: Layout) -> None:
        self.progress = 0.0
        self.request = Train(torch.empty(0), Steps(1))
        self._layout = layout
        self.pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[TrainingResult | TrainingError | None] = (
            queue.SimpleQueue()
        )
        self._num_samples = num_samples
        self._batch_size = 1.0

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def layout(self) -> Layout:
        return self._layout

    def cost(self, request: Train) -> float:
        if isinstance(request.work, Epochs):
            return request.work.share * request.keep_ratio * self._num_samples
        return request.work.num_steps * self._batch_size

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Hand the work to the loop, and wait until it is done."""
        self.progress, self.request = progress, request
        num_steps, num_due = math.inf, math.inf
        if isinstance(request.work, Epochs):
            num_due = self.cost(request)
        else:
            num_steps = request.work.num_steps
        self.pieces.put(_Piece(request.params, num_steps, num_due))
        result = self.done.get()
        if result is None:
            raise _LoopLeftError
        if isinstance(result, TrainingError):
            raise result
        self._batch_size = result.num_samples / result.num_steps
        return result

    def cancel(self) -> None:
        self.done.put(None)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to go back to: optimizer and data are the caller's."""


class _LoopLeftError(Exception):
    """The caller has left its loop before the run was over."""
