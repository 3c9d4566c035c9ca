"""The pool on a real Ray, with several nodes on this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_clusters import RayNodes, cluster
from tests.small_runs import ctrl_c_at
from tests.unit.test_at_once import study
from tests.unit.test_ray_pool import experiment, left, local

from edgegossip.cli.main import main
from edgegossip.contract.errors import Interrupted, NetworkError
from edgegossip.integrations.ray.ray_pool import RayPool
from edgegossip.integrations.ray_runs import RayRuns
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.runs.study import Cell, Row, Session, run_study

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
pytest.importorskip("ray", reason="needs ray; pip install 'edgegossip[ray]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster(1, 1) as found:
        yield found


@contextmanager
def ready(nodes: RayNodes) -> Iterator[RayPool]:
    """A pool whose two actors are there."""
    with RayPool(nodes.address, min_seconds=0.0) as pool:
        while len(pool.seats) < 2:
            time.sleep(0.05)
        yield pool


@contextmanager
def at_event(number: int, do: Callable[[], None], experiment: Experiment) -> Iterator[None]:
    """Do something in the midst of a run: when its algorithm handles that event."""
    kind: Any = type(experiment.algorithm)
    handle, count = kind.handle, itertools.count(1)

    def handled(self: object, *arguments: object) -> object:
        if next(count) == number:
            do()
        return handle(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "handle", handled)
        yield


@pytest.mark.parametrize("name", ["gosgd", "every-word"])
def test_results_are_those_of_the_local_pool(
    tmp_path: Path, nodes: RayNodes, name: str
) -> None:
    with ready(nodes) as pool:
        run(experiment(name), out=tmp_path, open_pool=lambda: pool)
        assert all(seat.seconds_per_cost for seat in pool.seats)
    assert left(tmp_path) == local(name)


@pytest.mark.parametrize("begins", ["here", "there"])
def test_a_checkpoint_of_one_pool_goes_on_in_another(
    tmp_path: Path, nodes: RayNodes, begins: str
) -> None:
    ray: dict[str, Any] = {"open_pool": lambda: RayPool(nodes.address, min_seconds=0.0)}
    here: dict[str, Any] = {"num_threads": 1}
    first, second = (here, ray) if begins == "here" else (ray, here)
    begun = experiment("every-word")
    with ctrl_c_at(40, begun.algorithm), pytest.raises(Interrupted):
        run(begun, out=tmp_path, **first)
    run(begun, out=tmp_path, resume=True, **second)
    assert left(tmp_path) == local("every-word")


def test_a_killed_actor_changes_nothing(tmp_path: Path, nodes: RayNodes) -> None:
    with ready(nodes) as pool:
        seats = pool.seats

        def kill() -> None:
            mine = [each for each in psutil.process_iter() if "_ActorDesk" in each.name()]
            os.kill(mine[0].pid, signal.SIGKILL)

        with at_event(12, kill, experiment("gosgd")):
            run(experiment("gosgd"), out=tmp_path, open_pool=lambda: pool)
        assert sum(seat.is_lost for seat in seats) == 1
    assert left(tmp_path) == local("gosgd")


def test_a_killed_node_changes_nothing_and_another_takes_its_place(
    tmp_path: Path, nodes: RayNodes
) -> None:
    with ready(nodes) as pool:
        seats = pool.seats
        with at_event(12, lambda: nodes.kill(nodes.others.pop()), experiment("gosgd")):
            run(experiment("gosgd"), out=tmp_path, open_pool=lambda: pool)
        assert sum(seat.is_lost for seat in seats) == 1
    nodes.add_node(1)
    assert left(tmp_path) == local("gosgd")
    with ready(nodes):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no program answers at --ray-address 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "must be HOST:PORT or 'auto'"),
        ("somewhere", "must be HOST:PORT or 'auto'"),
    ],
)
def test_a_wrong_address_is_told_at_once(address: str, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        RayPool(address)


def test_an_address_where_something_else_answers_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NetworkError, match="is not a Ray cluster"):
            RayPool(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


OWN_RECIPE = """
from dataclasses import replace
import torch
from edgegossip.recipes.quickstart import quickstart

class Own(torch.nn.Sequential):
    pass

def own_model():
    return Own(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def own():
    experiment = quickstart().experiments["gosgd"]
    task = replace(experiment.task, model=own_model)
    return replace(experiment, task=task, max_seconds=2.0)
"""


def test_a_recipe_of_ones_own_is_sent_along(tmp_path: Path, nodes: RayNodes) -> None:
    recipe = tmp_path / "my_recipe.py"
    recipe.write_text(OWN_RECIPE)
    run_own = ["run", f"{recipe}:own", "--out"]
    there = ["--pool", "ray", "--ray-address", nodes.address]
    assert main([*run_own, str(tmp_path / "here")]) == 0
    assert main([*run_own, str(tmp_path / "there"), *there]) == 0
    assert left(tmp_path / "there") == left(tmp_path / "here")


# Whole runs.

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


def started(
    out: Path, mark: str, *words: str, limit: str = "--threads"
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edgegossip", *(words or ("run", "quickstart"))]
    options = ["--pool", "ray", limit, "2", "--out", str(out)]
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


def wait_until_it_trains(out: Path, process: subprocess.Popen[str]) -> None:
    events = out / "events.jsonl"
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if events.read_text().count('"trained"') > 3:
                return
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_whole_folder_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "run"
    with started(out, mark) as process:
        wait_until_it_trains(out, process)
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "--resume" in told
    assert (out / "checkpoint.safetensors").exists()
    _, alive = psutil.wait_procs(marked(mark), timeout=5)
    assert alive == []


def test_an_interrupted_sweep_keeps_what_has_ended(tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "sweep"
    with started(out, mark, *SWEEP, limit="--processes") as process:
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
    with started(out, mark, *SWEEP, limit="--processes") as process:
        runs: list[psutil.Process] = []
        while process.poll() is None and not runs:
            runs = [each for each in marked(mark) if "_carry_out" in each.name()]
        os.kill(runs[0].pid, signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert len(swept(out)) == 4
    assert not [*Path("/tmp").glob(f"eg-run-{runs[0].pid}-*")]


def test_a_killed_driver_takes_its_processes_along(tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "run"
    with started(out, mark) as process:
        wait_until_it_trains(out, process)
        assert len(marked(mark)) > 3
        process.kill()
        process.communicate(timeout=60)
    # Two of Ray's own wait for their head for up to a minute before they end.
    _, alive = psutil.wait_procs(marked(mark), timeout=120)
    assert alive == []
