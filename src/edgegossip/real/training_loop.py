"""Taking part in a run from the caller's own training loop."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import NetworkError, TrainingError, UsageError
from edgegossip.contract.metrics import ACCURACY
from edgegossip.contract.protocol import Layout, Rank, Role, Seconds
from edgegossip.contract.ranges import check_range, check_rank
from edgegossip.models.flat import FlatModel
from edgegossip.models.shared import (
    ReplicatedModel,
    ShardedModel,
    SharedModel,
    group_of,
    num_shards,
    without_ddp,
)
from edgegossip.net.host.host import Host
from edgegossip.net.host.introduction import Introduction
from edgegossip.net.host.settings import Forecaster, HostServices, HostSettings
from edgegossip.net.transport import Transport
from edgegossip.real.agreement import Agreement, agreement_of
from edgegossip.real.best_model import best_model, best_state, with_best
from edgegossip.real.introduction import compared_tensors, run_id, sketch
from edgegossip.real.loop_folder import LoopFolder, OpenLoopFolder
from edgegossip.real.own_work import OwnWork, Piece, Stateful
from edgegossip.real.processes import Processes, StepTotals
from edgegossip.runs.best import LOSS, BestModel, KeepBest, kept_best
from edgegossip.runs.describe import describe, flatten, versions
from edgegossip.runs.final_average import FinalAverage, FinalState, ending_seconds

_METRICS = (LOSS, ACCURACY)
"""Metrics of `evaluate` by which models may be chosen: the direction of others is unknown."""
_LOG = logging.getLogger("edgegossip.real")
Validate: TypeAlias = Callable[
    [nn.Module], float | tuple[float, float] | tuple[float, Mapping[str, float]]
]
"""Returns a model's mean loss on validation data, alone or with metrics or an accuracy."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of a `TrainingLoop`.

    Args:
        name: Name of the run, equal for all workers.
        meet_seconds: Seconds to wait for missing workers before beginning without them.
        min_workers: Minimum number of workers, including this one, to begin and to continue;
            with fewer, `step` raises `NetworkError`. With None, a run needs one other worker to
            begin and may continue without any.
        max_seconds: Time limit in seconds, counted from the beginning of the run.
        final_average: At the end, average the models of all evaluated workers; each of them
            sends its model once to all others.
        keep: Also keep the best average of the workers' models by validation, and perhaps end
            the run when it no longer improves: a `KeepBest`, or "best" for its defaults. Its
            metric is the loss of `evaluate`, or "accuracy".
        has_buffers: Also exchange floating-point buffers (running means).
        torch_device: Device of the model; None for the one that it is on.
        folder: Keep a run folder, as ``edgegossip worker`` does; see `LoopFolder`.

    Raises:
        ValueError: If `keep` is something else.
    """

    name: str = ""
    meet_seconds: Seconds = 60.0
    min_workers: int | None = None
    max_seconds: Seconds = math.inf
    final_average: bool = False
    keep: KeepBest | Literal["best"] | None = None
    has_buffers: bool = True
    torch_device: torch.device | str | None = None
    folder: LoopFolder | None = None

    def __post_init__(self) -> None:
        kept_best(self.keep)

    def for_host(self, introduction: Introduction) -> HostSettings:
        """The settings of the loop's host."""
        return HostSettings(
            run=run_id(f"training loop {self.name}"),
            introduction=introduction,
            meet_seconds=self.meet_seconds,
            min_to_begin=self.min_workers or 2,
            min_workers=self.min_workers or 1,
            max_seconds=self.max_seconds,
            checkpoint_seconds=60.0 if self.folder is None else self.folder.checkpoint_seconds,
            ending_seconds=ending_seconds(self.max_seconds) if self.final_average else 0.0,
        )


class TrainingLoop:
    """Exchanges a model with other workers while the caller's loop trains it.

    Call `step` after each optimizer step. When the algorithm's current piece of work is done,
    the model is exchanged: a synchronous algorithm makes `step` wait for the other workers, and
    an asynchronous one sends in the background. Afterwards the model has the parameters for
    further training; the optimizer keeps its state. Once `is_over` is true, the parameters are
    final; a later `step` undoes further training.

    Each worker begins with the parameters of its own `model`; make them equal, for example with
    ``torch.manual_seed(0)`` before making the model. Different ones are allowed, with a warning
    in the log, because a script that is started again may load a checkpoint. Algorithms that
    exchange only changes, such as `DiLoCo`, may keep such a difference to the end. Names,
    shapes, types and order of the exchanged tensors must be equal.

    The final parameters are those that the algorithm leaves on this worker. After synchronous
    algorithms that average over all workers, all workers have the same parameters (gossip on a
    complete graph: but for the last bits); after other algorithms, such as GoSGD, each worker
    has its own. `final_average` gives all workers in
    reach of each other the mean of their models, or the server's model. Workers wait for the
    slowest one; afterwards `agreement` tells which workers have the mean.

    With `keep`, `best` is the best average of the workers' models by validation, for example
    for ``model.load_state_dict(loop.best.params)``. The worker of the lowest rank in reach
    measures it with its `evaluate`, so all workers need one, with the same validation data.
    With a `patience`, the run ends when nothing better was found; see `BestByValidation`.

    **Several processes.** A worker may train with `DistributedDataParallel` or `fully_shard`.
    All its processes then make the same loop and call the same methods. The process of rank 0
    in their group takes part in the run, and the others follow it: after an exchange, all have
    its parameters and the same properties. Steps without an exchange cost nothing, except that
    processes look up at least once a second. So the end of a run in the middle of a piece of
    work, or a loss that is not finite, takes up to a second to be noticed. An error of one
    process ends the others with an error once they look up.

    A rank whose role has no data, such as a server, does not train: entering the `with` block
    waits until the run is over.

    **A run folder.** With `folder`, the loop leaves the same folder as ``edgegossip worker``,
    and a loop that is started again with it resumes; see `LoopFolder`. With several processes,
    only the one of rank 0 writes, and `LoopFolder.stateful` must be empty.

    Missing, lost and returned workers are logged (``edgegossip.net``), and so is the run's end
    (``edgegossip.real``, level INFO). After an exception in the `with` block, including
    Ctrl+C, the worker tells the others and leaves the run, and the exception propagates.

    Args:
        model: Model that the caller trains; its parameters are moved into one vector, in place.
            Frozen parameters (``requires_grad = False``) are not sent, and must be equal on all
            workers.
        algorithm: Algorithm, with equal settings on all workers; a worker with other settings
            is rejected and ends with an error that names the setting.
        rank: Rank of this worker.
        num_workers: Number of all workers.
        transport: Transport of the messages; only processes that follow may have None.
        num_samples: Number of this worker's samples, in all its processes together, from which
            epochs are counted; 0 for a rank whose role has no data.
        settings: Settings of the loop.
        forecaster: A `Monitor` of this machine, for `EdgeGossip`.
        evaluate: Returns the mean loss of a model on validation data, for `ADSP`, `ADACOMM` and
            `keep`, or a pair: this loss, and metrics by name (or an accuracy). It is called on
            another thread, with a copy of `model` in evaluation mode, which a sharded model
            cannot have.
        process_group: Processes that train this worker together. By default, a model in
            `DistributedDataParallel` or sharded by `fully_shard` names them, and any other
            model is trained by this process alone.
        options: Fields of `LoopSettings`, such as ``final_average=True``, which take the place
            of those in `settings`.

    Raises:
        TypeError: If an option is no field of `LoopSettings`.
        ValueError: If `rank` is out of range, the algorithm is for a different number of
            workers, `num_samples` is too small for the role, a rank with a slice of the model
            lacks `final_average`, `keep` lacks `evaluate` or is for parts of a model, this
            process is not in `process_group`, or the folder's experiment is of another loop.
        RunFolderError: If the folder cannot be written, has other contents, or is in use.
        UsageError: If the model is in a kind of distributed training that cannot be exchanged,
            such as `FullyShardedDataParallel`.

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
        transport: Transport | None,
        *,
        num_samples: int,
        settings: LoopSettings = LoopSettings(),
        forecaster: Forecaster | None = None,
        evaluate: Validate | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        settings = replace(settings, **options)
        _check_workers(algorithm, rank, num_workers)
        has_average = settings.final_average
        _check_role(algorithm.role(rank), rank, num_samples, final_average=has_average)
        group = group_of(model, process_group)
        self._processes = None if group is None else Processes(group)
        self._follows = self._processes is not None and not self._processes.is_lead
        model = without_ddp(model)
        self._kept = kept_best(settings.keep)
        is_needed = self._kept is not None and algorithm.role(rank).is_evaluated
        _check_evaluate(evaluate, model, is_needed=is_needed)
        stateful = _stateful(settings, algorithm, num_workers, model, group)
        judge, self._spare = None, None
        with self._heard():
            if evaluate is not None and not self._follows:
                self._spare = FlatModel(copy.deepcopy(model), **_layout(model, settings))
                judge = partial(_judge, evaluate, self._spare)
            self._model = _shared(model, settings, group)
        self._work = OwnWork(num_samples, Layout(self._model.num_trained), stateful)
        self._present = Piece(torch.empty(0), 1, math.inf)
        self._has_begun = False
        self._error: BaseException | None = None
        self._told_rounds = 0
        self._told_agreement: Agreement | None = None
        self.is_over = False
        params = self._model.gather()
        if self._follows:
            return
        self._algorithm = _whole_algorithm(algorithm, num_workers, settings)
        introduction = _introduction(algorithm, num_workers, params, self._model, settings)
        services = HostServices(forecaster=forecaster, evaluate=judge)
        host = partial(Host, settings=settings.for_host(introduction), services=services)
        with self._heard():
            host = partial(
                host, self._algorithm, rank, num_workers, params, self._work, _given(transport)
            )
            self._folder = _opened(settings, rank, model)
            self._host: Host[Any] = host() if self._folder is None else self._folder.host(host)
        self._thread = threading.Thread(target=self._run, name=f"host {rank}", daemon=True)

    @property
    def rounds(self) -> int:
        """Completed rounds of the algorithm."""
        return self._told_rounds if self._follows else int(self._host.state.round)

    @property
    def agreement(self) -> Agreement | None:
        """Which workers share the final average; None without one, or before the end."""
        if self._follows or not self.is_over:
            return self._told_agreement
        return agreement_of(self._algorithm, self._host)

    @property
    def best(self) -> BestModel | None:
        """The best average of the workers' models by validation.

        None without `keep`, before the end or the end of the `with` block, if no model was
        measured, or in a process that follows another.
        """
        if self._follows or (self._thread.is_alive() and not self.is_over):
            return None
        state = best_state(self._host.state)
        if state is None or self._kept is None or self._spare is None:
            return None
        return best_model(state, self._kept.find(_METRICS), self._spare)

    @property
    def progress(self) -> float:
        """Completed share of the run, in [0, 1], for the learning rate.

        In a given round, all workers of a synchronous algorithm have the same value.
        """
        return self._work.progress

    @property
    def batch_ratio(self) -> float:
        """Size of the next batch relative to the usual one; `BatchTune` sets it by speed.

        A loop may ignore this and keep its batch size.
        """
        return self._work.request.batch_ratio

    @property
    def rate_ratio(self) -> float:
        """Learning rate of the next step relative to the usual one, by default 1."""
        return self._work.request.rate_ratio

    @property
    def momentum(self) -> float | None:
        """Momentum of the next step, if the algorithm sets one."""
        return self._work.request.momentum

    @property
    def has_gone_back(self) -> bool:
        """Whether the last `step` put the last sound parameters into the model."""
        return self._work.has_gone_back

    def step(self, loss: float | None, num_samples: int) -> None:
        """Record an optimizer step; exchange the model when an exchange is due.

        If another worker's message makes the loss infinite or NaN, the model goes back to the
        last sound parameters. In that case (see `has_gone_back`), call
        ``optimizer.state.clear()``, because momentum is not finite either.

        Args:
            loss: Loss of this process's batch; None for all steps if it is unknown. Then only
                the parameters show whether training has failed.
            num_samples: Samples in this process's batch.

        Raises:
            TrainingError: If the loss is not finite and no other worker can be blamed, if the
                run has failed, or if another process of this worker has left.
            UsageError: If the `with` block has not begun.
        """
        if self.is_over:
            # The other workers have these parameters, too: undo this step.
            self._share(None if self._follows else self._host.state.estimate)
            return
        if not self._has_begun:
            raise UsageError(
                "call step within the loop's block: with TrainingLoop(...) as loop"
            )
        self._work.has_gone_back = False
        if self._processes is None:
            steps = StepTotals()
            steps.add(loss, num_samples)
            self._advance(steps)
        elif self._processes.count(loss, num_samples):
            with self._heard():
                steps = self._processes.report()
                if self._processes.is_lead:
                    self._advance(steps)
                else:
                    self._follow(self._processes)

    def _advance(self, steps: StepTotals) -> None:
        """Record steps, and exchange the model if their piece of work is done."""
        if steps.bad_loss:
            wrong = f"the loss became {steps.bad_loss}; try a smaller learning rate"
            self._work.done.put(TrainingError(wrong))
            self._take_next()
            return
        self._present.add(steps)
        state = self._host.state
        # Once the final average has begun, or the run has stopped early, training no longer
        # counts.
        is_ending = isinstance(state, FinalState) and state.is_ending
        is_ending |= (best := best_state(state)) is not None and best.is_over
        if self._present.is_done or is_ending:
            if self._model.is_sharded:
                self._tell("gather")
            self._work.done.put(self._present.result(self._model.gather()))
            self._take_next()
        elif not self._thread.is_alive():
            # The run is over, or has failed, in the middle of a piece; its end is in the queue.
            self._take_next()
        else:
            self._tell("train on")

    def _take_next(self) -> None:
        """Wait for the next training request, and load its initial parameters."""
        piece = self._work.pieces.get()
        if piece is None:  # from `_run`, at the end of the host
            self.is_over = True
            if self._error is not None:
                raise self._error
            params = self._host.state.estimate
        else:
            self._present = piece
            params = piece.params
        self._tell("share")
        self._share(params)
        if self._processes is not None and self.is_over:
            self._processes.part()

    def _share(self, params: Tensor | None) -> None:
        with torch.no_grad():
            self._model.share(params)

    def _tell(self, deed: str) -> None:
        """Tell the processes that follow what to do, and the state of this loop."""
        if self._processes is None:
            return
        request, agreement = self._work.request, self.agreement
        news = {
            "deed": deed,
            "is_over": self.is_over,
            "rounds": self.rounds,
            "progress": self.progress,
            "has_gone_back": self.has_gone_back,
            "request": {
                "batch_ratio": request.batch_ratio,
                "rate_ratio": request.rate_ratio,
                "momentum": request.momentum,
            },
            "agreement": None if agreement is None else asdict(agreement),
        }
        self._processes.tell(news, *self._present.due)

    def _follow(self, processes: Processes) -> None:
        """Do as the process of rank 0 does, until there is work again."""
        while (news := processes.hear())["deed"] == "gather":
            self._model.gather()
        self._told_rounds = news["rounds"]
        self._work.progress = news["progress"]
        self._work.has_gone_back = news["has_gone_back"]
        self._work.request = replace(self._work.request, **news["request"])
        if (agreement := news["agreement"]) is not None:
            self._told_agreement = Agreement.from_json(agreement)
        if news["deed"] == "share":
            self._share(None)
        self.is_over = news["is_over"]
        if self.is_over:
            processes.part()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Let this worker's other processes, which may wait for this one, hear of an error."""
        try:
            yield
        except BaseException as error:
            if self._processes is not None:
                self._processes.leave(error)
            raise

    def _run(self) -> None:
        host = self._host
        try:
            reason = host.run() if self._folder is None else self._folder.run()
            _LOG.info("worker %d: %s after %d rounds", host.rank, reason, self.rounds)
            if self._folder is None:  # a folder's end has logged it
                agreement = agreement_of(self._algorithm, host)
                if agreement is not None:
                    agreement.log()
            if host.meeting.shortage is not None:
                raise NetworkError(host.meeting.shortage)
            if self._folder is not None:
                self._folder.require_end(reason)
        except BaseException as error:
            self._error = error
        finally:
            # Last: the caller's thread reads `_error` and the final state once it has this.
            self._work.pieces.put(None)

    def __enter__(self) -> Self:
        if self._has_begun:
            raise UsageError(
                "a TrainingLoop is one part in one run, which has begun; make another loop, "
                "with a transport of its own"
            )
        self._has_begun = True
        try:
            with self._heard():
                if self._follows:
                    assert self._processes is not None
                    self._follow(self._processes)
                else:
                    if self._folder is not None:
                        self._folder.listen_to_signals()
                    self._thread.start()
                    self._take_next()
        except BaseException as error:  # the wait for others was interrupted or failed
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the run, even before its end."""
        if self._processes is not None and not self.is_over:
            self._processes.leave(error)
        if self._follows:
            return
        # The host may be waiting for the caller's work, so that must end before it can stop.
        self._host.stop()
        self._work.cancel()
        self._thread.join()
        if self._folder is not None:
            self._folder.close()


def _check_workers(algorithm: Algorithm[Any], rank: Rank, num_workers: int) -> None:
    check_rank(rank, num_workers)
    topology = algorithm.traits.topology
    if topology is not None and topology.num_workers != num_workers:
        raise ValueError(
            f"the algorithm's topology has {topology.num_workers} workers, but {num_workers} "
            f"take part; make the algorithm for {num_workers}. A script's worker.training_loop "
            "also takes a function (of n, steps) that makes it for n"
        )


def _stateful(
    settings: LoopSettings,
    algorithm: Algorithm[Any],
    num_workers: int,
    model: nn.Module,
    group: dist.ProcessGroup | None,
) -> Mapping[str, Stateful]:
    """Check that the folder, if any, is of this loop; return its stateful objects."""
    if (folder := settings.folder) is None:
        return {}
    kept = kept_best(settings.keep)
    folder.require(algorithm, num_workers, model, kept, has_buffers=settings.has_buffers)
    if folder.stateful and group is not None:
        raise ValueError(
            "stateful objects are kept for one process, and this worker has several; leave "
            "`stateful` out, and keep their states by the means of your framework"
        )
    return folder.stateful


def _opened(settings: LoopSettings, rank: Rank, model: nn.Module) -> OpenLoopFolder | None:
    """Open the loop's folder, if any."""
    if settings.folder is None:
        return None
    return OpenLoopFolder(
        settings.folder, rank, model, settings.max_seconds, has_buffers=settings.has_buffers
    )


def _whole_algorithm(
    algorithm: Algorithm[Any], num_workers: int, settings: LoopSettings
) -> Algorithm[Any]:
    """The algorithm with the best model and the final average, if wanted."""
    whole = with_best(algorithm, num_workers, kept_best(settings.keep), _METRICS)
    if not settings.final_average:
        return whole
    return FinalAverage(inner=whole, num_workers=num_workers, ends_at=settings.max_seconds)


def _check_role(role: Role, rank: Rank, num_samples: int, *, final_average: bool) -> None:
    """Raise `ValueError` if a loop cannot play this role with these arguments."""
    if role.num_slices > 1 and not final_average:
        raise ValueError(
            f"rank {rank} has only a slice of the model, and would end without a model; "
            "give all ranks final_average=True"
        )
    check_range("num_samples", num_samples, f"at least {int(role.has_data)}")


def _given(transport: Transport | None) -> Transport:
    if transport is None:
        raise ValueError(
            "transport is None, which only a process that follows another may have; give this "
            "worker a transport"
        )
    return transport


def _check_evaluate(evaluate: Validate | None, model: nn.Module, *, is_needed: bool) -> None:
    if is_needed and evaluate is None:
        raise ValueError(
            "keep chooses a model by validation; give evaluate, a function that returns the "
            "loss of a model on validation data"
        )
    if evaluate is not None and num_shards(model):
        raise ValueError(
            "evaluate needs a copy of the model, and no process has a whole model that "
            "fully_shard has divided; leave evaluate out, or use DistributedDataParallel"
        )


def _introduction(
    algorithm: Algorithm[Any],
    num_workers: int,
    params: Tensor,
    model: SharedModel,
    settings: LoopSettings,
) -> Introduction:
    """Settings to compare with other workers; a difference in the others is only a warning.

    Loops may begin with different parameters, because each begins with its caller's model: a
    script that is started again may have loaded a checkpoint.
    """
    chosen: dict[str, Any] = {
        "num_workers": num_workers,
        "algorithm": describe(algorithm),
        "num_params": len(params),
        "final_average": settings.final_average,
        **compared_tensors(model.described),
    }
    longest = settings.max_seconds
    limits = {} if math.isinf(longest) else {"max_seconds": longest}
    if (kept := kept_best(settings.keep)) is not None:
        chosen["keep"] = describe(kept)
    frozen = model.frozen_sample
    stays = {} if frozen is None else {"frozen parameters": sketch(frozen)}
    return Introduction(
        settings={**flatten(chosen), **stays},
        versions={**versions(), **limits, "initial parameters": sketch(params)},
    )


def _shared(
    model: nn.Module, settings: LoopSettings, group: dist.ProcessGroup | None
) -> SharedModel:
    if num_shards(model):
        return ShardedModel(model, has_buffers=settings.has_buffers)
    return ReplicatedModel(model, group, **_layout(model, settings))


def _layout(model: nn.Module, settings: LoopSettings) -> dict[str, Any]:
    """Arguments of the `FlatModel` of the caller's model."""
    on = next((each.device for each in model.parameters()), "cpu")
    # The caller's batches keep their memory format, so the weights keep theirs.
    return {
        "has_buffers": settings.has_buffers,
        "channels_last": False,
        "torch_device": settings.torch_device or on,
    }


def _judge(
    evaluate: Validate, model: FlatModel, params: Tensor
) -> tuple[float, Mapping[str, float]]:
    """Measure `params` ([num_params]) with the caller's function."""
    with torch.no_grad():
        model.load(params)
        found = evaluate(model.module.eval())
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    if not isinstance(metrics, Mapping):
        metrics = {"accuracy": metrics}
    return float(loss), {name: float(value) for name, value in metrics.items()}
