"""Work on a host's own machine: training, evaluating and forecasting."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError, TrainingError, no_validation_data
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Evaluate,
    Evaluated,
    Event,
    Predict,
    Predicted,
    Rank,
    Seconds,
    Started,
    Train,
    Trained,
)
from edgegossip.contract.trainer import Trainer
from edgegossip.net.host.settings import Evaluator, Forecaster
from edgegossip.net.runtime import Background, Life, Runtime, Sink

_LOG = logging.getLogger("edgegossip.net")
_MEMORY = 10
_CREDIT = 6
_SLACK = 0.1
"""Difference of losses that is always allowed, as a share of the first loss."""
_CANCELLATION: Seconds = 10.0
_QUESTIONS = {Evaluated: Evaluate, Predicted: Predict, Assigned: Assign}


@dataclass(slots=True, eq=False)
class Completed:
    """Background work that has ended: it yields an event, or has failed."""

    event: Callable[[Seconds], Event] | None = None
    error: BaseException | None = None


class LastSoundParameters:
    """Parameters to which a worker goes back after bad messages have broken its training.

    Training fails if a loss or parameters are not finite. If a sender can be blamed, the worker
    continues from the last parameters for which the mean of the last ten losses was at most
    twice the lowest such mean. The newest parameters are not safe, because bad values act for a
    while before they are fatal. If training fails right from the last sound parameters, as in
    the second part of a round, it continues from those before another worker's influence.

    One sender is blamed and muted. For the next five failures no sender is blamed, because the
    same values may have spread through other workers. A worker that fails because of its own
    learning rate or data therefore still fails, only later.

    Args:
        params: Initial parameters, [num_params].
    """

    def __init__(self, params: Tensor) -> None:
        self.params = params
        # What `params` was before another worker last influenced it; None if none ever did.
        self._earlier: Tensor | None = None
        self._losses: deque[float] = deque(maxlen=_MEMORY)
        self._lowest = math.inf
        self._slack = 0.0
        self._credit = 0

    def whole(self, estimate: Tensor) -> Tensor:
        """Return `estimate`, or the last sound parameters if it is a slice, [num_params]."""
        return estimate if estimate.shape == self.params.shape else self.params

    def check(self, event: Trained) -> bool:
        """Record the result of training; return whether it is sound.

        Raises:
            TrainingError: If the parameters are not finite.
        """
        if not math.isfinite(event.params.sum().item()) and not event.params.isfinite().all():
            raise TrainingError(
                "the parameters became infinite or NaN; try a smaller learning rate"
            )
        self._losses.append(event.loss)
        mean = sum(self._losses) / len(self._losses)
        if self._lowest == math.inf:
            self._slack = _SLACK * abs(mean)
        self._lowest = min(self._lowest, mean)
        # Twice the lowest mean, or near zero the slack, as losses there double all the time.
        is_sound = mean - self._lowest <= max(abs(self._lowest), self._slack)
        if is_sound:
            if not torch.equal(event.before, self.params):
                self._earlier = self.params
            self.params = event.params
        return is_sound

    @property
    def needs_suspect(self) -> bool:
        """Whether the next failure must be blamed on a sender."""
        return self._credit == 0

    def go_back(
        self, request: Train, seconds: Seconds, error: TrainingError, suspect: Rank | None
    ) -> Trained:
        """Answer a failed `Train` with the last sound parameters.

        Args:
            request: The failed request.
            seconds: Duration of the training.
            error: Why it failed.
            suspect: The sender to blame; None if there is none.

        Raises:
            TrainingError: If no sender can be blamed; this is the given `error`.
        """
        # A stage's training inputs come from others, even where its parameters do not.
        is_continued = torch.equal(request.params, self.params)
        if not request.inputs and is_continued and self._earlier is None:
            raise error  # no other worker has influenced these parameters
        if self.needs_suspect and suspect is None:
            raise error
        if is_continued and self._earlier is not None:
            # They seemed sound in an earlier part of the same round.
            self.params, self._earlier = self._earlier, None
        # The same values may have spread through other workers, so this one blame is enough for
        # the next failures, too. It is limited, so that an unfit learning rate still fails.
        self._credit = (self._credit or _CREDIT) - 1
        _LOG.warning("%s: going back to the last sound parameters", error)
        self._losses.clear()
        return Trained(
            params=self.params,
            before=self.params,
            num_samples=0,
            num_steps=0,
            seconds=seconds,
            loss=self._lowest if math.isfinite(self._lowest) else 0.0,
            has_gone_back=True,
        )


class Work:
    """Carries out one worker's effects on its own machine, in the background.

    Args:
        rank: Rank of the worker.
        trainer: Trains on its own thread. Other threads may call `cancel` at any time, read its
            properties and `state_dict` while it sets up, and call `load_state_dict` and
            `start_over` while it is idle.
        items: Queue of `Completed` items for `take`.
        forecaster: Answers `Predict` and learns how long training takes; None if unused.
        evaluate: Answers `Evaluate` with loss and metrics; None if it is never requested.
        runtime: Provides the threads and the forecaster's clock.
    """

    def __init__(
        self,
        rank: Rank,
        trainer: Trainer,
        items: Sink,
        forecaster: Forecaster | None,
        evaluate: Evaluator | None,
        runtime: Runtime,
    ) -> None:
        self.is_busy = False  # training, or taking over another worker's data
        self._rank = rank
        self._trainer = trainer
        self._items = items
        self._forecaster = forecaster
        self._evaluate = evaluate
        self._runtime = runtime
        self._clock = runtime.clock
        # The training that runs, or will run after setting up, and the time of its request.
        self.training: tuple[Train, Seconds] | None = None
        self.forecast: Predicted | None = None  # the last one, for metrics
        self._asked: list[Evaluate | Predict | Assign] = []  # requests without an answer
        self._lock = threading.Lock()  # guards the two below
        self._is_set_up = self._is_put_off = False
        # One thread for all work with the trainer, so that its steps never overlap.
        self._training_thread = runtime.background(f"train {rank}")
        self._evaluation_thread: Background | None = None

    def started(self, has_rejoined: bool, has_data: bool, life: Life) -> Started:
        """Return the worker's first event; begin to set up its data, if any."""
        if not has_data:
            return Started(has_rejoined, life=life)
        # Meanwhile the algorithm may already exchange messages.
        self._run(self._training_thread, self._set_up)
        trainer = self._trainer
        data = (trainer.num_samples, trainer.epoch_cost, trainer.layout)
        return Started(has_rejoined, *data, life, trainer.num_units)

    def train(self, effect: Train, now: Seconds, progress: float) -> None:
        """Begin to train; `Trained` follows. `progress` is passed to `Trainer.train`."""
        if self.is_busy:
            raise LocalProtocolError(f"worker {self._rank} asked for a second Train at once")
        self.is_busy, self.training = True, (effect, now)
        trainer, is_set_up = self._trainer, self._is_set_up

        def job() -> Callable[[Seconds], Event]:
            self._set_up()
            if not is_set_up:
                trainer.announce(effect, progress)
            # From here on, because a forecast must not take the setup for slow training.
            began = self._clock()
            cost = trainer.cost(effect)
            result = trainer.train(effect, progress)
            span = (began, self._clock())

            def trained(end: Seconds) -> Event:
                self.is_busy = False
                event = result.event(effect.params, end - now, cost)
                if self._forecaster is not None:
                    self._forecaster.trained(*span, event.cost)
                return event

            return trained

        if is_set_up:  # else `put_off` may still postpone this training
            trainer.announce(effect, progress)
        self._run(self._training_thread, job)

    def _set_up(self) -> None:
        self._trainer.set_up()
        with self._lock:
            if self._is_put_off:
                raise TrainingError(f"worker {self._rank} was told to stop")
            self._is_set_up = True

    def put_off(self) -> bool:
        """Until the checkpoint is resumed, postpone the work that waits for the setup.

        Returns False if the setup has ended; the caller should then wait for the work.
        """
        # The lock decides: either the setup ends first and training runs to its end, or the
        # stop is first and training never begins.
        with self._lock:
            self._is_put_off = not self._is_set_up
            return self._is_put_off

    def ask(self, effect: Evaluate | Predict | Assign) -> None:
        """Begin to answer a request; `Evaluated`, `Predicted` or `Assigned` follows."""
        self._asked.append(effect)
        match effect:
            case Evaluate(params):
                self._begin_to_evaluate(params)
            case Predict():
                if self._forecaster is None:
                    raise LocalProtocolError(
                        f"worker {self._rank} asked to Predict, but this run has no monitor; "
                        "give a TrainingLoop forecaster=edgegossip.Monitor(...)"
                    )
                predicted = self.forecast = self._forecaster.forecast(self._clock())
                # Through the inbox, although it is ready: an answer never comes during
                # `handle`.
                self._items.put(Completed(lambda now: predicted))
            case Assign(ranks):
                self._begin_to_assign(ranks)

    def _begin_to_evaluate(self, params: Tensor) -> None:
        evaluate = self._evaluate
        if evaluate is None:
            raise no_validation_data(self._rank)
        # In its own thread: training goes on meanwhile. Most workers never need it.
        name = f"evaluate {self._rank}"
        self._evaluation_thread = self._evaluation_thread or self._runtime.background(name)

        def job() -> Callable[[Seconds], Event]:
            loss, metrics = evaluate(params)
            return lambda now: Evaluated(loss, metrics)

        self._run(self._evaluation_thread, job)

    def _begin_to_assign(self, ranks: tuple[Rank, ...]) -> None:
        if self.is_busy:
            raise LocalProtocolError(
                f"worker {self._rank} asked for other data while it trains"
            )
        self.is_busy = True
        trainer = self._trainer

        def job() -> Callable[[Seconds], Event]:
            trainer.assign(ranks)
            self._is_set_up = False
            event = Assigned(trainer.num_samples, trainer.epoch_cost)

            def assigned(now: Seconds) -> Event:
                self.is_busy = False
                return event

            return assigned

        self._run(self._training_thread, job)
        # The answer comes before the new data is ready, as at the start.
        self._run(self._training_thread, self._set_up)

    @property
    def has_questions(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._asked)

    def ask_again(self, now: Seconds, progress: float) -> None:
        """Repeat requests unanswered at the checkpoint; start postponed training."""
        asked, self._asked = self._asked, []
        for effect in asked:
            self.ask(effect)
        if self.training is not None:
            self.train(self.training[0], now, progress)

    def forget_questions(self) -> None:
        """Drop all open requests."""
        self._asked, self.training = [], None

    def take(self, done: Completed, now: Seconds) -> Event:
        """Return the event that `done` yields.

        Raises:
            BaseException: If the work has failed.
        """
        if done.error is not None:
            raise done.error
        assert done.event is not None
        # Here, and not in the thread, because it changes what only the host's thread may.
        event = done.event(now)
        if isinstance(event, Trained):
            self.training = None
        # Requests of one kind are answered in order, so the answer belongs to the oldest.
        if question := _QUESTIONS.get(type(event)):
            self._asked.remove(next(a for a in self._asked if isinstance(a, question)))
        return event

    def start_over(self) -> None:
        """Give up the training that has failed."""
        self._trainer.start_over()
        self.is_busy, self.training = False, None

    def _run(
        self, thread: Background, job: Callable[[], Callable[[Seconds], Event] | None]
    ) -> None:
        """Put what `job` yields, or its error, into the inbox."""

        def work() -> Completed | None:
            if self._is_put_off:
                return None
            try:
                event = job()
            except BaseException as error:  # the host must hear of any error
                return Completed(error=error)
            return Completed(event) if event else None

        def report(done: Completed | None) -> None:
            if done is not None:
                self._items.add(done)
                self._items.help()

        thread.submit(work, report)

    def close(self) -> None:
        """Stop working; a process must not end in the middle of a step."""
        # First the cancellation: the thread then ends after its current step.
        self._trainer.cancel()
        for background in filter(None, (self._training_thread, self._evaluation_thread)):
            background.close(_CANCELLATION)

    def state_dict(self) -> Mapping[str, Any]:
        """State of the trainer and the open requests, while nothing trains."""
        trainer = self._trainer.state_dict()
        put_off = None if self.training is None else self.training[0]
        return {"trainer": trainer, "asked": [*self._asked], "train": put_off}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; see `ask_again`."""
        self._trainer.load_state_dict(state["trainer"])
        self._asked, put_off = list(state["asked"]), state["train"]
        self.training = None if put_off is None else (put_off, 0.0)
