"""`edgegossip status`: the state of each worker from logs, here or over the network."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.run_folders import Event, header, rounds
from tests.unit.test_observer import Mesh
from tests.unit.test_watch import crash, link, write

from edgegossip.cli.main import main
from edgegossip.report.status import RunState, run_state

TRAINED = {"type": "trained", "num_steps": 1, "num_samples": 16, "loss": 0.5}


def trained(rank: int, time: float) -> Event:
    return {**TRAINED, "rank": rank, "start": time - 0.5, "time": time}


def begin(folder: Path) -> list[Path]:
    """Logs of four workers that have begun."""
    logs = [folder / "workers" / str(rank) / "events.jsonl" for rank in range(4)]
    for rank, log in enumerate(logs):
        write(log, {**header("real"), "type": "worker", "rank": rank}, trained(rank, 1.0))
    return logs


def states(folder: Path) -> list[str]:
    return [each.state for each in found(folder).workers]


def found(folder: Path) -> RunState:
    state = run_state(folder)
    assert state is not None
    return state


def test_the_state_of_a_simulated_run_counts_what_its_log_says(tmp_path: Path) -> None:
    events = rounds(20, has_barrier=False)
    end = max(event["time"] for event in events)
    write(tmp_path / "events.jsonl", header("gossip"), *events, crash(3, end))
    state = found(tmp_path)
    assert (state.name, state.seconds, state.reason) == ("gossip", end, None)
    assert [worker.state for worker in state.workers] == ["finished"] * 3 + ["lost"]
    first = state.workers[0]
    assert (first.samples, first.round, first.samples_per_second) == (5000, 19, 1000.0)
    write(tmp_path / "events.jsonl", {"type": "ended", "time": end + 1, "reason": "target"})
    assert found(tmp_path).reason == "target"


def test_real_workers_are_lost_cut_silent_or_stopped(tmp_path: Path) -> None:
    logs = begin(tmp_path)
    assert states(tmp_path) == ["running"] * 4
    write(logs[0], link("disconnected", 0, 3, 1.4), link("disconnected", 0, 2, 1.4))
    write(logs[2], link("disconnected", 2, 0, 1.3))
    assert states(tmp_path) == ["cut", "running", "cut", "lost"]
    assert found(tmp_path).workers[3].without_link == [0]
    write(logs[3], trained(3, 2.5))
    assert states(tmp_path)[3] == "cut"
    write(logs[0], link("connected", 0, 3, 2.6), link("connected", 0, 2, 2.6))
    write(logs[2], link("connected", 2, 0, 2.6))
    assert states(tmp_path) == ["running"] * 4
    write(logs[1], {"type": "ended", "time": 2.7, "rank": 1, "reason": "interrupted"})
    write(logs[0], trained(0, 6.0))
    write(logs[2], trained(2, 6.0))
    assert states(tmp_path) == ["running", "stopped", "running", "silent"]
    write(logs[1], {**header("real"), "type": "worker", "rank": 1}, trained(1, 6.0))
    assert states(tmp_path)[1] == "running"


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path)
    assert main(["status", str(tmp_path)]) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == "real: 1.0 s, in progress"
    assert titles.split()[:3] == ["worker", "state", "round"]
    assert rows[3].split() == ["3", "running", "-", "16", "32.0", "0.5", "1.0", "s", "-"]
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][3]["samples"] == 16


def test_an_empty_folder_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert main(["status", "--connect", "tcp/127.0.0.1:9", "--seconds", "0.5"]) == 1
    assert "nothing was heard of a run at tcp/127.0.0.1:9" in capsys.readouterr().err


def test_an_observer_prints_the_state_of_a_run_elsewhere(
    tmp_path: Path, opened: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = Mesh(tmp_path, opened)
    mesh.worker(0)
    write(mesh.logs[0], {**header("real"), "type": "worker", "rank": 0}, trained(0, 1.0))
    tls = str(mesh.tls("observer").certificate.parent)
    assert main(["status", "--connect", mesh.endpoints[0], "--tls", tls, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["name"] == "real"
    assert [each["samples"] for each in printed["workers"]] == [16, 0, 0, 0]
