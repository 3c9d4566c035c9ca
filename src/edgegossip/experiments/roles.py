"""Which rank has which role, in words and in the record of a run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from edgegossip.core.protocol import WORKER, Rank
from edgegossip.experiments.experiment import Experiment


def described_roles(
    experiment: Experiment, shards: Mapping[Rank, Sized]
) -> dict[str, list[Any]]:
    """Say by rank what each is and how much data it has, and who counts in the final model."""
    num_workers, role = experiment.num_workers, experiment.algorithm.role
    return {
        "roles": experiment.roles,
        "evaluated": [rank for rank in range(num_workers) if role(rank).is_evaluated],
        "shard_sizes": [len(shards.get(rank, ())) for rank in range(num_workers)],
    }


def rank_name(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank by its role, alone where no other rank has it.

    >>> [rank_name(["server", "worker", "worker"], rank) for rank in range(3)]
    ['server', 'worker 1', 'worker 2']
    >>> rank_name(["worker"], 0)
    'worker 0'
    """
    role = roles[rank]
    return role if role != WORKER.name and roles.count(role) == 1 else f"{role} {rank}"


def with_article(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank within a sentence.

    >>> [with_article(["server", "worker", "worker"], rank) for rank in range(2)]
    ['the server', 'worker 1']
    """
    name = rank_name(roles, rank)
    return f"the {name}" if name == roles[rank] else name


def who_is_who(roles: Sequence[str]) -> str:
    """Say the ranks of each role; empty where all are workers.

    >>> who_is_who(["server", "worker", "worker", "worker"])
    'server: rank 0, worker: ranks 1 to 3'
    >>> who_is_who(["worker", "worker"])
    ''
    """
    if set(roles) <= {WORKER.name}:
        return ""
    by_role: dict[str, list[Rank]] = {}
    for rank, role in enumerate(roles):
        by_role.setdefault(role, []).append(rank)
    return ", ".join(f"{role}: {_ranks(ranks)}" for role, ranks in by_role.items())


def _ranks(ranks: Sequence[Rank]) -> str:
    """Write ranks with stretches of neighbors taken together."""
    stretches = [
        [rank for _, rank in group]
        for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    words = [
        str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in stretches
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
