"""Three machines at home, as docs/home.md has them: one that can be called, two that cannot."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.lab import HostSpec, Lab
from lab.machine import missing

from edgegossip.net.identity.joined import JoinedRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
    pytest.mark.skipif(shutil.which("nft") is None, reason="a home router needs nft"),
]
EDGEGOSSIP = [sys.executable, "-m", "edgegossip"]
HOME = HostSpec(is_behind_nat=True)


def wait_until(condition: Callable[[], object], folder: Path, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{path}:\n{path.read_text()}" for path in folder.glob("*.txt")]
            raise AssertionError("it did not happen\n" + "\n".join(texts))
        time.sleep(0.1)


def test_a_host_behind_a_home_router_can_call_but_not_be_called(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "http.server", "8000"]
    get = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5).read()"

    def fetches(lab: Lab, host: int, address: str) -> bool:
        words = [sys.executable, "-c", get, f"http://{address}:8000"]
        return lab.start(host, words, output=subprocess.DEVNULL).wait() == 0

    with Lab([HostSpec(), HOME, HOME]) as lab:
        for host in range(3):
            lab.start(host, serve, cwd=tmp_path, output=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while not fetches(lab, 1, lab.addresses[0]):
            assert time.monotonic() < end
        assert fetches(lab, 1, "127.0.0.1")
        assert not fetches(lab, 0, lab.addresses[1])
        assert not fetches(lab, 2, lab.addresses[1])


def test_two_machines_without_an_open_port_train_with_a_third(tmp_path: Path) -> None:
    names = ["desk", "attic", "cellar"]

    def start(lab: Lab, host: int, name: str, *words: str) -> None:
        with (tmp_path / f"{name}.txt").open("wb") as output:
            lab.start(host, [*EDGEGOSSIP, *words], cwd=tmp_path, output=output)

    def text(name: str) -> str:
        return (tmp_path / f"{name}.txt").read_text()

    def has_ended(name: str) -> bool:
        return any(tmp_path.glob(f"{name}/workers/*/summary.json"))

    with Lab([HostSpec(), HOME, HOME]) as lab:
        invite = ["invite", "quickstart", "--num-workers", "3", "--only", "gosgd"]
        invitations = []
        for name in ("invite", "again", "once-more"):
            start(lab, 0, name, *invite, "--host", lab.addresses[0])
            wait_until(lambda name=name: "edgegossip join" in text(name), tmp_path)  # type: ignore[misc]
            invitations += re.findall(r"edgegossip join (\S+)", text(name))
        for host, (name, invitation) in enumerate(zip(names, invitations, strict=True)):
            start(lab, host, name, "join", invitation, "--name", name, "--out", name)
        wait_until(lambda: all(map(has_ended, names)), tmp_path)
        runs = {name: JoinedRun.read(tmp_path / name) for name in names}
        assert {run.rank for run in runs.values()} == {0, 1, 2}
        # The first can be called by the signing service, on its own machine; the others cannot.
        assert [runs[name].listen is None for name in names] == [False, True, True]
        for name in names:
            others = {run.rank for run in runs.values()} - {runs[name].rank}
            for rank in others:
                assert f"link with worker {rank} is up" in text(name)
            assert "gathers" in text(name) or "next, to measure" in text(name)
            assert "is not the run's" not in text(name)
