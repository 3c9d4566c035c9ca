"""A world of real hosts: speeds, starts, a network, and trouble."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.algorithms import PEERS
from tests.virtual_network import Wire

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.timing import Patience

SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Something that goes wrong.

    Args:
        kind: "pause", "cut", "one way cut", "partition", "interruption" (end of one link),
            "stall" (training takes so much longer), "full" (no memory for what arrives),
            "unheard end" (the same for each when it has finished), "full disk" (no checkpoint
            is written from then on), "kill", "leave", "stop", "stop all".
        at: When.
        ranks: Whom it befalls; of a partition, one half.
        seconds: For how long; one that is killed or stopped is started again after it, with
            infinity never.
        with_disk: It then goes on from its last checkpoint.
    """

    kind: str
    at: Seconds
    ranks: tuple[Rank, ...]
    seconds: Seconds = 0.0
    with_disk: bool = True


@dataclass(frozen=True, kw_only=True)
class World:
    """The world that one seed draws.

    Args:
        late_meet_seconds: As `meet_seconds`, for processes that start later; 0 for the same.
        rise: How far the targets lie above the start, so that models soon have values that one
            who comes new cannot judge.
    """

    seed: int
    name: str
    algorithm: Algorithm[Any]
    step_seconds: tuple[Seconds, ...]
    start_at: tuple[Seconds, ...]
    wire: Wire
    disturbances: tuple[Disturbance, ...]
    meet_seconds: Seconds
    checkpoint_seconds: Seconds
    disk_fails: float = 0.0
    log_bytes: int = HostSettings.max_log_bytes
    liar: Rank | None = None
    lie: str = ""
    is_open: bool = False
    offset: float = 0.0
    late_meet_seconds: Seconds = 0.0
    rise: float = 0.0

    @property
    def num_workers(self) -> int:
        return len(self.step_seconds)

    @property
    def loses(self) -> bool:
        """Frames are lost without a word, so that somebody waits for a deadline."""
        kinds = {each.kind for each in self.disturbances}
        return self.wire.lost > 0 or not kinds.isdisjoint({"full", "unheard end"})

    @property
    def forgets(self) -> bool:
        """Whether messages are forgotten that are in no checkpoint."""
        return self.log_bytes < HostSettings.max_log_bytes

    @property
    def is_of_peers(self) -> bool:
        """Whether it has peers, all of which take part from the start or come late."""
        return self.name in PEERS and self.offset > 0 and not self.is_open

    @property
    def is_thin(self) -> bool:
        """Links carry so little that messages wait to be sent, and others for them."""
        return self.wire.bandwidth < 1e4

    @property
    def deadline(self) -> Seconds:
        """How long one that lies can make others wait, as one that is silent can."""
        patience = Patience()
        # Some never send it anything, and it waits for them in turn; or those who come late
        # take its run for one to rejoin, and wait for each other's answers.
        if self.lie == "waiting" or (self.lie and any(self.start_at)):
            return patience.factor * patience.first
        longest = patience.factor * self.longest_wait + patience.slack
        return 0.0 if self.liar is None else patience.factor * longest

    @property
    def patience(self) -> Seconds:
        """How long a silent worker is waited for once it has trained for a round.

        Others may ask for up to twice the silence, which they round up.
        """
        patience = Patience()
        return 2 * (patience.factor * self.longest_wait + patience.slack)

    @property
    def longest_wait(self) -> Seconds:
        """One's own round, the rest of another's, and those that one who came back is behind.

        One that is no further behind than a present neighbor can be does not skip rounds.
        """
        if not self.disturbed:
            return 3 * self.round_seconds
        traits, peer = self.algorithm.traits, getattr(self.algorithm, "inner", self.algorithm)
        assert traits.topology is not None
        per_round = getattr(peer, "exchanges_per_round", 1)
        behind = math.ceil(traits.topology.longest_lead / per_round)
        return (2 + behind) * self.round_seconds

    @property
    def round_seconds(self) -> Seconds:
        """The longest round of anybody: its training and its exchanges."""
        traits = self.algorithm.traits
        is_balanced = isinstance(self.algorithm, EdgeGossip)
        slowest = max(self.step_seconds) * (SIZE if is_balanced else traits.local_steps or SIZE)
        hops = (
            2 * self.num_workers
        )  # an all-reduce takes several exchanges, flooding several hops
        return (
            slowest + hops * (self.wire.latency[1] + 0.01) + (hops / 2 if self.wire.late else 0)
        )

    @property
    def hits(self) -> tuple[Disturbance, ...]:
        """Disturbances that may make workers lose each other; interruptions do not."""
        return tuple(each for each in self.disturbances if each.kind != "interruption")

    @property
    def disturbed(self) -> set[Rank]:
        """Workers that something happens to; one side of a partition."""
        late = {rank for rank, at in enumerate(self.start_at) if at > 0}
        hit = {rank for each in self.hits for rank in each.ranks}
        # One that began alone waits for the others: what it says of the run nobody confirms.
        is_alone = len(late) == self.num_workers - 1
        alone = set(range(self.num_workers)) if is_alone else set()
        return late | hit | alone | ({self.liar} if self.liar is not None else set())


KINDS = ("pause", "cut", "one way cut", "partition", "kill", "stop all")
LIES = (
    *("elapsed", "older", "resumed", "finished", "waiting", "counts", "furthest"),
    *("not finite", "future"),
)
