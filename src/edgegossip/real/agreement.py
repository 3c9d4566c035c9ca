"""Which workers share the final mean, and whose models are not in it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.host import Host
from edgegossip.net.host.meeting import workers
from edgegossip.runs.final_average import FinalAverage, FinalState

_TOLERANCE = 1e-5
"""Largest distance of models that agree, as a share of their norm; machines may round
differently."""
_LOG = logging.getLogger("edgegossip.real")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The final mean of one worker, and the workers that do not share it.

    Attributes:
        members: Workers whose models are in the mean.
        away: Workers out of reach at the end, and the times at which they were lost.
        silent: Workers in reach whose models did not arrive.
        others: Workers in reach whose means are of other workers' models.
        distance: Largest distance of a member's model from the mean, as a share of its norm.
        rounds: Rounds of this worker.
        num_exchanged: Rounds in which a message of another worker arrived.
        is_alone: Whether there was none, and a worker was lost before the end.
        is_apart: Whether this worker's model may differ from the run's result: it does not
            share its mean with most of the workers, or it trained alone.
    """

    members: tuple[Rank, ...]
    away: Mapping[Rank, Seconds]
    silent: tuple[Rank, ...]
    others: tuple[Rank, ...]
    distance: float
    rounds: int
    num_exchanged: int
    is_alone: bool
    is_apart: bool

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Agreement:
        """Make an agreement from its fields after they have been JSON."""
        ranks = {name: tuple(fields[name]) for name in ("members", "silent", "others")}
        away = {int(rank): since for rank, since in fields["away"].items()}
        return cls(**{**fields, **ranks, "away": away})

    def lines(self) -> Iterator[str]:
        """Sentences about workers without this worker's final model; none if all have it."""
        for rank, since in self.away.items():
            yield f"worker {rank}, out of reach since {since:.1f} s, does not share this mean"
        for rank in self.silent:
            yield f"worker {rank} is in reach, but its final model did not arrive"
        if self.others:
            yield f"the final means of {workers(self.others)} are of other workers' models"
        if self.is_alone:
            yield f"this worker exchanged in 0 of {self.rounds} rounds, so it trained alone"

    def summary(self) -> dict[str, object]:
        """The fields of a worker's `summary.json`."""
        return {
            "members": list(self.members),
            "away": {str(rank): since for rank, since in self.away.items()},
            "distance": self.distance,
            "rounds_exchanged": self.num_exchanged,
            "is_apart": self.is_apart,
            "lines": list(self.lines()),
        }

    def log(self) -> None:
        """Log the mean, and a warning for each worker that lacks it."""
        if self.members:
            _LOG.info(
                "the final model is the mean of %s; their own were at most %.2g %% of its norm "
                "away from it",
                workers(self.members),
                100 * self.distance,
            )
        else:
            _LOG.warning("no final model arrived, so this worker keeps its own")
        for line in self.lines():
            _LOG.warning("%s", line)


def agreement_of(
    algorithm: Algorithm[Any], host: Host[Any], ended: Collection[Rank] = ()
) -> Agreement | None:
    """The agreement of a worker at its end; None without a final average.

    Args:
        algorithm: Algorithm of the host.
        host: Host of the worker.
        ended: Workers that had finished before.
    """
    state = host.state
    if not isinstance(algorithm, FinalAverage) or not state.is_ending:
        return None
    # Workers that have left have no final model, and those of an open run that never came.
    left = [rank for rank, peer in host.peers if peer.has_left]
    rest = {*range(algorithm.num_workers)} - {*ended, *left}
    mean = {} if state.average is None else state.means[state.rank]
    members = [*mean]
    # Workers that had the same mean may have finished and gone.
    others = {rank for rank in rest if state.means.get(rank) != mean} - {state.rank}
    counted = [rank for rank in algorithm.counted if rank in rest]
    differing = sorted(others & state.means.keys() - state.lost.keys())
    agreeing = [rank for rank in counted if rank in state.models and rank not in differing]
    is_minority = len(counted) > 1 and 2 * len(agreeing) <= len(counted)
    # In a short run without losses, nothing may have been due to arrive.
    is_alone = state.has_lost and state.round > 0 and not state.num_exchanged
    stands_by = algorithm.traits.changes_roles
    silent = [
        rank
        for rank in counted
        if rank not in state.lost
        if rank not in state.models or not (stands_by or len(state.models[rank]))
    ]
    return Agreement(
        members=tuple(members),
        away={rank: since for rank, since in sorted(state.lost.items()) if rank in others},
        silent=tuple(silent),
        others=tuple(differing),
        distance=_largest_distance(state, members),
        rounds=state.round,
        num_exchanged=state.num_exchanged,
        is_alone=is_alone,
        is_apart=is_minority or is_alone or not members,
    )


def is_apart(summary: Mapping[str, Any]) -> bool:
    """Whether the worker with this summary may have another model than the run's result."""
    agreement = summary.get("agreement")
    return isinstance(agreement, Mapping) and bool(agreement.get("is_apart"))


def disagreements(
    summaries: Mapping[Rank, Mapping[str, Any]], models: Mapping[Rank, Tensor], mean: Tensor
) -> list[str]:
    """Sentences about final models that differ, from the folders of a run's workers.

    Args:
        summaries: Summary of each worker that has one.
        models: Final parameters of the workers that should share them, [num_params] each.
        mean: The run's averaged model, [num_params].
    """
    found = []
    for rank, summary in sorted(summaries.items()):
        if is_apart(summary):
            lines = summary["agreement"].get("lines") or ["no final model arrived"]
            why = "; ".join(map(str, lines))
            found.append(f"worker {rank} ended apart from the others: {why}")
    for rank, model in sorted(models.items()):
        distance = _distance(model, mean)
        if not distance <= _TOLERANCE:
            found.append(
                f"the final model of worker {rank} differs from the run's averaged model by "
                f"{100 * distance:.2g} % of the norm"
            )
    return found


def _largest_distance(state: FinalState, members: list[Rank]) -> float:
    """The largest distance of a member's model from the mean; slices of a model have none."""
    mean = state.average
    if mean is None:
        return 0.0
    whole = [state.models[rank] for rank in members if len(state.models[rank]) == len(mean)]
    return max((_distance(each, mean) for each in whole), default=0.0)


def _distance(model: Tensor, mean: Tensor) -> float:
    """The distance of a model from the mean, as a share of the mean's norm."""
    mean = mean.double()
    norm = float(torch.linalg.vector_norm(mean)) or 1.0
    return float(torch.linalg.vector_norm(model.double() - mean)) / norm
