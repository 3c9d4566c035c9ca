"""Takeover: platforms that train on the data of failed ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from edgegossip.algorithms.wrappers.edge_gossip.balancer import Shares
from edgegossip.contract import Rank


def require_valid(
    num_workers: int,
    spares: Collection[Rank],
    reachable: Mapping[Rank, Collection[Rank]] | None,
    on_failure: str = "reassign",
    spread: str = "exact",
) -> None:
    """Raise `ValueError` if these settings of `EdgeGossip` contradict each other.

    >>> require_valid(3, spares=(2,), reachable={0: (1, 7)})
    Traceback (most recent call last):
        ...
    ValueError: reachable names worker 7; ranks are 0..2
    """
    within = reachable or {}
    for name, ranks in (("spares", spares), ("reachable", chain(within, *within.values()))):
        if strangers := sorted(set(ranks) - set(range(num_workers))):
            raise ValueError(
                f"{name} names worker {strangers[0]}; ranks are 0..{num_workers - 1}"
            )
    if (spares or reachable) and on_failure != "reassign":
        raise ValueError("spares and reachable are for on_failure='reassign'; set it, too")
    if on_failure != "continue" and spread == "gossip":
        raise ValueError(
            f"on_failure={on_failure!r} needs all forecasts; choose spread='exact'"
        )


def choose_takeovers(
    takeovers: Mapping[Rank, Rank],
    shares: Shares,
    throughputs: Sequence[float],
    spares: Collection[Rank] = (),
    reachable: Mapping[Rank, Collection[Rank]] | None = None,
) -> dict[Rank, Rank]:
    """Give each failed platform's data to a spare, or else to the fastest platform in reach.

    Args:
        takeovers: The platform that has taken over each platform's data, as `claimed_by` finds
            it. A recovered platform gets its data back. A spare that took over the data would
            then have none, so it keeps the data, and both platforms train on it.
        shares: Shares of the platforms; failed ones are marked.
        throughputs: [E] samples per second.
        spares: Platforms without their own data; each takes over the data of one platform.
        reachable: For each platform, the ranks whose data it can reach; None for all of them.

    Returns:
        The platform that takes over each failed platform's data, if there is one; also spares
        that keep a recovered platform's data.

    >>> from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
    >>> throughputs = [100.0, 80.0, 0.0]
    >>> shares = Balancer().balance(throughputs, [1000, 1000, 1000])
    >>> choose_takeovers({}, shares, throughputs)
    {2: 0}
    >>> choose_takeovers({}, shares, throughputs, reachable={0: (0,), 1: (1, 2)})
    {2: 1}
    """
    failed = [rank for rank, has_failed in enumerate(shares.has_failed) if has_failed]
    online = [rank for rank in range(len(throughputs)) if rank not in failed]
    # Those that stay: moving data again would cost its preparation, and its new samples.
    chosen = {
        rank: by
        for rank, by in takeovers.items()
        if by not in failed and (rank in failed or by in spares)
    }
    for rank in failed:
        if rank not in chosen and rank not in spares:
            idle = set(spares) - set(chosen.values())
            able = [j for j in online if reachable is None or rank in reachable.get(j, ())]
            if able:
                # Every worker computes this from the same forecasts, so ties need an order.
                chosen[rank] = max(able, key=lambda j: (j in idle, throughputs[j], -j))
    return chosen


def claimed_by(
    holdings: Mapping[Rank, Collection[Rank]], spares: Collection[Rank]
) -> dict[Rank, Rank]:
    """The platform that has taken over each platform's data, by the platforms' claims.

    If several claim the same data, spares come first, then low ranks.

    >>> claimed_by({0: (3,), 1: (3, 4), 2: (4,)}, spares=(2,))
    {3: 0, 4: 2}
    """
    last_first = sorted(holdings, key=lambda j: (j not in spares, j), reverse=True)
    return {owner: j for j in last_first for owner in holdings[j]}


def taken_over_by(rank: Rank, takeovers: Mapping[Rank, Rank]) -> tuple[Rank, ...]:
    """Workers whose data `rank` has taken over, in rank order."""
    return tuple(sorted(owner for owner, by in takeovers.items() if by == rank))
