"""Measures of training, computed from a run's events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.runs.events import EventReader


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """One round of a worker, from one message with its parameters to the next.

    Attributes:
        seconds: Length of the round; it begins with the previous round's exchange.
        num_blocks: Blocks of training, each after a forecast.
        num_samples: Samples that the worker trained on.
        cost: Cost of training and of looks at aggregated points, in training samples.
    """

    seconds: Seconds
    num_blocks: int
    num_samples: int
    cost: float


class TrainingEvents:
    """The lines of an `events.jsonl` about training and about parameters sent in rounds.

    Args:
        path: The file, which has at least its first line.

    Raises:
        RunFolderError: If the file cannot be read, or its first line is damaged.
    """

    def __init__(self, path: Path) -> None:
        reader = EventReader(path)
        if reader.first["type"] != "experiment":
            raise RunFolderError(f"{path}, line 1: expected the experiment; run it again")
        self._sizes: list[int] = reader.first["shard_sizes"]
        lines = reader.of_type("trained", "sent")
        self._trained = [line for line in lines if line["type"] == "trained"]
        self._sent: dict[tuple[Rank, int], Any] = {
            (line["rank"], line["round"]): line
            for line in lines
            if line["type"] == "sent" and line["kind"] == "params"
        }

    def sent_by(self, num_rounds: int) -> Seconds | None:
        """Time at which all workers have sent their parameters of round `num_rounds` (from 1).

        None if a worker has not sent them, or the algorithm has no rounds.
        """
        lines = [self._sent.get((rank, num_rounds - 1)) for rank in range(len(self._sizes))]
        ends = [line["end"] for line in lines if line is not None]
        return max(ends) if len(ends) == len(lines) else None

    def kept_shares(self) -> list[float] | None:
        """The mean share of its samples that each worker trained on per round.

        None if a worker has not finished a round.
        """
        if {rank for rank, _ in self._sent} != set(range(len(self._sizes))):
            return None
        return [self._kept_share(rank, size) for rank, size in enumerate(self._sizes)]

    def _kept_share(self, rank: Rank, size: int) -> float:
        num_rounds = 1 + max(round_ for other, round_ in self._sent if other == rank)
        end = self._sent[rank, num_rounds - 1]["time"]
        done = sum(line["num_samples"] for line in self._training(rank, -math.inf, end))
        return done / (num_rounds * size) if size else 0.0

    def _training(self, rank: Rank, begin: Seconds, end: Seconds) -> list[Any]:
        """Lines of a worker's training after `begin`, up to `end`."""
        own = (line for line in self._trained if line["rank"] == rank)
        return [line for line in own if begin < line["time"] <= end]

    def round_work(self, rank: Rank, round_: int) -> RoundWork:
        """The work of `rank` in a round that it sent, except round 0, which has no start."""
        begin, end = (self._sent[rank, number]["time"] for number in (round_ - 1, round_))
        lines = self._training(rank, begin, end)
        return RoundWork(
            seconds=end - begin,
            num_blocks=len(lines),
            num_samples=sum(line["num_samples"] for line in lines),
            cost=sum(line["cost"] for line in lines),
        )

    def look_share(self, rank: Rank | None = None) -> float | None:
        """Share of training time that `rank` (or all ranks) spent looking at aggregated points.

        None without training.
        """
        lines = [line for line in self._trained if rank in (None, line["rank"])]
        cost = sum(line["cost"] for line in lines)
        samples = sum(line["num_samples"] for line in lines)
        return (cost - samples) / cost if cost else None
