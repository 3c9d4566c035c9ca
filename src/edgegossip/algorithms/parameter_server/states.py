"""States of a parameter server and of the workers that commit to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.core.protocol import Layout, Message, Rank, Seconds, WorkerState

SERVER: Rank = 0
"""The rank that serves at first, and for good without standby."""
RESEND, PATIENCE = "resend", "patience"
"""Timers of servers and workers."""


@dataclass(slots=True, kw_only=True)
class ServerState(WorkerState):
    """State of the server; `params` are the model, `round` that of the worker furthest on.

    Attributes:
        num_commits: Commits merged of each worker, by rank.
        num_steps: Steps that went into them, by rank.
        rounds: The round of each worker, by rank; one that comes back skips the missed rounds.
        waiting: Commits that have come and are not answered yet, by sender.
        pulling: Workers, as keys, that ask for the model.
        lost: Workers that cannot be reached, as keys.
        dropped: Workers, as keys, whose commit was dropped because they lied.
        unseen: Workers, as keys, that have not yet shown a server that has restarted the model
            that they got last.
        copies: Models that were shown to it, by sender.
        is_new: It has restarted, and does not know the model yet.
        may_merge: It can reach a majority, where it needs one.
    """

    num_commits: dict[Rank, int]
    num_steps: dict[Rank, int]
    rounds: dict[Rank, int]
    waiting: dict[Rank, Message] = field(default_factory=dict)
    pulling: dict[Rank, None] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    dropped: dict[Rank, None] = field(default_factory=dict)
    unseen: dict[Rank, None] = field(default_factory=dict)
    copies: dict[Rank, Message] = field(default_factory=dict)
    is_new: bool = False
    may_merge: bool = True


@dataclass(slots=True, kw_only=True)
class CommitterState(WorkerState):
    """State of a worker that trains, and commits its progress to the server.

    Attributes:
        base: The model that `params` have grown out of: `params - base` is not committed yet.
        counts: The server's `num_commits`, as its last answer had them, [num_workers].
        memory: Other numbers that the server's last answer had it remember; see `settings`.
        layout: See `Started.layout`.
        commit: The commit that was sent and has no answer yet.
        committed: The parameters when it was sent.
        num_sends: Sends of the message that has no answer yet, as far as waits grow with it.
        sent_at: Time at which the last commit was sent, or work began.
        num_commits: Commits that were answered.
        local_steps: SGD steps between two commits, as the server has said last.
        num_asked: Steps asked for since the last commit; a wrapper may take fewer.
        num_steps: Steps taken since the last commit.
        is_due: A commit is due for another reason than the number of steps.
        interval: Seconds between two commits, where time decides.
        is_training: A `Train` is under way.
        has_moved: An answer has changed the parameters since it began.
        is_pulling: It needs the server's model before it trains on.
        has_server: The server can be reached.
        answer_seconds: Time from the last commit that was answered to its answer.
        step_seconds: Time of a step of the last piece of training.
    """

    base: Tensor
    counts: Tensor
    memory: dict[str, float] = field(default_factory=dict)
    layout: Layout | None = None
    commit: Message | None = None
    committed: Tensor | None = None
    num_sends: int = 0
    sent_at: Seconds = 0.0
    num_commits: int = 0
    local_steps: int = 1
    num_asked: int = 0
    num_steps: int = 0
    is_due: bool = False
    interval: Seconds = math.inf
    is_training: bool = False
    has_moved: bool = False
    is_pulling: bool = False
    has_server: bool = True
    answer_seconds: Seconds = 0.0
    step_seconds: Seconds = math.inf
