"""Real processes that keep a machine busy, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgegossip.contract.errors import DataError
from edgegossip.machine import loads
from edgegossip.machine.counters import is_running
from edgegossip.machine.loads import SIZES, Load, Pauses, count_words, sort_lines, write_text


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def wait_while(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if not condition():
            return
        time.sleep(0.01)
    pytest.fail("this takes too long")


def wait_until_empty(folder: Path) -> None:
    wait_while(lambda: processes_of(folder) or list(folder.iterdir()))


# The jobs.


@pytest.mark.parametrize("num_bytes", [1, 1000, 2_500_000])
def test_texts_have_the_size_asked_for(num_bytes: int, tmp_path: Path) -> None:
    write_text(tmp_path / "text", num_bytes)
    assert (tmp_path / "text").stat().st_size == num_bytes


def test_texts_have_frequent_words_and_rare_ones(tmp_path: Path) -> None:
    write_text(tmp_path / "text", 300_000)
    counts = count_words(tmp_path / "text", lambda: None).most_common()
    assert len(counts) > 2000
    assert counts[0][1] > 50 * counts[1000][1]


def test_words_are_counted(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a b\na  c\n\na")
    found = count_words(tmp_path / "text", lambda: None)
    assert found == Counter({b"a": 3, b"b": 1, b"c": 1})


def test_each_run_of_a_sort_is_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN", 50_000)
    write_text(tmp_path / "text", 200_000)
    sort_lines(tmp_path / "text", tmp_path / "runs", lambda: None)
    runs = [path.read_bytes().splitlines() for path in (tmp_path / "runs").iterdir()]
    assert len(runs) == 4
    assert all(run == sorted(run) for run in runs)
    text = (tmp_path / "text").read_bytes().splitlines()
    assert sorted(line for run in runs for line in run) == sorted(text)


def test_pauses_leave_a_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 0.3, 0.3])
    slept: list[float] = []
    clock = SimpleNamespace(thread_time=lambda: next(used), sleep=slept.append)
    monkeypatch.setattr(loads, "time", clock)
    Pauses(0.25)()
    assert slept == [pytest.approx(0.9)]


# The processes.


def test_there_are_thirteen_sizes_up_to_2_gb() -> None:
    assert len(SIZES) == 13
    assert (SIZES[0], SIZES[-1]) == (10**6, 2 * 10**9)


@pytest.mark.parametrize(
    "settings",
    [{"kind": "grep"}, {"num_bytes": 0}, {"num_processes": 0}, {"share": 0}, {"share": 1.1}],
)
def test_loads_out_of_range_are_refused(settings: dict[str, object]) -> None:
    good: dict[str, object] = {"kind": "sort", "num_bytes": 10}
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        Load(**good | settings)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wordcount", "sort"])
def test_a_load_is_work_of_others_and_ends_without_a_trace(kind: str, tmp_path: Path) -> None:
    with Load(kind=kind, num_bytes=200_000, num_processes=2).running(tmp_path):
        running = processes_of(tmp_path)
        assert len(running) == 2
        ours = {child.pid for child in psutil.Process().children(recursive=True)}
        assert not ours & {process.pid for process in running}
        before = sum(sum(process.cpu_times()[:2]) for process in running)
        time.sleep(0.5)
        after = sum(sum(process.cpu_times()[:2]) for process in running)
        assert after > before
    wait_until_empty(tmp_path)


@pytest.mark.slow
def test_a_load_ends_with_what_runs_beside_it(tmp_path: Path) -> None:
    load = Load(kind="sort", num_bytes=200_000)
    with pytest.raises(ZeroDivisionError), load.running(tmp_path):
        raise ZeroDivisionError
    wait_until_empty(tmp_path)


@pytest.mark.slow
def test_a_load_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from edgegossip.machine.loads import Load\n"
        "with Load(kind='sort', num_bytes=500_000, num_processes=2)"
        ".running(Path(sys.argv[1])):\n"
        "    print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        parent.stdout.readline()
        assert len(processes_of(tmp_path)) == 3
        parent.send_signal(signal.SIGKILL)
    wait_until_empty(tmp_path)


@pytest.mark.slow
def test_a_load_whose_process_was_killed_says_so(tmp_path: Path) -> None:
    context = Load(kind="wordcount", num_bytes=100_000, num_processes=2).running(tmp_path)
    context.__enter__()
    processes_of(tmp_path)[0].kill()
    wait_while(lambda: len(processes_of(tmp_path)) == 2)
    with pytest.raises(DataError, match=r"a wordcount of 0\.1 MB ended early: killed"):
        context.__exit__(None, None, None)
    wait_until_empty(tmp_path)


@pytest.mark.slow
def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    context = Load(kind="wordcount", num_bytes=100_000).running(tmp_path)
    context.__enter__()
    jobs = processes_of(tmp_path)
    for path in tmp_path.glob("*/text"):
        path.unlink()
    # One that ends has no command line any more some time before it is gone.
    wait_while(lambda: any(is_running(job.pid) for job in jobs))
    with pytest.raises(DataError, match=r"ended early: .*No such file or directory"):
        context.__exit__(None, None, None)
    wait_until_empty(tmp_path)


def test_a_disk_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=5e9)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    load = Load(kind="sort", num_bytes=2 * 10**9, num_processes=2)
    with pytest.raises(DataError, match=r"needs 6000 MB in .*, where 5000 MB are free"):
        load.running(tmp_path).__enter__()
    assert os.listdir(tmp_path) == []
