"""Jobs that run beside training, and what is recorded of it, for the predictor's figures."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import mapreduce
from benchmarks.mapreduce import map_task, reduce_task
from benchmarks.predictor_trace import Trace, events_from, replay
from tests.counted import Counted

from edgegossip.machine.counters import Usage
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor

LINES = [b"to be or", b"not to be"]
TEXT = b"\n".join(LINES) + b"\n"


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(mapreduce, "TEXT", TEXT)
    with mapreduce.Keepers(("127.0.0.1", 0), mapreduce.Keeper) as keepers:
        # The default looks twice a second whether it is over.
        threading.Thread(target=keepers.serve_forever, args=(0.01,), daemon=True).start()
        host, port = keepers.server_address[:2]
        yield str(host), int(port)
        keepers.shutdown()


def job(kind: str, server: tuple[str, int], folder: Path, splits: list[int]) -> bytes:
    parts = [folder / str(number) for number in range(len(splits))]
    for num_bytes, part in zip(splits, parts, strict=True):
        map_task(kind, server, num_bytes, part)
    reduce_task(kind, server, parts, folder / "out")
    return (folder / "out").read_bytes()


def test_word_count_adds_the_words_of_all_splits(
    keeper: tuple[str, int], tmp_path: Path
) -> None:
    out = job("wordcount", keeper, tmp_path, [len(TEXT), 2 * len(TEXT)])
    found = {word: int(number) for word, number in map(bytes.split, out.splitlines())}
    assert found == Counter(3 * TEXT.split())


def test_sort_leaves_all_lines_of_all_splits_in_order(
    keeper: tuple[str, int], tmp_path: Path
) -> None:
    out = job("sort", keeper, tmp_path, [len(TEXT), 2 * len(TEXT)])
    assert out.splitlines() == sorted(3 * LINES)


def test_a_replayed_trace_gives_the_forecasts_that_were_made() -> None:
    machine = Counted()
    trace = Trace(machine, machine.clock)
    monitor = Monitor(PerformancePredictor(), counters=trace, clock=machine.clock)
    made = []
    for number in range(20):
        start = machine.now
        for _ in range(number % 3 + 1):  # the last blocks end long after a reading
            machine.pass_by(0.7, machine=Usage(0.1 * (number % 4), 1e6, 2e6))
            monitor.read()
        machine.pass_by(0.1 * (number % 5))
        trace.trained(monitor, start, machine.now, cost=100.0 + 10 * (number % 7))
        made.append(trace.forecast(monitor))
    kept = json.loads(json.dumps(trace.as_json()))
    again = replay(events_from(kept), PerformancePredictor(), kept["num_cores"], kept["quota"])
    assert again == made
