"""How much of a round's training runs beside its exchange: no more than the exchange needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgegossip.algorithms.gossip.owned_chunks import OwnedChunks
from edgegossip.contract import (
    Effect,
    Event,
    Message,
    Rank,
    RoundState,
    Seconds,
    SetTimer,
    Steps,
    TimerFired,
    Train,
    Work,
)


@dataclass(slots=True, kw_only=True)
class Overlap:
    r"""Divides each round's steps into those before its exchange and those beside it.

    Others' progress is late by the steps beside, and a worker waits if these end before the
    exchange does. So they are as few as take as long as an exchange did, but at least one, and
    all of them if that takes longer than the round. Each worker decides this for itself.

    An exchange of two parts takes :math:`2 d` seconds, where :math:`d` is the duration of the
    second part. The first takes as long, but also waits for the last worker to begin. If
    workers trained on meanwhile, they would begin ever later themselves, and never meet again.
    After a shorter exchange, the expected duration falls by half of the difference.

    Attributes:
        steps: Steps of this round that run beside its exchange.
        seconds: Expected duration of an exchange.
        num_steps, train_seconds: What this worker has trained since the round began.
        began, heard: When the second part of the last exchange began, and when the last message
            of it arrived.
        round_seconds: How long the last round's training took.
        is_ahead: Whether the steps before the next exchange are done or under way.

    >>> overlap = Overlap(heard=1.5, num_steps=10, train_seconds=20.0)
    >>> overlap.divide(10)  # an exchange takes 3 seconds, and two of ten steps take 4
    2
    """

    steps: int = 0
    seconds: Seconds = 0.0
    num_steps: int = 0
    train_seconds: Seconds = 0.0
    began: Seconds = 0.0
    heard: Seconds = 0.0
    round_seconds: Seconds = 0.0
    is_ahead: bool = False

    def note(self, num_steps: int, seconds: Seconds) -> None:
        """Note training of this round, unless none of its steps count: those of a training
        that failed are undone, and tell nothing.
        """
        if num_steps:
            self.num_steps += num_steps
            self.train_seconds += seconds

    def divide(self, local_steps: int) -> int:
        """Choose how many of the next round's `local_steps` run beside its exchange."""
        took = 2 * (self.heard - self.began)
        self.seconds = max(took, (took + self.seconds) / 2)
        num_steps, train_seconds = self.num_steps, self.train_seconds
        self.num_steps, self.train_seconds = 0, 0.0
        if not train_seconds:
            return local_steps  # not known yet: nobody waits
        self.round_seconds = train_seconds
        # A wrapper may have made fewer steps of `local_steps`, and cannot do less than one.
        needed = max(1, math.ceil(num_steps * self.seconds / train_seconds))
        return min(local_steps, math.ceil(local_steps * needed / num_steps))


@dataclass(slots=True, kw_only=True)
class OverlapState(RoundState):
    """State of one worker.

    Attributes:
        overlap: The division of a round's steps.
    """

    overlap: Overlap = field(default_factory=Overlap)


S = TypeVar("S", bound=OverlapState)


@dataclass(frozen=True, kw_only=True)
class Overlapping(OwnedChunks[S], Generic[S]):
    """Base of algorithms with owned chunks whose workers may train while they exchange.

    A worker that has waited for as long as a round's training takes, as for one that is lost,
    takes the steps before its next exchange meanwhile. One with nobody to exchange with trains
    before its exchanges, as without overlap. `learn` must note what was trained in
    `OverlapState.overlap`.

    Args:
        overlap: Whether the last of a round's steps run beside its exchange, as few as take as
            long.
    """

    overlap: bool = False

    @property
    def total_rounds(self) -> int:
        # What was learned beside the last round's exchange is sent in one more. A single worker
        # learns nothing beside, and would only take another step of its momentum.
        return self.num_rounds + (self.overlap and self.num_workers > 1)

    def handle(self, state: S, event: Event, now: Seconds) -> list[Effect]:
        if event == TimerFired("ahead"):
            return self._train_ahead(state)
        return super().handle(state, event, now)

    def work(self, state: S) -> Work | None:
        if not self._is_training_due(state):
            return None
        if state.overlap.is_ahead:
            state.overlap.is_ahead = False
            return None
        return self._work_before(state)

    def _work_before(self, state: S) -> Work | None:
        if self.overlap:
            beside = self.steps_beside(state)
            # Without others an exchange takes no time, so steps beside it would only come late.
            state.overlap.steps = beside if len(state.lost) < self.num_workers - 1 else 0
        before = self.local_steps - state.overlap.steps
        return Steps(before) if before else None

    def work_beside(self, state: S) -> Work | None:
        steps = state.overlap.steps if self._is_training_due(state) else 0
        return Steps(steps, after=self.local_steps - steps) if steps else None

    def wait(self, state: S, now: Seconds) -> list[Effect]:
        if state.overlap.steps == self.local_steps:
            return []  # it takes all of the next round's steps beside the exchange, too
        return [SetTimer("ahead", now + state.overlap.round_seconds)]

    def _train_ahead(self, state: S) -> list[Effect]:
        is_waiting = state.is_exchanging and not state.is_training
        if not is_waiting or state.overlap.is_ahead or state.round + 1 >= self.num_rounds:
            return []
        if (work := self._work_before(state)) is None:
            return []
        state.overlap.is_ahead = state.is_training = True
        return [Train(self.start(state), work)]

    def steps_beside(self, state: S) -> int:
        """How many steps of the next round run beside its exchange, with `overlap`."""
        return state.overlap.divide(self.local_steps)

    def _is_training_due(self, state: S) -> bool:
        return self.is_first(state) and state.round < self.num_rounds

    def send(self, state: S, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        if not self.is_first(state):
            state.overlap.began = state.overlap.heard = now
        return super().send(state, receivers, now)

    def receive(self, state: S, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        if not self.is_first(state) and self.exchange_of(message) == state.exchange:
            state.overlap.heard = now
        return super().receive(state, sender, message, now)
