"""Views: which workers a worker of an open run takes for present, exchange by exchange.

A worker's view comes from its own driver alone (`WorkerLost`, `WorkerJoined`), never from what
others say about third ones, so nobody can talk a worker out of a run. No server and no vote
agrees on it: views agree as soon as the drivers do. Until then exchanges are safe, because

- a worker binds its view when it sends an exchange's messages, and *tells* it to all that are
  present before, with the exchange from which on it holds;
- a worker waits for another only in exchanges in which that one's view makes it send;
- where mixing must be symmetric, a payload counts only if both views have the edge, and either
  end knew the other's view when it sent; each payload says which one it was ("seen"). Both ends
  give the edge the smaller of their two weights.

Therefore nobody waits for a message that is never sent, and mixing matrices stay symmetric and
keep the mean, however the views differ. Two halves of a cut network have two views, and again
a common one when the cut is over. A worker that claims a false view cuts its own edges only: it
is waited for less, and a receiver's own weights bound what it can do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from edgegossip.contract.protocol import Rank

Members: TypeAlias = tuple[Rank, ...]
"""The workers of a view, ascending, with its owner."""


@dataclass(slots=True, kw_only=True)
class Views:
    """A worker's own view, and what the others have told of theirs.

    Attributes:
        own: The view that the current exchange is made under.
        told: By worker, the view that it has been told last, and from which exchange on it
            holds.
        others: By worker, the exchanges from which on its views hold, and these; ascending.
        counted: Workers that get a payload in this exchange, and the exchange from which on
            that view of theirs holds which gives them one.
        seen: By sender and exchange, from which exchange on that view of this worker holds
            which its payload is made for.
        newcomers: Workers that have joined with an empty state and have not told a view yet;
            whether this worker has offered them its model.
    """

    own: Members
    told: dict[Rank, tuple[Members, int]] = field(default_factory=dict)
    others: dict[Rank, list[tuple[int, Members]]] = field(default_factory=dict)
    counted: dict[Rank, int] = field(default_factory=dict)
    seen: dict[Rank, dict[int, int]] = field(default_factory=dict)
    newcomers: dict[Rank, bool] = field(default_factory=dict)

    def of(self, rank: Rank, exchange: int) -> tuple[int, Members]:
        """From which exchange on the view of `rank` in `exchange` holds, and that view.

        If it is not known, these are -1 and an empty view.

        >>> views = Views(own=(0, 1))
        >>> views.hear(1, 4, (0, 1))
        >>> views.of(1, 3), views.of(1, 5)
        ((-1, ()), (4, (0, 1)))
        """
        known = reversed(self.others.get(rank, []))
        return next((each for each in known if each[0] <= exchange), (-1, ()))

    def counts(self, sender: Rank, exchange: int) -> bool:
        """Whether the payload of `sender` in `exchange` is mixed, at its end as at this one."""
        _, told_first = self.told.get(sender, ((), -2))
        is_seen = self.seen.get(sender, {}).get(exchange) == told_first
        return is_seen and self.counted.get(sender) == self.of(sender, exchange)[0]

    def latest(self, rank: Rank) -> Members | None:
        """The newest view of `rank`; None if it has told none."""
        return known[-1][1] if (known := self.others.get(rank)) else None

    def hear(self, rank: Rank, first: int, members: Members) -> None:
        """Record that `rank` goes by the view `members` from exchange `first` on."""
        earlier = [each for each in self.others.get(rank, []) if each[0] < first]
        self.others[rank] = [*earlier, (first, members)]
        self.newcomers.pop(rank, None)

    def forget(self, rank: Rank) -> None:
        """Forget what a worker that has begun anew has told and been told."""
        for each in (self.others, self.told, self.seen):
            each.pop(rank, None)

    def pass_by(self, exchange: int) -> None:
        """Drop views that held before `exchange` only."""
        for known in self.others.values():
            while len(known) > 1 and known[1][0] <= exchange:
                del known[0]
        for rank, seen in self.seen.items():
            self.seen[rank] = {k: first for k, first in seen.items() if k >= exchange}
