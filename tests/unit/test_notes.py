"""Notes: numbers that an algorithm puts on record, in the simulator and on a network."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.every_word import EveryWord
from tests.observers import Silent
from tests.parity import SETTINGS, Steady, run_all
from tests.scripted import world
from tests.tiers import thorough
from tests.trials import trials
from tests.worlds import NUM_PARAMS, UNEVEN, ManySamples, Recorder, loss_of, make_world

from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.contract.protocol import (
    MAX_NOTED,
    Effect,
    Event,
    Finish,
    Note,
    Rank,
    Seconds,
    SetTimer,
    Started,
)
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.worker_files import NOTES_A_SECOND, NOTES_AT_ONCE, WorkerEventLog
from edgegossip.runs.events import EventLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_simulator_hands_a_note_to_the_observer_at_once() -> None:
    note = Note("window", {"rate": 4, "reward": 0.5})

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Started):
            return [SetTimer("later", now + 2.0)]
        return [note, Finish()] if rank == 1 else [Finish()]

    found = world(answer).run()
    assert found.watcher.notes == [(2.0, 1, note)]
    assert found.simulator.now == 2.0


@thorough
def test_hosts_hand_on_the_notes_that_the_simulator_does() -> None:
    class Notes(Silent):
        def __init__(self) -> None:
            self.rounds: list[float] = []

        def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
            self.rounds.append(note.numbers["round"])

    network, found = MemoryNetwork(), [Notes() for _ in range(NUM_WORKERS)]
    hosts = [
        Host(
            EveryWord(NUM_WORKERS),
            rank,
            NUM_WORKERS,
            torch.zeros(NUM_PARAMS),
            ManySamples(rank, 0.1, 4),
            network.transport(rank),
            settings=SETTINGS,
            services=HostServices(
                evaluate=loss_of, forecaster=Steady(1.0), observer=found[rank]
            ),
        )
        for rank in range(NUM_WORKERS)
    ]
    run_all(hosts)
    recorder = Recorder()
    simulated_world = make_world(
        EveryWord(NUM_WORKERS), size=4, platforms=UNEVEN, observer=recorder
    )
    assert simulated_world.run(until=1000.0)
    simulated = [note.numbers["round"] for _, rank, note in recorder.notes if rank == 0]
    assert [each.rounds for each in found] == [simulated] * NUM_WORKERS


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("window", {f"x{i}": 0.0 for i in range(MAX_NOTED + 1)}),
        ("window", {"x" * 41: 0.0}),
        ("w" * 41, {}),
    ],
)
def test_a_note_is_small(kind: str, numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="make two of it"):
        Note(kind, numbers)


def test_a_note_is_a_line_of_the_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.noted(1.5, 0, Note("window", {"rate": 2, "reward": -math.inf}))
    log.close()
    numbers = {"rate": 2, "reward": None}
    expected = {"type": "noted", "time": 1.5, "rank": 0, "kind": "window", "numbers": numbers}
    assert lines(tmp_path / "events.jsonl") == [expected]


def test_a_worker_that_notes_too_much_fills_no_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = WorkerEventLog(tmp_path / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * NOTES_AT_ONCE):
            diary.noted(0.0, 0, Note("step", {}))
        for _ in range(2 * NOTES_A_SECOND):
            diary.noted(1.0, 0, Note("step", {}))
    diary.close()
    assert len(lines(tmp_path / "events.jsonl")) == NOTES_AT_ONCE + NOTES_A_SECOND
    assert len(caplog.messages) == 1


def test_adsp_notes_each_window_of_its_search() -> None:
    algorithm = ADSP(num_workers=NUM_WORKERS - 1, num_rounds=60, window=10.0, min_interval=1.0)
    recorder = Recorder()
    found = make_world(algorithm, platforms=UNEVEN, lr=0.05, observer=recorder)
    assert found.run(until=1000.0)
    tried = trials(found.states[0])
    assert len(tried) > 2
    assert [(at, 0, each.note) for each in tried for at in [each.at]] == recorder.notes
    first = recorder.notes[0][2].numbers
    assert {"window", "rate", "reward", "loss", "num_commits"} <= {*first}
    assert "at" not in first
    assert sum(each.num_commits for each in tried) <= 60 * (NUM_WORKERS - 1)
