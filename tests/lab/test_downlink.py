"""The simulator's downlink against one that `tc tbf` limits."""

from __future__ import annotations

import pytest
from benchmarks import downlink
from benchmarks.downlink import SETTINGS, Setting
from lab.lab import GOODPUT
from lab.machine import missing

needs_lab = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]


def test_senders_without_limit_take_the_time_of_the_downlink() -> None:
    alone = downlink.SIZE / (20e6 / 8 * GOODPUT)
    times = downlink.simulate(SETTINGS["senders without limit"])
    assert times == pytest.approx([alone * k for k in (1, 2, 3, 4)], rel=1e-3)


def test_senders_with_narrow_uplinks_do_not_fill_the_downlink() -> None:
    own = downlink.SIZE / (4e6 / 8 * GOODPUT)
    times = downlink.simulate(SETTINGS["narrower even together"])
    assert times == pytest.approx([own] * 4, rel=1e-3)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=needs_lab)
        for name, setting in SETTINGS.items()
        if name in ("senders without limit", "wider only together", "one after the other")
    ],
)
def test_many_senders_take_as_long_as_in_the_simulator(setting: Setting) -> None:
    found = downlink.compare(setting, repeats=3)
    assert found["is_kept"], found
