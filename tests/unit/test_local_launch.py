"""Processes with a folder of pictures each, which no other process reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.small_runs import events, summary

from edgegossip.real.launch import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_pictures.py"
NUM_PICTURES = (20, 12, 30)
"""Of each class, for each rank."""
WATCHED = '''
import os
from pathlib import Path
import edgegossip as eg
from own_pictures import own_pictures as original

READS = Path(__file__).parent / "reads"


def watched(data_dir: str = "photos", num_workers: int = 3, num_epochs: int = 2):
    """The example, which writes down what each process reads."""
    read = eg.pictures

    def reading(folder, *arguments, **settings):
        READS.mkdir(exist_ok=True)
        with (READS / str(os.getpid())).open("a") as file:
            file.write(Path(folder).name + " ")
        return read(folder, *arguments, **settings)

    eg.pictures = reading
    return original(data_dir=data_dir, num_workers=num_workers, num_epochs=num_epochs)
'''


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with the recipe, and a folder of pictures for each rank."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "watched.py").write_text(WATCHED)
    random = np.random.default_rng(0)
    for rank, number in enumerate(NUM_PICTURES):
        for label, name in enumerate(("disc", "square")):
            folder = tmp_path / "photos" / str(rank) / name
            folder.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 100, (16, 16, 3)) + 120 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path


def program(work: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edgegossip", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=work, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return output


def reads(work: Path) -> list[str]:
    """The ranks that each process has read."""
    return sorted(path.read_text() for path in (work / "reads").iterdir())


@pytest.mark.slow
def test_launch_with_a_folder_for_each_rank(work: Path) -> None:
    out = work / "out"
    words = ["watched.py:watched", "--data-dir", "photos/{rank}", "--out", str(out)]
    said(program(work, "launch", *words))
    assert summary(out)["reason"] == "finished"
    assert "final_accuracy" in summary(out)
    sizes = [2 * number - round(0.2 * number) for number in NUM_PICTURES]
    assert events(out, "experiment")[0]["shard_sizes"] == sizes
    # A worker, and what measured for it; the launcher itself reads nothing.
    assert reads(work) == ["0 ", "0 ", "1 ", "1 ", "2 ", "2 "]


@pytest.mark.slow
def test_workers_with_a_folder_of_one_name_on_machines_of_their_own(work: Path) -> None:
    """Each machine has its own `photos`, as in the tutorial."""
    machines = [work / f"machine{rank}" for rank in range(2)]
    for rank, there in enumerate(machines):
        there.mkdir()
        shutil.copy(EXAMPLE, there)
        shutil.move(work / "photos" / str(rank), there / "photos")
    recipe = ["own_pictures.py:own_pictures", "--num-workers", "2", "--num-epochs", "2"]
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(2)]
    workers = [
        program(
            there,
            "worker",
            *recipe,
            *["--rank", str(rank), "--out", f"run/workers/{rank}"],
            *["--listen", endpoints[rank], "--connect", endpoints[1 - rank]],
        )
        for rank, there in enumerate(machines)
    ]
    output = [said(process) for process in workers]
    assert "edgegossip gather own_pictures.py:own_pictures --num-workers 2" in output[0]
    shutil.copytree(machines[1] / "run" / "workers" / "1", machines[0] / "run/workers/1")
    first = said(program(machines[0], "gather", *recipe, "--out", "run"))
    assert "workers 0, 1 have models to measure" in first
    assert "edgegossip measure own_pictures.py:own_pictures --num-workers 2" in first
    shutil.copytree(machines[0] / "run" / "averaged", machines[1] / "run" / "averaged")
    for rank, there in enumerate(machines):
        said(program(there, "measure", *recipe, "--rank", str(rank), "--out", "run"))
    shutil.copy(machines[1] / "run/measured/1.json", machines[0] / "run/measured")
    said(program(machines[0], "gather", *recipe, "--out", "run"))
    assert summary(machines[0] / "run")["reason"] == "finished"


@pytest.mark.slow
def test_a_worker_without_its_folder_ends_with_one_line(work: Path) -> None:
    recipe = ["own_pictures.py:own_pictures", "--data-dir", "elsewhere"]
    process = program(work, "worker", *recipe, "--rank", "1", "--listen", "tcp/127.0.0.1:0")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 1
    assert output.strip().splitlines()[-1] == (
        "edgegossip: data of worker 1: there is no folder elsewhere; expected one with a "
        "folder of each class"
    )
