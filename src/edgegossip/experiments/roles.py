"""Roles of the ranks, in words and in the log of a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from edgegossip.core.protocol import WORKER, Rank
from edgegossip.experiments.experiment import Experiment
from edgegossip.learning.local import Local


def described_roles(experiment: Experiment, shards: Mapping[Rank, Sized]) -> dict[str, Any]:
    """Describe roles and shard sizes by rank, the ranks that count in the final model, and
    whether workers train on shares of their data. The sizes of `Local` data are known only now.
    """
    num_workers, role = experiment.num_workers, experiment.algorithm.role
    sizes = [len(shards.get(rank, ())) for rank in range(num_workers)]
    # Left out otherwise, as in folders of earlier versions.
    local = {"num_train": sum(sizes)} if isinstance(experiment.task.dataset, Local) else {}
    balanced = {"is_balanced": True} if experiment.algorithm.traits.is_balanced else {}
    return {
        "roles": experiment.roles,
        "evaluated": [rank for rank in range(num_workers) if role(rank).is_evaluated],
        "shard_sizes": sizes,
        **local,
        **balanced,
    }


def stage_number(role: str) -> int | None:
    """Return the stage of a role, from 0; None for other roles.

    >>> stage_number("stage-2"), stage_number("server")
    (2, None)
    """
    found = re.fullmatch(r"stage-(\d{1,9})", role)
    return int(found[1]) if found else None


def role_words(role: str) -> str:
    """Write a role in words.

    >>> role_words("stage-2"), role_words("server")
    ('stage 2', 'server')
    """
    number = stage_number(role)
    return role if number is None else f"stage {number}"


def rank_name(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank by its role, without a number if the role is unique.

    >>> [rank_name(["server", "worker", "worker"], rank) for rank in range(3)]
    ['server', 'worker 1', 'worker 2']
    >>> rank_name(["worker"], 0)
    'worker 0'
    >>> [rank_name(["stage-0", "stage-0", "stage-1"], rank) for rank in range(3)]
    ['worker 0 of stage 0', 'worker 1 of stage 0', 'stage 1']
    """
    role, is_only = roles[rank], roles.count(roles[rank]) == 1
    if role == WORKER.name or not (is_only or stage_number(role) is not None):
        return f"{role} {rank}"
    return role_words(role) if is_only else f"worker {rank} of {role_words(role)}"


def with_article(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank within a sentence.

    >>> [with_article(["server", "worker", "worker"], rank) for rank in range(2)]
    ['the server', 'worker 1']
    >>> with_article(["stage-0", "stage-1"], 1)
    'stage 1'
    """
    name = rank_name(roles, rank)
    return f"the {name}" if name == roles[rank] else name


def who_is_who(roles: Sequence[str]) -> str:
    """List the ranks of each role; empty if all are workers.

    >>> who_is_who(["server", "worker", "worker", "worker"])
    'server: rank 0, worker: ranks 1 to 3'
    >>> who_is_who(["stage-0", "stage-0", "stage-1"])
    'stage 0: ranks 0 to 1, stage 1: rank 2'
    >>> who_is_who(["worker", "worker"])
    ''
    """
    if set(roles) <= {WORKER.name}:
        return ""
    by_role: dict[str, list[Rank]] = {}
    for rank, role in enumerate(roles):
        by_role.setdefault(role, []).append(rank)
    return ", ".join(
        f"{role_words(role)}: rank{'s' if len(ranks) > 1 else ''} {rank_spans(ranks)}"
        for role, ranks in by_role.items()
    )


def rank_spans(ranks: Sequence[Rank]) -> str:
    """Write ranks, with ranges for consecutive ones.

    >>> rank_spans([0, 1, 2, 5])
    '0 to 2, 5'
    """
    stretches = [
        [rank for _, rank in group]
        for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    words = [
        str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in stretches
    ]
    return ", ".join(words)
