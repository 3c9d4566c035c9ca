"""Options of a lab, checked without creating one."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from lab.lab import HostSpec, Lab
from lab.machine import LabError

from lab import machine, run


@pytest.mark.parametrize("bad", [{"cpu": 0.0}, {"bandwidth": 0.0}, {"latency": -1.0}])
def test_hosts_need_sensible_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        HostSpec(**bad)


def test_hosts_of_no_more_than_a_core_stay_on_one_each_as_even_as_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert machine.share_out([0.15, 0.6, None, 0.48, 0.2, 2.0]) == [3, 3, None, 5, 5, None]


def test_nobody_but_root_can_make_a_lab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in machine.missing()[-1]
    with pytest.raises(LabError, match="root"), Lab([HostSpec()]):
        pass
    assert run.main(["--", "true"]) == 0
    assert "root" in capsys.readouterr().out


def test_other_systems_are_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.missing() == ["Linux"]


def test_the_last_value_counts_for_all_hosts_that_are_left() -> None:
    options = run.parse(["--hosts", "3", "--cpu", "0.6", "0.3", "--mbit", "80", "--", "true"])
    assert run.specs(options) == [HostSpec(cpu=cpu, bandwidth=1e7) for cpu in (0.6, 0.3, 0.3)]


@pytest.mark.parametrize("bad", ["1 kill", "1 cut 0", "1 burn 0", "soon kill 0", "1 kill x"])
def test_a_fault_that_cannot_be_read_is_refused(
    bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--at", bad, "--", "true"])
    assert "allowed are" in capsys.readouterr().err
