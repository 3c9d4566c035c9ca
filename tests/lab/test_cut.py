"""Transports notice a cut that nobody reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.lab import HostSpec, Lab
from lab.machine import missing
from tests.lab.talkers import PREPARE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

LEASE = 1.5
TALKER = f"""{PREPARE}
from edgegossip.net.transport import Listener

class Own(Listener):
    def received(self, sender, frame): pass
    def refused(self, rank, reason): pass
    def appeared(self, rank, incarnation): print("appeared", rank, flush=True)
    def disappeared(self, rank, incarnation): print("disappeared", rank, flush=True)
    def interrupted(self, rank, incarnation): print("interrupted", rank, flush=True)

def talk(receiver):
    while True:
        transport.send(receiver, [bytes(19_000)])
        time.sleep(0.05)

transport.open(Own())
talk_to_all()
time.sleep(600)
"""


def test_each_half_misses_the_other_within_three_seconds_and_nobody_else(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / f"{rank}.txt" for rank in range(4)]

    def said(what: str) -> list[list[str]]:
        lines = [path.read_text().splitlines() for path in paths]
        return [sorted(each for each in half if each.startswith(what)) for half in lines]

    with Lab([HostSpec()] * 4) as lab:
        for rank, path in enumerate(paths):
            with path.open("wb") as output:
                words = [sys.executable, "-c", TALKER, str(rank), str(LEASE), *lab.addresses]
                lab.start(rank, words, output=output)
        wait_until(lambda: all(len(each) == 3 for each in said("appeared")), 60)
        lab.cut((0, 1), (2, 3))
        across = [["disappeared 2", "disappeared 3"]] * 2
        across += [["disappeared 0", "disappeared 1"]] * 2
        wait_until(lambda: said("disappeared") == across, 3)
        time.sleep(4)
        lab.mend()
        wait_until(lambda: all(len(each) == 5 for each in said("appeared")), 5)
        assert said("disappeared") == across


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
