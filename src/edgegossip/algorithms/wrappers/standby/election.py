"""Elections: workers elect another server by majority once their server is lost.

Each server has its own term, a whole number; `term` modulo the number of ranks is the rank that
serves in it. No term therefore has two servers, even if voters lose their memory. The highest
term counts: a rank that hears of a higher term follows that term's server, and steps down if it
was the server.

A worker that misses its server waits for a short random time. It then asks all others to vote
for a term of its own, which is higher than all known terms. A vote is given

- once per term, and for no term below that of an earlier vote;
- only by ranks that also miss their server, so a rank that is cut off cannot depose the server;
- to a candidate whose model is at least as new as the voter's.

A candidate needs the votes of more than half of all ranks. Any two majorities share a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, Send, SetTimer
from edgegossip.contract.randomness import uniform
from edgegossip.contract.schema import MessageSpec

ELECTION = "election"
UNKNOWN = -1
"""Term of a returned worker, which knows no term yet."""
MAX_TERM = 2**53
AGE = {"as_of": range(UNKNOWN, MAX_TERM), "num_commits": range(2**63)}
"""Limits of the numbers of an `Age`."""
_SHORTEST: Seconds = 0.1
_SPREAD: Seconds = 0.4
_LONGEST: Seconds = 10.0
_TERMS_A_SECOND = 20
_CLOCKS_DIFFER: Seconds = 60.0
_REPEATS = 8
"""Attempts of a candidate in one term, because messages may be lost or slow."""

Age: TypeAlias = tuple[int, int]
"""Age of a model: the term of its server and the number of its commits."""


@dataclass(slots=True, kw_only=True)
class Election:
    """One rank's view of which rank serves; events in, effects out.

    Attributes:
        rank: Rank of this worker.
        num_ranks: Total number of ranks, each with a vote.
        term: Term of the followed server.
        promised: The highest term that has this rank's vote.
        stands_for: The term of this rank's candidacy; `UNKNOWN` if there is none.
        votes: Voters for that term, as keys.
        lost: Unreachable ranks, as keys.
        is_leading: Whether this rank serves.
        misses_leader: Whether the server is lost, restarted or unknown.
        followers: On the leader, ranks that have sent a message in this term since the last
            announcement, as keys.
        must_confirm: On the leader, whether most ranks were unreachable for a while and may
            have another server by now.
        num_attempts: Number of attempts to be elected since the server was lost.
    """

    rank: Rank
    num_ranks: int
    term: int = 0
    promised: int = UNKNOWN
    stands_for: int = UNKNOWN
    votes: dict[Rank, None] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    is_leading: bool = False
    misses_leader: bool = False
    followers: dict[Rank, None] = field(default_factory=dict)
    must_confirm: bool = False
    num_attempts: int = 0

    @property
    def leader(self) -> Rank:
        """The rank that serves in the current term; `UNKNOWN` while no term is known."""
        return UNKNOWN if self.term == UNKNOWN else self.term % self.num_ranks

    @property
    def has_majority(self) -> bool:
        """Whether this rank can reach more than half of all ranks, including itself."""
        return self._is_majority(self.num_ranks - len(self.lost))

    @property
    def may_merge(self) -> bool:
        """On the leader, whether most ranks are reachable and, after an outage, follow it."""
        return self.has_majority and not self.must_confirm

    @property
    def has_forgotten(self) -> bool:
        """Whether the others follow this rank although it has restarted since it served."""
        return not self.is_leading and self.leader == self.rank

    def is_possible(self, term: int, now: Seconds) -> bool:
        """Whether candidates can have reached `term` by now.

        Each rank stands at most ten times per second, each such candidacy makes all ranks stand
        at most once more, and each time the term rises by less than two per rank. A liar's
        higher term would leave no term for the elections of the others.
        """
        latest = _TERMS_A_SECOND * self.num_ranks**3 * (now + _CLOCKS_DIFFER)
        return term <= min(latest, MAX_TERM - 2 * self.num_ranks)

    def _is_majority(self, number: int) -> bool:
        return number > self.num_ranks // 2

    # Ranks that leave and return.

    def lose(self, rank: Rank, now: Seconds) -> list[Effect]:
        """Handle the loss of a rank."""
        self.lost[rank] = None
        # Those that are lost may be most of the ranks, and elect another server. It is not
        # enough that they are back: each must say that it still follows this one.
        if self.is_leading and not self.has_majority:
            self.must_confirm, self.followers = True, {}
        return self.miss_leader(now) if self._follows(rank) else []

    def join(self, rank: Rank, has_restarted: bool, now: Seconds) -> list[Effect]:
        """Handle the return of a rank; a restarted rank no longer serves."""
        self.lost.pop(rank, None)
        if has_restarted:
            # It has forgotten its vote and may give another.
            self.votes.pop(rank, None)
        if self.is_leading:
            # Whatever it has heard, it may have forgotten, or have followed another since.
            self.followers.pop(rank, None)
            lead = Message("lead", 0)
            # Only now can enough ranks confirm, so all are asked, not just this one.
            is_in_doubt = self.must_confirm and self.has_majority
            return [*self.tell(lead)] if is_in_doubt else [Send(rank, lead)]
        if not self._follows(rank):
            return []
        # A server that has restarted has forgotten its model, and may not even know its term.
        return self.miss_leader(now) if has_restarted else self._found()

    def _follows(self, rank: Rank) -> bool:
        return not self.is_leading and rank == self.leader

    def miss_leader(self, now: Seconds) -> list[Effect]:
        """Prepare to stand for election, unless already doing so."""
        if self.misses_leader:
            return []
        self.misses_leader, self.num_attempts = True, 0
        return [SetTimer(ELECTION, now + self._pause())]

    def _found(self) -> list[Effect]:
        # The promise stays: votes that are on their way may still elect its candidate.
        self.misses_leader, self.stands_for, self.votes = False, UNKNOWN, {}
        return [SetTimer(ELECTION, math.inf)]

    def _pause(self) -> Seconds:
        # Random, so that one candidate has its votes before the next one stands. The latency of
        # messages is unknown, so each further attempt waits twice as long.
        longest = min(_LONGEST, _SPREAD * 2.0**self.num_attempts)
        draw = uniform(0, self.rank, "election", self.term, self.num_attempts)
        return _SHORTEST + longest * draw + (longest / 2 if self.num_attempts else 0)

    def hear(self, rank: Rank) -> None:
        """Record a follower in the current term."""
        self.followers[rank] = None
        # Together with this rank itself, which is no follower.
        if self._is_majority(len(self.followers) + 1):
            self.must_confirm = False

    # Standing and voting.

    def stand(self, age: Age, now: Seconds) -> list[Effect]:
        """Ask for missing votes, in a new term if another candidate is ahead or votes stay
        split.
        """
        if not self.misses_leader:
            return []
        self.num_attempts = min(self.num_attempts + 1, 100)
        timer = SetTimer(ELECTION, now + self._pause())
        # Without a majority no candidacy can succeed, and its terms would only grow.
        if not self.has_majority:
            return [timer]
        is_late = self.stands_for < max(self.promised, self.term + 1)
        # Repeating a term asks only for missing votes. A new one makes all vote again, which is
        # needed if another candidate is ahead, or votes have been split for too long.
        if is_late or self.num_attempts % _REPEATS == 0:
            highest = max(self.term, self.promised)
            self.stands_for = (highest // self.num_ranks + 1) * self.num_ranks + self.rank
            self.promised, self.votes = self.stands_for, {self.rank: None}
        numbers = {"stands_for": self.stands_for, "as_of": age[0], "num_commits": age[1]}
        asked = self.tell(Message("stand", 0, numbers=numbers))
        return [timer, *(each for each in asked if each.receiver not in self.votes)]

    def vote(
        self, candidate: Rank, stand: Message, age: Age, may_stand: bool, now: Seconds
    ) -> list[Effect]:
        """Answer a candidate with a vote, or stand for election with a newer model."""
        numbers = {name: int(number) for name, number in stand.numbers.items()}
        term = numbers["stands_for"]
        if not self.misses_leader:
            # It follows a server that is there; the answer's term tells the candidate which.
            return [Send(candidate, Message("lead", 0))]
        # A term belongs to one rank: a liar cannot stand in another's name.
        if term % self.num_ranks != candidate:
            return []
        # A rank never votes below a promise: once a majority has promised a higher term, no
        # candidate of a lower one can win.
        is_late, self.promised = term < self.promised, max(self.promised, term)
        # This rank has commits that the candidate lacks, and they were answered. It does not
        # vote but stands itself, once for each term of a candidate.
        if (numbers["as_of"], numbers["num_commits"]) < age:
            return self.stand(age, now) if may_stand and self.stands_for < term else []
        kind = "promised" if is_late else "vote"
        return [Send(candidate, Message(kind, 0, numbers={"stands_for": self.promised}))]

    def count(self, voter: Rank, vote: Message) -> bool:
        """Count a vote; return whether it has elected this rank."""
        # Votes of an earlier candidacy are for a term in which others may have voted since.
        if not self.misses_leader or vote.numbers["stands_for"] != self.stands_for:
            return False
        self.votes[voter] = None
        return self._is_majority(len(self.votes))

    def heed(self, promised: Message) -> None:
        """Record that a voter has promised a higher term."""
        # The next candidacy stands for a term above it, or it would be in vain again.
        self.promised = max(self.promised, int(promised.numbers["stands_for"]))

    def lead(self) -> list[Effect]:
        """Begin to serve, and tell all ranks."""
        self.term, self.is_leading, self.followers = self.stands_for, True, {}
        self.must_confirm = False
        return [*self._found(), *self.tell(Message("lead", 0))]

    def follow(self, term: int, now: Seconds) -> list[Effect]:
        """Follow the server of a higher term."""
        self.term, self.is_leading = term, False
        effects = self._found()
        # News of a server may outlive it; its followers stand for election in turn.
        is_gone = self.leader == self.rank or self.leader in self.lost
        return [*effects, *self.miss_leader(now)] if is_gone else effects

    def remind(self) -> list[Send]:
        """Repeat the announcement to ranks that have not answered."""
        told = self.tell(Message("lead", 0)) if self.is_leading else []
        return [each for each in told if each.receiver not in self.followers]

    def tell(self, message: Message) -> list[Send]:
        """Send a message to all reachable ranks."""
        others = (j for j in range(self.num_ranks) if j != self.rank and j not in self.lost)
        return [Send(j, message) for j in others]


def schema(max_round: int) -> dict[str, MessageSpec]:
    """Describe the messages of an election."""
    terms = range(MAX_TERM)
    return {
        "stand": MessageSpec(numbers={"stands_for": terms, **AGE}, max_round=max_round),
        "vote": MessageSpec(numbers={"stands_for": terms}, max_round=max_round),
        "resign": MessageSpec(max_round=max_round),
        "promised": MessageSpec(numbers={"stands_for": terms}, max_round=max_round),
        "lead": MessageSpec(max_round=max_round),
    }
