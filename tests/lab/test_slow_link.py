"""A slow uplink that neighbors share: nothing is lost on it, and its bytes are known."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from lab.lab import HostSpec, Lab
from lab.machine import missing
from tests.lab.talkers import PREPARE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

MBIT = 1e6 / 8
NUM_FRAMES = 2
FRAME_BYTES = 1_000_000
SLOW = 1

TALKER = f"""{PREPARE}
from edgegossip.net.transport import Listener

class Own(Listener):
    def received(self, sender, frame): print("received", sender, len(frame), flush=True)
    def refused(self, rank, reason): print("refused", rank, reason, flush=True)
    def appeared(self, rank, incarnation): here.release()
    def disappeared(self, rank, incarnation): print("disappeared", rank, flush=True)
    def interrupted(self, rank, incarnation): print("interrupted", rank, flush=True)

def talk(receiver):
    for _ in range({NUM_FRAMES}):
        transport.send(receiver, [bytes({FRAME_BYTES})])

here = threading.Semaphore(0)
transport.open(Own())
for _ in others:
    here.acquire()
if rank == {SLOW}:
    talk_to_all()
while True:
    time.sleep(0.5)
    print("bytes", transport.network_bytes, flush=True)
"""


class Workers:
    """Four, one of them on a link of 4 Mbit/s, and what they have said."""

    def __init__(self, lab: Lab, folder: Path, lease: float) -> None:
        self._paths = [folder / f"{rank}.txt" for rank in range(4)]
        for rank, path in enumerate(self._paths):
            with path.open("wb") as output:
                words = [sys.executable, "-c", TALKER, str(rank), str(lease), *lab.addresses]
                lab.start(rank, words, output=output)

    def said(self, what: str) -> list[str]:
        lines = [line for path in self._paths for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith(what)]

    def network_bytes(self, rank: int) -> int:
        lines = self._paths[rank].read_text().splitlines()
        return int([line for line in lines if line.startswith("bytes")][-1].split()[1])

    def wait_for(self, number: int, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.said(what)) < number:
            assert time.monotonic() < deadline, f"only {self.said(what)}"
            time.sleep(0.1)


def test_with_a_longer_lease_a_slow_link_loses_nothing_and_its_bytes_are_known(
    tmp_path: Path,
) -> None:
    with Lab([HostSpec(), HostSpec(bandwidth=4 * MBIT), HostSpec(), HostSpec()]) as lab:
        workers = Workers(lab, tmp_path, lease=6.0)
        workers.wait_for(3 * NUM_FRAMES, f"received {SLOW} {FRAME_BYTES}", 120)
        assert workers.said("disappeared") == workers.said("refused") == []
        time.sleep(1.5)
        counted, passed = workers.network_bytes(SLOW), sum(lab.traffic(SLOW))
    # The rest is headers, receipts and what was lost and sent again.
    assert 0.8 * passed < counted < passed
