"""Settings of a host, which do not depend on the algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from edgegossip.contract.observer import UNOBSERVED, Observer
from edgegossip.contract.protocol import Predicted, Rank, Seconds
from edgegossip.contract.ranges import check_counts, check_range, check_ranges
from edgegossip.net.host.introduction import Introduction
from edgegossip.net.runtime import RealRuntime, Runtime

MIB = 2**20


class Forecaster(Protocol):
    """Answers `Predict`, as `machine.monitor.Monitor` does."""

    def trained(self, start: Seconds, end: Seconds, cost: float) -> None:
        """Record training of `cost` samples, from `start` to `end` on the host's clock."""

    def forecast(self, now: Seconds) -> Predicted:
        """Forecast for the work that begins at `now` on the host's clock."""


Evaluator: TypeAlias = Callable[[Tensor], tuple[float, Mapping[str, float]]]
"""Returns the loss and the metrics of parameters, [num_params], on the validation split."""
OnLink: TypeAlias = Callable[[Seconds, Rank, str, bool], None]
"""Gets the time, the worker at the other end, the reason, and whether the link is up."""
Chore: TypeAlias = Callable[[Seconds], Seconds]
"""A chore that runs between two events: it gets the time and returns when it is next due.
"""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Settings of one worker's host.

    Args:
        run: 8 bytes that identify this run; messages of other runs are rejected.
        introduction: This worker's introduction; other workers' introductions must have equal
            settings.
        meet_seconds: Seconds to wait for missing workers before beginning without them, and for
            lost workers to return if fewer than `min_workers` are left.
        min_to_begin: Number of workers, including this one, that a run needs to begin. Workers
            in `ended` count.
        min_workers: Number of workers that a run needs to continue.
        ended: Workers that have already finished; the others do not wait for them.
        is_open: Whether the number of workers is a limit: the run begins soon after
            `min_to_begin` have met, and workers may come for the first time at any time.
        max_seconds: Time limit, counted from the beginning of the run.
        ending_seconds: Seconds beyond `max_seconds` for the last messages of an algorithm that
            knows the limit; training is then no longer awaited.
        checkpoint_seconds: Seconds between checkpoints.
        quiet_seconds: Seconds between two reports of counts at the end; the run ends after
            twice this time without a change.
        settle_seconds: Seconds for which counts may disagree before a worker leaves anyway.
        max_waiting_bytes: Limit, in bytes, on messages that wait for one receiver, and on
            arrived messages that the algorithm still needs. There is always room for three of
            the largest messages. See `ReceiveBudget` for None.
        max_log_bytes: Limit, in bytes, on messages kept per worker for resending; an eighth of
            it without checkpoints.
        runtime: Clock, inbox and threads.

    Raises:
        ValueError: If `run` is not 8 bytes, or a number is out of range.
    """

    run: bytes
    introduction: Introduction = Introduction()
    meet_seconds: Seconds = 60.0
    min_to_begin: int = 1
    min_workers: int = 1
    ended: tuple[Rank, ...] = ()
    is_open: bool = False
    max_seconds: Seconds = math.inf
    ending_seconds: Seconds = 0.0
    checkpoint_seconds: Seconds = 60.0
    quiet_seconds: Seconds = 0.05
    settle_seconds: Seconds = 2.0
    max_waiting_bytes: int | None = None
    max_log_bytes: int = 64 * MIB
    runtime: Runtime = RealRuntime()

    def __post_init__(self) -> None:
        if len(self.run) != 8:
            raise ValueError(f"run must be 8 bytes, got {len(self.run)}")
        for name in ("meet_seconds", "max_seconds", "checkpoint_seconds"):
            check_range(name, getattr(self, name), "above 0")
        check_counts(self, "max_waiting_bytes")
        check_ranges(
            self,
            min_to_begin="at least 1",
            min_workers="at least 1",
            max_waiting_bytes="at least 1 or None",
        )


@dataclass(frozen=True, kw_only=True)
class HostServices:
    """Services of a machine for its host, beyond training and messages.

    Args:
        forecaster: Answers `Predict` and learns how long training takes; None if unused.
        evaluate: Answers `Evaluate`; None if it is never requested.
        observer: Observes this worker.
        on_link: Called when a link is lost or comes back while the run lasts.
        chores: Periodic chores between two events.
        save: Stores a checkpoint and returns whether it succeeded; None for no checkpoints.
    """

    forecaster: Forecaster | None = None
    evaluate: Evaluator | None = None
    observer: Observer = UNOBSERVED
    on_link: OnLink | None = None
    chores: tuple[Chore, ...] = ()
    save: Callable[[dict[str, Any]], bool] | None = None
