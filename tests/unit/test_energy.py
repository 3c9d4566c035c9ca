"""Energy in folders, plans and reports, and what is said of wrong powers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import comparison, whole_run, write_run

from edgegossip.contract.errors import UsageError
from edgegossip.contract.metrics import ACCURACY
from edgegossip.machine.energy import Energy
from edgegossip.plan.machines import Machine, links_between, read_machines
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.report.units import energy
from edgegossip.runs.describe import describe
from edgegossip.runs.results import Evaluation
from edgegossip.sim.link import Link
from edgegossip.sim.platform import Platform

EVALUATION = Evaluation(
    time=1.0,
    epochs=0.5,
    metrics={"accuracy": 0.9},
    loss=0.1,
    consensus_distance=0.0,
    bytes_sent=8,
    samples_processed=4,
    energy=Energy(busy=3.0, idle=2.0, links=0.5),
)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"idle_watts": -1.0}, r"idle_watts must be in \[0, inf\) W, got -1.0"),
        ({"busy_watts": float("inf")}, r"busy_watts must be in \[0, inf\) W, got inf"),
        ({"idle_watts": 60.0}, "busy_watts must be at least idle_watts, got 6.4 and 60.0"),
    ],
)
def test_powers_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Platform(throughput=1.0, **values)
    with pytest.raises(ValueError, match=said):
        Machine(name="desk", **values)


@pytest.mark.parametrize("joules", [-1e-6, float("nan"), float("inf")])
def test_energy_per_byte_out_of_range_is_refused(joules: float) -> None:
    with pytest.raises(ValueError, match=r"joules_per_byte must be in \[0, inf\) J, got"):
        Link(joules_per_byte=joules)


def test_descriptions_omit_powers_at_their_defaults() -> None:
    assert "idle_watts" not in describe(Platform(throughput=1.0))
    assert "joules_per_byte" not in describe(Link())
    described = describe(Platform(throughput=1.0, idle_watts=0.0))
    assert (described["idle_watts"], "busy_watts" in described) == (0.0, False)
    assert describe(Link(joules_per_byte=0.0))["joules_per_byte"] == 0.0


def test_lines_keep_the_energy_and_older_lines_have_none() -> None:
    line = json.loads(json.dumps(EVALUATION.line()))
    assert Evaluation.from_line(line, [ACCURACY]) == EVALUATION
    assert line["joules"] == EVALUATION.joules == 5.5
    for name in ("joules", "busy_joules", "idle_joules", "link_joules"):
        del line[name]
    assert Evaluation.from_line(line, [ACCURACY]).joules is None


def test_a_wrong_number_of_joules_makes_a_line_damaged() -> None:
    with pytest.raises(TypeError, match="idle_joules is 'many', not a number"):
        Evaluation.from_line({**EVALUATION.line(), "idle_joules": "many"}, [ACCURACY])


MACHINES = """
[[machine]]
name = "desk"
idle_watts = 60
busy_watts = 350
joules_per_mb_sent = 0
joules_per_mb_received = 0

[[machine]]
name = "phone"
joules_per_mb_sent = 8
joules_per_mb_received = 3
"""


def test_machines_have_the_powers_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "machines.toml").write_text(MACHINES)
    desk, phone = read_machines(tmp_path / "machines.toml")
    platform = desk.platform(1.0)
    assert (platform.idle_watts, platform.busy_watts) == (60, 350)
    links = links_between([desk, phone])
    assert links.link(0, 1).joules_per_byte == 3e-6  # sent for nothing, received by the phone
    assert links.link(1, 0).joules_per_byte == 8e-6


def test_machines_without_powers_are_those_of_the_simulator() -> None:
    machine = Machine(name="board")
    assert machine.platform(1.0) == Platform(name="board", throughput=1.0)
    assert links_between([machine, machine]).link(0, 1) == Link()


def test_a_wrong_power_in_a_file_names_the_machine(tmp_path: Path) -> None:
    (tmp_path / "machines.toml").write_text('[[machine]]\nname = "desk"\nidle_watts = -1\n')
    with pytest.raises(UsageError, match="'desk': idle_watts must be in"):
        read_machines(tmp_path / "machines.toml")


def with_joules(events: list[dict[str, object]], watts: float) -> list[dict[str, object]]:
    """The events of a run whose machines take `watts` together, a quarter of it idle."""
    return [
        {
            **event,
            "joules": watts * float(str(event["time"])),
            "busy_joules": 0.7 * watts * float(str(event["time"])),
            "idle_joules": 0.25 * watts * float(str(event["time"])),
            "link_joules": 0.05 * watts * float(str(event["time"])),
        }
        if event["type"] == "evaluated"
        else event
        for event in events
    ]


def test_a_report_shows_the_energy_and_compares_it_at_the_target(tmp_path: Path) -> None:
    comparison(tmp_path)
    for name, watts in (("all-reduce", 20.0), ("gossip", 30.0)):
        events = whole_run(name, has_barrier=name == "all-reduce")
        write_run(tmp_path / name, with_joules(events, watts))
    dense, gossip = read_folder(tmp_path).runs
    assert dense.summary.joules_to_target == 20.0 * (dense.summary.time_to_target or 0)
    assert gossip.summary.joules == 30.0 * gossip.log.evaluations[-1].time
    page = write_report(tmp_path).read_text()
    joules = gossip.summary.joules or 0
    for share in (1, 0.7, 0.25, 0.05):
        assert f"<td>{energy(share * joules)}</td>" in page
    assert "needed the least energy by the model of the machines and links" in page
    assert "2.7&nbsp;W" in page
    assert (tmp_path / "figures" / "accuracy-energy.svg").exists()


def test_a_report_of_an_older_folder_says_nothing_of_energy(tmp_path: Path) -> None:
    comparison(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "nergy" not in page
    assert not (tmp_path / "figures" / "accuracy-energy.svg").exists()
    assert "2.7&nbsp;W" not in page
