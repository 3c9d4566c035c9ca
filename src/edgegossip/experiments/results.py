"""Results of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from edgegossip.core.protocol import Seconds

ENDS = ("finished", "time limit", "target")
"""Reasons for a run's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The averaged model at one moment of a run.

    Attributes:
        time: Virtual seconds.
        epochs: Samples processed by all workers over training samples.
        accuracy: Accuracy on the test split, in [0, 1].
        loss: Mean loss on the test split.
        consensus_distance: Root mean square distance of the workers from their mean.
        bytes_sent: Bytes sent by all workers so far.
        samples_processed: Samples processed by all workers so far.
    """

    time: Seconds
    epochs: float
    accuracy: float
    loss: float
    consensus_distance: float
    bytes_sent: int
    samples_processed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """Results of a run.

    Attributes:
        name: Name of the run.
        reason: Reason for the end: one of `ENDS`, "interrupted" or "failed".
        history: Evaluations of the averaged model, in order of time.
        worker_accuracies: Accuracy of each evaluated worker at the end, in [0, 1].
        params: The averaged model's tensors by name, as in its `state_dict`.
        virtual_seconds: Virtual time of the end.
        wall_seconds: Duration, including resumed parts; for workers only the last part.
        mean_staleness: Mean staleness of received messages, in rounds.
        folder: Folder of the run.
    """

    name: str
    reason: str
    history: list[Evaluation]
    worker_accuracies: list[float]
    params: dict[str, Tensor]
    virtual_seconds: Seconds
    wall_seconds: float
    mean_staleness: float
    folder: Path | None

    @property
    def final_accuracy(self) -> float:
        """Accuracy of the averaged model at the end."""
        return self.history[-1].accuracy

    @property
    def best_accuracy(self) -> float:
        """Best accuracy of the averaged model."""
        return max(evaluation.accuracy for evaluation in self.history)

    def time_to(self, accuracy: float) -> Seconds | None:
        """Virtual seconds until the averaged model first reached `accuracy`; None if never."""
        return next((e.time for e in self.history if e.accuracy >= accuracy), None)

    def summary(
        self, target_accuracy: float | None = None, baseline: Results | None = None
    ) -> dict[str, Any]:
        """The entry of this run in `summary.json`."""
        last = self.history[-1]
        time = reference = None
        if target_accuracy is not None:
            time = self.time_to(target_accuracy)
            reference = baseline.time_to(target_accuracy) if baseline else None
        return {
            "final_accuracy": self.final_accuracy,
            "best_accuracy": self.best_accuracy,
            "worker_accuracy_min": min(self.worker_accuracies),
            "worker_accuracy_mean": sum(self.worker_accuracies) / len(self.worker_accuracies),
            "time_to_target": time,
            "speedup": reference / time if reference is not None and time else None,
            "virtual_seconds": self.virtual_seconds,
            "wall_seconds": self.wall_seconds,
            "bytes_sent": last.bytes_sent,
            "samples_processed": last.samples_processed,
            "consensus_distance": last.consensus_distance,
            "mean_staleness": self.mean_staleness,
        }
