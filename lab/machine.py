"""The parts of Linux that a lab is made of: commands, namespaces, control groups.

Everything is named after the process that made it, so that what a crash left behind can be told
from what another process still uses.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "edgegossip-lab"
PERIOD = 20_000
"""Microseconds in which a quota is spent. At the kernel's 100 ms a host of 0.15 cores would
answer nobody for 85 ms at a stretch."""

_serials = itertools.count()


class LabError(RuntimeError):
    """The machine refused something that a lab is made of."""


def call(*command: str) -> str:
    """Run a command; return what it printed.

    Raises:
        LabError: If it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


# Names.


def new_name() -> str:
    """Name a lab after this process and the moment it began, as process ids come again."""
    return f"{PREFIX}-{os.getpid()}-{_began(os.getpid())}-{next(_serials)}"


def _is_stale(name: str) -> bool:
    """Whether the process that made the lab `name` is gone."""
    pid, began = name.removeprefix(f"{PREFIX}-").split("-")[:2]
    return _began(int(pid)) != int(began)


def _began(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the command, may hold blanks and brackets.
    return int(stat.rpartition(")")[2].split()[19])


# Namespaces.


def namespaces() -> list[str]:
    """Names of all network namespaces that labs have made."""
    lines = call("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{PREFIX}-")]


# Control groups.


def cgroup_root() -> Path | None:
    """Where groups with quotas of processor time can be made; None if nowhere."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted_at, kind, options = line.split()[:4]
        path = Path(mounted_at)
        if kind == "cgroup" and "cpu" in options.split(","):
            return path
        if kind == "cgroup2" and "cpu" in (path / "cgroup.controllers").read_text().split():
            return path
    return None


def make_group(path: Path) -> None:
    """Make a group and, in version 2, let it have groups of its own with quotas."""
    for parent in (path.parent, path):
        parent.mkdir(exist_ok=True)
        control = parent / "cgroup.subtree_control"
        if parent != path and control.exists():
            control.write_text("+cpu")


def set_quota(group: Path, cores: float) -> None:
    """Let the processes in `group` use at most `cores` cores together."""
    quota = round(cores * PERIOD)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def share_out(quotas: Sequence[float | None]) -> list[int | None]:
    """The core for each quota, the largest first; None for those that are not of one core."""
    used = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    cores: list[int | None] = [None] * len(quotas)
    for index in sorted(range(len(quotas)), key=lambda each: -(quotas[each] or 0.0)):
        quota = quotas[index]
        if quota is not None and quota <= 1:
            core = min(used, key=lambda each: used[each])
            cores[index], used[core] = core, used[core] + quota
    return cores


def prefer(group: Path) -> None:
    """Let `group` have its quotas whatever else runs on the machine."""
    if (group / "cpu.weight").exists():
        (group / "cpu.weight").write_text("10000")
    else:
        (group / "cpu.shares").write_text("262144")


def processes(group: Path) -> list[int]:
    """Ids of the processes in `group`."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def kill_all(group: Path, patience: float = 10.0) -> None:
    """Kill all processes in `group`, also those that they start meanwhile.

    Raises:
        LabError: If some are still there after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while pids := processes(group):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {pids} in {group} do not die")
        time.sleep(0.005)


# Cleaning up.


def remove(name: str) -> None:
    """Remove all that belongs to the lab `name`: processes first, they hold the rest.

    Raises:
        LabError: If something will not go; all else has gone nevertheless.
    """
    problems: list[Exception] = []
    if (root := cgroup_root()) is not None and (root / name).is_dir():
        for group in [*(root / name).glob("*/"), root / name]:
            try:
                kill_all(group)
                group.rmdir()
            except (LabError, OSError) as error:
                problems.append(error)
    for namespace in namespaces():
        if namespace.startswith(f"{name}-"):
            try:
                call("ip", "netns", "delete", namespace)
            except LabError as error:
                problems.append(error)
    if problems:
        raise LabError("; ".join(str(problem) for problem in problems))


def remove_stale() -> None:
    """Remove what labs of processes that are gone have left."""
    root = cgroup_root()
    groups = [path.name for path in root.glob(f"{PREFIX}-*/")] if root is not None else []
    labs = {"-".join(name.split("-")[:5]) for name in [*groups, *namespaces()]}
    for name in sorted(labs):
        if _is_stale(name):
            remove(name)


# Can it be done here?


def missing() -> list[str]:
    """The features for a lab that this machine lacks, in words; empty if it lacks none."""
    if sys.platform != "linux":
        return ["Linux"]
    commands = [
        f"the command {name}" for name in ("ip", "tc", "taskset") if shutil.which(name) is None
    ]
    lacks = [*commands, *([] if os.geteuid() == 0 else ["root"])]
    return lacks or _missing_from_kernel()


def _missing_from_kernel() -> list[str]:
    """Try each part once, in a namespace that is thrown away."""
    root, name = cgroup_root(), f"{new_name()}-probe"
    lacks = [] if root is not None and os.access(root, os.W_OK) else ["cgroups with quotas"]
    try:
        call("ip", "netns", "add", name)
    except LabError as error:
        return [*lacks, f"network namespaces ({error})"]
    link = ("ip", "-n", name, "link", "add")
    qdisc = ("tc", "-n", name, "qdisc", "add", "dev", "one")
    probes = {
        "veth pairs": (*link, "one", "type", "veth", "peer", "name", "two"),
        "bridges": (*link, "switch", "type", "bridge"),
        "tc tbf": (*qdisc, "root", "tbf", "rate", "1mbit", "burst", "16kb", "limit", "64kb"),
        "tc clsact": (*qdisc, "clsact"),
        "tc u32 with mirred": drop_filter(name, "one", 1, "02:00:00:00:00:01", "two"),
    }
    try:
        for part, command in probes.items():
            try:
                call(*command)
            except LabError as error:
                lacks.append(f"{part} ({error})")
    finally:
        call("ip", "netns", "delete", name)
    return lacks


def drop_filter(
    namespace: str, interface: str, priority: int, sender: str, sink: str
) -> tuple[str, ...]:
    """Command that throws away what the hardware address `sender` sends out at `interface`.

    Kernels without tc's `drop` can still lead frames to an interface where nobody listens.
    """
    where = ("dev", interface, "egress", "protocol", "all", "pref", str(priority))
    what = ("u32", "match", "ether", "src", sender, "action", "mirred", "egress", "redirect")
    return ("tc", "-n", namespace, "filter", "add", *where, *what, "dev", sink)
