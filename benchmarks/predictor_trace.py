"""A monitor's inputs, recorded, from which another predictor's forecasts can be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgegossip.contract.protocol import Predicted, Seconds
from edgegossip.machine.counters import Counters, Reading, Usage
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor

Event = tuple[str, Seconds, Any]
"""("read", when, reading), ("trained", start, (end, cost)) or ("forecast", when, None)."""


@dataclass
class Trace:
    """All that reaches a monitor, in order; also the counters of the monitor that is recorded.

    Args:
        counters: The counters that are read.
        clock: Monotonic clock in seconds.

    Attributes:
        events: What was read and recorded.
    """

    counters: Counters
    clock: Callable[[], Seconds] = time.monotonic
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_cores, self.quota = self.counters.num_cores, self.counters.quota

    def read(self) -> Reading:
        reading = self.counters.read()
        self.events.append(("read", self.clock(), reading))
        return reading

    def forecast(self, monitor: Monitor) -> Predicted:
        """Ask the monitor that reads these counters for a forecast."""
        now = self.clock()
        self.events.append(("forecast", now, None))
        return monitor.forecast(now)

    def trained(self, monitor: Monitor, start: Seconds, end: Seconds, cost: float) -> None:
        """Report training to the monitor that reads these counters."""
        self.events.append(("trained", start, (end, cost)))
        monitor.trained(start, end, cost)

    def as_json(self) -> dict[str, Any]:
        events = [
            (kind, when, asdict(what) if isinstance(what, Reading) else what)
            for kind, when, what in self.events
        ]
        return {"num_cores": self.num_cores, "quota": self.quota, "events": events}


def events_from(kept: dict[str, Any]) -> list[Event]:
    """The events of `Trace.as_json`."""
    return [
        (kind, when, _reading(what) if kind == "read" else what)
        for kind, when, what in kept["events"]
    ]


def _reading(kept: dict[str, Any]) -> Reading:
    return Reading(Usage(**kept["machine"]), Usage(**kept["own"]), kept["group"])


@dataclass
class _Replayed:
    """Counters that give what was read, and a clock that shows when."""

    readings: Sequence[tuple[Seconds, Reading]]
    num_cores: int
    quota: float
    num_read: int = 0

    def read(self) -> Reading:
        self.num_read += 1
        return self.readings[self.num_read - 1][1]

    def clock(self) -> Seconds:
        return self.readings[self.num_read - 1][0]


def replay(
    events: Sequence[Event],
    predictor: PerformancePredictor,
    num_cores: int,
    quota: float,
) -> list[Predicted]:
    """The forecasts of `predictor`, had it been in the place of the one that was recorded."""
    readings = [(when, what) for kind, when, what in events if kind == "read"]
    # A monitor that is asked for more than was read gets the last reading again.
    counters = _Replayed([*readings, *readings[-1:] * 2], num_cores, quota)
    monitor = Monitor(predictor, counters=counters, clock=counters.clock)
    forecasts, num_passed = [], 0
    for kind, when, what in events:
        if kind == "read":
            num_passed += 1
            # Forecasts and long training read by themselves, here as they did then.
            while counters.num_read < num_passed:
                monitor.read()
        elif kind == "trained":
            monitor.trained(when, *what)
        else:
            forecasts.append(monitor.forecast(when))
    return forecasts
