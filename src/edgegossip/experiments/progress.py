"""Status reports of a run to a live view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgegossip.core.metric_spec import ACCURACY, MetricSpec
from edgegossip.core.protocol import Seconds
from edgegossip.experiments.results import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a run.

    Attributes:
        name: Name of the run.
        time: Virtual seconds.
        share: Completed share of the run, in [0, 1].
        evaluation: Newest evaluation; None before the first.
        metric: The task's chosen metric.
        wall_seconds: Duration of the run so far, in wall seconds.
        samples_per_second: Samples processed per wall second since the last start or resume.
        commits: Commits of all workers to a server so far; None without a server.
        num_workers: Number of workers, if they are processes of their own.
        num_lost: Number of these that have failed or were killed, and did not come back.
        roles: The ranks of each role, in words; empty if all are workers.
    """

    name: str
    time: Seconds
    share: float
    evaluation: Evaluation | None
    wall_seconds: float
    samples_per_second: float
    metric: MetricSpec = ACCURACY
    commits: int | None = None
    num_workers: int | None = None
    num_lost: int = 0
    roles: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Estimated wall seconds until the end."""
        return self.wall_seconds * (1 / self.share - 1) if self.share > 0 else None


class Progress(Protocol):
    """A live view."""

    def update(self, status: Status) -> None:
        """Show `status`."""


class Silent:
    """Shows nothing."""

    def update(self, status: Status) -> None:
        pass
