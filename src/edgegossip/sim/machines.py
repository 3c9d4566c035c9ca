"""The trainer and the monitor on each worker's platform; a crash of the worker ends both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from edgegossip.core.protocol import Rank, Seconds, Span
from edgegossip.core.trainer import Trainer
from edgegossip.sim.forecasting import MakePredictor, SimulatedMonitor, default_predictor
from edgegossip.sim.platform import Platform
from edgegossip.sim.pool import MakeTrainer


class Machines:
    """The trainer and the monitor of each worker, and the time until its platform is free.

    Args:
        platforms: One for each worker.
        make_trainer: Makes a worker's trainer at its first training.
        make_predictor: Makes a worker's predictor at its first forecast.
    """

    def __init__(
        self,
        platforms: Sequence[Platform],
        make_trainer: MakeTrainer,
        make_predictor: MakePredictor | None = None,
    ) -> None:
        self._platforms = platforms
        self._make_trainer = make_trainer
        self._make_predictor = make_predictor
        self._incarnations = [0] * len(platforms)
        # By data preparation, training or evaluation.
        self._busy_until: list[Seconds] = [0.0] * len(platforms)
        self._trainers: dict[Rank, Trainer] = {}
        self._monitors = [self._new_monitor(rank) for rank in range(len(platforms))]

    def _new_monitor(self, rank: Rank, start: Seconds = 0.0) -> SimulatedMonitor:
        platform = self._platforms[rank]
        make = self._make_predictor
        make_own = partial(default_predictor, platform) if make is None else partial(make, rank)
        return SimulatedMonitor(platform, make_own, start)

    def trainer(self, rank: Rank) -> Trainer:
        trainer = self._trainers.get(rank)
        if trainer is None:
            trainer = self._make_trainer(rank, self._incarnations[rank])
            self._trainers[rank] = trainer
        return trainer

    def monitor(self, rank: Rank) -> SimulatedMonitor:
        return self._monitors[rank]

    def occupy(self, rank: Rank, now: Seconds, cost: float) -> Span:
        """Schedule work of `cost` samples once the platform is free; return start and end."""
        busy_until = self._busy_until[rank]
        start = now if now > busy_until else busy_until
        end = start + self._platforms[rank].duration(start, cost)
        self._busy_until[rank] = end
        return start, end

    def stop(self, rank: Rank) -> None:
        """Drop the trainer and the monitor after a crash."""
        self._trainers.pop(rank, None)
        self._busy_until[rank] = 0.0
        self._incarnations[rank] += 1
        self._monitors[rank] = self._new_monitor(rank)

    def restart(self, rank: Rank, now: Seconds) -> None:
        """Watch a recovered platform from `now` on."""
        self._monitors[rank] = self._new_monitor(rank, now)

    def state_dict(self) -> dict[str, Any]:
        """All mutable state of these machines."""
        return {
            "incarnations": list(self._incarnations),
            "busy_until": list(self._busy_until),
            "trainers": {rank: each.state_dict() for rank, each in self._trainers.items()},
            "monitors": [monitor.state_dict() for monitor in self._monitors],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of equal machines."""
        self._incarnations = list(state["incarnations"])
        self._busy_until = list(state["busy_until"])
        self._trainers = {}
        for rank, trainer_state in state["trainers"].items():
            self.trainer(rank).load_state_dict(trainer_state)
        for monitor, monitor_state in zip(self._monitors, state["monitors"], strict=True):
            monitor.load_state_dict(monitor_state)
