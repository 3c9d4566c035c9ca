"""Workers' folders written by hand, read and measured."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
from tests.small_runs import NUM_WORKERS
from tests.worker_folders import (
    EXPERIMENT,
    make_folders,
    trained,
    write_lines,
    write_snapshots,
)

from edgegossip.contract.errors import RunFolderError
from edgegossip.machine.energy import Energy
from edgegossip.machine.goodput import NodeUse
from edgegossip.real import gathering as evaluations, worker_folder
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.worker_files import snapshot_path
from edgegossip.real.worker_folder import WorkerFolder
from edgegossip.runs import events as event_log
from edgegossip.runs.events import to_line
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_folders(tmp_path)
    return tmp_path


def sent(time: float, round: int, num_bytes: int) -> dict[str, Any]:
    return {"type": "sent", "time": time, "round": round, "num_bytes": num_bytes}


def measured(out: Path) -> Gathering:
    """A run, as far as it can be measured."""
    gathering = Gathering(EXPERIMENT, out)
    gathering.read()
    while gathering.measure_next():
        pass
    return gathering


def times(gathering: Gathering) -> list[float]:
    return [each.time for each in gathering.history]


# What is measured while the run goes on.


def test_the_newest_moment_is_measured_first(out: Path) -> None:
    write_snapshots(out, 0, 1, 2)
    gathering = Gathering(EXPERIMENT, out)
    gathering.read()
    assert gathering.measure_next()
    assert times(gathering) == [1]
    assert times(measured(out)) == [0, 0.5, 1]


def test_each_moment_has_what_was_done_up_to_it(out: Path) -> None:
    for rank in range(NUM_WORKERS):
        write_lines(out, rank, trained(0.2, 8), sent(0.3, 0, 100), trained(0.7, 8))
    write_snapshots(out, 0, 1, 2)  # at 0, 0.5 and 1 s
    gathering = measured(out)
    assert [each.samples_processed for each in gathering.history] == [0, 32, 64]
    assert [each.bytes_sent for each in gathering.history] == [0, 400, 400]


def test_what_was_measured_is_there_when_the_run_is_resumed(out: Path) -> None:
    write_snapshots(out, 0, 1)
    before = measured(out)
    assert [worker.snapshots for worker in before.workers] == [[]] * NUM_WORKERS
    write_snapshots(out, 1, 2)  # the last once more, where the run goes on
    after = measured(out)
    assert times(after) == [0, 0.5, 1]
    assert after.history[:2] == before.history
    assert [worker.snapshots for worker in after.workers] == [[]] * NUM_WORKERS


def test_a_run_that_goes_on_from_earlier_is_measured_anew_from_there(out: Path) -> None:
    write_snapshots(out, 0, 1, 2, 3)
    measured(out)
    write_snapshots(out, 4)
    Gathering(EXPERIMENT, out).go_on_at(0.7)
    assert times(measured(out)) == [0, 0.5]
    write_snapshots(out, 2)
    assert times(measured(out)) == [0, 0.5, 1]


def test_a_snapshot_goes_only_when_its_evaluation_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def disk_full(path: Path, content: object) -> None:
        raise RunFolderError(f"cannot write {path}")

    write_snapshots(out, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "write_json", disk_full)
        gathering = measured(out)
    assert [worker.snapshots for worker in gathering.workers] == [[0, 1]] * NUM_WORKERS
    assert len(caplog.messages) == 1
    write_snapshots(out, 2)
    while gathering.measure_next():
        pass
    assert times(gathering) == times(Gathering(EXPERIMENT, out)) == [0, 0.5, 1]
    assert [worker.snapshots for worker in gathering.workers] == [[]] * NUM_WORKERS


@pytest.mark.parametrize("content", ['{"0": {"time', "{}", '{"0": 1}', '{"x": {}}', "[]"])
def test_damaged_evaluations_do_not_stop_a_run(out: Path, content: str) -> None:
    (out / WORKERS / "evaluations.json").write_text(content)
    write_snapshots(out, 0)
    assert times(measured(out)) == [0]


# A worker's log.


def test_a_worker_folder_holds_no_lines(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_READ_AT_ONCE", 2**12)
    monkeypatch.setattr(worker_folder, "_BLOCK", 2**12)
    write_lines(out, 0, *(trained(0.01 * step, 8) for step in range(1000)))
    tracemalloc.start()
    try:
        worker = WorkerFolder(out / WORKERS / "0", 0)
        worker.read()
        held = tracemalloc.get_traced_memory()[0]
        assert sum(1 for _ in worker.timeline()) == 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = (out / WORKERS / "0" / "events.jsonl").stat().st_size
    assert held < size / 4
    assert peak < size


@pytest.mark.parametrize("block", [1, 200, 2**18])
def test_a_timeline_is_in_order_whatever_the_order_of_the_log(
    out: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(worker_folder, "_BLOCK", block)
    random = Random(0)
    lines = [trained(random.randrange(20), number) for number in range(100)]
    write_lines(out, 0, *lines)
    worker = WorkerFolder(out / WORKERS / "0", 0)
    worker.read()
    in_order = sorted(lines, key=lambda line: float(line["time"]))
    assert [line for _, line in worker.timeline()] == [to_line(line) for line in in_order]


@pytest.mark.parametrize("block", [1, 2**18])
def test_who_has_recovered_has_crashed_when_it_was_last_seen(
    out: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(worker_folder, "_BLOCK", block)
    recovered = {"type": "recovered", "time": 5.0, "rank": 0}
    ended = {"type": "ended", "time": 7.0}
    write_lines(out, 0, trained(1.0, 5), sent(0.5, 0, 7), {"type": "worker"})
    write_lines(out, 0, trained(4.0, 5), recovered, trained(6.0, 5), ended)
    worker = WorkerFolder(out / WORKERS / "0", 0)
    worker.read()
    seen = [(time, json.loads(line)["type"]) for time, line in worker.timeline()]
    kinds = ["sent", "trained", "crashed", "trained", "recovered", "trained"]
    assert seen == list(zip([0.5, 1.0, 1.0, 4.0, 5.0, 6.0], kinds, strict=True))


def test_totals_grow_with_the_lines_that_come(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    write_lines(out, 0, trained(1.0, 5), sent(1.5, 4, 70))
    worker.read()
    assert (worker.samples.total, worker.num_rounds) == (5, 5)
    write_lines(out, 0, trained(2.0, 7))
    worker.read()
    assert [worker.samples.at(index) for index in (1, 2, 3, 4)] == [0, 5, 5, 12]


def test_what_a_worker_does_again_counts_again(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    again = {"type": "worker", "rank": 0}
    write_lines(out, 0, trained(1.0, 5), trained(3.0, 5), again, trained(2.0, 5))
    worker.read()
    assert worker.samples.at(5) == 5  # at 2.5 s
    assert worker.samples.at(6) == 15


def test_speed_is_measured_without_what_came_with_getting_ready(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    slow, again = {**trained(9.0, 4), "start": 1.0}, {"type": "worker", "rank": 0}
    write_lines(out, 0, slow)
    worker.read()
    assert worker.throughput == 0.5  # nothing better is known
    write_lines(out, 0, {**trained(10.0, 4), "start": 9.0}, again, slow)
    worker.read()
    assert worker.throughput == 4.0


def test_a_line_that_is_not_whole_yet_is_read_later(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    text = json.dumps(trained(1.0, 5)) + "\n"
    path = out / WORKERS / "0" / "events.jsonl"
    path.write_text(text + text[:10])
    worker.read()
    assert worker.samples.total == 5
    path.write_text(text + text)
    worker.read()
    assert worker.samples.total == 10


def test_a_worker_that_never_was_there_has_done_nothing(tmp_path: Path) -> None:
    worker = WorkerFolder(tmp_path / "0", 0)
    worker.read()
    assert (worker.samples.total, worker.num_rounds, worker.throughput) == (0, 0, 0.0)
    assert worker.snapshots == []


# Damage.


def test_damaged_lines_are_skipped_and_named_and_all_others_count(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = out / WORKERS / "1" / "events.jsonl"
    write_lines(out, 1, {"type": "worker"}, trained(0.1, 8))
    with path.open("ab") as file:
        # Zeros are what a power cut leaves, and might be taken for another encoding.
        file.write(b"\0\0\0\n" + b'{"type":"trained","time":NaN}\n' + b'{"type":"sent"\n')
    write_lines(out, 1, sent(0.2, 0, 100), {"type": "trained", "time": 1.0}, trained(0.3, 8))
    folder = WorkerFolder(path.parent, rank=1)
    folder.read()
    assert (folder.samples.total, folder.bytes_sent.total) == (16, 100)
    assert [time for time, _ in folder.timeline()] == [0.1, 0.2, 0.3]
    for number in (3, 4, 5, 7):
        assert f"{path}, line {number} is damaged and skipped" in caplog.text
    folder.read()
    assert len(caplog.records) == 4


def test_a_log_that_cannot_be_read_is_named_once_and_the_others_are_read(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = out / WORKERS / "1" / "events.jsonl"
    path.mkdir()
    write_lines(out, 2, trained(0.1, 8))
    gathering = Gathering(EXPERIMENT, out)
    for _ in range(3):
        gathering.read()
    assert [worker.samples.total for worker in gathering.workers] == [0, 0, 8, 0]
    assert [str(path) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("damage", ["no file of tensors", "another model", "another type"])
def test_a_damaged_snapshot_is_named_once_and_the_others_are_measured(
    out: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_snapshots(out, 0, 1)
    params = EXPERIMENT.workload().initial_params()
    tensors = {"another model": params[1:], "another type": params.double()}
    path = snapshot_path(out / WORKERS / "2" / "snapshots", 1)
    if damage in tensors:
        safetensors.torch.save_file({"params": tensors[damage].clone()}, path)
    else:
        path.write_bytes(b"\xff" * 99)
    (path.parent / "mine.safetensors").write_bytes(b"")  # none of ours
    assert times(measured(out)) == [0, 0.5]
    assert [str(path) in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("name", ["summary.json", "params.safetensors"])
def test_a_worker_whose_end_is_damaged_is_left_out_of_the_result(
    out: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    end = {"reason": "finished", "seconds": 1.0, "wall_seconds": 1.0, "mean_staleness": 0.0}
    params = EXPERIMENT.workload().initial_params()
    for rank in range(NUM_WORKERS):
        folder = out / WORKERS / str(rank)
        (folder / "summary.json").write_text(json.dumps(end))
        safetensors.torch.save_file({"params": params}, folder / "params.safetensors")
    damaged = out / WORKERS / "3" / name
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert len(Gathering(EXPERIMENT, out).finish().worker_accuracies) == NUM_WORKERS - 1
    assert str(damaged) in caplog.text


@pytest.mark.parametrize("is_open", [True, False])
def test_the_model_of_a_worker_that_left_an_open_run_is_no_result(
    out: Path, is_open: bool
) -> None:
    params = EXPERIMENT.workload().initial_params()
    for rank in range(NUM_WORKERS):
        folder, reason = out / WORKERS / str(rank), "interrupted" if rank == 3 else "finished"
        end = {"reason": reason, "seconds": 2.0, "wall_seconds": 2.0, "mean_staleness": 0.0}
        (folder / "summary.json").write_text(json.dumps(end))
        last = {"params": params * (10 if rank == 3 else 1)}
        safetensors.torch.save_file(last, folder / "params.safetensors")
    gathering = Gathering(EXPERIMENT, out)
    gathering.is_open = is_open
    results = gathering.finish()
    told = "worker 3 left before the end. The results do not include its model"
    assert (told in gathering.left_out) == is_open
    assert len(results.worker_accuracies) == NUM_WORKERS - is_open
    assert (results.history[-1].consensus_distance == 0.0) == is_open
    assert results.reason == ("finished" if is_open else "interrupted")


def test_model_is_that_of_the_worker_that_counts_at_the_time(out: Path) -> None:
    """One server at a time serves; the others are on standby."""
    params = EXPERIMENT.workload().initial_params()
    serves = {0: [0, 1], 1: [2, 3]}
    for rank in range(NUM_WORKERS):
        own = out / WORKERS / str(rank)
        for index in range(4):
            # What counts are worse and worse models.
            counted = params * (1 + index) if index in serves.get(rank, []) else params[:0]
            path = snapshot_path(own / "snapshots", index)
            safetensors.torch.save_file({"params": counted}, path)
        end = {"reason": "finished", "seconds": 2.0, "wall_seconds": 2.0, "mean_staleness": 0.0}
        own.joinpath("summary.json").write_text(json.dumps({**end, "is_evaluated": rank == 1}))
        last = {"params": params * (rank + 1)}
        safetensors.torch.save_file(last, own / "params.safetensors")
    results = Gathering(EXPERIMENT, out).finish()
    assert [each.consensus_distance for each in results.history] == [0.0] * 5
    evaluate = EXPERIMENT.workload().evaluate
    expected = [evaluate(params * factor)[0] for factor in (1, 2, 3, 4, 2)]
    assert [each.loss for each in results.history] == pytest.approx(expected)
    assert len(results.worker_accuracies) == 1


# The end.


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"reason": "time limit", "cut_off": [[0, 1.5]]}, [(0, 1.5)]),
        ({"reason": "time limit", "cut_off": []}, []),
        ({"reason": "finished"}, []),
        ({"reason": "time limit"}, None),
        ({"reason": "interrupted", "cut_off": []}, None),
        ({"reason": "time limit", "cut_off": [[0, "early"]]}, None),
    ],
)
def test_a_worker_tells_whether_the_end_cut_off_its_training(
    out: Path, last: dict[str, Any], expected: list[tuple[int, float]] | None
) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    write_lines(out, 0, trained(1.0, 5), {"type": "ended", "time": 2.0, **last})
    worker.read()
    assert worker.cut_off == expected


def test_a_worker_that_was_killed_for_good_has_crashed_when_it_was_last_seen(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    write_lines(out, 0, trained(3.0, 5), sent(1.0, 0, 7))
    worker.read()
    *_, (time, line) = worker.timeline(is_lost=True)
    assert json.loads(line) == {"type": "crashed", "time": 3.0, "rank": 0}
    assert time == 3.0


# Energy, from what workers have logged.


def test_energy_of_real_workers_follows_from_their_logs(out: Path) -> None:
    boards = tuple(
        Platform(throughput=1.0, idle_watts=2.0, busy_watts=6.0) for _ in range(NUM_WORKERS)
    )
    links = Links(default=Link(joules_per_byte=0.5))
    experiment = replace(EXPERIMENT, platforms=boards, links=links)
    for rank in range(NUM_WORKERS):
        training = {**trained(0.4, 8), "start": 0.1}
        write_lines(out, rank, training, sent(0.4, 0, 100))
    write_snapshots(out, 0, 1)  # at 0 and 0.5 s
    gathering = Gathering(experiment, out)
    gathering.read()
    while gathering.measure_next():
        pass
    first, second = (each.energy for each in gathering.history)
    assert first == Energy()
    assert second is not None
    assert second.busy == pytest.approx(NUM_WORKERS * 0.3 * 6.0)
    assert second.idle == pytest.approx(NUM_WORKERS * 0.2 * 2.0)
    assert second.links == pytest.approx(NUM_WORKERS * 100 * 0.5)


def test_a_worker_that_was_down_was_off(out: Path) -> None:
    write_lines(out, 1, trained(0.5, 8), {"type": "worker"}, {"type": "recovered", "time": 2.0})
    folder = WorkerFolder(out / WORKERS / "1", rank=1)
    folder.read()
    assert [folder.off_until(time) for time in (0.2, 1.0, 9.0)] == [0.0, 0.5, 1.5]


def test_energy_is_unknown_while_a_log_is_missing(out: Path) -> None:
    write_snapshots(out, 0)
    shutil.rmtree(out / WORKERS / "1")
    gathering = Gathering(EXPERIMENT, out)
    gathering.workers[1].has_ended = True
    assert gathering.measure_next()
    assert [each.energy for each in gathering.history] == [None]


# Goodput, from what workers have logged.


def test_use_of_real_workers_follows_from_their_logs(out: Path) -> None:
    for rank in range(NUM_WORKERS):
        training = {**trained(0.4, 8), "start": 0.1}  # at 8 / 0.3 samples a second
        later = {"type": "recovered", "time": 0.45, "rank": rank}
        write_lines(out, rank, training, {"type": "worker"}, *([later] if rank == 0 else []))
    write_snapshots(out, 0, 1)  # at 0 and 0.5 s
    gathering = Gathering(EXPERIMENT, out)
    gathering.read()
    while gathering.measure_next():
        pass
    first, second = (each.use for each in gathering.history)
    assert first == NodeUse(goodput=0.0, compute_used=0.0, node_seconds=0.0)
    assert second is not None
    # Worker 0 was down from 0.4 s to 0.45 s, and had sent nothing.
    share = 0.3 / 0.5
    assert second.goodput == pytest.approx(share * (NUM_WORKERS - 1) / NUM_WORKERS)
    on = 0.5 * NUM_WORKERS - 0.05
    assert second.node_seconds == pytest.approx(on)
    assert second.compute_used == pytest.approx(0.3 * NUM_WORKERS / on)


def test_what_a_real_worker_has_sent_is_not_lost_in_its_crash(out: Path) -> None:
    back = {"type": "recovered", "time": 2.0}
    write_lines(
        out, 1, trained(0.5, 8), sent(0.6, 0, 7), trained(0.9, 4), {"type": "worker"}, back
    )
    folder = WorkerFolder(out / WORKERS / "1", rank=1)
    folder.read()
    assert [folder.useful.at(index) for index in (1, 2)] == [8, 12]  # at 0.5 s and 1 s
    assert (folder.useful.total, folder.samples.total) == (8, 12)
