"""Merging of commits, and of the models that workers report to a restarted server."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from edgegossip.algorithms.parameter_server.states import MAX_BELIEVED
from edgegossip.core.protocol import Layout, Message, Rank


def believed(copies: Mapping[Rank, Message], workers: range) -> dict[Rank, dict[Rank, int]]:
    """Return each copy's counts of commits, limited to the number that each worker itself
    counts.

    A higher count is believed if two other workers report it, because a worker that resumes
    from a checkpoint has forgotten some commits.
    """
    counts = {j: copy.payload["counts"].clamp(max=MAX_BELIEVED) for j, copy in copies.items()}
    told = {j: dict(zip(workers, counts[j].tolist(), strict=True)) for j in sorted(counts)}
    most: dict[Rank, int] = {}
    for rank, own in copies.items():
        others = sorted(counts[rank] for j, counts in told.items() if j != rank)
        most[rank] = max([int(own.numbers["number"]), *others[-2:-1]])
    return {
        j: {rank: min(count, most.get(rank, count)) for rank, count in counts.items()}
        for j, counts in told.items()
    }


def change(commit: Message, params: Tensor) -> Tensor:
    """Return a commit's change of `params`, [num_params]; statistics stay as measured."""
    update, num_trained = commit.payload["update"], int(commit.numbers["num_trained"])
    if num_trained == update.numel():
        return update
    return Layout(num_trained).with_statistics(update, update - params)
