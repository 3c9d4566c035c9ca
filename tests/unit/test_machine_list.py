"""A list of machines: their speeds and links, and what is said of a wrong file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.machine_lists import three_machines

from edgegossip.contract.errors import UsageError
from edgegossip.machine.contention import Contention
from edgegossip.machine.profile import Profile
from edgegossip.plan.machines import Machine, links_between, read_machines


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    return three_machines(tmp_path)


def test_machines_have_the_speeds_and_links_of_the_file(machines: Path) -> None:
    found = read_machines(machines)
    assert [each.name for each in found] == ["desk", "phone", "phone"]
    platforms = [each.platform(measured=1.0) for each in found]
    assert [each.throughput for each in platforms] == [1000, 250.5, 250.5]
    assert [each.uplink for each in platforms] == [12.5e6, math.inf, math.inf]
    links = links_between(found)
    assert links.overrides[0, 1].latency == pytest.approx(0.025)
    assert links.overrides[1, 2].latency == pytest.approx(0.040)


def test_a_machine_may_be_told_beside_this_one() -> None:
    assert Machine(name="phone", speed=0.5).platform(measured=300.0).throughput == 150.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must list machines"),
        ("machine = 3", "must list machines"),
        ("x = 1\n[[machine]]\nspeed = 1", "it has x, machine"),
        ("[[machine]]\nfast = 1", "no 'fast'; it may have name"),
        ("[[machine]]\nspeed = 'fast'", "speed of 'machine' must be a number"),
        ("[[machine]]\nspeed = 0", "speed must be above 0"),
        ("[[machine]]\ncount = 0", "count of 'machine' must be a number"),
        ("[[machine", "cannot read machines"),
        ("[[machine]]\nendpoint = 7447", "endpoint of 'machine' must be a text"),
        ("[[machine]]\nprofile = 'no.csv'\nsamples_per_second = 1", "leave out one"),
    ],
)
def test_a_wrong_file_is_told_what_it_may_have(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_machines(path)


def test_a_machine_may_have_the_speed_of_its_profile(tmp_path: Path) -> None:
    idle = [Contention(cores / 20, 0.0, 0.0) for cores in range(10)]
    Profile(idle, [0.01 / (1 - each.cores) for each in idle]).write(tmp_path / "desk.csv")
    (tmp_path / "machines.toml").write_text('[[machine]]\nprofile = "desk.csv"\n')
    [machine] = read_machines(tmp_path / "machines.toml")
    assert machine.samples_per_second == pytest.approx(100.0, rel=0.05)
