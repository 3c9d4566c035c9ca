"""Links and the script of what goes wrong."""

from __future__ import annotations

import math

import pytest

from edgegossip.sim.fault import (
    Crash,
    Delay,
    Drop,
    Fault,
    Faults,
    Partition,
    Recover,
    applies,
)
from edgegossip.sim.link import Link, Links


def test_a_link_of_its_own_counts_in_its_direction_only() -> None:
    slow = Link(latency=1.0, bandwidth=10.0)
    links = Links(default=Link(latency=0.1), overrides={(0, 1): slow})
    assert links.link(0, 1) is slow
    assert links.link(1, 0) == Link(latency=0.1)
    assert links.link(0, 2) == Link(latency=0.1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"latency": -0.1}, "latency must be in"),
        ({"latency": math.inf}, "latency must be in"),
        ({"latency": math.nan}, "latency must be in"),
        ({"bandwidth": 0.0}, "bandwidth must be above 0"),
        ({"bandwidth": math.nan}, "bandwidth must be above 0"),
    ],
)
def test_a_link_out_of_range_is_refused(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(**numbers)


@pytest.mark.parametrize(
    "fault",
    [
        Crash(at=-1.0, rank=0),
        Recover(at=math.inf, rank=0),
        Crash(at=math.nan, rank=0),
        Partition(start=2.0, end=1.0, group=(0,)),
        Partition(start=-1.0, end=1.0, group=(0,)),
        Partition(start=math.inf, end=math.inf, group=(0,)),
        Drop(probability=1.5),
        Drop(probability=-0.1),
        Drop(probability=math.nan),
        Drop(probability=0.5, start=3.0, end=2.0),
        Delay(seconds=-1.0),
        Delay(seconds=math.inf),
        Delay(seconds=1.0, start=math.nan),
    ],
    ids=repr,
)
def test_a_fault_out_of_range_is_refused(fault: Fault) -> None:
    with pytest.raises(ValueError, match="must"):
        Faults(script=(fault,))


@pytest.mark.parametrize("detection_time", [-1.0, math.inf, math.nan])
def test_a_detection_time_out_of_range_is_refused(detection_time: float) -> None:
    with pytest.raises(ValueError, match=r"detection_time must be in \[0, inf\)"):
        Faults(detection_time=detection_time)


def test_a_partition_separates_the_group_from_the_others_only() -> None:
    partition = Partition(start=0.0, end=1.0, group=(0, 2))
    assert partition.separates(0, 1)
    assert partition.separates(3, 2)
    assert not partition.separates(0, 2)
    assert not partition.separates(1, 3)


def test_a_fault_applies_from_its_start_until_just_before_its_end() -> None:
    drop = Drop(probability=1.0, start=1.0, end=2.0)
    found = [applies(drop, now, 0, 1) for now in (0.9, 1.0, 1.9, 2.0)]
    assert found == [False, True, True, False]


def test_a_fault_may_be_limited_to_a_sender_and_a_receiver() -> None:
    delay = Delay(seconds=1.0, sender=0, receiver=2)
    pairs = [(0, 2), (2, 0), (0, 1), (1, 2)]
    assert [applies(delay, 0.0, i, j) for i, j in pairs] == [True, False, False, False]


def test_a_script_names_its_ranks() -> None:
    faults = Faults(
        script=(
            Crash(at=0.0, rank=1),
            Recover(at=1.0, rank=2),
            Partition(start=0.0, end=1.0, group=(3, 4)),
            Drop(probability=0.1, sender=5),
            Delay(seconds=0.1, receiver=6),
        )
    )
    assert faults.ranks == {1, 2, 3, 4, 5, 6}


def test_random_crashes_repeat_and_are_healed() -> None:
    def draw(seed: int) -> Faults:
        return Faults.random(
            num_workers=5, horizon=10.0, seed=seed, num_crashes=20, drop_probability=0.1
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    script = draw(1).script
    crashes = [fault for fault in script if isinstance(fault, Crash)]
    recoveries = [fault for fault in script if isinstance(fault, Recover)]
    assert len(crashes) == len(recoveries) == 20
    for crash, recovery in zip(crashes, recoveries, strict=True):
        assert crash.rank == recovery.rank
        assert 0 <= crash.at < 10
        assert crash.at <= recovery.at <= crash.at + 5
    assert script[-1] == Drop(probability=0.1)


def test_churn_is_drawn_by_worker_and_failure() -> None:
    few = Faults.churn(num_workers=3, horizon=50.0, mean_up=10.0, mean_down=2.0, seed=4)
    more = Faults.churn(num_workers=5, horizon=90.0, mean_up=10.0, mean_down=2.0, seed=4)
    assert few.seed == 4
    assert {*few.script} < {*more.script}
    for rank in range(3):
        mine = [fault for fault in few.script if getattr(fault, "rank", None) == rank]
        assert [type(fault) for fault in mine] == [Crash, Recover] * (len(mine) // 2)
        times = [fault.at for fault in mine if isinstance(fault, Crash | Recover)]
        assert times == sorted(times)
        assert all(time < 50.0 for time in times[::2])


def test_churn_has_the_given_means() -> None:
    faults = Faults.churn(num_workers=400, horizon=100.0, mean_up=20.0, mean_down=5.0)
    crashes = [fault.at for fault in faults.script if isinstance(fault, Crash)]
    back = [fault.at for fault in faults.script if isinstance(fault, Recover)]
    assert len(crashes) / 400 == pytest.approx(100 / 25, rel=0.05)
    away = [end - start for start, end in zip(crashes, back, strict=True)]
    assert sum(away) / len(away) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("name", ["mean_up", "mean_down"])
def test_churn_needs_times_above_0(name: str) -> None:
    times = {"mean_up": 1.0, "mean_down": 1.0, name: 0.0}
    with pytest.raises(ValueError, match=f"{name} must be above 0 and finite, got 0.0"):
        Faults.churn(num_workers=1, horizon=1.0, **times)  # type: ignore[arg-type]
