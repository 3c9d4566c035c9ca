"""Whole runs on a real Ray, with several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_clusters import RayNodes, cluster
from tests.small_runs import parameters, repeatable_events
from tests.unit.test_at_once import study

from edgegossip.cli.main import main
from edgegossip.integrations.ray_runs import RayRuns
from edgegossip.runs.study import Cell, Row, Session, run_study

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
pytest.importorskip("ray", reason="needs ray; pip install 'edgegossip[ray]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster(1, 1) as found:
        yield found


OWN_RECIPE = """
from dataclasses import replace
import torch
from edgegossip.recipes.quickstart import quickstart

class Own(torch.nn.Sequential):
    pass

def own_model():
    return Own(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def own():
    known = quickstart()
    changed = {}
    for name in ("gosgd", "gossip"):
        experiment = known.experiments[name]
        task = replace(experiment.task, model=own_model)
        changed[name] = replace(experiment, task=task, max_seconds=2.0)
    return replace(known, experiments=changed, baseline="gosgd")
"""


def test_a_recipe_of_ones_own_is_sent_along(tmp_path: Path, nodes: RayNodes) -> None:
    recipe = tmp_path / "my_recipe.py"
    recipe.write_text(OWN_RECIPE)
    compare_own = ["compare", f"{recipe}:own", "--out"]
    there = ["--pool", "ray", "--ray-address", nodes.address]
    assert main([*compare_own, str(tmp_path / "here")]) == 0
    assert main([*compare_own, str(tmp_path / "there"), *there]) == 0
    for name in ("gosgd", "gossip"):
        here, found = (tmp_path / place / name for place in ("here", "there"))
        assert repeatable_events(found) == repeatable_events(here)
        assert parameters(found) == parameters(here)


SWEEP = ["sweep", "quickstart", "--only", "gosgd", "--num-epochs", "2", "--seeds", "0..3"]


def swept(folder: Path) -> dict[str, Any]:
    """Rows and parameters of a sweep."""
    kept = json.loads((folder / "study.json").read_text())["cells"]
    return {
        name: (cell["row"], (folder / "cells" / name / "params.safetensors").read_bytes())
        for name, cell in kept.items()
    }


def test_a_sweep_finds_what_it_finds_here(tmp_path: Path, nodes: RayNodes) -> None:
    there = ["--pool", "ray", "--ray-address", nodes.address]
    assert main([*SWEEP, "--processes", "1", "--out", str(tmp_path / "here")]) == 0
    assert main([*SWEEP, *there, "--out", str(tmp_path / "there")]) == 0
    assert swept(tmp_path / "there") == swept(tmp_path / "here")


def wait_for_a_loss(marks: Path, session: Session) -> Row:
    """Tell the node, and wait until another node is killed."""
    node = this_node()
    (marks / node).touch()
    while not (marks / "killed").exists():
        time.sleep(0.05)
    return {"node": node}


def this_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def test_cells_of_a_killed_node_are_begun_again(tmp_path: Path, nodes: RayNodes) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def kill() -> None:
        while len([*marks.iterdir()]) < 2:
            time.sleep(0.05)
        nodes.kill(nodes.others.pop())
        (marks / "killed").touch()

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    cells = [Cell(name=name, group="a", work=partial(wait_for_a_loss, marks)) for name in "ab"]
    try:
        rows = run_study(study(*cells), out=tmp_path / "out", at_once=RayRuns(nodes.address))
    finally:
        if not nodes.others:
            nodes.add_node(1)
    assert {*rows} == {"a", "b"}
    assert len({row["node"] for row in rows.values()}) == 1


# Processes.


def started(out: Path, mark: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edgegossip", *SWEEP]
    options = ["--pool", "ray", "--processes", "2", "--out", str(out)]
    return subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "src", "EDGEGOSSIP_TEST": mark},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def marked(mark: str) -> list[psutil.Process]:
    """Processes that were started from one with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("EDGEGOSSIP_TEST") == mark:
                found.append(process)
    return found


def test_an_interrupted_sweep_keeps_what_has_ended(tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "sweep"
    with started(out, mark) as process:
        while process.poll() is None and not [*out.glob("cells/*/*/summary.json")]:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "--resume" in told
    num_kept = len(swept(out))
    assert num_kept < 4
    assert not [*out.glob("cells/*/.*")]
    assert not [*Path("/tmp").glob("eg-ray-*/eg-run-*")]
    _, alive = psutil.wait_procs(marked(mark), timeout=5)
    assert alive == []
    assert main([*SWEEP, "--processes", "1", "--resume", "--out", str(out)]) == 0
    assert len(swept(out)) == 4


def test_a_run_whose_process_is_stopped_is_started_again(tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "sweep"
    with started(out, mark) as process:
        runs: list[psutil.Process] = []
        while process.poll() is None and not runs:
            with suppress(psutil.NoSuchProcess):
                runs = [each for each in marked(mark) if "_carry_out" in each.name()]
        os.kill(runs[0].pid, signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert len(swept(out)) == 4
    assert not [*Path("/tmp").glob(f"eg-run-{runs[0].pid}-*")]


def test_a_killed_driver_takes_its_processes_along(tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "sweep"
    with started(out, mark) as process:
        while process.poll() is None and not [*out.glob("cells/*/*/summary.json")]:
            time.sleep(0.01)
        assert len(marked(mark)) > 3
        process.kill()
        process.communicate(timeout=60)
    # Two of Ray's own wait for their head for up to a minute before they end.
    _, alive = psutil.wait_procs(marked(mark), timeout=120)
    assert alive == []
