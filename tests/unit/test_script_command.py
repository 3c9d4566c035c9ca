"""`edgegossip script`: a script of one's own in processes of its own."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

from edgegossip.cli.main import main
from edgegossip.cli.script_command import ScriptOptions, script_command
from edgegossip.contract.errors import UsageError
from edgegossip.machine.counters import is_running
from edgegossip.net.address import Address
from edgegossip.real.join import Connection
from edgegossip.real.launch import worker_processes
from edgegossip.real.script import ScriptWorker

SCRIPT = """
import json, sys
import torch
import edgegossip as eg

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = eg.own_share(torch.arange(16.0).view(8, 2))
worker = eg.script_worker()
with worker.training_loop(model, eg.averaging(), num_samples=len(data), num_steps=4) as loop:
    while not loop.is_over:
        for x in data:
            loss = (model(x) - x.sum()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.step(loss.item(), 1)
            if loop.is_over:
                break
print(json.dumps([worker.rank, len(data), model.weight.tolist(), sys.argv[1:]]))
"""


@pytest.fixture(autouse=True)
def work_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    Path("train.py").write_text(text)
    return "train.py"


@thorough
def test_two_processes_of_a_script_end_with_one_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["script", "-n", "2", "--out", "out", write(SCRIPT), "--lr", "0.1"]) == 0
    first = json.loads(capfd.readouterr().out.splitlines()[-1])
    second = json.loads(Path("out", "worker-1.txt").read_text().splitlines()[-1])
    assert (first[0], second[0]) == (0, 1)
    assert first[1:] == second[1:]
    assert (first[1], first[3]) == (4, ["--lr", "0.1"])


SPLIT = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
data = data[dist.get_rank() :: 2]
"""


@pytest.mark.slow
def test_workers_of_two_processes_each_end_with_one_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before, loop = SCRIPT.split("with worker", 1)
    loop = loop.replace("len(data)", "2 * len(data)", 1)
    write(
        f"{before}{SPLIT}\nwith worker{loop.replace('model.weight', 'model.module.weight')}"
        "dist.destroy_process_group()"
    )
    torchrun = ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "0.1"]
    assert main(["script", "-n", "2", "--out", "out", "--", *torchrun]) == 0
    printed = capfd.readouterr().out + Path("out", "worker-1.txt").read_text()
    found = [json.loads(each) for each in printed.splitlines() if each.startswith("[")]
    assert sorted(each[0] for each in found) == [0, 0, 1, 1]
    assert all(each[1:] == found[0][1:] for each in found)
    assert (found[0][1], found[0][3]) == (2, ["--lr", "0.1"])


def test_a_command_starts_each_worker_with_a_port_for_its_own_processes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(
        "import os, sys\n"
        "names = ['EDGEGOSSIP_RANK', 'PET_MASTER_PORT']\n"
        "print(*[os.environ[each] for each in names], *sys.argv[1:])"
    )
    command = ["python", "train.py", "--lr", "0.1"]
    assert main(["script", "-n", "2", "--out", "out", "--", *command]) == 0
    printed = capfd.readouterr().out + Path("out", "worker-1.txt").read_text()
    first, second = (line.split() for line in printed.splitlines())
    assert (first[0], second[0]) == ("0", "1")
    assert first[2:] == second[2:] == ["--lr", "0.1"]
    assert first[1] != second[1]


@thorough
def test_processes_of_a_killed_worker_are_killed_too() -> None:
    write(
        "import pathlib, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        "pathlib.Path('begun').write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    with worker_processes() as workers:
        workers.start(0, ["train.py"], None)
        while not (Path("begun").exists() and Path("begun").read_text()):
            time.sleep(0.01)
    child = int(Path("begun").read_text())
    for _ in range(1000):  # a killed process takes a moment to end
        if not is_running(child):
            break
        time.sleep(0.01)
    assert not is_running(child)


def test_a_process_that_fails_is_named_and_the_other_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    failing = "import os\nassert os.environ['EDGEGOSSIP_RANK'] == '0', 'no data here'"
    assert main(["script", "-n", "2", "--out", "out", write(failing)]) == 1
    said = capfd.readouterr().err
    assert "edgegossip: worker 1 failed: AssertionError: no data here (see out/" in said
    assert "worker 0" not in said


def test_a_process_that_is_killed_is_told_by_its_signal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last line of its output, such as a progress bar, is no reason."""
    killed = (
        "import os, signal\n"
        "print(' 32%|###2      | 51/160 [00:02<00:05]', flush=True)\n"
        "if os.environ['EDGEGOSSIP_RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert main(["script", "-n", "2", "--out", "out", write(killed)]) == 1
    said = capfd.readouterr().err
    assert said == "edgegossip: worker 1 was killed (signal 9) (see out/worker-1.txt)\n"


def test_ctrl_c_reaches_all_processes(capfd: pytest.CaptureFixture[str]) -> None:
    write(
        "import os, pathlib, time\n"
        "rank = os.environ['EDGEGOSSIP_RANK']\n"
        "try:\n"
        "    pathlib.Path(f'begun-{rank}').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    pathlib.Path(f'told-{rank}').touch()\n"
    )

    is_over = threading.Event()

    def stop_once_begun() -> None:
        while not is_over.wait(0.01):
            if Path("begun-0").exists() and Path("begun-1").exists():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    stopper = threading.Thread(target=stop_once_begun)
    stopper.start()
    code = main(["script", "-n", "2", "--out", "out", "train.py"])
    is_over.set()
    stopper.join()
    assert code == 130
    assert "interrupted; the workers have left the run" in capfd.readouterr().err
    assert Path("told-0").exists()
    assert Path("told-1").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "no script; usage: edgegossip script -n 4"),
        (["-n", "2", "gone.py"], "there is no file gone.py"),
        (["-n", "2", "--"], "no script; usage: edgegossip script -n 4"),
        (["-n", "2", "--", "gone", "a", "b"], "no program 'gone'; give a script FILE.py, or"),
        (["-n", "2", "--rank", "2", "--listen", "tcp/127.0.0.1:0"], "rank must be in 0..1"),
        (["-n", "2", "--rank", "1"], "no way to any other worker"),
    ],
)
def test_commands_that_start_nothing_say_why(arguments: list[str], message: str) -> None:
    write(SCRIPT)
    given = arguments if len(arguments) < 4 else [*arguments, "train.py"]
    with pytest.raises(UsageError, match=message):
        script_command(given)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"listen": ("tls/127.0.0.1:0",)}, "--listen"),
        ({"connect": ("tls/127.0.0.1:1",)}, "--connect"),
        ({"multicast": True, "insecure": True}, "--multicast, --insecure"),
        ({"tls": Path("certs"), "ban": ("a1",)}, "--tls, --ban"),
    ],
)
def test_a_connection_is_that_of_one_worker(options: dict[str, Any], given: str) -> None:
    with pytest.raises(ValueError, match=f"{given}: for one worker only; add its --rank"):
        ScriptOptions(n=2, **options)
    way = {"listen": ("tls/127.0.0.1:0",), "connect": (), "multicast": False}
    address = {name: options.get(name, default) for name, default in way.items()}
    others = {name: value for name, value in options.items() if name not in way}
    [worker] = ScriptOptions(n=2, rank=1, lease=9.0, **{**way, **options}).workers()
    connection = Connection(address=Address(**address), lease=9.0, **others)
    assert worker == ScriptWorker(rank=1, num_workers=2, connection=connection)


def test_workers_of_one_machine_take_its_lease() -> None:
    for worker in ScriptOptions(n=2, lease=9.0).workers():
        assert worker.connection is not None
        assert worker.connection.lease == 9.0
