"""States of a parameter server and of the workers that commit to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.contract.protocol import Layout, Message, Rank, Seconds, WorkerState

SERVER: Rank = 0
"""The initial server, which is permanent without standby."""
RESEND, PATIENCE = "resend", "patience"
"""Timers of servers and workers."""
TARGET = "target"
"""Kind of the server's messages with settings between its answers."""
MAX_COUNT = 2**52
"""Largest number of a commit, and of a worker's commits in a model."""
MAX_BELIEVED = MAX_COUNT // 2
"""Largest count that a restarted server believes, so that numbers are left for all commits."""
_EPOCHS_A_SECOND = 1e6
_CLOCKS_DIFFER: Seconds = 60.0


@dataclass(slots=True, kw_only=True)
class ServerState(WorkerState):
    """State of the server; `params` is the model, and `round` is the most advanced worker's.

    Attributes:
        num_commits: Number of merged commits of each worker, by rank.
        num_steps: Number of steps in these commits, by rank.
        rounds: The round of each worker, by rank; a returning worker skips its missed rounds.
        waiting: Unanswered commits, by sender.
        pulling: Workers that ask for the model, as keys.
        lost: Workers that cannot be reached, as keys.
        dropped: Workers whose commit was dropped because they lied, as keys.
        unseen: Workers that have not yet reported their latest model to the restarted server,
            as keys.
        copies: Reported models, by sender.
        is_new: Whether the server has restarted and does not know the model yet.
        may_merge: Whether a majority follows the server, or no majority is needed.
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

    @property
    def version(self) -> int:
        """Number of commits that the model includes."""
        return sum(self.num_commits.values())

    def newest(self, rank: Rank) -> float:
        """Number of the newest known commit of worker `rank`."""
        waiting = self.waiting.get(rank)
        return self.num_commits[rank] if waiting is None else waiting.numbers["number"]

    def is_counted(self, rank: Rank) -> bool:
        """Return whether the waiting commit of worker `rank` is counted."""
        return self.waiting[rank].numbers["number"] <= self.num_commits[rank]

    def count(self, rank: Rank, num_rounds: int) -> None:
        """Count the waiting commit of worker `rank` once, and a round of that worker."""
        if self.is_counted(rank):
            return
        commit = self.waiting[rank].numbers
        self.num_commits[rank] = int(commit["number"])
        self.num_steps[rank] += int(commit["num_steps"])
        self.rounds[rank] = min(self.rounds[rank] + 1, num_rounds)
        self.round = max(self.round, self.rounds[rank])


@dataclass(slots=True, kw_only=True)
class CommitterState(WorkerState):
    """State of a worker that trains and commits its progress to the server.

    Attributes:
        base: The model that `params` started from; `params - base` is not committed yet.
        counts: The server's `num_commits` in its last answer, [num_workers].
        memory: Other numbers from the server's last answer; see `ParameterServer.settings`.
        layout: See `Started.layout`.
        commit: The unanswered commit, if any.
        committed: The parameters when `commit` was sent.
        num_sends: Number of times that the unanswered message was sent; each lengthens the
            wait.
        sent_at: Time at which the last commit was sent or work began.
        num_commits: Number of answered commits.
        local_steps: SGD steps between two commits, from the server's last message.
        num_asked: Number of steps requested since the last commit; a wrapper may run fewer.
        num_steps: Number of steps since the last commit.
        is_due: Whether a commit is due for a reason other than the number of steps.
        interval: Seconds between two commits, if a timer triggers commits.
        is_training: Whether a `Train` is running.
        has_moved: Whether an answer has changed the parameters since that training began.
        is_pulling: Whether the worker needs the server's model before it continues to train.
        has_server: Whether the server is reachable.
        answer_seconds: Time from the last answered commit to its answer.
        step_seconds: Duration of a step in the last piece of training.
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

    @property
    def next_number(self) -> int:
        """Number of the commit after the last answered one."""
        # A server that lies may have claimed `MAX_COUNT` commits; no receiver allows more.
        return min(self.num_commits + 1, MAX_COUNT)

    @property
    def last_number(self) -> int:
        """Number of the last commit sent; no server can have merged a later one."""
        return self.num_commits if self.commit is None else self.next_number


def is_possible(epoch: float, now: Seconds) -> bool:
    """Whether the first of several servers can have begun so many epochs by now.

    It counts from the milliseconds of its clock, and each event begins at most one epoch. After
    a liar's higher epoch, no server and no worker would accept an honest one.
    """
    return epoch <= _EPOCHS_A_SECOND * (now + _CLOCKS_DIFFER)
