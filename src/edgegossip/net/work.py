"""What a host's own machine does for it: training, evaluating, forecasting."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from edgegossip.core.errors import LocalProtocolError
from edgegossip.core.protocol import (
    Assign,
    Assigned,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Predicted,
    Rank,
    Seconds,
    Started,
    Train,
    Trained,
    Trainer,
    TrainingResult,
)
from edgegossip.net.background import Background
from edgegossip.net.settings import Forecaster

_LEAVE_OFF: Seconds = 10.0
Judge = Callable[[Tensor], tuple[float, float]]


@dataclass(slots=True, eq=False)
class Done:
    """Something done beside the host has ended: makes the event, or has failed."""

    event: Callable[[Seconds], Event] | None = None
    error: BaseException | None = None


class Work:
    """Carries out one worker's effects on its own machine, beside the host.

    Args:
        rank: Whose work it is.
        trainer: Trains; None of its methods is called from two threads at once.
        items: Where a `Done` is put, for the host to pass to `take`.
        forecaster: Answers `Predict`, and is told what training took; None if nobody asks.
        evaluate: Answers `Evaluate` with (loss, accuracy); None if nobody asks.
        clock: What the forecaster goes by.
    """

    def __init__(
        self,
        rank: Rank,
        trainer: Trainer,
        items: queue.SimpleQueue[Any],
        forecaster: Forecaster | None,
        evaluate: Judge | None,
        clock: Callable[[], Seconds],
    ) -> None:
        self.is_training = False
        self._rank = rank
        self._trainer = trainer
        self._items = items
        self._forecaster = forecaster
        self._evaluate = evaluate
        self._clock = clock
        self._bench = Background(f"train {rank}")
        self._judge: Background | None = None

    def started(self, has_rejoined: bool, has_data: bool) -> Started:
        """What the worker is told first."""
        if not has_data:
            return Started(has_rejoined)
        cost = self._trainer.cost(Epochs(), {})
        return Started(has_rejoined, self._trainer.num_samples, cost)

    def train(self, effect: Train, now: Seconds) -> None:
        """Begin to train; ends with `Trained`."""
        if self.is_training:
            raise LocalProtocolError(f"worker {self._rank} asked for a second Train at once")
        self.is_training = True
        cost = self._trainer.cost(effect.work, effect.inputs)

        def job() -> Callable[[Seconds], Event]:
            result = self._trainer.train(effect.params, effect.work, effect.inputs)
            return partial(self._trained, result, effect.params, now, cost)

        self._beside(self._bench, job)

    def _trained(
        self, result: TrainingResult, before: Tensor, start: Seconds, cost: float, now: Seconds
    ) -> Trained:
        self.is_training = False
        if self._forecaster is not None:
            end = self._clock()
            self._forecaster.trained(end - (now - start), end, cost)
        return result.event(before, now - start, cost)

    def evaluate(self, effect: Evaluate) -> None:
        """Begin to evaluate; ends with `Evaluated`."""
        evaluate = self._evaluate
        if evaluate is None:
            raise LocalProtocolError(
                f"worker {self._rank} asked to Evaluate; this run has no test data"
            )
        self._judge = self._judge or Background(f"evaluate {self._rank}")

        def job() -> Callable[[Seconds], Event]:
            loss, accuracy = evaluate(effect.params)
            return lambda now: Evaluated(loss, accuracy)

        self._beside(self._judge, job)

    def predict(self) -> Predicted:
        """Forecast the throughput of the work that begins now."""
        if self._forecaster is None:
            raise LocalProtocolError(f"worker {self._rank} asked to Predict without a monitor")
        return self._forecaster.forecast(self._clock())

    def assign(self, effect: Assign) -> None:
        """Begin to take over data; ends with `Assigned`."""
        if self.is_training:
            raise LocalProtocolError(
                f"worker {self._rank} asked for other data while it trains"
            )
        trainer = self._trainer

        def job() -> Callable[[Seconds], Event]:
            trainer.assign(effect.ranks)
            cost = trainer.cost(Epochs(), {})
            return lambda now: Assigned(trainer.num_samples, cost)

        self._beside(self._bench, job)

    def take(self, done: Done, now: Seconds) -> Event:
        """The event that `done` is about.

        Raises:
            BaseException: Whatever the work has raised.
        """
        if done.error is not None:
            raise done.error
        assert done.event is not None
        return done.event(now)

    def _beside(self, bench: Background, job: Callable[[], Callable[[Seconds], Event]]) -> None:
        def work() -> None:
            try:
                self._items.put(Done(job()))
            except BaseException as error:  # whatever it is, the host must hear of it
                self._items.put(Done(error=error))

        bench.submit(work)

    def close(self) -> None:
        """Leave off: a process must not end in the middle of a step."""
        self._trainer.cancel()
        for background in filter(None, (self._bench, self._judge)):
            background.close(_LEAVE_OFF)

    def state_dict(self) -> Mapping[str, Any]:
        """The trainer's; nothing may be training."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict`."""
        self._trainer.load_state_dict(state)
