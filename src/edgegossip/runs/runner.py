"""Runner: carry out an experiment in the simulator and keep its results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import (
    Interrupted,
    RunFolderError,
    TrainingError,
    UndescribedError,
)
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.best import LOSS, BestModel, Selection
from edgegossip.runs.describe import described_roles, header, who_is_who
from edgegossip.runs.events import EventLog, cut_off
from edgegossip.runs.experiment import Experiment, is_target_reached
from edgegossip.runs.files import LOADING_ERRORS, locked
from edgegossip.runs.final_average import FinalAverage, FinalState
from edgegossip.runs.folder import RunFolder, require_folder
from edgegossip.runs.process import interrupted, on_stop_signal, one_intra_op_thread
from edgegossip.runs.results import ALL_CRASHED, EARLY_STOP, Evaluation, FiniteMetrics, Results
from edgegossip.runs.tracking import (
    Follower,
    Progress,
    Silent,
    Status,
    TrackedRun,
    Tracker,
    followed,
)
from edgegossip.sim.machines import profiled
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.task import Workload

_MIN_EVALUATIONS = 20
"""Evaluations of a run that lasts until its time limit, at least."""


def run(
    experiment: Experiment,
    *,
    out: Path | str,
    resume: bool = False,
    recipe: str | None = None,
    command: str | None = None,
    num_threads: int | None = None,
    checkpoint_seconds: float = 60.0,
    progress: Progress | None = None,
    trackers: Sequence[Tracker] = (),
) -> Results:
    """Simulate `experiment` and keep all results in the folder `out`.

    Args:
        experiment: Experiment to run.
        out: Folder, made if missing; must not hold another run unless `resume`.
        resume: Continue from the checkpoint in `out`, to exactly the result of an uninterrupted
            run. A finished run is only read.
        recipe: Name of the recipe, for the record.
        command: Command line that repeats the run, for the record.
        num_threads: Number of threads of the compute pool; None for one per core. No effect on
            the result.
        checkpoint_seconds: Wall seconds between checkpoints.
        progress: A live view.
        trackers: Trackers that receive the run's numbers, such as `TensorBoard()`. A tracker
            that fails is dropped.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; `out` is valid and can be resumed.
        TrainingError: If a loss is not finite; results so far are in `out`.
        RunFolderError: If `out` cannot be written, holds another run, lacks the files that
            `resume` needs, or is in use by another process.
        EdgeGossipError: If the algorithm cannot continue: a `PlatformError`, a
            `ServerLostError`, or a `LocalProtocolError`, for example if workers wait forever
            for lost messages.
    """
    out = Path(out)
    if resume:
        require_folder(out)
    with locked(out):
        folder = RunFolder(out, header(experiment, recipe), resume=resume)
        if results := folder.finished_results():
            return results
        tracked = TrackedRun(name=experiment.run_name, folder=out, header=folder.header)
        with (
            one_intra_op_thread(),
            ComputePool(num_threads) as pool,
            followed(trackers, tracked) as follower,
        ):
            shown = progress or Silent()
            running = _Run(
                experiment, folder, command, pool, shown, checkpoint_seconds, follower
            )
            with on_stop_signal(running.stop):
                return running.execute()


def check_interval(experiment: Experiment, workload: Workload) -> Seconds:
    """Virtual seconds between two checks of whether an evaluation is due."""
    if experiment.evaluation_interval is not None:
        return experiment.evaluation_interval
    speeds = [platform.total_throughput for platform in experiment.platforms]
    if experiment.evaluation_epochs is not None:
        # An evaluation is due soonest if no worker ever waits.
        return experiment.evaluation_epochs * workload.num_train / sum(speeds) / 4
    often = max(len(shard) / speeds[rank] for rank, shard in workload.shards.items()) / 4
    # A short run of machines with very different speeds has few epochs of the slowest one.
    return min(often, (experiment.max_seconds or math.inf) / _MIN_EVALUATIONS)


def _whole_algorithm(experiment: Experiment) -> Algorithm[Any]:
    """The experiment's algorithm, with the final average if wanted."""
    if not experiment.final_average:
        return experiment.algorithm
    # Just behind the limit, so that the look at the limit is that of a run without it.
    ends_at = math.nextafter(experiment.max_seconds or math.inf, math.inf)
    return FinalAverage(
        inner=experiment.algorithm, num_workers=experiment.num_workers, ends_at=ends_at
    )


class _Run:
    """A running experiment: simulate up to the next evaluation, evaluate, store, repeat."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        command: str | None,
        pool: ComputePool,
        progress: Progress,
        checkpoint_seconds: float,
        follower: Follower,
    ) -> None:
        self._experiment = experiment
        self._folder = folder
        self._progress = progress
        self._checkpoint_seconds = checkpoint_seconds
        self._follower = follower
        self._workload = experiment.workload()
        self._interval = check_interval(experiment, self._workload)
        self._metric = experiment.task.metric
        self._history: list[Evaluation] = []
        self._num_looks = 0
        self._finite = FiniteMetrics()
        kept, metrics = experiment.kept, experiment.task.specs
        self._selection = None if kept is None else Selection(kept, kept.find(metrics))
        self._last_params: Tensor | None = None
        self._started = self._last_checkpoint = time.monotonic()
        self._wall_before = 0.0
        checkpoint = folder.checkpoint()
        self._is_untried = checkpoint is not None  # until the next one is kept
        self._log = EventLog(folder.events, checkpoint["log_size"] if checkpoint else 0)
        self.simulator: Simulator[Any] = Simulator(
            _whole_algorithm(experiment),
            experiment.platforms,
            self._workload.initial_params,
            self._workload.make_trainer,
            links=experiment.links,
            faults=experiment.faults,
            pool=pool,
            observer=self._log,
            evaluators=self._workload.validator,
            make_predictor=profiled(experiment.platforms, experiment.profiles),
            max_seconds=experiment.max_seconds or math.inf,
        )
        if checkpoint:
            self._restore(checkpoint)
        else:
            roles = described_roles(experiment, self._workload.shards)
            begun = {"command": command, **roles, "wall_started": folder.started}
            self._log.write("experiment", **folder.header, **begun)
        self._samples_before = self._log.samples_processed

    def stop(self) -> None:
        """Make the run stop between two events, with a checkpoint."""
        self.simulator.should_stop = True

    def execute(self) -> Results:
        """Simulate to the end, or until stopped, and leave a complete folder either way."""
        try:
            if not self._simulate_or_keep():
                self._end("interrupted")
                raise self._interrupted()
            results = self._end(self._reason())
            self._folder.drop_checkpoint()
        finally:
            self._log.abandon()
        if self.simulator.should_stop:
            raise self._interrupted()  # a comparison must not go on
        return results

    def _simulate_or_keep(self) -> bool:
        """Simulate; return whether the run has ended. Write a checkpoint if it was stopped."""
        try:
            has_ended = self._simulate()
            if not has_ended:
                self._keep()
        except KeyboardInterrupt:
            return False  # asked twice: the last checkpoint must suffice
        except RunFolderError:
            raise
        except Exception as error:
            # A state of another model sends messages that this model's schema forbids.
            if self._is_untried and isinstance(error, (*LOADING_ERRORS, UndescribedError)):
                raise self._misfit(error) from error
            self._end("failed", error)
            raise
        return has_ended

    def _reason(self) -> str:
        finals = [each for each in self.simulator.states if isinstance(each, FinalState)]
        if any(each.is_cut for each in finals):
            return "time limit"
        if self.simulator.is_over or (finals and self.simulator.has_finished):
            last_round = self._experiment.algorithm.traits.num_rounds or math.inf
            has_finished = any(state.round >= last_round for state in self.simulator.states)
            return (
                "finished" if self.simulator.is_anyone_online or has_finished else ALL_CRASHED
            )
        if self._is_at_target():
            return "target"
        return EARLY_STOP if self._has_stopped_improving() else "time limit"

    def _is_at_target(self) -> bool:
        """Whether the averaged model has reached the experiment's target."""
        metrics = self._experiment.task.chosen_first
        return is_target_reached(self._experiment.until, self._history, metrics)

    def _has_stopped_improving(self) -> bool:
        """Whether the averaged model has been no better for as long as `KeepBest` permits."""
        return self._selection is not None and self._selection.is_over

    def _simulate(self) -> bool:
        """Simulate and evaluate; return True at the end of the run, False after a stop."""
        simulator, limit = self.simulator, self._experiment.max_seconds or math.inf
        if self._history and self._history[-1].time >= limit:  # resumed within the exchange
            return self._exchange()
        while True:
            until = min(self._num_looks * self._interval, limit)
            is_over = simulator.run(until)
            if simulator.should_stop and not is_over:
                return False  # not counted as a look: a resumed run looks at `until` again
            self._num_looks += 1
            if is_over or until == limit or self._is_due():
                self._evaluate(simulator.now if is_over else until)
            if is_over or self._is_at_target() or self._has_stopped_improving():
                return True
            if until == limit:
                return self._exchange()
            if time.monotonic() - self._last_checkpoint >= self._checkpoint_seconds:
                self._keep()

    def _exchange(self) -> bool:
        """Let the workers average their models after the time limit, and measure the mean.

        Returns:
            As `_simulate`.
        """
        simulator = self.simulator
        if not self._experiment.final_average:
            return True
        while not simulator.has_finished:
            # Not to the simulator's end: a training that was cut off, and no longer counts, may
            # take longer than the exchange.
            simulator.run(simulator.next_at)
            if simulator.should_stop:
                return False
        self._evaluate(simulator.now)
        return True

    def _is_due(self) -> bool:
        """Whether to evaluate now."""
        epochs = self._experiment.evaluation_epochs
        if epochs is None:
            return True
        due = epochs * len(self._history) * self._workload.num_train
        return self._log.samples_processed >= due

    # Measuring.

    def _evaluate(self, now: Seconds, *, is_final: bool = False) -> None:
        mean, distance = self._workload.average(self.simulator.estimates())
        before = self._last_params
        # An unchanged model is not measured again, which also skips a second look at the end.
        if self._history and before is not None and torch.equal(mean, before):
            last = self._history[-1]
            loss, metrics, validated = last.loss, last.metrics, last.validation_value
        else:
            loss, metrics = self._workload.evaluate(mean)
            self._finite.check(loss, metrics, is_fatal=not self._history and not is_final)
            validated = self._validate(mean, now)
        self._last_params = mean
        samples = self._log.samples_processed
        evaluation = Evaluation(
            time=now,
            epochs=samples / self._workload.num_train,
            metrics=metrics,
            loss=loss,
            consensus_distance=distance,
            bytes_sent=self._log.bytes_sent,
            samples_processed=samples,
            validation_value=validated,
            energy=self.simulator.energy(now),
            use=self.simulator.use(now),
        )
        self._history.append(evaluation)
        self._log.write("evaluated", **evaluation.line())
        self._progress.update(self._status(now))
        self._follower.tell(self._history, training_loss=self._log.take_training_loss())

    def _validate(self, mean: Tensor, now: Seconds) -> float | None:
        """Measure the averaged model on the validation split; it may be the best one."""
        if (selection := self._selection) is None:
            return None
        loss, metrics = self._workload.validate(mean)
        value = {**metrics, LOSS.name: loss}[selection.metric.name]
        ranks, states = self.simulator.estimates(), self.simulator.states
        round = min(states[rank].round for rank in ranks)
        selection.add(mean, value, time=now, round=round, index=len(self._history))
        return value

    def _best(self) -> BestModel | None:
        """The best model so far; None if there is none, or it is not asked for."""
        if (found := self._selection) is None or found.params is None:
            return None
        return BestModel(
            params=self._workload.named_parameters(found.params),
            time=found.time,
            round=found.round,
            metric=found.metric,
            validation_value=found.value,
            metrics=self._history[found.index].metrics,
        )

    def _worker_values(self) -> list[float]:
        """The chosen metric of all workers, or of at most 64 evenly spaced ones.

        A worker with a part of the model is measured with the average of the other parts.
        """
        estimates = self.simulator.estimates()
        mean, measured = self._params(), self._last_params
        stride = math.ceil(len(estimates) / 64)
        models = (
            self._workload.with_own(mean, rank, estimate)
            for rank, estimate in [*estimates.items()][::stride]
        )
        return [
            self._history[-1].value
            if measured is not None and torch.equal(model, measured)
            else self._workload.evaluate(model)[1][self._metric.name]
            for model in models
        ]

    @property
    def _wall_seconds(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    def _status(self, now: Seconds) -> Status:
        rounds = [state.round for state in self.simulator.states]
        seconds = time.monotonic() - self._started
        samples = self._log.samples_processed - self._samples_before
        return Status(
            name=self._experiment.run_name,
            time=now,
            share=self._experiment.completed_share(now, rounds),
            evaluation=self._history[-1],
            metric=self._metric,
            wall_seconds=self._wall_seconds,
            samples_per_second=samples / seconds if seconds > 0 else 0.0,
            commits=self._log.commits.total,
            roles=who_is_who(self._experiment.roles),
        )

    # Keeping.

    def _keep(self) -> None:
        """Write a checkpoint; everything before it is final."""
        try:
            simulator = self.simulator.state_dict()
        except TrainingError:
            # Training under way has failed, at a virtual time that the run may never reach; the
            # last checkpoint must suffice.
            return
        self._folder.save_checkpoint(
            {
                "simulator": simulator,
                # Synced before the checkpoint, which must not outlive the lines it counts on.
                "log_size": self._log.flush(),
                "log": self._log.state_dict(),
                "history": [each.line() for each in self._history],
                "num_looks": self._num_looks,
                "wall_seconds": self._wall_seconds,
                "best": self._selection,
                # Without it, the same model would be measured again, and count twice.
                "last_params": None if self._selection is None else self._last_params,
            }
        )
        self._last_checkpoint = time.monotonic()
        self._is_untried = False

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        try:
            self.simulator.load_state_dict(checkpoint["simulator"])
            self._log.load_state_dict(checkpoint["log"])
            metrics = self._experiment.task.chosen_first
            self._history = [
                Evaluation.from_line(each, metrics) for each in checkpoint["history"]
            ]
            self._num_looks = int(checkpoint["num_looks"])
            self._wall_before = float(checkpoint["wall_seconds"])
            if self._selection is not None:
                self._selection = checkpoint["best"]
                self._last_params = checkpoint["last_params"]
        except LOADING_ERRORS as error:
            self._log.abandon()
            raise self._misfit(error) from error

    def _misfit(self, error: Exception) -> RunFolderError:
        return RunFolderError(
            f"the checkpoint in {self._folder.path} does not fit this experiment "
            f"({error!r:.300}); was its code changed? - choose another --out"
        )

    def _end(self, reason: str, error: Exception | None = None) -> Results:
        """Write the last line of the log, the summary and the parameters."""
        now = self.simulator.now
        if reason == "time limit" and self._experiment.max_seconds is not None:
            now = max(now, self._experiment.max_seconds)
        if not self._history:
            self._evaluate(now, is_final=True)
        results = Results(
            name=self._experiment.run_name,
            reason=reason,
            history=self._history,
            metric=self._metric,
            worker_values=self._worker_values(),
            params=self._workload.named_parameters(self._params()),
            virtual_seconds=now,
            wall_seconds=self._wall_seconds,
            mean_staleness=self._log.mean_staleness,
            folder=self._folder.path,
            best=self._best(),
        )
        text = None if error is None else str(error)
        self._log.write(
            "ended",
            time=now,
            reason=reason,
            error=text,
            wall_seconds=results.wall_seconds,
            **cut_off(reason, self.simulator.in_training),
        )
        self._log.close()
        self._folder.write_results(results, text)
        return results

    def _params(self) -> Tensor:
        """The averaged model of the last evaluation; after a resume, the current one."""
        if self._last_params is not None:
            return self._last_params
        return self._workload.average(self.simulator.estimates())[0]

    def _interrupted(self) -> Interrupted:
        return interrupted(self._folder.path, f"at {self.simulator.now:g} virtual seconds")
