"""Hosts of unequal processors and cables measure themselves as what they are."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.lab import HostSpec, Lab
from lab.machine import missing

from edgegossip.net.identity.joined import JoinedRun
from edgegossip.plan.machines import read_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]
EDGEGOSSIP = [sys.executable, "-m", "edgegossip"]
DESK, FAST, SLOW = range(3)
HOSTS = [HostSpec(), HostSpec(cpu=0.6, bandwidth=2.5e6), HostSpec(cpu=0.2, bandwidth=2.5e6)]


def wait_until(condition: Callable[[], object], folder: Path) -> None:
    deadline = time.monotonic() + 600.0
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{path}:\n{path.read_text()}" for path in folder.glob("*.txt")]
            raise AssertionError("it did not happen\n" + "\n".join(texts))
        time.sleep(0.1)


def test_speeds_and_links_are_those_of_the_hosts(tmp_path: Path) -> None:
    def start(lab: Lab, host: int, name: str, *words: str) -> None:
        with (tmp_path / f"{name}.txt").open("wb") as output:
            lab.start(host, [*EDGEGOSSIP, *words], cwd=tmp_path, output=output)

    def text(name: str) -> str:
        return (tmp_path / f"{name}.txt").read_text()

    plan = ["plan", "quickstart", "--live", "--yes", "--num-workers", "2", "--only", "gosgd"]
    plan += ["--seeds", "0", "--max-seconds", "2", "--budget", "1runs"]
    with Lab(HOSTS) as lab:
        start(lab, DESK, "plan", *plan, "--host", lab.addresses[DESK])
        wait_until(lambda: text("plan").count("edgegossip join") == 2, tmp_path)
        invitations = re.findall(r"join (\S+)", text("plan"))
        for host, name in ((FAST, "fast"), (SLOW, "slow")):
            start(lab, host, name, "join", invitations.pop(), "--name", name, "--out", name)
        ended = "{}/workers/*/summary.json".format
        wait_until(
            lambda: all(any(tmp_path.glob(ended(name))) for name in ("fast", "slow")), tmp_path
        )
    found = {each.name: each for each in read_machines(tmp_path / "quickstart.toml")}
    speeds = [found[name].samples_per_second or 0.0 for name in ("fast", "slow")]
    assert 2.0 < speeds[0] / speeds[1] < 4.5
    for name in ("fast", "slow"):
        assert found[name].mbits == pytest.approx(19.0, rel=0.2)  # 20 with headers
        assert found[name].latency_ms < 20.0
        assert JoinedRun.read(tmp_path / name).kind == "planned"
