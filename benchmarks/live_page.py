"""How soon is the page of `edgegossip watch` live, what does it cost, and does it keep up?

    python -m benchmarks.live_page [--seconds 20] [--json FILE]

Logs of workers grow as those of real workers do, and the page is open in a headless Chromium.
Measured are: seconds from the start of the command to the live page; processor time of the
command for 8 workers that log 20 lines a second each, with the page open and after it was
closed; frames a second for 64 workers that log 2,000 lines a second together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from benchmarks.kept import about, rounded
from tests.browser import Browser
from tests.run_folders import header

from edgegossip.real.launch import free_ports
from edgegossip.runs.files import write_json

LIVE = "document.body?.dataset.live === 'yes'"
FRAMES = """
window.frames_at = [];
(function frame(now) { window.frames_at.push(now); requestAnimationFrame(frame); })(0);
0
"""


@contextmanager
def writing(run: Path, num_workers: int, rate: float) -> Iterator[None]:
    """Workers that log so many lines a second each, ten times a second."""
    logs = []
    for rank in range(num_workers):
        folder = run / "workers" / str(rank)
        folder.mkdir(parents=True)
        logs.append((folder / "events.jsonl").open("a"))
        first = {**header("real"), "type": "worker", "rank": rank, "num_workers": num_workers}
        logs[-1].write(json.dumps(first) + "\n")
        logs[-1].flush()
    is_over = threading.Event()

    def write() -> None:
        began = time.monotonic()
        num_written = 0
        while not is_over.wait(0.1):
            due = int((time.monotonic() - began) * rate)
            for rank, log in enumerate(logs):
                for line in range(num_written, due):
                    event = {
                        **{"type": "trained", "rank": rank, "num_steps": 1},
                        **{"num_samples": 64, "loss": 2.3 / (1 + line / 500)},
                        **{"start": line / rate, "time": (line + 0.9) / rate},
                    }
                    log.write(json.dumps(event) + "\n")
                log.flush()
            num_written = due

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for log in logs:
            log.close()


@contextmanager
def watching(run: Path, browser: Browser) -> Iterator[tuple[float, psutil.Process]]:
    """The command with its page open; seconds until it is live, and the process."""
    [port] = free_ports(1)
    words = [sys.executable, "-m", "edgegossip", "watch", str(run), "--at", str(port)]
    began = time.monotonic()
    command = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert command.stdout is not None
    try:
        command.stdout.readline()
        browser.call("Page.navigate", url=f"http://127.0.0.1:{port}")
        browser.until(LIVE)
        yield time.monotonic() - began, psutil.Process(command.pid)
    finally:
        command.terminate()
        command.wait()
        command.stdout.close()


def core_share(process: psutil.Process, seconds: float) -> float:
    """Share of a core that a process uses."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def measure(place: Path, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ExitStack() as opened:
        browser = opened.enter_context(closing(Browser(place / "browser")))
        with writing(place / "few", 8, 20), watching(place / "few", browser) as (live, process):
            found["seconds until live"] = live
            found["core share, 8 workers"] = core_share(process, seconds)
            browser.call("Page.navigate", url="about:blank")
            time.sleep(2)  # a reader who has left is noticed by the next lines
            found["core share, nobody watches"] = core_share(process, seconds)
            complaints = [*browser.complaints]  # before the server's end adds its own
        with (
            writing(place / "many", 64, 31.25),
            watching(place / "many", browser) as (_, process),
        ):
            browser.value(FRAMES)
            found["core share, 64 workers"] = core_share(process, seconds)
            at = sorted(browser.value("window.frames_at"))[1:]
            gaps = sorted(b - a for a, b in pairwise(at))
            found["frames a second"] = 1000 * len(gaps) / (at[-1] - at[0])
            found["99 % of frames, ms"] = gaps[int(0.99 * len(gaps))]
            found["samples shown"] = browser.value("total(run.workers.get(63).samples, 1e9)")
            found["complaints"] = complaints + browser.complaints[len(complaints) :]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="file of the figures")
    options = parser.parse_args()
    found = {**about(options), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as place:
        found |= measure(Path(place), options.seconds)
    print(json.dumps(rounded(found), indent=1))
    if options.json:
        write_json(options.json, rounded(found))


if __name__ == "__main__":
    main()
