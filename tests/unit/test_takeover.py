"""A failed platform's data go to a spare, else to the fastest that can reach them."""

from __future__ import annotations

from collections.abc import Mapping

from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.algorithms.wrappers.edge_gossip.takeover import choose_takeovers, taken_over_by


def takeovers(
    throughputs: list[float],
    before: Mapping[int, int] | None = None,
    spares: tuple[int, ...] = (),
    reachable: Mapping[int, tuple[int, ...]] | None = None,
) -> dict[int, int]:
    sizes = [0 if rank in spares else 100 for rank in range(len(throughputs))]
    shares = Balancer().balance(throughputs, sizes)
    return choose_takeovers(before or {}, shares, throughputs, spares, reachable)


def test_nobody_failed_and_nobody_inherits() -> None:
    assert takeovers([1.0, 2.0, 3.0]) == {}


def test_the_fastest_inherits() -> None:
    assert takeovers([5.0, 0.0, 9.0, 0.0]) == {1: 2, 3: 2}


def test_of_equally_fast_ones_the_lowest_rank_inherits() -> None:
    assert takeovers([0.0, 4.0, 4.0]) == {0: 1}


def test_only_who_can_reach_the_data_inherits() -> None:
    reachable = {1: (1, 0), 3: (3,)}
    assert takeovers([0.0, 1.0, 0.0, 9.0], reachable=reachable) == {0: 1}


def test_an_idle_spare_comes_before_a_faster_platform() -> None:
    assert takeovers([9.0, 0.0, 1.0], spares=(2,)) == {1: 2}


def test_each_spare_takes_over_one_platform_first() -> None:
    assert takeovers([9.0, 0.0, 0.0, 0.0, 1.0, 2.0], spares=(4, 5)) == {1: 5, 2: 4, 3: 0}


def test_a_spare_that_failed_has_nothing_to_leave_and_inherits_nothing() -> None:
    assert takeovers([9.0, 0.0, 0.0], spares=(2,)) == {1: 0}


def test_takeovers_stay_although_a_faster_platform_appears() -> None:
    assert takeovers([5.0, 0.0, 9.0], before={1: 0}) == {1: 0}


def test_data_passes_on_when_the_heir_fails_too() -> None:
    assert takeovers([0.0, 0.0, 9.0], before={1: 0}) == {0: 2, 1: 2}


def test_a_platform_that_recovered_has_its_data_back() -> None:
    assert takeovers([5.0, 5.0, 0.0], before={1: 0, 2: 0}) == {2: 0}


def test_a_spare_keeps_the_data_of_a_platform_that_recovered() -> None:
    assert takeovers([5.0, 5.0, 1.0, 0.0], before={1: 2}, spares=(2,)) == {1: 2, 3: 0}


def test_when_all_have_failed_nobody_inherits() -> None:
    assert takeovers([0.0, 0.0]) == {}


def test_inherited_data_is_listed_in_order() -> None:
    assert taken_over_by(2, {3: 2, 0: 1, 1: 2}) == (1, 3)
    assert taken_over_by(0, {3: 2}) == ()
