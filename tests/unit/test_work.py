"""Work that a host's own machine does, beside the host."""

from __future__ import annotations

import threading

import torch
from tests.worlds import NUM_PARAMS, ManySamples

from edgegossip.contract.protocol import Epochs, Predicted, Seconds, Started, Train, Trained
from edgegossip.contract.trainer import TrainingResult
from edgegossip.net.host.work import Work
from edgegossip.net.runtime import FairQueue, RealRuntime

SIZE = 10
SETTING_UP, TRAINING = 100.0, 1.0


class StoppedClock(RealRuntime):
    """Stands still unless told otherwise."""

    now = 0.0

    def clock(self) -> Seconds:
        return self.now


class SlowToSetUp(ManySamples):
    """Takes its time before it trains for the first time, and waits for leave to begin."""

    def __init__(self, clock: StoppedClock) -> None:
        super().__init__(0, 0.1, SIZE)
        self.may_begin = threading.Event()
        self._clock = clock
        self._is_set_up = False
        self.num_announced = 0

    def announce(self, request: Train, progress: float) -> None:
        self.num_announced += 1

    def set_up(self) -> None:
        assert self.may_begin.wait(10)
        if not self._is_set_up:
            self._clock.now += SETTING_UP
        self._is_set_up = True

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self._clock.now += TRAINING
        return super().train(request, progress)


class Noting:
    """A forecaster that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Seconds, Seconds, float]] = []

    def trained(self, start: Seconds, end: Seconds, cost: float) -> None:
        self.told.append((start, end, cost))

    def forecast(self, now: Seconds) -> Predicted:
        raise AssertionError("nobody asks")


def test_a_host_is_not_kept_by_its_own_setting_up_and_a_forecast_does_not_count_it() -> None:
    clock, forecaster = StoppedClock(), Noting()
    trainer = SlowToSetUp(clock)
    items = FairQueue()
    work = Work(0, trainer, items, forecaster, None, clock)
    started = work.started(has_rejoined=False, has_data=True, life=7)
    assert started == Started(False, SIZE, SIZE, life=7)
    for _ in range(2):
        work.train(Train(torch.zeros(NUM_PARAMS), Epochs()), clock.now, 0.0)
        trainer.may_begin.set()  # the host has gone on
        trained = work.take(items.get(timeout=10), clock.now)
        assert isinstance(trained, Trained)
    work.close()
    first, second = SETTING_UP + TRAINING, SETTING_UP + 2 * TRAINING
    assert forecaster.told == [(SETTING_UP, first, SIZE), (first, second, SIZE)]


REQUEST = Train(torch.zeros(NUM_PARAMS), Epochs())


def test_each_training_is_announced_once() -> None:
    clock, items = StoppedClock(), FairQueue()
    trainer = SlowToSetUp(clock)
    trainer.may_begin.set()
    work = Work(0, trainer, items, None, None, clock)
    for number in (1, 2, 3):
        work.train(REQUEST, clock.now, 0.0)
        work.take(items.get(timeout=10), clock.now)
        assert trainer.num_announced == number
    work.close()


def test_a_training_that_a_stop_puts_off_was_not_announced() -> None:
    clock, items = StoppedClock(), FairQueue()
    trainer = SlowToSetUp(clock)
    work = Work(0, trainer, items, None, None, clock)
    work.train(REQUEST, clock.now, 0.0)
    assert work.put_off()
    trainer.may_begin.set()
    work.close()
    assert trainer.num_announced == 0
    assert work.training is not None  # for the checkpoint
