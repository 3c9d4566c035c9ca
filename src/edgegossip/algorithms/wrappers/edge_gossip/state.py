"""State of a balanced worker, which wraps the inner algorithm's state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgegossip.algorithms.wrappers.edge_gossip.forecasts import Fastest, PlatformForecast
from edgegossip.algorithms.wrappers.edge_gossip.plan import (
    SHORTEST_BLOCK,
    EpochPlan,
    RoundPlan,
    differ,
)
from edgegossip.contract import (
    Epochs,
    Layout,
    Message,
    Rank,
    Seconds,
    Steps,
    Train,
    WrapperState,
)


@dataclass(slots=True, kw_only=True)
class BalancedState(WrapperState):
    """State of one worker.

    Attributes:
        epoch_cost: Cost of a pass over all of this worker's data, in training samples; 0 for an
            unused spare.
        layout: Layout of `params`, from `Started`.
        throughput: This worker's last forecast, in training samples per second.
        waiting: Training requested by the inner algorithm that has not begun.
        plan: Plan of the current epoch or round, if it is done in blocks.
        keep_ratio: This worker's share in this epoch.
        step_ratio: This worker's steps in a round, relative to those that the inner algorithm
            asks for.
        trained_at: Time of the last training; infinite before the first.
        step_cost: Cost of a step in that training, in training samples.
        rest_seconds: Seconds between two forecasts of a failed platform that no worker waits
            for; 0 for a platform that does not rest.
        pass_left: Remainder of the pass before the next forecast, in training samples, for
            algorithms that train by steps.
        measured_cost, measured_seconds: Training since the forecast was last compared with it.
        has_news: Whether a forecast has changed since `step_ratio` was computed.
        forecasts: Last forecast of each platform (``spread="exact"``).
        fastest: The fastest known platform (``spread="gossip"``).
        lost: Workers that cannot be reached, as keys.
        inherited: Workers whose data this worker has taken over, in rank order.
        is_predicting: Whether a forecast for the waiting training has been requested.
        is_assigning: Whether requested data has not arrived yet.
        is_spare: Whether the worker is an unused spare, whose inner algorithm has not started.
    """

    epoch_cost: float = 0.0
    layout: Layout | None = None
    throughput: float = 0.0
    waiting: Train | None = None
    plan: EpochPlan | RoundPlan | None = None
    keep_ratio: float = 1.0
    step_ratio: float = 1.0
    trained_at: Seconds = math.inf
    step_cost: float = 0.0
    rest_seconds: Seconds = 0.0
    pass_left: float = 0.0
    measured_cost: float = 0.0
    measured_seconds: Seconds = 0.0
    has_news: bool = False
    forecasts: dict[Rank, PlatformForecast] = field(default_factory=dict)
    fastest: Fastest = field(default_factory=Fastest)
    lost: dict[Rank, None] = field(default_factory=dict)
    inherited: tuple[Rank, ...] = ()
    is_predicting: bool = False
    is_assigning: bool = False
    is_spare: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether the waiting training must not begin yet."""
        return self.is_predicting or self.is_assigning or self.rest_seconds > 0

    @property
    def is_within_pass(self) -> bool:
        """Whether the waiting steps continue a pass with a known share."""
        is_steps = self.waiting is not None and isinstance(self.waiting.work, Steps)
        return is_steps and self.pass_left > 0

    def expect(self, throughput: float) -> None:
        """Note a forecast, with which training will be compared."""
        self.throughput, self.is_predicting = throughput, False
        self.measured_cost = self.measured_seconds = 0.0

    def measure(self, cost: float, seconds: Seconds) -> None:
        """Note training, with which the forecast will be compared."""
        self.measured_cost += cost
        self.measured_seconds += seconds

    @property
    def begins_round(self) -> bool:
        """Whether the waiting steps are the first ones of a round."""
        assert self.waiting is not None
        return isinstance(self.waiting.work, Steps) and not self.waiting.work.after

    def was_wrong(self) -> bool:
        """Compare the forecast with the training since the last comparison."""
        if self.measured_seconds < SHORTEST_BLOCK:
            return False
        measured = self.measured_cost / self.measured_seconds
        self.measured_cost = self.measured_seconds = 0.0
        return differ(measured, self.throughput)

    def is_stranded(self, regulars: Iterable[Rank]) -> bool:
        """Whether the worker is a spare that cannot reach any worker with an initial model."""
        return self.is_spare and self.lost.keys() >= {*regulars}

    def take_waiting(self) -> Train:
        """Remove and return the waiting training, which begins now."""
        train, self.waiting = self.waiting, None
        assert train is not None
        return train

    def take_plan(self) -> EpochPlan | RoundPlan:
        """Remove and return the plan of the current epoch or round, which ends now."""
        plan, self.plan = self.plan, None
        assert plan is not None
        return plan

    @property
    def own_forecast(self) -> PlatformForecast:
        """This worker's forecast, as sent to the others."""
        speed = (self.throughput, self.epoch_cost)
        return PlatformForecast(self.inner.round, *speed, inherited=self.inherited)

    @property
    def holdings(self) -> dict[Rank, tuple[Rank, ...]]:
        """Workers whose data each reachable platform has taken over, by its own report."""
        known = {j: f.inherited for j, f in self.forecasts.items() if j not in self.lost}
        return {**known, self.rank: self.inherited}

    def hear_forecast(self, sender: Rank, message: Message) -> None:
        """Keep a forecast of `sender`, unless a newer one is known."""
        known = self.forecasts.get(sender)
        # Messages may overtake each other. An equal round is newer: it follows an `Assign`.
        if known is None or known.round <= message.round:
            self.forecasts[sender] = PlatformForecast.from_message(message)

    def has_heard_all(self, expected: Iterable[Rank]) -> bool:
        """Whether training waits and all its required forecasts have arrived."""
        if self.waiting is None:
            return False
        # Algorithms that train by steps do not wait for each other's rounds, so the last known
        # forecast will do. An epoch needs one of this round from each platform.
        round = self.inner.round if isinstance(self.waiting.work, Epochs) else 0
        for j in expected:
            known = self.forecasts.get(j)
            if j not in self.lost and (known is None or known.round < round):
                return False
        return True

    def is_due_to_try(self, now: Seconds) -> bool:
        """Whether one step would take at most a tenth of the time since the last training."""
        if not self.epoch_cost:
            return False
        return self.throughput * (now - self.trained_at) >= 10 * self.step_cost > 0

    def rests_on(self, min_throughput: float, now: Seconds) -> bool:
        """Whether the platform still rests; recovery, or a step that is due, ends the rest."""
        # A step now and then shows whether the platform is fast again.
        if not self.has_failed(min_throughput) or self.is_due_to_try(now):
            self.rest_seconds = 0.0
        return self.rest_seconds > 0

    def has_failed(self, min_throughput: float) -> bool:
        """Whether the platform is too slow to train, or has no data."""
        return self.throughput < min_throughput or self.seconds == math.inf

    def patience(self, timeout: Seconds | None, min_throughput: float) -> Seconds:
        """Seconds to wait for forecasts; a failed platform does not wait."""
        if self.has_failed(min_throughput):
            return 0.0
        return timeout or 0.05 * (self.keep_ratio or 1.0) * self.seconds

    @property
    def seconds(self) -> Seconds:
        """Time for all of this worker's data; infinite without data or without a forecast."""
        if not (self.epoch_cost and self.throughput):
            return math.inf
        return self.epoch_cost / self.throughput
