"""Nothing fails on macOS and Windows for lack of a name that only Linux has."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

from edgegossip.machine import system

SOURCES = Path(system.__file__).parents[1]
MISSING = {
    "os": [
        "fork",
        "forkpty",
        "getuid",
        "geteuid",
        "getgid",
        "getpgid",
        "killpg",
        "O_NOFOLLOW",
        "posix_fallocate",
        "register_at_fork",
        "sched_getaffinity",
        "sched_setaffinity",
        "setsid",
        "statvfs",
        "uname",
        "getloadavg",
        "sysconf",
        "fchmod",
    ],
    "signal": ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "setitimer", "alarm"],
}
"""Names that Windows lacks; macOS lacks some of them."""
on_posix = pytest.mark.skipif(not hasattr(os, "setsid"), reason="takes away what Windows lacks")
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")

# Other packages choose their own code by the system, so they are imported before names go.
ELSEWHERE = f"""
import importlib, os, signal, sys, warnings
import cryptography.x509, filelock, jinja2, lazy_loader, matplotlib, numpy, psutil, rich.live
import rich.progress, safetensors.torch, scipy.optimize, sklearn, threadpoolctl, torch, tyro
import matplotlib.figure, torch.distributed, torch.multiprocessing, xxhash, zenoh

for module, names in {MISSING!r}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {MODULES!r}:
            raise ModuleNotFoundError(name, name=name)

for name in {MODULES!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())

warnings.filterwarnings("error", category=EncodingWarning, module="edgegossip")

from pathlib import Path
plain = Path.read_text
def read_text(path, *rest, **more):
    if path.parts[:2] == ("/", "proc"):
        raise FileNotFoundError(str(path))
    return plain(path, *rest, **more)
Path.read_text = read_text
"""


def elsewhere(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has only what Windows has, and writes cp1252 as it does."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES.parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONIOENCODING": "cp1252",
        "PYTHONWARNDEFAULTENCODING": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="cp1252",
    )


@thorough
def test_every_module_is_imported_without_the_names_of_linux(tmp_path: Path) -> None:
    names = [
        ".".join(("edgegossip", *file.relative_to(SOURCES).with_suffix("").parts))
        for file in sorted(SOURCES.rglob("*.py"))
        if file.name != "__main__.py"
    ]
    # These need a framework, which is not installed everywhere.
    optional = ("integrations.lightning", "integrations.transformers", "integrations.ray_")
    needed = [name.removesuffix(".__init__") for name in names]
    needed = [name for name in needed if not any(each in name for each in optional)]
    code = f"for name in {needed!r}:\n    importlib.import_module(name)\nprint('all')"
    done = elsewhere(code, tmp_path)
    assert (done.stdout, done.returncode) == ("all\n", 0), done.stderr


@thorough
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["doctor"],
        ["run", "quickstart", "--num-epochs", "1", "--out", "run"],
        ["compare", "quickstart", "--num-epochs", "1", "--processes", "2", "--out", "both"],
        ["certs", "init", "--out", "certs"],
    ],
    ids=lambda words: words[0],
)
def test_commands_run_without_the_names_of_linux(words: list[str], tmp_path: Path) -> None:
    code = f"from edgegossip.cli.main import main\nsys.exit(main({words!r}))"
    done = elsewhere(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_only_one_module_uses_names_that_a_system_lacks() -> None:
    names = {each for names in MISSING.values() for each in names} | {*MODULES}
    found = {
        f"{file.relative_to(SOURCES)}: {name}"
        for file in SOURCES.rglob("*.py")
        if file != Path(system.__file__)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in _names(node) & names
    }
    # It is called where it is missing, and the error is handled.
    assert found == {"machine/files.py: posix_fallocate"}


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="os" | "signal"), attr=name):
            return {name}
        case ast.Import() | ast.ImportFrom():
            return {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
    return set()


@on_posix
def test_a_worker_of_windows_is_asked_by_ctrl_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "setsid")
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", 1, raising=False)
    assert system.own_group() == {"creationflags": 512}
    sent: list[int] = []

    class Process:
        def send_signal(self, number: int) -> None:
            sent.append(number)

    process: Any = Process()
    system.send_stop(process, signal.SIGTERM)
    assert sent == [1]


@on_posix
def test_a_worker_elsewhere_is_asked_by_its_signal() -> None:
    with subprocess.Popen(["sleep", "60"], **system.own_group()) as process:
        assert os.getsid(process.pid) == process.pid
        system.send_stop(process, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


@on_posix
def test_ctrl_break_stops_a_program_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    monkeypatch.delattr(signal, "SIGHUP")
    assert system.stop_signals() == (signal.SIGINT, signal.SIGTERM, 21)
    assert not any(map(system.is_hangup, system.stop_signals()))


@on_posix
def test_without_users_and_affinity_there_are_plain_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    key.touch(0o644)
    assert system.others_may_read(key)
    key.chmod(0o600)
    assert not system.others_may_read(key)
    assert system.usable_cores() == len(os.sched_getaffinity(0))
    assert system.user_number() == os.getuid()
    assert system.open_flags() == os.O_NOFOLLOW
    key.chmod(0o644)
    for name in ("getuid", "sched_getaffinity", "O_NOFOLLOW"):
        monkeypatch.delattr(os, name)
    assert not system.others_may_read(key)
    assert (system.usable_cores(), system.user_number(), system.open_flags()) == (None, 0, 0)
