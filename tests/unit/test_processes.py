"""Real processes, real signals: whatever ends one, its folder is whole and goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.small_runs import parameters, repeatable_events

from edgegossip.runs.folder import load_results

ROOT = Path(__file__).parents[2]

# Lasts a second or two on one core; checkpoints many times a second.
PROGRAM = """
import sys
from tests.small_runs import FAULTS, small_run, with_rounds
from edgegossip import Interrupted, run

experiment = with_rounds(small_run(sys.argv[1], faults=FAULTS), int(sys.argv[2]))
try:
    run(experiment, out=sys.argv[3], resume=len(sys.argv) > 4, num_threads=2,
        checkpoint_seconds=0.03)
except Interrupted as error:
    sys.exit(130)
"""
ROUNDS = {"all-reduce": "150", "epoch-gossip": "60", "gosgd": "200", "gossip": "150"}


def start(name: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, ROUNDS[name], str(out), *more], cwd=ROOT
    )


def wait_for_a_checkpoint(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has written one of its own, or is done."""
    path, began = out / "checkpoint.safetensors", time.time()
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if path.stat().st_mtime > began:
                return
        time.sleep(0.005)


def check_whole(out: Path) -> None:
    """Every file but the log's last line is whole, at any moment."""
    for path in out.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())
        elif path.suffix == ".jsonl":
            *lines, _ = path.read_bytes().split(b"\n")
            for line in lines:
                json.loads(line)
        else:
            assert path.suffix == ".part"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("all-reduce", signal.SIGINT),
        ("epoch-gossip", signal.SIGTERM),
        ("gosgd", signal.SIGKILL),
        ("gossip", signal.SIGKILL),
        ("gossip", signal.SIGHUP),
    ],
)
def test_a_process_ended_at_any_moment_leaves_a_folder_that_goes_on(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(name, whole).wait(timeout=120) == 0
    moments = random.Random(f"{name} {number}")
    process = start(name, stopped)
    num_ends = 0
    for _ in range(3):
        wait_for_a_checkpoint(stopped, process)
        time.sleep(moments.uniform(0, 0.3))
        process.send_signal(number)
        code = process.wait(timeout=60)
        if code == 0:
            break  # it was done before
        # Between the end of the run and that of the process nobody handles signals.
        assert code == -number or (number != signal.SIGKILL and code == 130)
        num_ends += 1
        check_whole(stopped)
        process = start(name, stopped, "--resume")
    assert process.wait(timeout=120) == 0
    assert num_ends > 0
    assert repeatable_events(stopped) == repeatable_events(whole)
    assert parameters(stopped) == parameters(whole)
    assert load_results(stopped).reason == "finished"


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_a_comparison_with_130_and_no_traceback(
    tmp_path: Path,
) -> None:
    arguments = ["compare", "quickstart", "--out", str(tmp_path / "out"), "--threads", "2"]
    command = [sys.executable, "-m", "edgegossip", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/*/events.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "--resume" in said.splitlines()[-1]
    assert (tmp_path / "out" / "report.html").exists()
    assert subprocess.run([*command, "--resume"], check=False).returncode == 0
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert len(runs) == 4


@pytest.mark.slow
def test_a_full_disk_ends_a_process_with_one_line(tmp_path: Path) -> None:
    limited = (
        "import resource, sys\n"
        "from edgegossip.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["run", "quickstart", "--out", str(tmp_path / "out"), "--only", "gosgd"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if not line.startswith("run ")]
    assert len(errors) == 1
    assert errors[0].startswith("edgegossip: cannot write")
    command = [sys.executable, "-m", "edgegossip", *arguments, "--resume"]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
